"""The mathematics of discrete flow matching: tensors in, tensors out; no network, no file, no flag.

Reading order: schedule, source, path, loss, grid, categorical, jump, chain, sampler, tie, exact.
"""

from fsdfm.flow.categorical import Draw, Filter, draw
from fsdfm.flow.chain import Chain, Links, counted_links, links_of
from fsdfm.flow.exact import ExactDenoiser, sampler_law, total_variation
from fsdfm.flow.grid import POLICIES, Grid, StepSizeWeights, dyadic_step_sizes
from fsdfm.flow.jump import (
    JUMPS,
    ExactJump,
    InstantJump,
    Jump,
    LiteralJump,
    SingleJump,
    SpacedJump,
    StratifiedJump,
    advance,
    spaced_turns,
    transition_log_prob,
)
from fsdfm.flow.loss import generalised_kl, path_loss
from fsdfm.flow.path import Coupling, IndependentCoupling, Path, velocity
from fsdfm.flow.sampler import Denoiser, DenseLogits, LogitsHook, PickyDenoiser, SplitDenoiser, Step, sample, trajectory
from fsdfm.flow.schedule import CosineSchedule, ExponentialSchedule, PolynomialSchedule, Schedule
from fsdfm.flow.source import MaskSource, MixtureSource, Source, UniformSource
from fsdfm.flow.tie import alike, coded_noise, tied_draws, tied_law

__all__ = [
    "JUMPS",
    "POLICIES",
    "Chain",
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
    "Links",
    "LiteralJump",
    "LogitsHook",
    "MaskSource",
    "MixtureSource",
    "Path",
    "PickyDenoiser",
    "PolynomialSchedule",
    "Schedule",
    "SingleJump",
    "Source",
    "SpacedJump",
    "SplitDenoiser",
    "Step",
    "StepSizeWeights",
    "StratifiedJump",
    "UniformSource",
    "advance",
    "alike",
    "coded_noise",
    "counted_links",
    "draw",
    "dyadic_step_sizes",
    "generalised_kl",
    "links_of",
    "path_loss",
    "sample",
    "sampler_law",
    "spaced_turns",
    "tied_draws",
    "tied_law",
    "total_variation",
    "trajectory",
    "transition_log_prob",
    "velocity",
]
