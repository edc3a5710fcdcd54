"""The mathematics of discrete flow matching: tensors in, tensors out; no network, no file, no flag.

Reading order: schedule, source, path, loss, grid, categorical, posterior, rule, sampler; then crf, coupling, exact.
"""

from fsdfm.flow.adaptive import CertainTurns, StableStop
from fsdfm.flow.categorical import Draw, Filter, draw
from fsdfm.flow.coupling import alike, inverse_autoregressive_noise, quantile_draws, quantile_law
from fsdfm.flow.crf import Chain, ChainCRF, Transitions, crf_posterior, pmi_transitions
from fsdfm.flow.exact import ExactDenoiser, sampler_law, total_variation
from fsdfm.flow.grid import POLICIES, Grid, StepSizeWeights, dyadic_step_sizes
from fsdfm.flow.loss import generalised_kl, path_loss
from fsdfm.flow.path import Coupling, IndependentCoupling, MixturePath, velocity
from fsdfm.flow.posterior import (
    Denoiser,
    Independent,
    LogitsFunction,
    LogitsHook,
    Posterior,
    Rows,
    SplitNetwork,
    network_posterior,
    posterior_of,
)
from fsdfm.flow.rule import (
    RULES,
    ExactJump,
    InstantJump,
    Jump,
    LiteralJump,
    LowDiscrepancyJump,
    Plan,
    SamplerState,
    SingleJump,
    StepRule,
    SystematicJump,
    advance,
    find_rule,
    low_discrepancy_turns,
    require_retreat,
    transition_log_prob,
)
from fsdfm.flow.sampler import Question, Sampler, Step, sample, trajectory
from fsdfm.flow.schedule import CosineSchedule, ExponentialSchedule, PolynomialSchedule, Schedule
from fsdfm.flow.source import MaskSource, MixtureSource, Source, UniformSource
from fsdfm.flow.sweep import Sweep

__all__ = [
    "POLICIES",
    "RULES",
    "CertainTurns",
    "Chain",
    "ChainCRF",
    "CosineSchedule",
    "Coupling",
    "Denoiser",
    "Draw",
    "ExactDenoiser",
    "ExactJump",
    "ExponentialSchedule",
    "Filter",
    "Grid",
    "Independent",
    "IndependentCoupling",
    "InstantJump",
    "Jump",
    "LiteralJump",
    "LogitsFunction",
    "LogitsHook",
    "LowDiscrepancyJump",
    "MaskSource",
    "MixturePath",
    "MixtureSource",
    "Plan",
    "PolynomialSchedule",
    "Posterior",
    "Question",
    "Rows",
    "Sampler",
    "SamplerState",
    "Schedule",
    "SingleJump",
    "Source",
    "SplitNetwork",
    "StableStop",
    "Step",
    "StepRule",
    "StepSizeWeights",
    "Sweep",
    "SystematicJump",
    "Transitions",
    "UniformSource",
    "advance",
    "alike",
    "crf_posterior",
    "draw",
    "dyadic_step_sizes",
    "find_rule",
    "generalised_kl",
    "inverse_autoregressive_noise",
    "low_discrepancy_turns",
    "network_posterior",
    "path_loss",
    "pmi_transitions",
    "posterior_of",
    "quantile_draws",
    "quantile_law",
    "require_retreat",
    "sample",
    "sampler_law",
    "total_variation",
    "trajectory",
    "transition_log_prob",
    "velocity",
]
