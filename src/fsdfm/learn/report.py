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
    averaged: int = 1  # training steps

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


def _nothing() -> list[float]:
    """A sum and a count; a function with a name, for processes send it to each other."""
    return [0.0, 0]


class Tally:
    """Sums over the outcomes since the last report, here or on several processes.

    cells     (log2 h, quarter of t) -> [sum of losses, count]
    logs      name -> portion -> [sum, count], so that what processes say of one portion comes together
    earlier   name -> [sum of portions' means, portions]: from before the run was resumed
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[float]] = defaultdict(_nothing)
        self.logs: dict[str, dict[int, list[float]]] = {}
        self.earlier: dict[str, list[float]] = {}
        self.portions = self.tokens = self.steps = 0
        self.norms = self.seconds = 0.0

    def add(self, outcome: Outcome, tokens: int) -> None:
        """Note what an objective said about some rows."""
        for t, h, loss in zip(outcome.t.tolist(), outcome.h.tolist(), outcome.sample_loss.tolist(), strict=True):
            _grow(self.cells[round(math.log2(h)), min(int(t * _TIME_BINS), _TIME_BINS - 1)], loss, 1)
        for name, value in outcome.logs.items():
            count = outcome.counts.get(name, 1)
            self.logs.setdefault(name, {})[self.portions] = [value * count, count]
        self.portions += 1
        self.tokens += tokens

    def add_step(self, norm: float) -> None:
        """Note a training step and the norm of its gradient."""
        self.norms += norm
        self.steps += 1

    def take(self, other: Tally) -> None:
        """Add what another process noted about its rows of the same portions."""
        for cell, (total, count) in other.cells.items():
            _grow(self.cells[cell], total, count)
        for name, portions in other.logs.items():
            for portion, (total, count) in portions.items():
                _grow(self.logs.setdefault(name, {}).setdefault(portion, [0.0, 0.0]), total, count)
        self.tokens += other.tokens

    def loss_by_h_t(self) -> dict[str, dict[str, float]]:
        """The mean loss by log2 h and by the quarter of [0, 1) that t lies in."""
        table: dict[str, dict[str, float]] = {}
        for (h, time), (total, count) in sorted(self.cells.items()):
            table.setdefault(str(h), {})[f"{time / _TIME_BINS:g}"] = total / count
        return table

    def means(self) -> dict[str, float]:
        """The mean of everything the objective noted, over the portions where it did."""
        return {name: total / count if count else math.nan for name, (total, count) in self._sums().items()}

    def _sums(self) -> dict[str, list[float]]:
        sums = {name: list(sum_) for name, sum_ in self.earlier.items()}
        for name, portions in self.logs.items():
            own = sums.setdefault(name, [0.0, 0])
            for total, count in portions.values():
                if count:
                    _grow(own, total / count, 1)
        return sums

    def to_json(self) -> dict[str, Any]:
        """The sums as plain values, for a run that resumes before its next report."""
        cells = [[h, time, *sums] for (h, time), sums in sorted(self.cells.items())]
        numbers = {name: getattr(self, name) for name in _SUMS}
        return {**numbers, "cells": cells, "means": self._sums()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], *, whole: bool = True) -> Tally:
        """What `to_json` wrote; not `whole`: without what all processes say together, which one of them has."""
        tally = cls()
        try:
            for name in _SUMS if whole else _OF_ALL:
                setattr(tally, name, type(getattr(tally, name))(record[name]))
            for h, time, total, count in record["cells"] if whole else ():
                tally.cells[int(h), int(time)] = [float(total), int(count)]
            for name, (total, count) in record["means"].items() if whole else ():
                tally.earlier[str(name)] = [float(total), int(count)]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"the sums in this training state cannot be read ({error!r}); start a new run") from error
        return tally


_OF_ALL = ("steps", "norms", "seconds")  # the same on every process
_SUMS = (*_OF_ALL, "tokens")


def _grow(sums: list[float], total: float, count: float) -> None:
    sums[0] += total
    sums[1] += count


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
