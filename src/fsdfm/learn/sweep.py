"""Training for the rule `sweep`: rows whose first positions are settled, beside rows of ordinary noise.

In a *prefix state* the first m positions show the text and the others pure noise, t = kappa^-1(m / L). The noise knows
nothing of the text, so the posterior is what an autoregressive model says of the rest,

    p_{1|t}(x_1 | x_t) = p(x^{m+1} .. x^L | x^1 .. x^m) = prod_{i > m} q(x^i | x^{<i}),

and a causal head has the same factors. Where q is at hand as a network, the loss is the cross-entropy against its whole
law, without it against the text (q = delta_{x^i}, whose mean over texts is the same):

    L_prefix = - sum_{i > m} w_i sum_v q(v | x^{<i}) log p_theta(v | x^{<i}, x_t),      smallest at p_theta = q

A step of size h draws the positions up to m + hL and no others: w_i is the share of the step sizes that would draw i,
one of them at least; at m = 0 all positions count alike. All rows of a training step with m = 0 show the same noise,
that of the step, so that the trunk runs once for all of them; there it can know nothing of their texts anyway.

**On-policy rows** (`own_share`): the texts of some rows that start are the model's own, x_1 ~ p_theta(. | x_0) at
t = 0, drawn anew in every training step, and q says what should have followed: distillation on what the student writes
(Agarwal et al., arXiv 2306.13649), so that it learns to go on from its own slips as its teacher would,

    L_own = - E_{x_1 ~ p_theta} sum_i w_i sum_v q(v | x_1^{<i}) log p_theta(v | x_1^{<i}, x_0),   x_1 held fixed

whose least value is at p_theta = q again, wherever p_theta gets to.

Ordinary rows take the likelihood of whole texts, as in few-step training without a teacher. With `frozen_trunk` the
trunk stands still: only the head, the vocabulary and the embedding that the head reads learn, at half the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import POLICIES, MixturePath, StepSizeWeights, dyadic_step_sizes
from fsdfm.flow.posterior import without_token
from fsdfm.learn.losses import CHUNK, ChunkLoss, chunked_loss, log_probs_at, soft_cross_entropy
from fsdfm.learn.objective import Outcome, SectionConfig, TrainableDenoiser
from fsdfm.learn.optim import without_dropout
from fsdfm.learn.path import (
    CrossEntropy,
    FineTimes,
    MultiplesOfH,
    NoisedRows,
    TimeGrid,
    mean_by_sample,
    noised,
    path_branch,
    settled,
)
from fsdfm.learn.registry import Registry, find_named
from fsdfm.learn.teacher import NoTeacherConfig
from fsdfm.model import CausalHead, CausalModel
from fsdfm.noise import Noise, Purpose

__all__ = [
    "SWEEP_TEACHERS",
    "AutoregressiveConfig",
    "AutoregressiveTeacher",
    "SweepConfig",
    "SweepObjective",
    "make_sweep_objective",
]

_ANYWHERE = 0.2  # of the prefixes end at any position, the others at a multiple of the smallest step


@dataclass(frozen=True, kw_only=True)
class AutoregressiveConfig:
    """The keys of [objective.teacher] with kind = "autoregressive"."""

    kind: str = "autoregressive"
    checkpoint: str  # a llama2.c .bin over the tokens of the model, or more of them
    tokenizer: str | None = None  # its tokenizer.bin; None: it stands behind the weights


@dataclass(frozen=True)
class AutoregressiveTeacher:
    """A frozen autoregressive model: one call for all positions of a text."""

    checkpoint: str
    tokenizer: str | None = None
    calls = 1
    from_h = 0.0
    temperature = 1.0
    network: Literal["autoregressive"] = "autoregressive"


SWEEP_TEACHERS = Registry("objective.teacher.kind", "autoregressive")
"""Who knows the law of a text's next token: kind -> config, build(config)."""

SWEEP_TEACHERS.register("none", NoTeacherConfig, lambda _: None)
SWEEP_TEACHERS.register(
    "autoregressive",
    AutoregressiveConfig,
    lambda config: AutoregressiveTeacher(config.checkpoint, config.tokenizer),
)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The keys of [objective] with kind = "sweep"."""

    kind: str = "sweep"
    prefix_share: float = 0.6  # of rows whose first positions are settled, the others noise
    start_share: float = 0.35  # of those: nothing is settled yet
    smallest_h: int = -4  # log2 of the smallest step size; prefixes end at its multiples, mostly
    weights: str = "G"  # how often an ordinary row has each step size: TB-10, TB-20, PU, G
    times: Literal["multiples-of-h", "fine"] = "multiples-of-h"
    spaced_share: float = 0.0  # of ordinary rows whose turned positions are spaced as the rule `spaced` takes them
    own_share: float = 0.0  # of rows that start whose text the model writes itself; wants a teacher
    frozen_trunk: bool = False  # only the causal head, the vocabulary and the embedding learn
    teacher: SectionConfig = field(default_factory=NoTeacherConfig, metadata={"registry": SWEEP_TEACHERS})

    def __post_init__(self) -> None:
        for name in ("prefix_share", "start_share", "spaced_share", "own_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are 0 <= {name} <= 1")
        if self.own_share and isinstance(self.teacher, NoTeacherConfig):
            raise ValueError(
                f"own_share is {self.own_share}, but nobody says what should follow the model's own text; name an "
                "objective.teacher, or leave it out"
            )
        if not -30 <= self.smallest_h <= 0:
            raise ValueError(f"smallest_h is {self.smallest_h}; allowed are -30 .. 0, the log2 of a step size")


def make_sweep_objective(config: SweepConfig, path: MixturePath) -> SweepObjective:
    """The objective of a recipe's section."""
    return SweepObjective(
        path,
        asked=SWEEP_TEACHERS.build(config.teacher),
        prefix_share=config.prefix_share,
        start_share=config.start_share,
        step_sizes=dyadic_step_sizes(config.smallest_h),
        weights=find_named(POLICIES, config.weights, "objective.weights"),
        times=MultiplesOfH() if config.times == "multiples-of-h" else FineTimes(2.0**config.smallest_h),
        spaced_share=config.spaced_share,
        own_share=config.own_share,
        frozen_trunk=config.frozen_trunk,
    )


@dataclass(frozen=True)
class SweepObjective:
    """The mean over rows: prefix states against the teacher's law, ordinary states by their likelihood."""

    path: MixturePath
    asked: AutoregressiveTeacher | None = None
    prefix_share: float = 0.6
    start_share: float = 0.35
    step_sizes: Tensor = field(default_factory=lambda: dyadic_step_sizes(-4))
    weights: StepSizeWeights = POLICIES["G"]
    times: TimeGrid = field(default_factory=MultiplesOfH)
    spaced_share: float = 0.0
    own_share: float = 0.0
    frozen_trunk: bool = False
    chunk: int | None = CHUNK

    @property
    def teacher(self) -> AutoregressiveTeacher | None:
        """Who is asked about the next token."""
        return self.asked

    @property
    def teacher_share(self) -> float:
        """The rows in a prefix state."""
        return 0.0 if self.asked is None else self.prefix_share

    @property
    def validation(self) -> SweepObjective:
        """The same states, scored by the text itself."""
        return replace(self, asked=None, own_share=0.0)

    def __call__(
        self,
        model: TrainableDenoiser,
        batch: TrainingBatch,
        noise: Noise,
        /,
        *,
        training_step: int,
        ema: Any,
    ) -> Outcome:
        """The loss of a batch; `ema` is the autoregressive model, if one is asked."""
        drawn = self._draw(batch, noise, training_step)
        batch = settled(self.path, batch, noise, h=drawn.h)
        if bool(drawn.own.any()):
            batch = self._with_own(model, batch, drawn, noise=noise, training_step=training_step)
        rows = noised(self.path, batch, noise, t=drawn.t, spaced_share=self.spaced_share)
        rows = self._with_prefixes(rows, batch, drawn, of_step=Noise(noise.seed, [training_step]))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_trunk):
            features = _features(model, rows.x_t, drawn)
        size, total = len(rows.x_t), features.new_zeros((), dtype=torch.float32)
        sample_loss = torch.zeros(size, device=features.device)
        for chosen in (~drawn.prefix, drawn.prefix):
            if bool(chosen.any()):
                index = chosen.nonzero()[:, 0]
                there = index.to(features.device)
                own, times = rows.pick(there), {"t": drawn.t[index], "h": drawn.h[index]}
                if chosen is drawn.prefix:
                    loss, per_row = self._prefix(model, features[there], own, **times, causal=ema)
                else:
                    loss, per_row = self._ordinary(model, features[there], own, **times)
                total = total + loss
                sample_loss[there] = mean_by_sample(per_row, own, size)
        logs, counts = drawn.means(sample_loss)
        return Outcome(total, drawn.t, drawn.h, sample_loss, {**logs, "loss": float(total.detach())}, counts)

    def _draw(self, batch: TrainingBatch, noise: Noise, training_step: int) -> _Drawn:
        """What each row is, stratified over the batch: a start, a prefix, an ordinary one with its step size."""
        size, length = batch.size or len(batch.x_1), batch.x_1.shape[1]
        offset, of_start = Noise(noise.seed, [training_step]).uniform(Purpose.STEP_SIZE, 2)[0]
        share = (noise.samples.cpu() % size + offset) / size
        prefix, start = share < self.prefix_share, share < self.prefix_share * self.start_share
        rest = ((share - self.prefix_share) / max(1 - self.prefix_share, 1e-9)).clamp(0, 1)
        h = self.weights.sample(self.step_sizes, rest, training_step=training_step)
        u = noise.uniform(Purpose.TIME, 3).cpu()
        t = self.times(h, u[:, 0])
        settled_positions = torch.where(start, 0, _prefix_length(u, length, float(self.step_sizes.min())))
        known = settled_positions.double() / length
        fitting = _fitting(self.step_sizes, torch.where(start, of_start, u[:, 0]), known)
        t = torch.where(prefix, self.path.schedule.kappa_inverse(known), t)
        own = share < self.prefix_share * self.start_share * self.own_share
        return _Drawn(prefix, start, own, settled_positions, t, torch.where(prefix, fitting, h))

    @torch.no_grad()
    def _with_own(
        self, model: TrainableDenoiser, batch: TrainingBatch, drawn: _Drawn, *, noise: Noise, training_step: int
    ) -> TrainingBatch:
        """The batch with texts that the model writes in one call, from the noise of the step, behind a first token."""
        x_1, length, of_step = batch.x_1, batch.x_1.shape[1], Noise(noise.seed, [training_step])
        index = drawn.own.nonzero()[:, 0]
        there, device = index.to(x_1.device), x_1.device
        first = torch.zeros_like(x_1[there], dtype=torch.bool)
        if batch.given is not None:
            first[:, 0] = batch.given[there, 0]
        shown = torch.where(first, x_1[there], self.path.source.sample(of_step, length, step=1).to(device))
        with without_dropout(model), torch.autocast(device.type, enabled=False):
            posterior = _causal_head(model).posterior(
                model, shown, drawn.t[index].to(device), h=drawn.h[index].to(device)
            )
            posterior = posterior.given(torch.where(first, shown, -1), forbidden=self.path.source.mask_token)
            u = noise.uniform(Purpose.DESTINATION, length)[index.to(noise.samples.device)]
            written = posterior.draw(torch.arange(len(index), device=device), u)
        return replace(batch, x_1=x_1.index_copy(0, there, written))

    def _with_prefixes(self, rows: NoisedRows, batch: TrainingBatch, drawn: _Drawn, *, of_step: Noise) -> NoisedRows:
        """The rows with those of a prefix state in it; of what is given only the first position counts there."""
        x_1, device, length = batch.x_1, batch.x_1.device, batch.x_1.shape[1]
        assert batch.x_0 is not None
        prefix, start = drawn.prefix.to(device)[:, None], drawn.start.to(device)[:, None]
        x_0 = torch.where(start, self.path.source.sample(of_step, length, step=1).to(device), batch.x_0)
        position = torch.arange(length, device=device)
        shown = position < drawn.settled.to(device)[:, None]
        if batch.given is not None:
            shown = shown | (batch.given & (position == 0))
        scored = ~shown & rows.real
        weight = torch.where(start, 1.0, _draw_shares(self.step_sizes, drawn.settled, length).to(device)) * scored
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-9) / len(x_1)
        return replace(
            rows,
            x_t=torch.where(prefix, torch.where(shown, x_1, x_0), rows.x_t),
            weight=torch.where(prefix, weight, rows.weight).float(),
            scorable=torch.where(prefix, scored, rows.scorable),
        )

    def _ordinary(
        self, model: TrainableDenoiser, features: Tensor, rows: NoisedRows, *, t: Tensor, h: Tensor
    ) -> tuple[Tensor, Tensor]:
        flat = features.flatten(0, 1)
        loss = CrossEntropy()
        total, per_row, _ = path_branch(model, self.path, flat, rows=rows, t=t, h=h, loss=loss, chunk=self.chunk)
        return total, per_row

    def _prefix(
        self, model: TrainableDenoiser, features: Tensor, rows: NoisedRows, *, t: Tensor, h: Tensor, causal: Any
    ) -> tuple[Tensor, Tensor]:
        """The loss of the positions that are scored, and that of every position, 0 elsewhere."""
        there = features.device
        read = _causal_head(model).read(model, features, rows.x_1, t=t.to(there), h=h.to(there)).flatten(0, 1)
        weight = rows.weight.flatten()
        scored = weight.nonzero()[:, 0]
        if self.asked is None:
            losses = _labels(rows.x_1.flatten()[scored], self.path.source.mask_token)
        else:
            losses = _laws(causal, rows.x_1, scored, forbidden=self.path.source.mask_token)
        total, found = chunked_loss(model, read[scored], weight[scored], losses=losses, chunk=self.chunk)
        return total, torch.zeros_like(weight).index_copy_(0, scored, found)


@dataclass(frozen=True)
class _Drawn:
    """What each row of a batch is: bool [B], the settled positions [B], and its times."""

    prefix: Tensor
    start: Tensor
    own: Tensor
    settled: Tensor
    t: Tensor
    h: Tensor

    def means(self, sample_loss: Tensor) -> tuple[dict[str, float], dict[str, int]]:
        """The mean loss of each kind of row, and how many there are."""
        kinds = {
            "path": ~self.prefix,
            "prefix": self.prefix & ~self.start,
            "start": self.start & ~self.own,
            "own": self.own,
        }
        some = {f"{name}_loss": sample_loss.cpu()[own] for name, own in kinds.items() if bool(own.any())}
        return {name: float(own.mean()) for name, own in some.items()}, {name: len(own) for name, own in some.items()}


def _prefix_length(u: Tensor, length: int, smallest: float) -> Tensor:
    """m from uniforms [B, 3]: mostly a multiple of the smallest step, sometimes anything from 1 to L - 1."""
    parts = max(2, min(round(1 / smallest), length))
    regular = torch.round((torch.floor(u[:, 1] * (parts - 1)) + 1) * length / parts)
    anywhere = torch.floor(u[:, 1] * (length - 1)) + 1
    return torch.where(u[:, 2] < _ANYWHERE, anywhere, regular).long().clamp(max=length - 1)


def _fitting(step_sizes: Tensor, u: Tensor, known: Tensor) -> Tensor:
    """A step size for every row, any that does not pass the end, all alike; the smallest if all do."""
    count = (step_sizes <= 1 - known[:, None] + 1e-9).sum(1).clamp(min=1)
    return step_sizes[torch.minimum((u * count).long(), count - 1)]


def _draw_shares(step_sizes: Tensor, known: Tensor, length: int) -> Tensor:
    """Of the step sizes that fit behind a prefix, the share that draws each position: float64 [B, L]."""
    left = 1 - known.double() / length
    fits = step_sizes <= left[:, None] + 1e-9
    fits[:, 0] = True
    ahead = (torch.arange(length) - known[:, None]).double() / length  # how far a position lies behind the prefix
    drawn = (fits[:, None] & (step_sizes > ahead[..., None])).sum(-1)
    return drawn.clamp(min=1).double() / fits.sum(1, keepdim=True)


def _features(model: TrainableDenoiser, x_t: Tensor, drawn: _Drawn) -> Tensor:
    """The trunk's features; rows of a start that show the same go through it once."""
    key = torch.where(drawn.start.to(x_t.device)[:, None], x_t, -1 - torch.arange(len(x_t), device=x_t.device)[:, None])
    _, place = torch.unique(key, dim=0, return_inverse=True)
    order = torch.arange(len(x_t), device=x_t.device)
    first = torch.full_like(order, len(x_t)).scatter_reduce_(0, place, order, "amin")[: int(place.max()) + 1]
    features = model.trunk(x_t[first], drawn.t.to(x_t.device)[first], drawn.h.to(x_t.device)[first])
    return features[place]


def _causal_head(model: TrainableDenoiser) -> CausalHead:
    head = getattr(model, "joint", None)
    if not isinstance(head, CausalHead):
        raise ValueError('objective.kind is "sweep", which trains a causal head; set model.causal_blocks, to 2 perhaps')
    return head


def _labels(tokens: Tensor, forbidden: int | None) -> ChunkLoss:
    """-log p of the text's own tokens [N]."""

    def losses(logits: Tensor, part: slice) -> Tensor:
        logits = logits if forbidden is None else without_token(logits, forbidden)
        return -log_probs_at(logits, tokens[part, None])[:, 0]

    return losses


def _laws(causal: CausalModel, x_1: Tensor, scored: Tensor, *, forbidden: int | None) -> ChunkLoss:
    """The cross-entropy against what an autoregressive model says after x_1^{<i}, at some positions b * L + i."""
    length = x_1.shape[1]
    if bool((scored % length == 0).any()):
        raise ValueError(
            "the first position is to be learnt from an autoregressive model, which needs a token before it; train a "
            'model whose texts begin with a given token, or set objective.teacher to "none"'
        )
    with torch.no_grad():
        features = causal.trunk(x_1[:, :-1]).flatten(0, 1)[scored - scored // length - 1]

    def losses(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            law = torch.softmax(causal.head(features[part]).float(), -1)
            law = torch.nn.functional.pad(law, (0, logits.shape[-1] - law.shape[-1]))
        return soft_cross_entropy(logits if forbidden is None else without_token(logits, forbidden), law)

    return losses
