"""Objective and Teacher: the two protocols of training, and their tables.

An objective makes of a model and a batch one number to minimise; a teacher says what a large step should do. Each
implementation stands in a file of its own with its frozen config beside it, whose fields are the keys of a recipe's
section; `fsdfm.learn` registers those of the package, and anybody may register more:

    register_objective("mine", MyConfig, lambda config, path: MyObjective(path, config.strength))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from torch import Tensor, nn

from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath
from fsdfm.learn.registry import Registry
from fsdfm.noise import Noise

__all__ = [
    "OBJECTIVES",
    "TEACHERS",
    "Asked",
    "Objective",
    "Outcome",
    "SectionConfig",
    "Target",
    "Teacher",
    "TrainableDenoiser",
    "UntaughtObjective",
    "register_objective",
    "register_teacher",
]


class TrainableDenoiser(Protocol):
    """What training needs of a network: a trunk, a linear head, and the logits of chosen rows."""

    @property
    def head(self) -> nn.Module:
        """The last linear layer."""
        ...

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor, /) -> Tensor:
        """Features [B, L, C], the head's input."""
        ...

    def logits_at(self, features: Tensor) -> Tensor:
        """The head: [N, C] -> [N, V]."""
        ...


class Target(Protocol):
    """What the student should say about the rows that were shown to a teacher."""

    def log_probs(self, rows: slice | Tensor, *, forbidden: int | None) -> Tensor:
        """log p at some of the flattened positions: float32 [n, V]; `forbidden` is a token that is never drawn."""
        ...


class Asked(Protocol):
    """What an objective says of its teacher: who it is, how often and from which step size on it is asked."""

    @property
    def calls(self) -> int:
        """Network calls per row."""
        ...

    @property
    def from_h(self) -> float:
        """tau: steps of this size and larger learn from the teacher, smaller ones take the path loss."""
        ...

    @property
    def temperature(self) -> float:
        """At which teacher and student are compared."""
        ...

    @property
    def network(self) -> Literal["ema", "student", "parent", "autoregressive"]:
        """Who is asked: the averaged weights, the student without dropout, the frozen parent, or another's model."""
        ...


class Teacher(Asked, Protocol):
    """Says what a step of size h from x_t should do."""

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
    ) -> Target:
        """The target of a step of size h [B] from x_t [B, L] at t [B]."""
        ...


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

    @property
    def step_sizes(self) -> Tensor:
        """The step sizes h that it trains: where there are several, the network is told which."""
        ...

    @property
    def teacher(self) -> Asked | None:
        """Who is asked about large steps, if anybody."""
        ...

    @property
    def teacher_share(self) -> float:
        """Of the rows, the share that asks the teacher."""
        ...

    @property
    def validation(self) -> Objective:
        """What is measured on held-out text: a loss without a teacher, so that runs compare."""
        ...

    def __call__(
        self,
        model: TrainableDenoiser,
        batch: TrainingBatch,
        noise: Noise,
        /,
        *,
        training_step: int,
        ema: TrainableDenoiser,
    ) -> Outcome:
        """The loss of a batch; `ema` is the network that a teacher asks."""
        ...


class UntaughtObjective:
    """What most objectives say: nobody is asked, and held-out text has the same loss. A subclass may say otherwise."""

    @property
    def teacher(self) -> Teacher | None:
        """Nobody is asked."""
        return None

    @property
    def teacher_share(self) -> float:
        """Of the rows, all or none."""
        return 0.0 if self.teacher is None else 1.0

    @property
    def validation(self) -> Objective:
        """Itself."""
        return cast(Objective, self)


class SectionConfig(Protocol):
    """The config of an objective or a teacher: a frozen dataclass that names its kind."""

    @property
    def kind(self) -> str:
        """Its name in the table."""
        ...


OBJECTIVES = Registry("objective.kind", "path")
"""kind -> config, build(config, path) -> Objective."""

TEACHERS = Registry("objective.teacher.kind", "shortcut", hint="a tableau such as rk4 is objective.teacher.tableau")
"""kind -> config, build(config) -> Teacher, or None."""


def register_objective(name: str, config: type[Any], build: Callable[[Any, MixturePath], Objective]) -> None:
    """Let recipes say `objective.kind = name`.

    config   a frozen dataclass: the section's keys and defaults, among them kind: str = name
    build    (config, path) -> objective
    """
    OBJECTIVES.register(name, config, build)


def register_teacher(name: str, config: type[Any], build: Callable[[Any], Teacher | None]) -> None:
    """Let recipes say `objective.teacher.kind = name`; `config` and `build(config)` as in `register_objective`."""
    TEACHERS.register(name, config, build)
