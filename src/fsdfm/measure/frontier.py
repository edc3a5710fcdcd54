"""Frontiers: log-perplexity by entropy as the temperature moves, and two models compared at equal entropy.

    ours, theirs = frontier_of(rows_a), frontier_of(rows_b)
    for at in compare_frontiers(theirs, ours):
        print(f"{at.entropy_bits:.2f} bits: {at.ratio:.3f} times the perplexity")

A sampler can always buy perplexity with entropy by a lower temperature, so a point says little and the curve says what
there is to choose from (arXiv 2604.02718). f(H) is log-perplexity by entropy, straight between two measured
temperatures; what a model is worth against another at entropy H is

    ratio(H) = exp(f_a(H) - f_b(H)),   H inside both sweeps

This is the one place where models are compared at equal entropy. Its intervals draw every point anew from the intervals
of its perplexity and its entropy, as independent normal numbers (in logarithms, of perplexities).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdfm.measure.results import Measured, Row
from fsdfm.measure.statistics import Interval
from fsdfm.noise import Noise, Purpose

__all__ = [
    "AtEntropy",
    "Frontier",
    "common_entropies",
    "compare_frontiers",
    "frontier_of",
    "frontier_point",
    "mean_frontier",
]

Floats = npt.NDArray[np.float64]
PERPLEXITY, ENTROPY = "token_perplexity", "entropy_bits"
_RESAMPLES = 2000
_HALF_WIDTH = 1.959964  # deviations from the middle of a 95 % interval to its end
_FEWEST_POINTS = 2


@dataclass(frozen=True)
class Frontier:
    """Points (entropy in bits, log-perplexity) of a sweep over temperature, and the deviation of each number.

    entropy, log_perplexity           float64 [P], entropies ascending and different
    entropy_sd, log_perplexity_sd     their standard errors, [P]
    """

    entropy: Floats
    log_perplexity: Floats
    entropy_sd: Floats
    log_perplexity_sd: Floats

    def __post_init__(self) -> None:
        if len(self.entropy) < _FEWEST_POINTS:
            raise ValueError(
                f"the sweep has {len(self.entropy)} points of different entropy; a frontier needs two temperatures or "
                "more: --frontier"
            )

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest entropy of the sweep."""
        return float(self.entropy[0]), float(self.entropy[-1])

    def at(self, entropy_bits: float) -> float:
        """f(H) between the ends of the sweep; not a number outside."""
        low, high = self.ends
        return (
            float(_between(self.entropy, self.log_perplexity, entropy_bits))
            if low <= entropy_bits <= high
            else math.nan
        )

    def extended(self, entropy_bits: float) -> float:
        """f(H) at any entropy; beyond an end of the sweep its last piece continues."""
        return _between(self.entropy, self.log_perplexity, entropy_bits)

    def excess(self, entropy_bits: float, log_perplexity: float) -> float:
        """log-perplexity - f(H): below 0 is better than this sampler at the temperature of the same entropy."""
        return log_perplexity - self.at(entropy_bits)

    def draws(self, entropy_bits: float, noise: Noise, *, stream: int) -> Floats:
        """f(H) of sweeps drawn anew, one for each row of the noise; beyond a drawn sweep its last piece continues."""
        count = len(self.entropy)
        normal = _normal(noise, 2 * count, stream)
        entropy = self.entropy + self.entropy_sd * normal[:, :count]
        levels = self.log_perplexity + self.log_perplexity_sd * normal[:, count:]
        order = entropy.argsort(1)
        pairs = zip(np.take_along_axis(entropy, order, 1), np.take_along_axis(levels, order, 1), strict=True)
        return np.array([_between(x, y, entropy_bits) for x, y in pairs])


def _normal(noise: Noise, length: int, stream: int) -> Floats:
    """Standard normal numbers by Box and Muller: [R, length]."""
    first, second = (noise.uniform(Purpose.BOOTSTRAP, length, step=2 * stream + k).numpy() for k in (0, 1))
    numbers: Floats = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return numbers


def _between(x: Floats, y: Floats, at: float) -> float:
    """The straight line between the neighbours of `at`, or through the last two points beyond an end."""
    right = min(max(int(np.searchsorted(x, at)), 1), len(x) - 1)
    a, b = right - 1, right
    if x[b] == x[a]:
        return float((y[a] + y[b]) / 2)
    return float(y[a] + (y[b] - y[a]) * (at - x[a]) / (x[b] - x[a]))


def frontier_point(metrics: Mapping[str, Measured], by: str = ENTROPY) -> tuple[Measured, Measured] | None:
    """Entropy (or another metric that rises with the temperature) and perplexity of one row, if both are finite."""
    if PERPLEXITY not in metrics or by not in metrics:
        return None
    entropy, perplexity = metrics[by], metrics[PERPLEXITY]
    finite = math.isfinite(entropy.value) and math.isfinite(perplexity.value) and perplexity.value > 0
    return (entropy, perplexity) if finite else None


def frontier_of(rows: Iterable[Row], by: str = ENTROPY) -> Frontier:
    """The frontier of rows of one model and one budget at several temperatures.

    by   what perplexity is compared at: the entropy, or `distinct_2`, for models that are equally diverse
    """
    points = sorted(
        (point for point in (frontier_point(row.metrics, by) for row in rows) if point is not None),
        key=lambda point: point[0].value,
    )
    distinct = [p for n, p in enumerate(points) if n == 0 or p[0].value > points[n - 1][0].value]
    columns = [(e.value, math.log(p.value), _sd(e.low, e.high), _sd(_log(p.low), _log(p.high))) for e, p in distinct]
    table = np.array(columns, dtype=np.float64).reshape(len(columns), 4).T
    return Frontier(*table)


def mean_frontier(sweeps: Iterable[Sequence[tuple[float, float]]]) -> Frontier:
    """The frontier of a model over seeds: the mean, temperature by temperature, of their (entropy, log-perplexity).

    Every sweep has the same temperatures in the same order; where one is shorter, what all of them have.
    """
    means = sorted(tuple(np.mean(points, 0).tolist()) for points in zip(*sweeps, strict=False))
    distinct = [p for n, p in enumerate(means) if n == 0 or p[0] > means[n - 1][0]]
    entropy, level = np.array(distinct, dtype=np.float64).reshape(len(distinct), 2).T
    return Frontier(entropy, level, np.zeros_like(entropy), np.zeros_like(level))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


def _sd(low: float, high: float) -> float:
    """The standard error that an interval stands for; 0 where there is none."""
    width = (high - low) / (2 * _HALF_WIDTH)
    return width if math.isfinite(width) else 0.0


@dataclass(frozen=True)
class AtEntropy:
    """Two models at one entropy: how many times the baseline's perplexity the other has, with its interval."""

    entropy_bits: float
    ratio: Interval

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.ratio.high < 1 or self.ratio.low > 1

    def to_json(self) -> dict[str, Any]:
        """The mapping of a result file."""
        return {
            "entropy_bits": self.entropy_bits,
            "value": self.ratio.value,
            "low": self.ratio.low,
            "high": self.ratio.high,
        }


def common_entropies(*frontiers: Frontier, num: int = 5) -> list[float]:
    """`num` entropies evenly over what all sweeps have in common, its ends included; none where they do not meet."""
    low, high = max(f.ends[0] for f in frontiers), min(f.ends[1] for f in frontiers)
    return np.linspace(low, high, num).tolist() if low < high else []


def compare_frontiers(
    baseline: Frontier, other: Frontier, *, entropies: Sequence[float] | None = None, seed: int = 0
) -> list[AtEntropy]:
    """The ratio of perplexities at each entropy that lies inside both sweeps; below 1 the other model is better.

    entropies   where to compare; None: five evenly over what both sweeps have in common
    """
    wanted = common_entropies(baseline, other) if entropies is None else list(entropies)
    noise, found = Noise(seed, range(_RESAMPLES)), []
    for entropy in wanted:
        difference = other.at(entropy) - baseline.at(entropy)
        if math.isnan(difference):
            continue
        draws = other.draws(entropy, noise, stream=1) - baseline.draws(entropy, noise, stream=0)
        low, high = np.exp(np.quantile(draws, (0.025, 0.975))).tolist()
        found.append(AtEntropy(entropy, Interval(math.exp(difference), low, high)))
    return found
