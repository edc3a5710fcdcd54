"""Training of the study's networks: one loop, any objective, data drawn from a known law."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fsdfm.data import TrainingBatch
from fsdfm.flow.exact import all_states
from fsdfm.learn import Objective
from fsdfm.noise import Noise, Purpose
from fsdfm.studies.truth.worlds import World

__all__ = ["DataLaw", "DataSource", "Lessons", "TrainableStudent", "train"]


@dataclass(frozen=True)
class Lessons:
    """How a network is trained: Adam, a short warm-up, then a cosine to zero; an average of the weights is kept."""

    train_steps: int
    batch_size: int = 512
    learning_rate: float = 4e-3
    ema_decay: float = 0.99


class DataLaw:
    """Draws training data: x_1 from the truth, or pairs (x_0, x_1) from a coupling P(x_1 | x_0) [V^L, V^L]."""

    def __init__(self, world: World, joint: Tensor | None = None):
        self.states = all_states(world.p_1.shape[0], world.length)
        self.source = world.path.source
        self.pairs = joint is not None
        self.cumulative = (world.truth[None] if joint is None else joint).cumsum(-1)

    def batch(self, noise: Noise) -> TrainingBatch:
        """One sample per row of the noise."""
        u = noise.uniform(Purpose.DATA, 1)
        if not self.pairs:
            return TrainingBatch(self.states[self._place(torch.zeros(len(u), dtype=torch.int64), u[:, 0])])
        x_0 = self.source.sample(noise, self.states.shape[1])
        place = self.source.vocab_size ** torch.arange(self.states.shape[1] - 1, -1, -1)
        return TrainingBatch(self.states[self._place((x_0 * place).sum(-1), u[:, 0])], x_0=x_0)

    def _place(self, law: Tensor, u: Tensor) -> Tensor:
        """Inverse CDF, a law each, by bisection: torch's search would want its own copy of every law.

        The total is a little off 1 in floating point, so u is scaled to it.
        """
        scaled = u.to(self.cumulative.dtype) * self.cumulative[law, -1]
        low, high = torch.zeros_like(law), torch.full_like(law, len(self.states) - 1)
        for _ in range(len(self.states).bit_length()):
            middle = (low + high) // 2
            beyond = self.cumulative[law, middle] < scaled
            low, high = torch.where(beyond, middle + 1, low), torch.where(beyond, high, middle)
        return torch.minimum(low, high)


class DataSource(Protocol):
    """Where training data come from."""

    def batch(self, noise: Noise) -> TrainingBatch:
        """One sample per row of the noise."""
        ...


class TrainableStudent(Protocol):
    """A small network whose weights of h can be left alone."""

    @property
    def head(self) -> nn.Module:
        """The last linear layer."""
        ...

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C]."""
        ...

    def logits_at(self, rows: Tensor) -> Tensor:
        """The head: [N, C] -> [N, V]."""
        ...

    def plain_parameters(self) -> Iterable[nn.Parameter]:
        """Everything but the weights of h."""
        ...

    def step_aware_parameters(self) -> Iterable[nn.Parameter]:
        """Everything."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> object:
        """Whether its weights learn."""
        ...


_Student = TypeVar("_Student", bound=TrainableStudent)


def train(
    student: _Student,
    objective: Objective,
    data: DataSource,
    *,
    lessons: Lessons,
    seed: int,
    step_aware: bool,
    watch: Callable[[int, _Student], None],
) -> _Student:
    """Train a copy of the student and return the average of its weights, which is also the teacher while it trains.

    step_aware   whether the weights of h learn too; with the path loss alone h is always the same and says nothing
    watch        called with (training step, averaged network) at each quarter of the training
    """
    student = copy.deepcopy(student)
    student.requires_grad_(False)
    parameters: list[Tensor] = list(student.step_aware_parameters() if step_aware else student.plain_parameters())
    ema = copy.deepcopy(student)
    averaged: list[Tensor] = list(ema.step_aware_parameters() if step_aware else ema.plain_parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam(parameters, lr=lessons.learning_rate, betas=(0.9, 0.99), fused=True)
    quarters = {round(lessons.train_steps * share / 4) for share in (1, 2, 3, 4)}
    for step in range(lessons.train_steps):
        for group in optimiser.param_groups:
            group["lr"] = lessons.learning_rate * _pace(step, lessons.train_steps)
        noise = Noise(seed, range(step * lessons.batch_size, (step + 1) * lessons.batch_size))
        outcome = objective(student, data.batch(noise), noise, training_step=step, ema=ema)
        optimiser.zero_grad()
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        with torch.no_grad():
            decay = min(lessons.ema_decay, (step + 1) / (step + 10))
            torch._foreach_lerp_(averaged, parameters, 1 - decay)
        if step + 1 in quarters:
            watch(step + 1, ema)
    return ema


def _pace(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear over the first twentieth, then a half cosine to zero."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
