"""Next-token training: the causal model that few-step models are compared with, and a judge of their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.learn.objective import Outcome, UntaughtObjective
from fsdfm.noise import Noise

__all__ = ["NextTokenConfig", "NextTokenObjective"]


@dataclass(frozen=True, kw_only=True)
class NextTokenConfig:
    """The key of [objective] with kind = "next-token"."""

    kind: str = "next-token"


@dataclass(frozen=True)
class NextTokenObjective(UntaughtObjective):
    """-log p(x^i | x^1 .. x^{i-1}) in nats: the mean over samples of the mean over their tokens; the first is given."""

    @property
    def step_sizes(self) -> Tensor:
        """There is no time: all is one step."""
        return torch.ones(1, dtype=torch.float64)

    def __call__(self, model: Any, batch: TrainingBatch, _: Noise, /, **__: Any) -> Outcome:
        """The loss of a batch for a model with `nll`: int64 [B, L] -> [B, L-1]."""
        nll: Tensor = model.nll(batch.x_1)
        scored = torch.ones_like(nll) if batch.real is None else batch.real[:, 1:].to(nll)
        by_sample = (nll * scored).sum(1) / scored.sum(1).clamp(min=1)
        loss = by_sample.mean()
        size = torch.ones(len(by_sample), dtype=torch.float64)
        return Outcome(loss, torch.zeros_like(size), size, by_sample.detach(), {"loss": float(loss.detach())})
