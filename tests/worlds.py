"""Small worlds for the tests: known distributions over a few sequences, with every source and schedule."""

import torch
from torch import Tensor

from fsdfm.flow import (
    CosineSchedule,
    ExponentialSchedule,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    Schedule,
    UniformSource,
)

SCHEDULES = [
    PolynomialSchedule(1),
    PolynomialSchedule(2),
    PolynomialSchedule(1.5),
    CosineSchedule(),
    ExponentialSchedule(2),
]
SOURCES = ["uniform", "mask", "mixture"]


def coupled_data(vocab: int, length: int, seed: int = 0, sharpness: float = 4.0) -> Tensor:
    """A random distribution whose positions depend on each other: [vocab] * length."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand([vocab] * length, generator=generator, dtype=torch.float64) ** sharpness
    return weights / weights.sum()


def world(
    source: str, schedule: Schedule, vocab: int = 3, length: int = 2, seed: int = 0
) -> tuple[MixturePath, Tensor]:
    """A path and p_1 over its vocabulary (zero at the mask token where there is one)."""
    data = coupled_data(vocab, length, seed)
    if source == "uniform":
        return MixturePath(UniformSource(vocab), schedule), data
    padded = torch.nn.functional.pad(data, (0, 1) * length)
    kind = MaskSource(vocab + 1) if source == "mask" else MixtureSource(vocab + 1, mask_share=0.6)
    return MixturePath(kind, schedule), padded
