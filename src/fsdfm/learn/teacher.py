"""Shortcut teachers: what one large step should do, estimated with several small ones (section 4.1, appendix B.2).

A teacher is a table of data, a `Tableau`, and one loop. Stage k asks the model at time t + node_k h, told the step size
h/2, in a state reached by a jump from the state of an earlier stage; the answers are averaged with the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fsdfm.flow import RULES, ExactJump, Independent, Jump, MixturePath, SamplerState, Schedule, advance
from fsdfm.learn.objective import Target, TrainableDenoiser
from fsdfm.learn.registry import find_named
from fsdfm.noise import Noise

__all__ = [
    "TABLEAUS",
    "FeatureTarget",
    "NoTeacherConfig",
    "ParentTeacher",
    "ShortcutConfig",
    "ShortcutTeacher",
    "Stage",
    "Tableau",
    "chained_weights",
    "make_shortcut_teacher",
]

Average = Literal["logits", "probabilities"]


@dataclass(frozen=True)
class Stage:
    """One question to the model: at t + node * h, in the state reached by a jump.

    start   the stage whose state the jump starts from, at that stage's time; None: the state is x_t itself
    drive   the stage whose posterior drives the jump
    hop     the length of the jump as a share of h
    """

    node: float
    start: int | None = None
    drive: int = 0
    hop: float = 0.0


Weights = Callable[[Schedule, Tensor, Tensor], Tensor]
"""(schedule, t [B], h [B]) -> weights [B, stages], each row summing to 1."""


@dataclass(frozen=True)
class Tableau:
    """A teacher as data: its stages, their weights, and what is averaged, logits or probabilities."""

    stages: tuple[Stage, ...]
    weights: tuple[float, ...] | Weights
    average: Average = "logits"

    def __post_init__(self) -> None:
        if not callable(self.weights):
            if len(self.weights) != len(self.stages):
                raise ValueError(f"{len(self.weights)} weights for {len(self.stages)} stages; give one each")
            if abs(sum(self.weights) - 1) > 1e-12:
                raise ValueError(f"the weights {self.weights} sum to {sum(self.weights)}; they must sum to 1")
        for k, stage in enumerate(self.stages):
            if stage.start is not None and not (0 <= stage.start < k and 0 <= stage.drive < k):
                raise ValueError(f"stage {k} starts from {stage.start} driven by {stage.drive}; name earlier stages")

    def weights_at(self, schedule: Schedule, t: Tensor, h: Tensor) -> Tensor:
        """The weights of each row: float64 [B, stages]."""
        if callable(self.weights):
            return self.weights(schedule, t, h)
        return torch.tensor(self.weights, dtype=torch.float64).expand(len(t), -1)


def chained_weights(schedule: Schedule, t: Tensor, h: Tensor) -> Tensor:
    """What two chained exact half-steps redraw from: [w1 (1 - w2) p1(x_t) + w2 p2(x_mid)] / (w1 + w2 - w1 w2).

    A token left by the second half-step was last redrawn in the first with probability w1 (1 - w2), in the second with
    w2; the whole step redraws with probability w1 + w2 - w1 w2.
    """
    middle, end = t + h / 2, t + h
    first, second = schedule.redraw(t, middle), schedule.redraw(middle, end)
    shares = torch.stack([first * (1 - second), second], -1)
    return shares / shares.sum(-1, keepdim=True)


_MIDWAY = Stage(0.5, start=0, drive=0, hop=0.5)

TABLEAUS: dict[str, Tableau] = {
    # The paper's algorithm 2: neither Heun nor midpoint.
    "rk2": Tableau((Stage(0.0), _MIDWAY), (1 / 2, 1 / 2)),
    # The paper's algorithm 1: each state starts from the one before, so it runs ahead of its time label.
    "rk4": Tableau(
        (Stage(0.0), _MIDWAY, Stage(0.5, start=1, drive=1, hop=0.5), Stage(1.0, start=2, drive=2, hop=0.5)),
        (1 / 6, 2 / 6, 2 / 6, 1 / 6),
    ),
    "classical-rk4": Tableau(
        (Stage(0.0), _MIDWAY, Stage(0.5, start=0, drive=1, hop=0.5), Stage(1.0, start=0, drive=2, hop=1.0)),
        (1 / 6, 2 / 6, 2 / 6, 1 / 6),
    ),
    "heun": Tableau((Stage(0.0), Stage(1.0, start=0, drive=0, hop=1.0)), (1 / 2, 1 / 2)),
    "midpoint": Tableau((Stage(0.0), _MIDWAY), (0.0, 1.0)),
    "chained": Tableau((Stage(0.0), _MIDWAY), chained_weights, average="probabilities"),
}


@dataclass(frozen=True)
class FeatureTarget:
    """What the student should say: features of each stage and their weights, turned into probabilities on demand.

    The head is linear, so a mean of logits is the head of the mean of features, and it is taken once; a mean of
    probabilities asks the head for every stage of weight > 0.
    """

    model: TrainableDenoiser
    features: list[Tensor]  # each [N, C]
    weights: list[Tensor]  # each [N, 1]
    temperature: float = 1.0

    @torch.no_grad()
    def log_probs(self, rows: slice | Tensor, *, forbidden: int | None) -> Tensor:
        """log p of the target at some rows: float32 [n, V]."""
        parts = []
        for features, weight in zip(self.features, self.weights, strict=True):
            logits = self.model.logits_at(features[rows]).float().div_(self.temperature)
            if forbidden is not None:
                logits[:, forbidden] = -torch.inf
            parts.append(torch.log_softmax(logits, -1).add_(torch.log(weight[rows]).float()))
        return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), 0)


@dataclass(frozen=True)
class ShortcutTeacher:
    """Runs a tableau over [t, t+h].

    jump          the rule of its hops
    average       overrides what the tableau averages
    from_h        tau: steps of this size and larger learn from it
    temperature   of its target, and of the student that is compared with it
    network       who is asked: the averaged weights, or the student
    """

    tableau: Tableau
    jump: Jump = field(default_factory=ExactJump)
    average: Average | None = None
    from_h: float = 2.0**-9
    temperature: float = 1.0
    network: Literal["ema", "student"] = "ema"

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; allowed are finite numbers > 0 (the paper uses 1)")

    @property
    def calls(self) -> int:
        """One per stage."""
        return len(self.tableau.stages)

    @torch.no_grad()
    def target(
        self,
        model: TrainableDenoiser,
        path: MixturePath,
        x_t: Tensor,
        *,
        t: Tensor,
        h: Tensor,
        noise: Noise,
        frozen: Tensor | None = None,
    ) -> FeatureTarget:
        """The target of a step of size h [B] from x_t [B, L] at t [B], by `model`, usually the EMA of the student."""
        times: list[Tensor] = []
        states: list[Tensor] = []
        features: list[Tensor] = []
        for k, stage in enumerate(self.tableau.stages):
            if stage.start is None:
                state = x_t
            else:
                begin = times[stage.start]
                end = torch.minimum(begin + stage.hop * h, torch.ones_like(h))
                now = SamplerState(states[stage.start], begin, end, path, noise, index=k, frozen=frozen)
                state = advance(now, self.jump, Independent.of_features(features[stage.drive], model))
            times.append(t + stage.node * h)
            states.append(state)
            features.append(model.trunk(state, times[-1].to(x_t.device), (h / 2).to(x_t.device)))
        weights = self.tableau.weights_at(path.schedule, t, h)
        average = self.average or self.tableau.average
        return replace(
            _averaged(model, features, weights.to(x_t.device), average=average), temperature=self.temperature
        )


def _averaged(model: TrainableDenoiser, features: list[Tensor], weights: Tensor, *, average: Average) -> FeatureTarget:
    length = features[0].shape[1]
    if average == "logits":
        mean = sum(w.to(f.dtype)[:, None, None] * f for w, f in zip(weights.T, features, strict=True))
        assert isinstance(mean, Tensor)
        return FeatureTarget(model, [mean.flatten(0, 1)], [torch.ones(mean.shape[0] * length, 1, device=mean.device)])
    used = [k for k in range(len(features)) if bool((weights[:, k] > 0).any())]
    rows = [weights[:, k, None].expand(-1, length).reshape(-1, 1) for k in used]
    return FeatureTarget(model, [features[k].flatten(0, 1) for k in used], rows)


@dataclass(frozen=True)
class ParentTeacher:
    """Who is asked by an objective itself: the frozen parent, so many times per row."""

    calls: int
    from_h: float = 0.0
    temperature: float = 1.0
    network: Literal["ema", "student", "parent"] = "parent"

    def target(self, *_: Any, **__: Any) -> Target:
        """The objective asks the parent itself."""
        raise ValueError("this teacher belongs to its own objective; name a teacher of few-step training instead")


@dataclass(frozen=True, kw_only=True)
class NoTeacherConfig:
    """The key of [objective.teacher] with kind = "none": every step size takes the path loss."""

    kind: str = "none"


@dataclass(frozen=True, kw_only=True)
class ShortcutConfig:
    """The keys of [objective.teacher] with kind = "shortcut"."""

    kind: str = "shortcut"
    tableau: str = "rk4"  # rk2, rk4, classical-rk4, heun, midpoint, chained
    from_h: float = 2.0**-9  # tau: steps of this size and larger learn from the teacher, the others take the path loss
    average: Average | None = None  # None: what the tableau says
    jump: Literal["exact", "single", "instant"] = "exact"  # the rule of the teacher's own steps
    network: Literal["ema", "student"] = "ema"  # who the teacher asks
    temperature: float = 1.0  # of teacher and student in the distillation

    def __post_init__(self) -> None:
        if not 0 <= self.from_h <= 1:
            raise ValueError(
                f'from_h is {self.from_h}; allowed are step sizes 0 <= from_h <= 1; objective.teacher = "none" '
                "takes the path loss at all of them"
            )


def make_shortcut_teacher(config: ShortcutConfig) -> ShortcutTeacher:
    """The teacher of a recipe's section."""
    rule = RULES[config.jump]
    assert isinstance(rule, Jump)
    return ShortcutTeacher(
        find_named(TABLEAUS, config.tableau, "objective.teacher.tableau"),
        jump=rule,
        average=config.average,
        from_h=config.from_h,
        temperature=config.temperature,
        network=config.network,
    )
