"""What the tests of masked decoders share: the golden folder, its networks, a walk over a canvas."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import world

from fsdfm.checkpoint.huggingface import open_folder
from fsdfm.flow import (
    ExactDenoiser,
    Grid,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    StepRule,
    sample,
    total_variation,
    trajectory,
)
from fsdfm.flow.exact import all_states
from fsdfm.model.stack import Transformer
from fsdfm.noise import Noise, Purpose

GOLDEN = Path(os.environ.get("FSDFM_GOLDEN", Path(__file__).parents[2] / "shared" / "golden")) / "peers" / "llada-dream"
golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="no golden files: FSDFM_GOLDEN names no folder with peers/llada-dream"
)


def tiny(family: str, folder: Path, weights: str | None = None) -> Transformer:
    """The golden network of a family, read from a folder as it is published."""
    shutil.copy(GOLDEN / f"{family}_tiny.config.json", folder / "config.json")
    shutil.copy(GOLDEN / (weights or f"{family}_tiny.safetensors"), folder / "model.safetensors")
    with open_folder(folder) as opened:
        return opened.build()


class Seen:
    """A network that does not see the padding of its canvas."""

    def __init__(self, model: Transformer, keys: Tensor, positions: Tensor | None = None):
        self.model, self.keys, self.positions = model, keys, positions

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return self.model.trunk(x_t, t, h, keys=self.keys, positions=self.positions)

    def logits_at(self, features: Tensor) -> Tensor:
        return self.model.logits_at(features)


class KnownCoins(Noise):
    """Noise whose coins are those of a recording: [calls, B, L]."""

    def __init__(self, coins: Tensor):
        super().__init__(0, range(coins.shape[1]))
        self.coins = coins

    def uniform(self, purpose: Purpose, length: int, step: int = 0) -> Tensor:
        return self.coins[step] if purpose == Purpose.COIN else super().uniform(purpose, length, step)


def walk(network: Any, canvas: Tensor, rule: StepRule, *, steps: int, mask: int, noise: Noise | None = None) -> Tensor:
    """The canvas after every call: int64 [steps, B, L]; what is no mask is given."""
    noise = Noise(0, range(len(canvas))) if noise is None else noise
    path, frozen = MixturePath(MaskSource(64, mask)), canvas != mask
    taken = trajectory(network, path, canvas, grid=Grid.uniform(steps), noise=noise, rule=rule, frozen=frozen)
    return torch.stack([step.x_next for step in taken])


def law_distance(rule: StepRule, steps: int, *, rows: int = 2000) -> float:
    """Total variation from p_1 of what a rule writes with the true posterior of three positions as its network."""
    path, p_1 = world("mask", PolynomialSchedule(1), 3, 3)
    every, places = all_states(4, 3), torch.tensor([16, 4, 1])
    table = ExactDenoiser(path, p_1=p_1)(every, torch.full((len(every),), 0.5, dtype=torch.float64), None)

    def denoiser(x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return table[(x_t * places).sum(-1)]

    x_0, noise = torch.full((rows, 3), 3), Noise(0, range(rows))
    last = sample(denoiser, path, x_0, grid=Grid.uniform(steps), noise=noise, rule=rule)
    found = (last * places).sum(-1).bincount(minlength=64).double() / rows
    return total_variation(found, p_1.flatten())
