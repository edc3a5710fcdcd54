"""Objectives: what a batch of data asks of the model, as one number and some logs (section 4.3).

Pre-training is the path loss on small steps; few-step training blends it, row by row, with the distillation of a
shortcut teacher on large ones. Losses are float32 and computed a few rows at a time: no [B, L, V] tensor ever lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fsdfm.flow import (
    POLICIES,
    MixturePath,
    StepSizeWeights,
    dyadic_step_sizes,
    generalised_kl,
    low_discrepancy_turns,
)
from fsdfm.learn.losses import CHUNK, ChunkLoss, chunked_loss, log_probs_at, soft_cross_entropy
from fsdfm.learn.teacher import TABLEAUS, ShortcutTeacher, Target, TrainableDenoiser
from fsdfm.noise import Noise, Purpose

__all__ = [
    "Batch",
    "CrossEntropy",
    "FewStepObjective",
    "FineTimes",
    "GeneralisedKL",
    "MultiplesOfH",
    "Objective",
    "Outcome",
    "PathLoss",
    "PathObjective",
    "TimeGrid",
]

_SAMPLES = 4  # whose logits live at a time where positions are linked


@dataclass(frozen=True)
class Batch:
    """Data for one training step.

    x_1     tokens, int64 [B, L]
    x_0     the other end of a coupled pair, int64 [B, L]; None, or a row of -1: drawn from the path's coupling
    real    positions that hold data, bool [B, L]; None: all
    given   positions that are never noised and never scored, bool [B, L], such as the first; None: none
    larger  (h, x_0, x_1): pairs [B, L] that take the place of the rows at steps of size h and larger, h growing; they
            are whole, and of what is given only the first position counts
    size    samples in the whole batch over all processes; None: those here
    processes   how many compute parts of it at this moment: all of them ask the teacher, or none
    """

    x_1: Tensor
    x_0: Tensor | None = None
    real: Tensor | None = None
    given: Tensor | None = None
    larger: tuple[tuple[float, Tensor, Tensor], ...] = ()
    size: int | None = None
    processes: int = 1


@dataclass(frozen=True)
class Outcome:
    """The loss to minimise, and what happened: per-sample tensors [B], numbers, and what each is the mean over."""

    loss: Tensor
    t: Tensor
    h: Tensor
    sample_loss: Tensor
    logs: dict[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)


class Objective(Protocol):
    """A function of a model and a batch; `noise` is addressed by sample, so the result does not depend on the batch."""

    def __call__(
        self, model: TrainableDenoiser, batch: Batch, noise: Noise, *, training_step: int, ema: TrainableDenoiser
    ) -> Outcome:
        """The loss of a batch."""
        ...


class JointHead(Protocol):
    """The part of a model that makes its positions depend on each other."""

    def log_prob(self, logits: Tensor, x_1: Tensor, *, held: Tensor, real: Tensor) -> Tensor:
        """log p(x_1 | x_t) of texts, [B, L, V] and int64 [B, L] -> [B].

        held   the token of every position that is certain, -1 elsewhere: int64 [B, L]
        real   positions that are part of the text: bool [B, L]
        """
        ...


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
    """A loss a position from (log p(x_1), log p(x_t)): the model's logits meet the data here."""

    @abstractmethod
    def __call__(self, log_p_1: Tensor, log_p_t: Tensor, shown: Tensor, scalar: Tensor) -> Tensor:
        """All of them [N]; `shown` is x_t == x_1."""


@dataclass(frozen=True)
class GeneralisedKL(PathLoss):
    """-gbar [p(x_t) - delta + (1 - delta) log p(x_1)], the paper's path loss."""

    def __call__(self, log_p_1: Tensor, log_p_t: Tensor, shown: Tensor, scalar: Tensor) -> Tensor:
        """See `fsdfm.flow.generalised_kl`."""
        return generalised_kl(log_p_1, log_p_t, shown, scalar)


@dataclass(frozen=True)
class CrossEntropy(PathLoss):
    """-log p(x_1): the same minimiser, another weighting of times, less variance."""

    def __call__(self, log_p_1: Tensor, log_p_t: Tensor, shown: Tensor, scalar: Tensor) -> Tensor:
        """Whatever the time."""
        return -log_p_1


@dataclass(frozen=True)
class _Rows:
    """The noised batch and the weight of each position in the mean: 1 / (positions of the sample * B), or 0."""

    x_1: Tensor
    x_t: Tensor
    weight: Tensor
    scorable: Tensor
    real: Tensor


def _settled(path: MixturePath, batch: Batch, noise: Noise, h: Tensor) -> Batch:
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


def _noised(path: MixturePath, batch: Batch, noise: Noise, *, t: Tensor, spaced_share: float) -> _Rows:
    """Rows on their way from x_0 to x_1; in a share of them the turns are spaced as `LowDiscrepancyJump` takes them."""
    assert batch.x_0 is not None
    turns = None
    if spaced_share:
        length = batch.x_1.shape[1]
        spaced = noise.uniform(Purpose.PHASE, 1, step=1) < spaced_share
        turns = torch.where(spaced, low_discrepancy_turns(noise, length), noise.uniform(Purpose.PATH, length))
    x_t = path.sample(batch.x_0, batch.x_1, t, noise, turns=turns)
    scored = torch.ones_like(x_t, dtype=torch.bool)
    if batch.given is not None:
        x_t = torch.where(batch.given, batch.x_1, x_t)
        scored = scored & ~batch.given
    real = torch.ones_like(scored) if batch.real is None else batch.real
    scored = scored & real
    positions = scored.sum(1, keepdim=True).clamp(min=1)
    # A revealed position of the mask source has the delta as its posterior: nothing to learn there.
    scorable = scored & path.source.movable(x_t)
    return _Rows(batch.x_1, x_t, (scorable / positions).float() / len(x_t), scorable, real)


def _path_scalar(path: MixturePath, t: Tensor, h: Tensor) -> Tensor:
    """gbar_{t,h}; at t+h = 1, where it is infinite, the mean probability of a redraw w/h takes its place."""
    end = torch.minimum(t + h, torch.ones_like(t))
    return torch.where(end == 1, path.schedule.redraw(t, end) / h, path.schedule.mean_scalar(t, end))


def _path_rows(path: MixturePath, rows: _Rows, scalar: Tensor, *, loss: PathLoss, exits: Tensor) -> ChunkLoss:
    """The path loss a row; the rate gbar (1 - p(x_t)) at which it would leave its token is noted in `exits`."""
    x_1, x_t = rows.x_1.flatten(), rows.x_t.flatten()
    per_row = scalar.to(x_1.device, torch.float32)[:, None].expand_as(rows.x_1).flatten()

    def losses(logits: Tensor, part: slice) -> Tensor:
        if path.source.mask_token is not None:
            logits = _without(logits, path.source.mask_token)
        log_p_1, log_p_t = log_probs_at(logits, torch.stack([x_1[part], x_t[part]], -1)).unbind(-1)
        exits[part] = -per_row[part] * torch.expm1(log_p_t.detach())
        return loss(log_p_1, log_p_t, x_1[part] == x_t[part], per_row[part])

    return losses


def _joint_rows(path: MixturePath, rows: _Rows, joint: JointHead) -> ChunkLoss:
    """-log p(x_1 | x_t) of whole texts, an equal part on every position that is scored; chunks hold whole samples."""
    length = rows.x_1.shape[1]
    positions = rows.scorable.sum(1).clamp(min=1)

    def losses(logits: Tensor, part: slice) -> Tensor:
        if path.source.mask_token is not None:
            logits = _without(logits, path.source.mask_token)
        samples = slice((part.start or 0) // length, None if part.stop is None else part.stop // length)
        x_1, real, free = rows.x_1[samples], rows.real[samples], rows.scorable[samples]
        held = torch.where(free | ~real, -1, x_1)
        loss = -joint.log_prob(logits.view(*x_1.shape, -1), x_1, held=held, real=real) / positions[samples]
        return loss[:, None].expand_as(x_1).flatten()

    return losses


def _path_part(
    model: TrainableDenoiser,
    path: MixturePath,
    features: Tensor,
    rows: _Rows,
    *,
    t: Tensor,
    h: Tensor,
    loss: PathLoss,
    chunk: int | None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The path loss of features [N, C]: its sum, that of each row, and what is noted beside it.

    Where the model has a joint head, it is the likelihood of whole texts, and whole samples are taken at a time.
    """
    joint = getattr(model, "joint", None)
    if joint is None:
        exits = torch.zeros(len(features), device=features.device)
        losses = _path_rows(path, rows, _path_scalar(path, t, h), loss=loss, exits=exits)
        total, per_row = chunked_loss(model, features, rows.weight.flatten(), losses=losses, chunk=chunk)
        return total, per_row, {"exit_rate": _scored_mean(exits, rows)}
    if not isinstance(loss, CrossEntropy):
        raise ValueError(
            'a model with a joint posterior is trained on its likelihood; set objective.loss to "cross-entropy"'
        )
    whole = None if chunk is None else _SAMPLES * rows.x_1.shape[1]
    losses = _joint_rows(path, rows, joint)
    return *chunked_loss(model, features, rows.weight.flatten(), losses=losses, chunk=whole), {}


def _without(logits: Tensor, token: int) -> Tensor:
    column = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    column[token] = True
    return logits.masked_fill(column, -torch.inf)


def _distilled_rows(path: MixturePath, target: Target, *, temperature: float, entropies: Tensor) -> ChunkLoss:
    """Forward KL(target || student) a row; the target's entropy, in nats, is noted in `entropies`."""
    forbidden = path.source.mask_token

    def losses(logits: Tensor, part: slice) -> Tensor:
        if temperature != 1:
            logits = logits / temperature
        if forbidden is not None:
            logits = _without(logits, forbidden)
        log_target = target.log_probs(part, temperature=temperature, forbidden=forbidden)
        probs = torch.exp(log_target)
        entropies[part] = -torch.where(probs > 0, probs * log_target, 0.0).sum(-1)
        return soft_cross_entropy(logits, probs) - entropies[part]

    return losses


def _scored_mean(values: Tensor, rows: _Rows) -> float:
    scored = rows.scorable.flatten()
    return float(values[scored].mean()) if bool(scored.any()) else 0.0


def _by_sample(per_row: Tensor, rows: _Rows, batch: int) -> Tensor:
    """Each sample's own mean loss, for a batch of so many: [B] or fewer."""
    return (per_row.view_as(rows.weight) * rows.weight).sum(1) * batch


@dataclass(frozen=True)
class PathObjective:
    """Pre-training: the path loss at small steps of size h, t drawn from the time grid."""

    path: MixturePath
    loss: PathLoss = field(default_factory=GeneralisedKL)
    h: float = 2.0**-10
    times: TimeGrid = field(default_factory=MultiplesOfH)
    spaced_share: float = 0.0
    chunk: int | None = CHUNK

    def __call__(
        self, model: TrainableDenoiser, batch: Batch, noise: Noise, *, training_step: int, ema: TrainableDenoiser
    ) -> Outcome:
        """The mean over samples of the mean over their scored positions."""
        h = torch.full((len(batch.x_1),), self.h, dtype=torch.float64)
        t = self.times(h, noise.uniform(Purpose.TIME, 1)[:, 0])
        batch = _settled(self.path, batch, noise, h)
        rows = _noised(self.path, batch, noise, t=t, spaced_share=self.spaced_share)
        device = batch.x_1.device
        features = model.trunk(rows.x_t, t.to(device), h.to(device)).flatten(0, 1)
        total, per_row, noted = _path_part(model, self.path, features, rows, t=t, h=h, loss=self.loss, chunk=self.chunk)
        logs = {"loss": float(total.detach()), **noted}
        counts = dict.fromkeys(noted, int(rows.scorable.sum()))
        return Outcome(total, t, h, _by_sample(per_row, rows, len(t)), logs, counts)


@dataclass(frozen=True)
class FewStepObjective:
    """Few-step training: rows with h < path_below_h take the path loss, the others distil the shortcut teacher.

    Both branches are summed and divided by the batch size B (section 4.3, budget-aware blending). The teacher runs on
    the rows that use it and on no others.
    """

    path: MixturePath
    teacher: ShortcutTeacher = field(default_factory=lambda: ShortcutTeacher(TABLEAUS["rk4"]))
    weights: StepSizeWeights = POLICIES["TB-20"]
    step_sizes: Tensor = field(default_factory=dyadic_step_sizes)
    path_below_h: float = 2.0**-9
    loss: PathLoss = field(default_factory=GeneralisedKL)
    times: TimeGrid = field(default_factory=MultiplesOfH)
    temperature: float = 1.0
    spaced_share: float = 0.0
    chunk: int | None = CHUNK

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; allowed are finite numbers > 0 (the paper uses 1)")

    def draw_step_sizes(self, noise: Noise, training_step: int, batch_size: int) -> Tensor:
        """h of each sample, stratified over the batch: float64 [B]. Sample k of a batch of B takes the stratum k mod B.

        Strata make the number of rows that need the teacher the same in every batch, to within one.
        """
        offset = Noise(noise.seed, [training_step]).uniform(Purpose.STEP_SIZE, 1)[0, 0]
        strata = (noise.samples.cpu() % batch_size + offset) / batch_size
        return self.weights.sample(self.step_sizes, strata, training_step=training_step)

    def __call__(
        self, model: TrainableDenoiser, batch: Batch, noise: Noise, *, training_step: int, ema: TrainableDenoiser
    ) -> Outcome:
        """The blended loss; `ema` is the teacher's network, the student itself if you pass it."""
        device = batch.x_1.device
        h = self.draw_step_sizes(noise, training_step, batch.size or len(batch.x_1))
        t = self.times(h, noise.uniform(Purpose.TIME, 1)[:, 0])
        batch = _settled(self.path, batch, noise, h)
        rows = _noised(self.path, batch, noise, t=t, spaced_share=self.spaced_share)
        features = model.trunk(rows.x_t, t.to(device), h.to(device))
        takes_path = h < self.path_below_h
        if getattr(model, "joint", None) is not None and not bool(takes_path.all()):
            raise ValueError(
                f"a step of {float(h.max())} would learn from a teacher, but the model has a joint posterior, "
                "which no teacher knows of; set objective.path_below_h to 2"
            )
        total, sample_loss = features.new_zeros((), dtype=torch.float32), torch.zeros(len(h), device=device)
        logs: dict[str, float] = {}
        counts: dict[str, int] = {}
        if batch.processes > 1 and bool(takes_path.all()):
            # A sharded teacher is brought together by all processes or not at all: ask about a row that needs none.
            self.teacher.target(ema, self.path, rows.x_t[:1], t=t[:1], h=h[:1], noise=noise[:1])
        for name, chosen in (("path", takes_path), ("distil", ~takes_path)):
            if not bool(chosen.any()):
                continue
            picked = chosen.nonzero()[:, 0]
            part = _pick(rows, picked.to(device))
            picked_features = features[picked.to(device)].flatten(0, 1)
            if name == "path":
                branch, per_row, noted = _path_part(
                    model, self.path, picked_features, part, t=t[picked], h=h[picked], loss=self.loss, chunk=self.chunk
                )
            else:
                frozen = None if batch.given is None else batch.given[picked.to(device)]
                target = self.teacher.target(
                    ema, self.path, part.x_t, t=t[picked], h=h[picked], noise=noise[picked], frozen=frozen
                )
                entropies = torch.zeros(part.x_t.numel(), device=device)
                losses = _distilled_rows(self.path, target, temperature=self.temperature, entropies=entropies)
                branch, per_row = chunked_loss(
                    model, picked_features, part.weight.flatten(), losses=losses, chunk=self.chunk
                )
                noted = {"target_entropy": _scored_mean(entropies, part)}
            total = total + branch
            branch_samples = _by_sample(per_row, part, len(h))
            sample_loss[picked.to(device)] = branch_samples
            logs |= {name + "_loss": float(branch_samples.mean()), **noted}
            counts |= {name + "_loss": len(picked), **dict.fromkeys(noted, int(part.scorable.sum()))}
        logs["loss"] = float(total.detach())
        return Outcome(total, t, h, sample_loss, logs, counts)


def _pick(rows: _Rows, samples: Tensor) -> _Rows:
    return _Rows(rows.x_1[samples], rows.x_t[samples], rows.weight[samples], rows.scorable[samples], rows.real[samples])
