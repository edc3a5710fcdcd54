"""Sources: where x_0 comes from, and what that says about a token seen at time t.

A source is an i.i.d. distribution p_0 over the vocabulary. Besides sampling it answers the two questions that the
sampler and the exact posterior ask of it: `probabilities` (p_0 itself), and which positions may still move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fsdfm.noise import Noise, Purpose

__all__ = ["MaskSource", "MixtureSource", "Source", "UniformSource"]


class Source(ABC):
    """The law of x_0. `vocab_size` counts the mask token where there is one: the last, unless another is named."""

    vocab_size: int
    mask_token: int | None

    @abstractmethod
    def sample(self, noise: Noise, length: int, *, step: int = 0) -> Tensor:
        """x_0 ~ p_0: int64 [B, length], one row per sample of `noise`; another `step` is another, independent draw."""

    @abstractmethod
    def probabilities(self) -> Tensor:
        """p_0 over the vocabulary: float64 [V]."""

    def movable(self, x_t: Tensor) -> Tensor:
        """Which positions can still change: bool [B, L].

        Under the mask source a position that shows a token shows its x_1 token for certain: its posterior is the
        delta there, so it never moves. Under every other source a shown token may be noise.
        """
        return torch.ones_like(x_t, dtype=torch.bool)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in vars(self).items())})"


def _check_vocab(vocab_size: int, *, smallest: int) -> int:
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}; this source needs at least {smallest} tokens")
    return vocab_size


def _check_mask(mask_token: int | None, vocab_size: int) -> int:
    if mask_token is None:
        return vocab_size - 1
    if not isinstance(mask_token, int) or isinstance(mask_token, bool) or not 0 <= mask_token < vocab_size:
        raise ValueError(f"mask_token is {mask_token!r}; allowed are the tokens 0 .. {vocab_size - 1}")
    return mask_token


class UniformSource(Source):
    """x_0 uniform over the vocabulary: every position starts as a random real token (the paper's choice)."""

    def __init__(self, vocab_size: int):
        self.vocab_size = _check_vocab(vocab_size, smallest=1)
        self.mask_token = None

    def sample(self, noise: Noise, length: int, *, step: int = 0) -> Tensor:
        """Uniform tokens."""
        return noise.integers(Purpose.SOURCE, length, self.vocab_size, step=step)

    def probabilities(self) -> Tensor:
        """1/V everywhere."""
        return torch.full((self.vocab_size,), 1 / self.vocab_size, dtype=torch.float64)


class MaskSource(Source):
    """x_0 all [MASK]: one of `vocab_size` tokens, never emitted and, once left, never entered again."""

    mask_token: int

    def __init__(self, vocab_size: int, mask_token: int | None = None):
        self.vocab_size = _check_vocab(vocab_size, smallest=2)
        self.mask_token = _check_mask(mask_token, vocab_size)

    def sample(self, noise: Noise, length: int, **_: int) -> Tensor:
        """All mask."""
        return torch.full((len(noise), length), self.mask_token, device=noise.samples.device)

    def probabilities(self) -> Tensor:
        """The delta at the mask token."""
        p = torch.zeros(self.vocab_size, dtype=torch.float64)
        p[self.mask_token] = 1
        return p

    def movable(self, x_t: Tensor) -> Tensor:
        """The positions that are still masked."""
        return x_t.eq(self.mask_token)


class MixtureSource(Source):
    """Each position of x_0 is [MASK] with probability `mask_share`, else a uniform real token.

    The hybrid the paper names as future work: masks say openly what is missing, random tokens keep every shown
    token revisable.
    """

    mask_token: int

    def __init__(self, vocab_size: int, mask_share: float = 0.5, mask_token: int | None = None):
        if not 0 < mask_share < 1:
            raise ValueError(f"mask_share is {mask_share}; allowed are 0 < share < 1, the ends are the pure sources")
        self.vocab_size = _check_vocab(vocab_size, smallest=2)
        self.mask_token = _check_mask(mask_token, vocab_size)
        self.mask_share = float(mask_share)

    def sample(self, noise: Noise, length: int, *, step: int = 0) -> Tensor:
        """Masks and uniform tokens."""
        tokens = noise.integers(Purpose.SOURCE, length, self.vocab_size - 1, step=step)
        masked = noise.uniform(Purpose.SOURCE_KIND, length, step) < self.mask_share
        return torch.where(masked, self.mask_token, tokens + (tokens >= self.mask_token))

    def probabilities(self) -> Tensor:
        """mask_share at the mask token, the rest spread evenly."""
        real = self.vocab_size - 1
        p = torch.full((self.vocab_size,), (1 - self.mask_share) / real, dtype=torch.float64)
        p[self.mask_token] = self.mask_share
        return p
