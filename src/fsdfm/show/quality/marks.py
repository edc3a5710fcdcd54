"""The mark of blindness: which metrics of a table or figure a negative control fools, and how.

marks = comparison.marks
marks.label(metric_named("token_perplexity"))    # perplexity (token) ⊘
marks.notes(["token_perplexity"])                # what stands under the table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdfm.measure.controls import Blindness, blind_metrics
from fsdfm.measure.results import Evaluation
from fsdfm.show.quality.metrics import Metric, metric_named

__all__ = ["BLIND", "UNKNOWN", "Marks", "fooled_in_words"]

BLIND = "⊘"  # a metric that a negative control fools
UNKNOWN = f"{BLIND} is not known: no negative controls were measured beside these rows"
_OF_ROWS = " steps"


@dataclass(frozen=True)
class Marks:
    """The metrics that are blind, by their names; `measured`: whether any negative control was measured at all."""

    found: Mapping[str, Blindness]
    measured: bool = True

    @classmethod
    def of(cls, evaluations: Sequence[tuple[str, Evaluation]]) -> Marks:
        """Of labelled evaluations: the controls of each, or, where it has none, those that another one has.

        All are read by one judge, and a control's text is the same whatever model it stands beside.
        """
        lent = next((e for _, e in evaluations if e.controls), None)
        if lent is None:
            return cls({}, measured=False)
        several, found = len(evaluations) > 1, dict[str, Blindness]()
        for label, evaluation in evaluations:
            for mark in blind_metrics(evaluation) if evaluation.controls else blind_metrics(evaluation, lent=lent):
                above = {_called(label, row) if several else row: who for row, who in mark.above_models.items()}
                known = found.get(mark.metric, Blindness(mark.metric))
                real = tuple(dict.fromkeys((*known.above_real, *mark.above_real)))
                found[mark.metric] = Blindness(mark.metric, real, {**known.above_models, **above})
        return cls(found)

    def sign(self, *names: str) -> str:
        """The mark, behind what it belongs to, where one of these metrics is blind."""
        return f" {BLIND}" if any(name in self.found for name in names) else ""

    def label(self, metric: Metric) -> str:
        """What the metric is called, with its mark."""
        return metric.label + self.sign(metric.name)

    def notes(self, names: Iterable[str]) -> tuple[str, ...]:
        """What stands under a table of these metrics: how each blind one is fooled."""
        blind = [self.found[name] for name in dict.fromkeys(names) if name in self.found]
        told = tuple(f"{BLIND} {metric_named(mark.metric).label}: {fooled_in_words(mark)}" for mark in blind)
        return told if self.measured else (UNKNOWN,)


def _called(label: str, row: str) -> str:
    return f"{label}, {row.removesuffix(_OF_ROWS)}" if row.endswith(_OF_ROWS) else row


def fooled_in_words(mark: Blindness) -> str:
    """What a blind metric ranks above what; rows that the same controls beat are told together."""
    parts = [f"{', '.join(mark.above_real)} above real data"] if mark.above_real else []
    groups: dict[tuple[str, ...], list[str]] = {}
    for row, controls in mark.above_models.items():
        groups.setdefault(controls, []).append(row)
    parts += [f"{', '.join(controls)} above {_rows(rows)}" for controls, rows in groups.items()]
    return "; ".join(parts)


def _rows(rows: Sequence[str]) -> str:
    """Rows in words: 1, 2 steps, or, of several models, few-step (1, 2), parent (8)."""
    steps = [row.removesuffix(_OF_ROWS) for row in rows if row.endswith(_OF_ROWS)]
    told = [f"{', '.join(steps)}{_OF_ROWS}"] if steps else []
    models: dict[str, list[str]] = {}
    for row in (row for row in rows if not row.endswith(_OF_ROWS)):
        label, _, budget = row.rpartition(", ")
        models.setdefault(label or row, []).extend([budget] if label else [])
    told += [f"{label} ({', '.join(budgets)})" if budgets else label for label, budgets in models.items()]
    return ", ".join(told)
