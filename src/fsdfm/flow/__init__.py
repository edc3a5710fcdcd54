"""The mathematics of discrete flow matching: tensors in, tensors out; no network, no file, no flag.

Reading order: schedule, source, path, loss, grid, categorical, jump, chain, sampler, tie, exact.
"""

from fsdfm.flow.categorical import Draw, Filter, draw
from fsdfm.flow.coupling import alike, inverse_autoregressive_noise, quantile_draws, quantile_law
from fsdfm.flow.crf import ChainCRF, Transitions, pmi_transitions, transitions_of
from fsdfm.flow.exact import ExactDenoiser, sampler_law, total_variation
from fsdfm.flow.grid import POLICIES, Grid, StepSizeWeights, dyadic_step_sizes
from fsdfm.flow.loss import generalised_kl, path_loss
from fsdfm.flow.path import Coupling, IndependentCoupling, MixturePath, velocity
from fsdfm.flow.rule import (
    JUMPS,
    ExactJump,
    InstantJump,
    Jump,
    LiteralJump,
    LowDiscrepancyJump,
    SingleJump,
    SystematicJump,
    advance,
    low_discrepancy_turns,
    transition_log_prob,
)
from fsdfm.flow.sampler import Denoiser, DenseLogits, LogitsHook, PickyDenoiser, SplitDenoiser, Step, sample, trajectory
from fsdfm.flow.schedule import CosineSchedule, ExponentialSchedule, PolynomialSchedule, Schedule
from fsdfm.flow.source import MaskSource, MixtureSource, Source, UniformSource

__all__ = [
    "JUMPS",
    "POLICIES",
    "ChainCRF",
    "CosineSchedule",
    "Coupling",
    "Denoiser",
    "DenseLogits",
    "Draw",
    "ExactDenoiser",
    "ExactJump",
    "ExponentialSchedule",
    "Filter",
    "Grid",
    "IndependentCoupling",
    "InstantJump",
    "Jump",
    "LiteralJump",
    "LogitsHook",
    "LowDiscrepancyJump",
    "MaskSource",
    "MixturePath",
    "MixtureSource",
    "PickyDenoiser",
    "PolynomialSchedule",
    "Schedule",
    "SingleJump",
    "Source",
    "SplitDenoiser",
    "Step",
    "StepSizeWeights",
    "SystematicJump",
    "Transitions",
    "UniformSource",
    "advance",
    "alike",
    "draw",
    "dyadic_step_sizes",
    "generalised_kl",
    "inverse_autoregressive_noise",
    "low_discrepancy_turns",
    "path_loss",
    "pmi_transitions",
    "quantile_draws",
    "quantile_law",
    "sample",
    "sampler_law",
    "total_variation",
    "trajectory",
    "transition_log_prob",
    "transitions_of",
    "velocity",
]
