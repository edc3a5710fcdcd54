"""What may be claimed: one table of everything a reader weighs, and the rule that two judges have to agree.

A claim is that a text has a lower perplexity than another. It *holds* where the 95 % interval of the ratio lies on the
same side of 1 under both judges; where only one of them says so, or they contradict each other, it does not. Under one
judge nothing holds: it is what that judge says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.show.quality.comparison import REAL, Change, Comparison, change, real_metrics
from fsdfm.show.quality.metrics import GAP, metric_named, write_number
from fsdfm.show.quality.tables import FLAG, Notes, Table

__all__ = ["JudgedClaim", "claims_table", "find_claims", "headline_table"]

_FIRST, _SECOND = "token_perplexity", "second_token_perplexity"


@dataclass(frozen=True)
class JudgedClaim:
    """A row of a model against another text: the ratio of perplexities less 1 under each judge."""

    model: str
    steps: int
    against: str
    first: Change | None
    second: Change | None
    flags: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """What may be said."""
        if self.first is None or self.second is None:
            return "one judge only"
        sides = [_side(found) for found in (self.first, self.second)]
        if sides[0] == sides[1] and sides[0]:
            word = "lower" if sides[0] < 0 else "higher"
            return f"holds: {word}" + (f" {FLAG}" if self.flags and word == "lower" else "")
        return "the judges disagree" if sides[0] * sides[1] < 0 else "not decided"


def _side(found: Change) -> int:
    return (found.measured.low > 0) - (found.measured.high < 0) if found.decided else 0


def find_claims(comparison: Comparison) -> list[JudgedClaim]:
    """Every row of every model against the baseline's of as many steps, the autoregressive model and real data."""
    base = comparison.evaluations[0]
    found = []
    for label, evaluation in comparison.pairs:
        others: dict[str, Mapping[str, Measured]] = {
            **{str(row.facts.get("name")): row.metrics for row in _alternatives(comparison)},
            REAL: real_metrics(evaluation),
        }
        for row in evaluation.plain:
            same = base.row(row.steps) if evaluation is not base else None
            against = {} if same is None else {f"{comparison.labels[0]}, {same.steps}": same.metrics}
            found += [
                _claim(label, row, against=name, metrics=metrics) for name, metrics in {**against, **others}.items()
            ]
    return [claim for claim in found if claim.first is not None]


def _claim(label: str, row: Row, *, against: str, metrics: Mapping[str, Measured]) -> JudgedClaim:
    first, second = (change(metrics.get(name), row.metrics.get(name), relative=True) for name in (_FIRST, _SECOND))
    return JudgedClaim(label, row.steps, against, first, second, row.flags)


def _alternatives(comparison: Comparison) -> list[Row]:
    """Autoregressive models, each once."""
    return list({str(r.facts.get("name")): r for e in comparison.evaluations for r in e.alternatives}.values())


def claims_table(comparison: Comparison) -> Table | None:
    """Ratios of perplexity under both judges, and whether a claim holds; None: no two judges read anything."""
    claims = find_claims(comparison)
    if not any(claim.second is not None for claim in claims):
        return None
    names, marks = _judges(comparison.evaluations), comparison.marks
    body = [
        (f"{c.model}, {c.steps} against {c.against}", _ratio(c.first), _ratio(c.second), c.verdict)
        for c in claims
        if c.second is not None
    ]
    return Table(
        title="Claims: what both judges say",
        header=(
            "perplexity of",
            *(n + marks.sign(m) for n, m in zip(names, (_FIRST, _SECOND), strict=True)),
            "verdict",
        ),
        rows=tuple(body),
        caption="Ratio of token perplexities; a claim holds where both intervals lie on the same side of 1. "
        f"{FLAG} beside a lower one: the text left the band of real text, so that less was written.",
        notes=marks.notes((_FIRST, _SECOND)),
    )


def _judges(evaluations: tuple[Evaluation, ...]) -> tuple[str, str]:
    judge: Mapping[str, Any] = next((e.judge for e in evaluations if "second" in e.judge), evaluations[0].judge)
    return str(judge.get("name", "judge")), str(dict(judge.get("second", {})).get("name", "second judge"))


def _ratio(found: Change | None) -> str:
    if found is None:
        return GAP
    value, low, high = (1 + end for end in (found.measured.value, found.measured.low, found.measured.high))
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


# --- one table of everything ------------------------------------------------------------------------------------------

_COLUMNS = ("entropy_bits", "distinct_2", "energy_style_z", "energy_trunk_z", "brier_lm")


def headline_table(comparison: Comparison) -> Table:
    """Every model and budget, the autoregressive model and real data: both judges, variety, distances and seconds."""
    rows = [*_model_rows(comparison), *((str(r.facts.get("name")), r) for r in _alternatives(comparison))]
    reals = [(real.label, real.metrics) for real in comparison.reals]
    present = {name for _, row in rows for name in row.metrics}
    columns = [metric_named(name) for name in _COLUMNS if name in present]
    judges = dict(zip((_FIRST, _SECOND), _judges(comparison.evaluations), strict=True))
    asked = [name for name in judges if name in present]
    notes = Notes()
    body = []
    for label, row in rows:
        ratio = change(comparison.reals[0].metrics.get(_FIRST), row.metrics.get(_FIRST), relative=True)
        body.append(
            (
                label,
                str(row.num_calls),
                str(row.num_samples or GAP),
                f"{row.temperature:.3g}",
                *(notes.write(metric_named(name), row.metrics, row.flags) for name in asked),
                GAP if ratio is None else f"{1 + ratio.measured.value:.3g}",
                *(metric.write_value(row.metrics.get(metric.name)) for metric in columns),
                GAP if not row.seconds_per_sample else write_number(row.seconds_per_sample, 2),
            )
        )
    for label, metrics in reals:
        written = (metric_named(name).write(metrics.get(name)) for name in asked)
        body.append((label, GAP, GAP, GAP, *written, "1", *(m.write_value(metrics.get(m.name)) for m in columns), GAP))
    marks = comparison.marks
    judged = (judges[name] + marks.sign(name) for name in asked)
    header = ("text", "calls", "texts", "temperature", *judged, f"times real{marks.sign(_FIRST)}")
    return Table(
        title="In one table",
        header=(*header, *map(marks.label, columns), "seconds"),
        rows=tuple(body),
        notes=(*notes.lines(), *marks.notes((*asked, *(metric.name for metric in columns)))),
    )


def _model_rows(comparison: Comparison) -> Iterator[tuple[str, Row]]:
    for label, evaluation in comparison.pairs:
        yield from ((label, row) for row in evaluation.plain)
        yield from ((f"{label}, entropy of {(row.matched or {}).get('to')}", row) for row in evaluation.matched)
