"""Discrete reflow: let a parent run for many steps and keep where each noise ended.

The pairs (x_0, x_1) are draws of a coupling pi(x_0, x_1) of the same two ends. A child trained on them with the path
loss predicts what the parent makes of *this* noise, which is more certain than what data there may be: its steps can be
larger. How certain depends on where the parent's own randomness comes from. Free draws have fresh numbers, which nobody
can guess. A quantile coupling (`fsdfm.flow.coupling`) reads the first draw of a position off x_0 and takes the coins
and later draws, which only correct, from one noise for all pairs: x_1 is then a function of x_0.

`Perturbed` begins on the way to a real text instead, at a time that the pair remembers: ReDi's form for text. It works
for a mask source, too, where noise alone says nothing.

`InverseAutoregressive` needs no parent's run: it takes text as it is and asks an autoregressive model for the noise
that it would turn into this text. Discrete reflow was published as ReDi (arXiv 2507.15897); quantile coupling with an
autoregressive teacher is close to Gumbel Distillation (2603.22216).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fsdfm.flow import (
    Denoiser,
    ExactJump,
    Filter,
    Grid,
    LogitsFunction,
    LogitsHook,
    MixturePath,
    SplitNetwork,
    StepRule,
    inverse_autoregressive_noise,
    quantile_draws,
    sample,
)
from fsdfm.noise import Noise, Purpose

__all__ = ["DRAWS", "Draws", "InverseAutoregressive", "PairMaker", "PairSink", "Perturbed", "Reflow", "collect_pairs"]


class Draws(Protocol):
    """How the sampler's draws depend on the noise it started from."""

    def __call__(
        self, path: MixturePath, x_0: Tensor, *, filter: Filter | None = None, order: Tensor | None = None
    ) -> LogitsHook:
        """A hook for one batch."""
        ...


DRAWS: dict[str, Draws | None] = {"free": None, "quantile": quantile_draws}


class PairMaker(Protocol):
    """Makes pairs, each a function of its sample's index."""

    def pairs(self, samples: Sequence[int], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(x_0, x_1) of these samples, int64 [B, L] each."""
        ...


class PairSink(Protocol):
    """Where pairs are kept; it knows how many it has, so that a second run resumes after the first."""

    @property
    def count(self) -> int:
        """Pairs that are kept already."""
        ...

    def append(self, x_0: Tensor, x_1: Tensor) -> None:
        """Keep some more."""
        ...


@dataclass(frozen=True)
class Reflow:
    """How pairs are made. `first_token` is given at position 0 (the BOS that training gives) and frozen there."""

    denoiser: Denoiser | SplitNetwork | LogitsFunction
    path: MixturePath
    length: int
    grid: Grid
    rule: StepRule = field(default_factory=ExactJump)
    seed: int = 0
    first_token: int | None = None
    filter: Filter | None = None
    draws: Draws | None = None  # None: free, they have randomness of their own
    order: Tensor | None = None  # of the tokens, for draws that are not free: `fsdfm.flow.alike`

    def __post_init__(self) -> None:
        if self.draws is not None and getattr(self.denoiser, "joint", None) is not None:
            raise ValueError(
                "a quantile coupling reads each position's law, and this model draws its positions together; use free "
                "draws, or a parent with independent positions"
            )

    def pairs(self, samples: Sequence[int], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(x_0, x_1) of these samples, int64 [B, L] each."""
        noise = Noise(self.seed, samples)
        walk = noise if self.draws is None else Noise(self.seed, [0] * len(samples))
        x_0 = self.path.source.sample(noise, self.length).to(device)
        frozen = torch.zeros_like(x_0, dtype=torch.bool)
        if self.first_token is not None:
            x_0[:, 0] = self.first_token
            frozen[:, 0] = True
        x_1 = sample(
            self.denoiser,
            self.path,
            x_0,
            grid=self.grid,
            rule=self.rule,
            noise=walk,
            frozen=frozen,
            filter=self.filter if self.draws is None else None,
            hook=None if self.draws is None else self.draws(self.path, x_0, filter=self.filter, order=self.order),
        )
        return x_0, x_1


@dataclass(frozen=True)
class Perturbed:
    """Pairs (x_t, x_1 of the parent) that begin at a time t of their own, on the way from noise to a text.

    text     the rows of some samples, int64 [B, L]
    times    the times of some samples, float64 [B]
    steps    that the parent takes from t to 1
    first_token   whether the first token of a row is given
    """

    denoiser: Denoiser | SplitNetwork | LogitsFunction
    path: MixturePath
    text: Callable[[Sequence[int]], Tensor]
    times: Callable[[Sequence[int]], Tensor]
    steps: int
    rule: StepRule = field(default_factory=ExactJump)
    seed: int = 0
    first_token: bool = False
    filter: Filter | None = None

    def pairs(self, samples: Sequence[int], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(x_t, x_1) of these samples, int64 [B, L] each."""
        noise, real, t = Noise(self.seed, samples), self.text(samples), self.times(samples)
        frozen = torch.zeros_like(real, dtype=torch.bool)
        frozen[:, 0] = self.first_token
        x_0 = self.path.sample_x_0(real, noise)
        x_t = torch.where(frozen, real, self.path.sample(x_0, real, t, noise=noise)).to(device)
        shape = torch.linspace(0, 1, self.steps + 1, dtype=torch.float64)
        times = t[:, None] + (1 - t[:, None]) * shape
        times[:, -1] = 1.0
        x_1 = sample(
            self.denoiser,
            self.path,
            x_t,
            grid=Grid(times),
            rule=self.rule,
            noise=noise,
            frozen=frozen.to(device),
            filter=self.filter,
        )
        return x_t, x_1


@dataclass(frozen=True)
class InverseAutoregressive:
    """Pairs of text and its `inverse_autoregressive_noise`; the first token of a row is given.

    text         the rows of some samples, int64 [B, L]
    next_token   logits of what follows each position, int64 [B, L] -> [B, L, V]
    order        of the tokens, int64 [V]
    """

    text: Callable[[Sequence[int]], Tensor]
    next_token: Callable[[Tensor], Tensor]
    order: Tensor
    seed: int = 0

    @torch.no_grad()
    def pairs(self, samples: Sequence[int], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(x_0, x_1) of these samples, int64 [B, L] each."""
        x_1 = self.text(samples).to(device)
        probs = torch.softmax(self.next_token(x_1[:, :-1]).to(torch.float32), -1)
        u = Noise(self.seed, samples).uniform(Purpose.SOURCE, x_1.shape[1] - 1).to(device)
        x_0 = inverse_autoregressive_noise(probs, x_1[:, 1:], u, order=self.order.to(device))
        return torch.cat([x_1[:, :1], x_0], 1), x_1


def collect_pairs(
    maker: PairMaker,
    sink: PairSink,
    *,
    num_pairs: int,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Fill the sink up to `num_pairs`, yielding its count after every batch.

    Pair k comes from the noise of sample k of the seed, so a run that is interrupted and run again, in whatever
    batches, keeps the same pairs.
    """
    if num_pairs < 1 or batch_size < 1:
        raise ValueError(f"num_pairs is {num_pairs} and batch_size {batch_size}; both must be 1 or more")
    while sink.count < num_pairs:
        samples = range(sink.count, min(sink.count + batch_size, num_pairs))
        sink.append(*maker.pairs(samples, device=device))
        yield sink.count
