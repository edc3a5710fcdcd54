"""Intervals: how far a number would move with other samples.

    interval = bootstrap_mean(entropies, seed=0)
    f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"

A mean or a ratio of sums over samples is bootstrapped: samples are drawn with replacement, and the interval holds the
middle 95 % of the results. A statistic of the set that counts repetitions (distinct-n, self-BLEU, MAUVE, duplicates)
cannot be: a bootstrap set repeats samples and looks less diverse than it is. It gets a jackknife over groups.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from fsdfm.measure.judges.scoring import Scores
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import ALONE, Processes

__all__ = [
    "Interval",
    "bootstrap_mean",
    "bootstrap_ratio",
    "draw_ratios",
    "gap_closed",
    "interval_of",
    "jackknife",
    "sequence_perplexity",
    "student_mean",
    "token_perplexity",
]

_Sample = TypeVar("_Sample")

RESAMPLES = 2000
_LEVEL = 0.95
_ROWS_AT_ONCE = 64  # bootstrap sets that live at a time
# t quantiles at 97.5 % for 1 .. 30 degrees of freedom, and the normal's beyond
_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_QUANTILE = 1.96


@dataclass(frozen=True)
class Interval:
    """A number and the 95 % interval around it; not a number where one sample says nothing of the spread."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if math.isnan(self.low):
            return f"{self.value:{spec}}"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the number."""
        return Interval(function(self.value), function(self.low), function(self.high))


def interval_of(value: float, draws: Tensor) -> Interval:
    """The middle 95 % of bootstrap draws [R] around a value."""
    tail = (1 - _LEVEL) / 2
    low, high = torch.quantile(draws.double(), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(value, low, high)


def draw_ratios(numerator: Tensor, denominator: Tensor, *, seed: int, stream: int = 0) -> Tensor:
    """Bootstrap draws of sum(numerator) / sum(denominator) over samples [N] of which both are drawn together: [R].

    The draws are a function of (seed, stream, N). Give two quantities of the same samples the same stream, and the
    difference of their draws is paired; give independent sets different streams.
    """
    top, bottom = numerator.double(), denominator.double()
    if top.shape != bottom.shape or top.ndim != 1 or not len(top):
        raise ValueError(
            f"numerator has shape {tuple(top.shape)} and denominator {tuple(bottom.shape)}; give [N] each, N >= 1"
        )
    parts = [
        top[chosen.long()].sum(1) / bottom[chosen.long()].sum(1)
        for chosen in torch.split(_resamples(seed, stream, len(top), sets=RESAMPLES), _ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


@lru_cache(maxsize=4)
def _resamples(seed: int, stream: int, count: int, *, sets: int) -> Tensor:
    """Which samples each bootstrap set holds: int32 [R, N]; every quantity of the same samples asks for the same."""
    parts = []
    for start in range(0, sets, _ROWS_AT_ONCE):
        noise = Noise(seed, range(start, min(start + _ROWS_AT_ONCE, sets)))
        parts.append(noise.integers(Purpose.BOOTSTRAP, count, count, step=stream).int())
    return torch.cat(parts)


def bootstrap_ratio(numerator: Tensor, denominator: Tensor, *, seed: int = 0, stream: int = 0) -> Interval:
    """sum(numerator) / sum(denominator) with its interval: NLL per token, accuracy, share of copied n-grams."""
    draws = draw_ratios(numerator, denominator, seed=seed, stream=stream)
    return interval_of(float(numerator.double().sum() / denominator.double().sum()), draws)


def bootstrap_mean(values: Tensor | Sequence[float], *, seed: int = 0, stream: int = 0) -> Interval:
    """The mean over samples with its interval."""
    numbers = torch.as_tensor(values, dtype=torch.float64)
    return bootstrap_ratio(numbers, torch.ones_like(numbers), seed=seed, stream=stream)


def student_mean(values: Sequence[float]) -> Interval:
    """The mean over a few independent values, such as seeds, with its interval:

        mean -+ t_{N-1} s / sqrt(N),  s the standard deviation with N - 1 in its denominator

    A bootstrap of so few would be too narrow. Of ratios take logarithms: `student_mean(logs).map(math.exp)`.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    mean = statistics.fmean(values) if len(values) > 1 else values[0]
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = _t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def _t_quantile(degrees: int) -> float:
    return _T_QUANTILES[degrees - 1] if degrees <= len(_T_QUANTILES) else _NORMAL_QUANTILE


def token_perplexity(scores: Scores, *, seed: int = 0) -> Interval:
    """exp(sum NLL / sum tokens) with its interval over texts."""
    return bootstrap_ratio(scores.nll, scores.num_tokens, seed=seed).map(math.exp)


def sequence_perplexity(scores: Scores, *, seed: int = 0) -> Interval:
    """The paper's mean over texts of exp(NLL / tokens), with its interval."""
    return bootstrap_mean(scores.perplexities(), seed=seed)


def gap_closed(before: Scores, after: Scores, target: Scores, *, seed: int = 0) -> Interval:
    """The share of the log-perplexity gap that training closes, from three independent sets of texts.

        (log PPL before - log PPL after) / (log PPL before - log PPL target), token-level

    before: the parent at few calls; after: the few-step model at as many; target: the parent at many calls.
    """
    sets = (before, after, target)
    values = [float(scores.nll.sum() / scores.num_tokens.sum()) for scores in sets]
    draws = [draw_ratios(scores.nll, scores.num_tokens, seed=seed, stream=i) for i, scores in enumerate(sets)]
    return interval_of(_share(*values), (draws[0] - draws[1]) / (draws[0] - draws[2]))


def _share(before: float, after: float, target: float) -> float:
    if before == target:
        raise ValueError("before and target have the same perplexity; there is no gap to close")
    return (before - after) / (before - target)


def jackknife(
    statistic: Callable[[Sequence[_Sample]], float],
    samples: Sequence[_Sample],
    *,
    groups: int = 20,
    processes: Processes = ALONE,
) -> Interval:
    """A statistic of a set with its interval, from leaving out one of `groups` interleaved parts at a time.

    variance = (G-1)/G * sum_g (theta_g - mean theta)^2,  interval = theta -+ t_{G-1} * sqrt(variance)

    Several `processes` share the groups.
    """
    value, num_groups = statistic(samples), min(groups, len(samples))
    if num_groups < 2:
        return Interval(value, math.nan, math.nan)

    def without(group: int) -> float:
        return statistic([sample for i, sample in enumerate(samples) if i % num_groups != group])

    left_out = processes.map(without, range(num_groups))
    mean = sum(left_out) / num_groups
    variance = (num_groups - 1) / num_groups * sum((theta - mean) ** 2 for theta in left_out)
    half = _t_quantile(num_groups - 1) * math.sqrt(variance)
    return Interval(value, value - half, value + half)
