"""What a run says about itself: losses by (t, h), norms, speed; and the alarm that a few-step run collapses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from fsdfm.learn.objective import Objective, Outcome
from fsdfm.learn.teacher import ShortcutTeacher, Stage, Tableau

__all__ = ["EntropyAlarm", "Report", "Tally", "own_entropy"]

_TIME_BINS = 4
_ITSELF = Tableau((Stage(0.0),), (1.0,))  # the "teacher" that repeats what the network says at (x_t, t)


@dataclass(frozen=True)
class Report:
    """The training steps since the last report, averaged."""

    training_step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int  # seen since the run began
    tokens_per_second: float
    seconds_left: float
    logs: Mapping[str, float]  # what the objective noted
    loss_by_h_t: Mapping[str, Mapping[str, float]]  # log2 h -> first time of the bin -> loss
    alarm: str | None = None
    averaged: int = 1  # training steps; the first report after a resume may have fewer than the others

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, one line of `metrics.jsonl`."""
        named = {"loss", "training_step"}
        return {
            "training_step": self.training_step,
            "averaged_steps": self.averaged,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds_left": round(self.seconds_left, 1),
            **{name: value for name, value in self.logs.items() if name not in named},
            "loss_by_h_t": {h: dict(row) for h, row in self.loss_by_h_t.items()},
            **({"alarm": self.alarm} if self.alarm else {}),
        }

    def scalars(self) -> dict[str, float]:
        """Every number of the report under a name of its own, for plots."""
        numbers = {name: value for name, value in self.to_json().items() if isinstance(value, float)}
        cells = {f"loss_by_h_t/2^{h}/{t}": loss for h, row in self.loss_by_h_t.items() for t, loss in row.items()}
        return {**numbers, **cells}


class Tally:
    """Sums over the outcomes since the last report, here or on several processes."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.logs: dict[str, dict[int, list[float]]] = {}  # name -> portion -> [sum, count]
        self.norms: list[float] = []
        self.portions = 0
        self.tokens = 0
        self.steps = 0

    def add(self, outcome: Outcome, tokens: int) -> None:
        """Note what an objective said about some rows."""
        for t, h, loss in zip(outcome.t.tolist(), outcome.h.tolist(), outcome.sample_loss.tolist(), strict=True):
            self.cells[round(math.log2(h)), min(int(t * _TIME_BINS), _TIME_BINS - 1)].append(loss)
        for name, value in outcome.logs.items():
            count = outcome.counts.get(name, 1)
            self.logs.setdefault(name, {})[self.portions] = [value * count, count]
        self.portions += 1
        self.tokens += tokens

    def take(self, other: Tally) -> None:
        """Add what another process noted about its rows of the same portions."""
        for cell, losses in other.cells.items():
            self.cells[cell] += losses
        for name, portions in other.logs.items():
            for portion, (total, count) in portions.items():
                mine = self.logs.setdefault(name, {}).setdefault(portion, [0.0, 0.0])
                mine[0], mine[1] = mine[0] + total, mine[1] + count
        self.tokens += other.tokens

    def loss_by_h_t(self) -> dict[str, dict[str, float]]:
        """The mean loss by log2 h and by the quarter of [0, 1) that t lies in."""
        table: dict[str, dict[str, float]] = {}
        for (h, time), losses in sorted(self.cells.items()):
            table.setdefault(str(h), {})[f"{time / _TIME_BINS:g}"] = _mean(losses)
        return table

    def means(self) -> dict[str, float]:
        """The mean of everything the objective noted, over the portions where it did."""
        return {
            name: _mean([total / count for total, count in portions.values() if count])
            for name, portions in self.logs.items()
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class EntropyAlarm:
    """Tells when a teacher's targets have become much sharper than the student was at the start.

    A teacher that is the student's own average sharpens it, and is sharpened by it: collapse feeds itself. The alarm
    sounds when the mean entropy of the targets falls below `share` of the student's own at the start.
    """

    def __init__(self, share: float = 0.8):
        if not 0 <= share < 1:
            raise ValueError(f"share is {share}; allowed are 0 (never) <= share < 1")
        self.share = share
        self.reference: float | None = None

    def check(self, target_entropy: float | None) -> str | None:
        """A sentence if the entropy in nats is too low, else nothing."""
        if target_entropy is None or self.reference is None or target_entropy >= self.share * self.reference:
            return None
        return (
            f"what it learns from has entropy {target_entropy:.2f} nats, the student had {self.reference:.2f} at the "
            "start: it may be collapsing; look at its samples, lower optim.lr, average probabilities or raise the "
            "price of leaving the parent"
        )


def own_entropy(objective: Objective) -> Objective | None:
    """The objective that notes as target entropy what the network itself says; None where there is no teacher.

    It needs an objective that is a dataclass with the field `teacher`, or one that says it notes its own draws.
    """
    if getattr(objective, "notes_own_entropy", False):
        return objective
    teacher = objective.teacher
    if teacher is None or not is_dataclass(objective) or "teacher" not in {f.name for f in fields(objective)}:
        return None
    itself = ShortcutTeacher(_ITSELF, from_h=teacher.from_h, temperature=teacher.temperature, network=teacher.network)
    return replace(objective, teacher=itself)
