"""Counter-based randomness: (seed, sample, step, position, purpose) -> uniforms.

Every random number of the project is a pure function of its address, so a sample does not change with
batch size, process count or the order in which things run. The generator is Philox-4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), checked against its published test vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Noise", "Purpose", "philox"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number is for; two purposes never share a number."""

    SOURCE = 0  # x_0 ~ p_0
    SOURCE_KIND = 1  # which component of a mixture a position comes from
    PATH = 2  # x_t ~ p_t(. | x_0, x_1)
    COIN = 3  # does a position jump in this step?
    DESTINATION = 4  # where it jumps to
    PHASE = 5  # the one phase a position keeps under a variance-reduced rule
    RENOISE = 6  # which positions return to the source
    TIME = 7  # t in training
    STEP_SIZE = 8  # h in training
    DATA = 9  # synthetic data, corruption of real data
    DROPOUT = 10
    BATCH = 11  # where a training row starts and how long it is
    SHUFFLE = 12  # the order of an epoch
    BOOTSTRAP = 13  # which samples a bootstrap set holds
    CONTROL = 32  # negative controls, defects put into real text, splits of real text


def philox(counter: Sequence[Tensor], key: Sequence[int]) -> list[Tensor]:
    """Philox-4x32-10: four 32-bit counter words and two 32-bit key words to four random 32-bit words.

    Words are int64 tensors holding values in [0, 2^32); they broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves right.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


class Noise:
    """The random numbers of a batch: one row of independent streams per sample.

    `samples` names the rows by their global sample index, so row 7 of one big batch and row 0 of a batch that
    holds only sample 7 receive the same numbers.

        noise = Noise(seed=0, samples=range(8))
        u = noise.uniform(Purpose.COIN, length=1024, step=3)  # float64 [8, 1024]
    """

    def __init__(self, seed: int, samples: Sequence[int] | Tensor = (0,), *, device: torch.device | str = "cpu"):
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; allowed are whole numbers 0 <= seed < 2**64")
        self.seed = seed
        indices = torch.as_tensor(samples, device=device)
        if indices.numel() and (indices.is_floating_point() or indices.dtype == torch.bool):
            raise ValueError(f"samples are {indices.dtype}; allowed are whole numbers, one index per row")
        self.samples = indices.to(torch.int64)
        if self.samples.ndim != 1:
            raise ValueError(f"samples has shape {tuple(self.samples.shape)}; give one index per row")
        if self.samples.numel() and (int(self.samples.min()) < 0 or int(self.samples.max()) >= 2**56):
            raise ValueError("a sample index is outside 0 <= index < 2**56")

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return (
            f"Noise(seed={self.seed}, samples={self.samples.tolist() if len(self) <= 6 else f'[{len(self)} of them]'})"
        )

    def __getitem__(self, rows: Tensor | slice) -> Noise:
        """The noise of some of the rows: the same numbers, fewer of them."""
        return Noise(self.seed, self.samples[rows], device=self.samples.device)

    def uniform(self, purpose: Purpose, length: int, step: int = 0) -> Tensor:
        """Uniforms in the open interval (0, 1) with 52 random bits each: float64 [B, length].

        Odd multiples of 2^-53 are exact in float64 and never 0 or 1, so an inverse CDF needs no edge case.
        """
        if not 0 <= step < 2**32:
            raise ValueError(f"step is {step}; allowed are 0 <= step < 2**32")
        if not 0 <= length < 2**32:
            raise ValueError(f"length is {length}; allowed are 0 <= length < 2**32")
        samples = self.samples[:, None]
        position = torch.arange(length, dtype=torch.int64, device=samples.device)
        address = (position, torch.full_like(position, step), samples & _MASK, (samples >> 32) << 8 | int(purpose))
        high, low, _, _ = philox(address, (self.seed & _MASK, self.seed >> 32))
        bits = (high << 20) | (low >> 12)
        return (bits.to(torch.float64) + 0.5) * 2.0**-52

    def integers(self, purpose: Purpose, length: int, high: int, *, step: int = 0) -> Tensor:
        """Integers uniform on 0 .. high-1: int64 [B, length]; the bias is below high * 2^-52."""
        if not 1 <= high <= 2**32:
            raise ValueError(f"high is {high}; allowed are 1 <= high <= 2**32")
        return (self.uniform(purpose, length, step) * high).to(torch.int64)
