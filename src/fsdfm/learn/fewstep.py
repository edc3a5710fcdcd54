"""Few-step training (section 4.3): the path loss on small steps, blended row by row with a teacher on large ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import POLICIES, MixturePath, StepSizeWeights, dyadic_step_sizes
from fsdfm.flow.grid import AnnealedGeometricWeights, MirroredWeights
from fsdfm.flow.posterior import without_token
from fsdfm.learn.likelihood import is_joint
from fsdfm.learn.losses import CHUNK, ChunkLoss, chunked_loss, soft_cross_entropy
from fsdfm.learn.objective import TEACHERS, Outcome, SectionConfig, Target, Teacher, TrainableDenoiser
from fsdfm.learn.path import (
    GeneralisedKL,
    MultiplesOfH,
    NoisedRows,
    PathConfig,
    PathLoss,
    PathObjective,
    TimeGrid,
    mean_by_sample,
    mean_of_scored,
    noised,
    path_branch,
    settled,
)
from fsdfm.learn.registry import find_named
from fsdfm.learn.teacher import TABLEAUS, ShortcutConfig, ShortcutTeacher
from fsdfm.noise import Noise, Purpose

__all__ = ["FewStepConfig", "FewStepObjective", "make_few_step_objective"]


@dataclass(frozen=True, kw_only=True)
class FewStepConfig(PathConfig):
    """The keys of [objective] with kind = "fewstep": those of the path loss, the step sizes and the teacher."""

    kind: str = "fewstep"
    weights: str = "TB-20"  # how often each step size is drawn: TB-10, TB-20, PU, G, AG
    anneal_every: int | None = None  # training steps after which AG doubles its weights; None: 10,000
    mirrored: bool = False  # the weights in the other order: the paper's words taken literally
    teacher: SectionConfig = field(default_factory=ShortcutConfig, metadata={"registry": TEACHERS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights == "AG" and self.anneal_every is None:
            object.__setattr__(self, "anneal_every", 10_000)
        if self.anneal_every is not None and self.weights != "AG":
            raise ValueError(
                f'anneal_every is not used by objective.weights = "{self.weights}"; remove it, or choose "AG"'
            )

    def policy(self) -> StepSizeWeights:
        """The weights that are named."""
        weights = find_named(POLICIES, self.weights, "objective.weights")
        if self.anneal_every is not None:
            weights = AnnealedGeometricWeights(self.anneal_every)
        return MirroredWeights(weights) if self.mirrored else weights


def make_few_step_objective(config: FewStepConfig, path: MixturePath) -> FewStepObjective:
    """The objective of a recipe's section."""
    return FewStepObjective(
        path,
        teacher=TEACHERS.build(config.teacher),
        weights=config.policy(),
        step_sizes=dyadic_step_sizes(config.smallest_h),
        loss=config.path_loss(),
        times=config.time_grid(),
        spaced_share=config.spaced_share,
    )


@dataclass(frozen=True)
class FewStepObjective:
    """Few-step training: rows with h < tau take the path loss, the others distil the teacher; tau is its `from_h`.

        L = (1/B) sum_b [ m_b L_path + (1 - m_b) KL(teacher || student) ],   m_b = [h_b < tau]

    The teacher runs on the rows that use it and on no others. Without one every step size takes the path loss, or the
    likelihood of a model whose positions are joint.
    """

    path: MixturePath
    teacher: Teacher | None = field(default_factory=lambda: ShortcutTeacher(TABLEAUS["rk4"]))
    weights: StepSizeWeights = POLICIES["TB-20"]
    step_sizes: Tensor = field(default_factory=dyadic_step_sizes)
    loss: PathLoss = field(default_factory=GeneralisedKL)
    times: TimeGrid = field(default_factory=MultiplesOfH)
    spaced_share: float = 0.0
    chunk: int | None = CHUNK

    @property
    def teacher_share(self) -> float:
        """The weight of the step sizes that ask the teacher, at the first training step."""
        if self.teacher is None:
            return 0.0
        chances = self.weights.probabilities(self.step_sizes, 0)
        return float(chances[self.step_sizes >= self.teacher.from_h].sum())

    @property
    def validation(self) -> PathObjective:
        """The path loss at the smallest step, as the parent has it."""
        smallest = float(self.step_sizes.min())
        return PathObjective(
            self.path,
            loss=self.loss,
            h=smallest,
            times=self.times,
            spaced_share=self.spaced_share,
            chunk=self.chunk,
        )

    def draw_step_sizes(self, noise: Noise, training_step: int, batch_size: int) -> Tensor:
        """h of each sample, stratified over the batch: float64 [B]. Sample k of a batch of B takes the stratum k mod B.

        Strata make the number of rows that need the teacher the same in every batch, to within one.
        """
        offset = Noise(noise.seed, [training_step]).uniform(Purpose.STEP_SIZE, 1)[0, 0]
        strata = (noise.samples.cpu() % batch_size + offset) / batch_size
        return self.weights.sample(self.step_sizes, strata, training_step=training_step)

    def __call__(
        self,
        model: TrainableDenoiser,
        batch: TrainingBatch,
        noise: Noise,
        *,
        training_step: int,
        ema: TrainableDenoiser,
    ) -> Outcome:
        """The blended loss; `ema` is the teacher's network, the student itself if you pass it."""
        device = batch.x_1.device
        h = self.draw_step_sizes(noise, training_step, batch.size or len(batch.x_1))
        t = self.times(h, noise.uniform(Purpose.TIME, 1)[:, 0])
        batch = settled(self.path, batch, noise, h=h)
        rows = noised(self.path, batch, noise, t=t, spaced_share=self.spaced_share)
        features = model.trunk(rows.x_t, t.to(device), h.to(device))
        shown = _Shown(rows, features, t, h, noise, batch.given)
        takes_path = torch.ones_like(h, dtype=torch.bool) if self.teacher is None else h < self.teacher.from_h
        blend = _Blend(len(h), features)
        if bool(takes_path.any()):
            blend.add("path", self._path(model, shown.pick(takes_path)), takes_path)
        if not bool(takes_path.all()):
            blend.add("distil", self._distilled(model, shown.pick(~takes_path), ema), ~takes_path)
        elif batch.processes > 1 and self.teacher is not None:
            # A sharded teacher is brought together by all processes or not at all: ask about a row that needs none.
            self.teacher.target(ema, self.path, rows.x_t[:1], t=t[:1], h=h[:1], noise=noise[:1])
        return Outcome(blend.total, t, h, blend.sample_loss, blend.logs(), blend.counts)

    def _path(self, model: TrainableDenoiser, part: _Shown) -> _Branch:
        features = part.features.flatten(0, 1)
        total, per_row, noted = path_branch(
            model, self.path, features, rows=part.rows, t=part.t, h=part.h, loss=self.loss, chunk=self.chunk
        )
        return _Branch(total, per_row, part.rows, noted)

    def _distilled(self, model: TrainableDenoiser, part: _Shown, ema: TrainableDenoiser) -> _Branch:
        assert self.teacher is not None
        if is_joint(model):
            raise ValueError(
                f"a step of {float(part.h.max())} would learn from a teacher, but the model has a joint posterior, "
                'which no teacher knows of; set objective.teacher to "none"'
            )
        rows = part.rows
        target = self.teacher.target(ema, self.path, rows.x_t, t=part.t, h=part.h, noise=part.noise, frozen=part.given)
        entropies = torch.zeros(rows.x_t.numel(), device=rows.x_t.device)
        losses = _distilled_rows(self.path, target, temperature=self.teacher.temperature, entropies=entropies)
        total, per_row = chunked_loss(
            model, part.features.flatten(0, 1), rows.weight.flatten(), losses=losses, chunk=self.chunk
        )
        return _Branch(total, per_row, rows, {"target_entropy": mean_of_scored(entropies, rows)})


def _distilled_rows(path: MixturePath, target: Target, *, temperature: float, entropies: Tensor) -> ChunkLoss:
    """Forward KL(target || student) per row; the target's entropy, in nats, is noted in `entropies`."""
    forbidden = path.source.mask_token

    def losses(logits: Tensor, part: slice) -> Tensor:
        if temperature != 1:
            logits = logits / temperature
        if forbidden is not None:
            logits = without_token(logits, forbidden)
        log_target = target.log_probs(part, forbidden=forbidden)
        probs = torch.exp(log_target)
        entropies[part] = -torch.where(probs > 0, probs * log_target, 0.0).sum(-1)
        return soft_cross_entropy(logits, probs) - entropies[part]

    return losses


@dataclass(frozen=True)
class _Shown:
    """Rows, what the network made of them, and how they were noised."""

    rows: NoisedRows
    features: Tensor
    t: Tensor
    h: Tensor
    noise: Noise
    given: Tensor | None

    def pick(self, chosen: Tensor) -> _Shown:
        """Those that are chosen, bool [B]."""
        index = chosen.nonzero()[:, 0]
        there = index.to(self.features.device)
        given = None if self.given is None else self.given[there]
        return _Shown(
            self.rows.pick(there), self.features[there], self.t[index], self.h[index], self.noise[index], given
        )


@dataclass(frozen=True)
class _Branch:
    """The loss of some rows: their sum, per position, and what is noted beside it."""

    total: Tensor
    per_row: Tensor
    rows: NoisedRows
    noted: dict[str, float]


class _Blend:
    """The sum of both branches."""

    def __init__(self, size: int, features: Tensor):
        self.size = size
        self.total = features.new_zeros((), dtype=torch.float32)
        self.sample_loss = torch.zeros(size, device=features.device)
        self.noted: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, branch: _Branch, chosen: Tensor) -> None:
        """Add a branch over the samples that are chosen, bool [B]."""
        self.total = self.total + branch.total
        by_sample = mean_by_sample(branch.per_row, branch.rows, self.size)
        self.sample_loss[chosen.to(self.sample_loss.device)] = by_sample
        self.noted |= {name + "_loss": float(by_sample.mean()), **branch.noted}
        scored = int(branch.rows.scorable.sum())
        self.counts |= {name + "_loss": len(by_sample), **dict.fromkeys(branch.noted, scored)}

    def logs(self) -> dict[str, float]:
        """What was noted, and the whole loss."""
        return {**self.noted, "loss": float(self.total.detach())}
