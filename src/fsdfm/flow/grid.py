"""Grids: the times a sampler visits, and the step sizes that training draws.

A `Grid` holds times and derives h from them, so that a step size can never be taken for a time. Training draws h from
the dyadic sizes 2^-10 .. 1 (section 5.1) with weights that a policy states as a mapping of h and the training step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "POLICIES",
    "AnnealedGeometricWeights",
    "BoostedWeights",
    "GeometricWeights",
    "Grid",
    "MirroredWeights",
    "StepSizeWeights",
    "UniformWeights",
    "dyadic_step_sizes",
]

MAX_STEPS = 1 << 20


class Grid:
    """Times t_0 < t_1 < ... < t_S = 1: float64 [S+1], or [B, S+1] where rows start at different times."""

    def __init__(self, times: Sequence[float] | Tensor):
        self.times = torch.as_tensor(times, dtype=torch.float64).clone()
        if self.times.ndim not in (1, 2) or self.times.shape[-1] < 2 or self.times.shape[0] < 1:
            raise ValueError(f"times has shape {tuple(self.times.shape)}; a grid is at least two times, start and end")
        if not bool((self.times[..., 1:] > self.times[..., :-1]).all()):
            raise ValueError(f"times {_shorten(self.times)} do not increase; sort them and drop repeats")
        if not bool((self.times[..., 0] >= 0).all()) or not bool((self.times[..., -1] == 1).all()):
            raise ValueError(f"times {_shorten(self.times)} must lie in [0, 1] and end at exactly 1.0")

    @classmethod
    def uniform(cls, steps: int, start: float | Tensor = 0.0) -> Grid:
        """`steps` equal steps from `start` to 1; a tensor of starts [B] gives every row its own times."""
        if steps != int(steps) or not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"steps is {steps}; allowed are whole numbers 1 <= steps <= {MAX_STEPS}")
        begin = torch.as_tensor(start, dtype=torch.float64)
        if not bool(((begin >= 0) & (begin <= 1 - 1e-9)).all()):
            raise ValueError(f"start is {start}; allowed are 0 <= start < 1")
        share = torch.arange(int(steps) + 1, dtype=torch.float64) / int(steps)
        times = begin[..., None] + (1 - begin[..., None]) * share
        times[..., -1] = 1.0
        return cls(times)

    @property
    def steps(self) -> int:
        """S, the number of steps, and so of network calls."""
        return self.times.shape[-1] - 1

    @property
    def h(self) -> Tensor:
        """The step sizes t_{s+1} - t_s: float64 [S] or [B, S]."""
        return self.times.diff(dim=-1)

    def __repr__(self) -> str:
        return f"Grid({_shorten(self.times)})"


def _shorten(times: Tensor) -> str:
    rows = times.reshape(-1, times.shape[-1])
    bad = (rows.diff(dim=-1) <= 0).any(-1) | (rows[:, 0] < 0) | (rows[:, -1] != 1)
    row = rows[int(bad.to(torch.uint8).argmax())].tolist()
    shown = [f"{t:.6g}" for t in (row if len(row) <= 6 else row[:3] + row[-2:])]
    return "[" + ", ".join(shown if len(row) <= 6 else [*shown[:3], "...", *shown[3:]]) + "]"


def dyadic_step_sizes(smallest: int = -10) -> Tensor:
    """2^smallest, ..., 1/4, 1/2, 1: the step sizes of training in increasing order, float64."""
    if not -30 <= smallest <= 0:
        raise ValueError(f"smallest is {smallest}; allowed are exponents -30 .. 0")
    return torch.pow(2.0, torch.arange(smallest, 1, dtype=torch.float64))


class StepSizeWeights(ABC):
    """A policy of section D.1: how often training draws each step size.

    The paper prints its weight lists from the smallest step to the largest and calls the boosted first entry the
    largest step. Its results fit only the boost on the *smallest* step, where the path loss acts (two thirds of the
    samples under TB-20); so that is what these policies do. `MirroredWeights` is the other reading.
    """

    @abstractmethod
    def __call__(self, h: Tensor, training_step: int, /) -> Tensor:
        """Unnormalised weights of the step sizes h, which hold the smallest and the largest: float64 like h."""

    def probabilities(self, h: Tensor, training_step: int = 0) -> Tensor:
        """The weights, normalised."""
        weights = self(h.to(torch.float64), training_step)
        return weights / weights.sum()

    def sample(self, h: Tensor, u: Tensor, *, training_step: int = 0) -> Tensor:
        """Step sizes by inverse CDF of the uniforms u, in u's shape."""
        cumulative = self.probabilities(h, training_step).cumsum(0)
        index = torch.searchsorted(cumulative, u.to(torch.float64), right=True)
        return h[index.clamp(max=len(h) - 1)]


@dataclass(frozen=True)
class UniformWeights(StepSizeWeights):
    """PU: every step size alike."""

    def __call__(self, h: Tensor, _: int, /) -> Tensor:
        """1 everywhere."""
        return torch.ones_like(h)


@dataclass(frozen=True)
class BoostedWeights(StepSizeWeights):
    """TB-10, TB-20: `boost` on the smallest step size, 1 on the others."""

    boost: float

    def __post_init__(self) -> None:
        if not 0 < self.boost < float("inf"):
            raise ValueError(f"boost is {self.boost}; allowed are finite numbers > 0")

    def __call__(self, h: Tensor, _: int, /) -> Tensor:
        """The boost where h is smallest."""
        return torch.where(h == h.min(), self.boost, 1.0).to(torch.float64)


@dataclass(frozen=True)
class GeometricWeights(StepSizeWeights):
    """G: 2^10 on the smallest of the eleven sizes, halving up to 1 on the largest, that is h_max / h."""

    def __call__(self, h: Tensor, _: int, /) -> Tensor:
        """Inversely proportional to h."""
        return h.max() / h


@dataclass(frozen=True)
class AnnealedGeometricWeights(StepSizeWeights):
    """AG: geometric at first; weights double every `period` training steps up to the largest, so G becomes PU."""

    period: int = 10_000

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period is {self.period}; allowed are whole numbers >= 1")

    def __call__(self, h: Tensor, training_step: int) -> Tensor:
        """The geometric weights, doubled and capped."""
        geometric = h.max() / h
        doublings = min(training_step // self.period, 64)
        return (geometric * 2.0**doublings).clamp(max=float(geometric.max()))


@dataclass(frozen=True)
class MirroredWeights(StepSizeWeights):
    """Another policy with the order of the sizes reversed: the paper's words taken literally, for the ablation."""

    policy: StepSizeWeights

    def __call__(self, h: Tensor, training_step: int) -> Tensor:
        """The weight that the policy gives to the mirror image of h on the logarithmic grid."""
        return self.policy(h.min() * h.max() / h, training_step)


POLICIES: dict[str, StepSizeWeights] = {
    "TB-10": BoostedWeights(10),
    "TB-20": BoostedWeights(20),
    "PU": UniformWeights(),
    "G": GeometricWeights(),
    "AG": AnnealedGeometricWeights(),
}
