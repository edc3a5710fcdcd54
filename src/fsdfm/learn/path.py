"""The path loss (section 4.3): pre-training, and the small steps of few-step training.

Losses are float32 and computed a few rows at a time: no [B, L, V] tensor ever lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath, generalised_kl, low_discrepancy_turns
from fsdfm.flow.posterior import without_token
from fsdfm.learn.likelihood import is_joint, joint_loss
from fsdfm.learn.losses import CHUNK, ChunkLoss, chunked_loss, log_probs_at
from fsdfm.learn.objective import Outcome, TrainableDenoiser, UntaughtObjective
from fsdfm.noise import Noise, Purpose

__all__ = [
    "CrossEntropy",
    "FineTimes",
    "GeneralisedKL",
    "MultiplesOfH",
    "NoisedRows",
    "PathConfig",
    "PathLoss",
    "PathObjective",
    "TimeGrid",
    "make_path_objective",
    "mean_by_sample",
    "mean_of_scored",
    "noised",
    "path_branch",
    "settled",
]


class TimeGrid(Protocol):
    """Where training draws t, given h."""

    def __call__(self, h: Tensor, u: Tensor) -> Tensor:
        """Times [B] with t + h <= 1, from step sizes and uniforms [B], float64."""
        ...


@dataclass(frozen=True)
class MultiplesOfH:
    """t = 0, h, 2h, ..., 1-h: the times that a sampler with steps of size h visits."""

    def __call__(self, h: Tensor, u: Tensor) -> Tensor:
        """Rounded down to a multiple of h."""
        steps = torch.round(1 / h)
        return torch.floor(u * steps) / steps


@dataclass(frozen=True)
class FineTimes:
    """t on a fine grid up to 1-h, whatever h is."""

    smallest: float = 2.0**-10

    def __call__(self, h: Tensor, u: Tensor) -> Tensor:
        """One of the (1-h)/smallest + 1 times, all alike."""
        choices = torch.round((1 - h) / self.smallest) + 1
        return torch.floor(u * choices) * self.smallest


class PathLoss(ABC):
    """A loss per position from (log p(x_1), log p(x_t)): the model's logits meet the data here."""

    @abstractmethod
    def __call__(self, log_p_1: Tensor, log_p_t: Tensor, shown: Tensor, *, scalar: Tensor) -> Tensor:
        """All of them [N]; `shown` is x_t == x_1."""


@dataclass(frozen=True)
class GeneralisedKL(PathLoss):
    """-gbar [p(x_t) - delta + (1 - delta) log p(x_1)], the paper's path loss."""

    def __call__(self, log_p_1: Tensor, log_p_t: Tensor, shown: Tensor, *, scalar: Tensor) -> Tensor:
        """See `fsdfm.flow.generalised_kl`."""
        return generalised_kl(log_p_1, log_p_t, shown, scalar=scalar)


@dataclass(frozen=True)
class CrossEntropy(PathLoss):
    """-log p(x_1): the same minimiser, another weighting of times, less variance."""

    def __call__(self, log_p_1: Tensor, *_: Tensor, **__: Tensor) -> Tensor:
        """Whatever the time."""
        return -log_p_1


LOSSES: dict[str, PathLoss] = {"generalised-kl": GeneralisedKL(), "cross-entropy": CrossEntropy()}


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    """The keys of [objective] with kind = "path"."""

    kind: str = "path"
    loss: Literal["generalised-kl", "cross-entropy"] = "generalised-kl"
    times: Literal["multiples-of-h", "fine"] = "multiples-of-h"
    smallest_h: int = -10  # log2 of the smallest step size: the one of pre-training, the first of the few-step grid
    spaced_share: float = 0.0  # of rows whose turned positions are spaced as the jump rule `spaced` takes them

    def __post_init__(self) -> None:
        if not 0 <= self.spaced_share <= 1:
            raise ValueError(f"spaced_share is {self.spaced_share}; allowed are 0 <= spaced_share <= 1")
        if not -30 <= self.smallest_h <= 0:
            raise ValueError(f"smallest_h is {self.smallest_h}; allowed are -30 .. 0, the log2 of a step size")

    def path_loss(self) -> PathLoss:
        """The loss that is named."""
        return LOSSES[self.loss]

    def time_grid(self) -> TimeGrid:
        """The times that are named."""
        return MultiplesOfH() if self.times == "multiples-of-h" else FineTimes(2.0**self.smallest_h)


@dataclass(frozen=True)
class NoisedRows:
    """The noised batch and the weight of each position in the mean: 1 / (positions of the sample * B), or 0."""

    x_1: Tensor
    x_t: Tensor
    weight: Tensor
    scorable: Tensor
    real: Tensor

    def pick(self, samples: Tensor) -> NoisedRows:
        """Some of the samples, by their index."""
        return NoisedRows(
            self.x_1[samples], self.x_t[samples], self.weight[samples], self.scorable[samples], self.real[samples]
        )


def settled(path: MixturePath, batch: TrainingBatch, noise: Noise, *, h: Tensor) -> TrainingBatch:
    """The batch with the rows of its step sizes h, each with its noise."""
    x_0, x_1, given, real = batch.x_0, batch.x_1, batch.given, batch.real
    if x_0 is None or bool((x_0[:, 0] < 0).any()):
        drawn = path.sample_x_0(x_1, noise).to(x_1.device)
        x_0 = drawn if x_0 is None else torch.where(x_0 < 0, drawn, x_0)
    for from_h, noise_there, data_there in batch.larger:
        taken = (h >= from_h).to(x_1.device)[:, None]
        x_0, x_1 = torch.where(taken, noise_there, x_0), torch.where(taken, data_there, x_1)
        real = None if real is None else real | taken
        if given is not None:
            given = torch.cat([given[:, :1], given[:, 1:] & ~taken], 1)
    return replace(batch, x_0=x_0, x_1=x_1, given=given, real=real)


def noised(path: MixturePath, batch: TrainingBatch, noise: Noise, *, t: Tensor, spaced_share: float) -> NoisedRows:
    """Rows on their way from x_0 to x_1; in a share of them the turns are spaced as `LowDiscrepancyJump` takes them."""
    assert batch.x_0 is not None
    turns = None
    if spaced_share:
        length = batch.x_1.shape[1]
        spaced = noise.uniform(Purpose.PHASE, 1, step=1) < spaced_share
        turns = torch.where(spaced, low_discrepancy_turns(noise, length), noise.uniform(Purpose.PATH, length))
    x_t = batch.x_0 if batch.t is not None else path.sample(batch.x_0, batch.x_1, t, noise=noise, turns=turns)
    scored = torch.ones_like(x_t, dtype=torch.bool)
    if batch.given is not None:
        x_t = torch.where(batch.given, batch.x_1, x_t)
        scored = scored & ~batch.given
    real = torch.ones_like(scored) if batch.real is None else batch.real
    scored = scored & real
    positions = scored.sum(1, keepdim=True).clamp(min=1)
    # A revealed position of the mask source has the delta as its posterior: nothing to learn there.
    scorable = scored & path.source.movable(x_t)
    return NoisedRows(batch.x_1, x_t, (scorable / positions).float() / len(x_t), scorable, real)


def _path_scalar(path: MixturePath, t: Tensor, h: Tensor) -> Tensor:
    """gbar_{t,h}; at t+h = 1, where it is infinite, the mean probability of a redraw w/h takes its place."""
    end = torch.minimum(t + h, torch.ones_like(t))
    return torch.where(end == 1, path.schedule.redraw(t, end) / h, path.schedule.mean_scalar(t, end))


def _path_rows(path: MixturePath, rows: NoisedRows, scalar: Tensor, *, loss: PathLoss, exits: Tensor) -> ChunkLoss:
    """The path loss per row; the rate gbar (1 - p(x_t)) at which it would leave its token is noted in `exits`."""
    x_1, x_t = rows.x_1.flatten(), rows.x_t.flatten()
    per_row = scalar.to(x_1.device, torch.float32)[:, None].expand_as(rows.x_1).flatten()

    def losses(logits: Tensor, part: slice) -> Tensor:
        if path.source.mask_token is not None:
            logits = without_token(logits, path.source.mask_token)
        log_p_1, log_p_t = log_probs_at(logits, torch.stack([x_1[part], x_t[part]], -1)).unbind(-1)
        exits[part] = -per_row[part] * torch.expm1(log_p_t.detach())
        return loss(log_p_1, log_p_t, x_1[part] == x_t[part], scalar=per_row[part])

    return losses


def path_branch(
    model: TrainableDenoiser,
    path: MixturePath,
    features: Tensor,
    *,
    rows: NoisedRows,
    t: Tensor,
    h: Tensor,
    loss: PathLoss,
    chunk: int | None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The path loss of features [N, C]: its sum, that of each row, and what is noted beside it.

    Where the model's positions are joint, their likelihood takes its place.
    """
    if is_joint(model):
        if not isinstance(loss, CrossEntropy):
            raise ValueError(
                'a model with a joint posterior is trained on its likelihood; set objective.loss to "cross-entropy"'
            )
        return *joint_loss(model, path, features, rows=rows, t=t, h=h, whole=chunk is None), {}
    exits = torch.zeros(len(features), device=features.device)
    losses = _path_rows(path, rows, _path_scalar(path, t, h), loss=loss, exits=exits)
    total, per_row = chunked_loss(model, features, rows.weight.flatten(), losses=losses, chunk=chunk)
    return total, per_row, {"exit_rate": mean_of_scored(exits, rows)}


def mean_of_scored(values: Tensor, rows: NoisedRows) -> float:
    """The mean of values [N] over the positions that can be scored."""
    scored = rows.scorable.flatten()
    return float(values[scored].mean()) if bool(scored.any()) else 0.0


def mean_by_sample(per_row: Tensor, rows: NoisedRows, batch: int) -> Tensor:
    """Each sample's own mean loss, for a batch of so many: [B] or fewer."""
    return (per_row.view_as(rows.weight) * rows.weight).sum(1) * batch


@dataclass(frozen=True)
class PathObjective(UntaughtObjective):
    """Pre-training: the path loss at small steps of size h, t drawn from the time grid."""

    path: MixturePath
    loss: PathLoss = field(default_factory=GeneralisedKL)
    h: float = 2.0**-10
    times: TimeGrid = field(default_factory=MultiplesOfH)
    spaced_share: float = 0.0
    chunk: int | None = CHUNK

    @property
    def step_sizes(self) -> Tensor:
        """The one step size."""
        return torch.tensor([self.h], dtype=torch.float64)

    def __call__(
        self,
        model: TrainableDenoiser,
        batch: TrainingBatch,
        noise: Noise,
        /,
        **_: Any,
    ) -> Outcome:
        """The mean over samples of the mean over their scored positions."""
        h = torch.full((len(batch.x_1),), self.h, dtype=torch.float64)
        t = self.times(h, noise.uniform(Purpose.TIME, 1)[:, 0]) if batch.t is None else batch.t
        batch = settled(self.path, batch, noise, h=h)
        rows = noised(self.path, batch, noise, t=t, spaced_share=self.spaced_share)
        device = batch.x_1.device
        features = model.trunk(rows.x_t, t.to(device), h.to(device)).flatten(0, 1)
        total, per_row, noted = path_branch(
            model, self.path, features, rows=rows, t=t, h=h, loss=self.loss, chunk=self.chunk
        )
        logs = {"loss": float(total.detach()), **noted}
        counts = dict.fromkeys(noted, int(rows.scorable.sum()))
        return Outcome(total, t, h, mean_by_sample(per_row, rows, len(t)), logs, counts)


def make_path_objective(config: PathConfig, path: MixturePath) -> PathObjective:
    """The objective of a recipe's section."""
    return PathObjective(
        path,
        loss=config.path_loss(),
        h=2.0**config.smallest_h,
        times=config.time_grid(),
        spaced_share=config.spaced_share,
    )
