"""The tables: every one ends with real data, and a flagged perplexity bears its flag."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from fsdfm.measure.controls import DIRECTIONS
from fsdfm.measure.frontier import Frontier, compare_frontiers, frontier_of
from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.show.quality.comparison import REAL, Change, Comparison, Real, change, change_of_rows
from fsdfm.show.quality.marks import BLIND, Marks
from fsdfm.show.quality.metrics import GAP, Metric, in_order, metric_named, write_number

__all__ = [
    "Table",
    "across_budgets_table",
    "changes_csv",
    "changes_table",
    "controls_table",
    "equal_entropy_table",
    "few_steps_table",
    "matched_table",
    "metric_table",
    "model_tables",
    "plain_markdown",
    "results_csv",
]

FLAG = "⚑"
PAPER_BUDGETS = (1, 2, 4, 8, 16, 1024)
_FORMULA = tuple("=+-@\t\r")  # what a spreadsheet begins a formula with
NEAR_BITS = 0.1  # entropies that pass for equal
COMPARED = ("token_perplexity", "entropy_bits", "distinct_2", "accuracy", "mauve")


@dataclass
class Notes:
    """The reasons behind the flags of one table, each told once, under a letter."""

    reasons: dict[tuple[str, ...], str] = field(default_factory=dict)

    def mark(self, metric: Metric, flags: tuple[str, ...]) -> str:
        """What stands behind a number: nothing, or a flag with the letter of its reason."""
        if not flags or not metric.is_perplexity:
            return ""
        return f" {FLAG}{self.reasons.setdefault(flags, _letter(len(self.reasons)))}"

    def write(self, metric: Metric, metrics: Mapping[str, Measured], flags: tuple[str, ...] = ()) -> str:
        """The metric with its interval and its mark, or a gap."""
        measured = metrics.get(metric.name)
        return GAP if measured is None else metric.write(measured) + self.mark(metric, flags)

    def lines(self) -> tuple[str, ...]:
        """The reasons, to stand under the table."""
        return tuple(f"{FLAG}{letter}: {'; '.join(flags)}" for flags, letter in self.reasons.items())


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """The table with its title, caption and notes, in GitHub's Markdown."""
        lines = [f"### {plain_markdown(self.title)}", ""]
        if self.caption:
            lines += [self.caption, ""]
        lines += [_line(self.header), _line(["---", *["---:"] * (len(self.header) - 1)])]
        lines += [_line(row) for row in self.rows]
        if self.notes:
            lines += ["", *("<br>\n".join(map(plain_markdown, self.notes)),)]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """The table and its notes without title and caption; an interval stands apart from its number."""

        def cell(text: str, tag: str = "td") -> str:
            value, bracket, rest = escape(text).partition(" [")
            interval, close, after = rest.partition("]")
            small = f" <small>[{interval}]</small>{after}" if bracket and close else bracket + rest
            return f"<{tag}>{value}{small}</{tag}>"

        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.header)
        body = "\n".join(f"<tr>{cell(row[0], 'th')}{''.join(map(cell, row[1:]))}</tr>" for row in self.rows)
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>{notes}"


# --- the paper's tables -----------------------------------------------------------------------------------------------


def few_steps_table(comparison: Comparison) -> Table:
    """The paper's tables 1 to 4: a row per model, a column per budget; perplexity / entropy / MAUVE where measured."""
    present = comparison.metric_names()
    perplexity = metric_named("token_perplexity" if "token_perplexity" in present else "perplexity")
    others = [m for m in (metric_named("entropy_bits"), metric_named("mauve")) if m.name in present]
    budgets = comparison.budgets
    if len(budgets) > len(PAPER_BUDGETS):
        budgets = [steps for steps in PAPER_BUDGETS if steps in budgets] or budgets[: len(PAPER_BUDGETS)]
    notes = Notes()

    def cell(metrics: Mapping[str, Measured], flags: tuple[str, ...] = ()) -> str:
        if not any(metric.name in metrics for metric in (perplexity, *others)):
            return GAP
        first = perplexity.write_value(metrics.get(perplexity.name)) + notes.mark(perplexity, flags)
        return " / ".join([first, *(metric.write_value(metrics.get(metric.name)) for metric in others)])

    rows = [
        (label, *(cell(row.metrics, row.flags) if (row := e.row(steps)) else GAP for steps in budgets))
        for label, e in comparison.pairs
    ]
    rows += [(real.label, *[cell(real.metrics)] * len(budgets)) for real in comparison.reals]
    shown = " / ".join(comparison.marks.label(metric) for metric in (perplexity, *others))
    return Table(
        title="Few steps",
        header=("steps", *map(str, budgets)),
        rows=tuple(rows),
        caption=f"{shown[0].upper()}{shown[1:]}; the intervals stand in the tables below.",
        notes=(*notes.lines(), *_how(comparison, (perplexity, *others))),
    )


def _how(comparison: Comparison, metrics: Iterable[Metric]) -> tuple[str, ...]:
    """How those of the metrics are fooled that bear the mark."""
    marks = comparison.marks
    return marks.notes(metric.name for metric in metrics) if marks.measured else ()


def metric_table(comparison: Comparison, metric: Metric) -> Table:
    """One metric of every model, a row per budget, with intervals; a perplexity has the entropy beside it."""
    notes = Notes()
    entropy = metric_named("entropy_bits")

    def cell(metrics: Mapping[str, Measured], flags: tuple[str, ...] = ()) -> str:
        beside = f" / {entropy.write_value(metrics[entropy.name])}" if _has_both(metric, metrics) else ""
        return notes.write(metric, metrics, flags) + beside

    rows = [
        (str(steps), *(cell(row.metrics, row.flags) if (row := e.row(steps)) else GAP for e in comparison.evaluations))
        for steps in comparison.budgets
    ]
    rows.append((REAL, *(cell(comparison.real_of(label).metrics) for label in comparison.labels)))
    beside = metric.is_perplexity and entropy.name in comparison.metric_names()
    return Table(
        title=metric.label[0].upper()
        + comparison.marks.label(metric)[1:]
        + (f" / {comparison.marks.label(entropy)}" if beside else ""),
        header=("steps", *comparison.labels),
        rows=tuple(rows),
        notes=(*notes.lines(), *_how(comparison, (metric, entropy) if beside else (metric,))),
    )


def _has_both(metric: Metric, metrics: Mapping[str, Measured]) -> bool:
    return metric.is_perplexity and metric.name in metrics and "entropy_bits" in metrics


def model_tables(label: str, evaluation: Evaluation, real: Real, *, marks: Marks | None = None) -> list[Table]:
    """All that was measured of one model: the main metrics, then the rest.

    marks   the metrics that are blind; None: by the controls of this evaluation
    """
    marks = Marks.of([(label, evaluation)]) if marks is None else marks
    names = {name for row in evaluation.plain for name in row.metrics} | set(real.metrics)
    metrics = in_order(names)
    parts = {label: [m for m in metrics if m.main], f"{label}: further": [m for m in metrics if not m.main]}
    rows = (*evaluation.plain, *evaluation.alternatives)
    return [
        _model_table(title, rows, real, metrics=part, timed=n == 0, marks=marks)
        for n, (title, part) in enumerate(parts.items())
        if part or n == 0
    ]


def controls_table(label: str, evaluation: Evaluation, real: Real) -> Table | None:
    """Negative controls beside real data: text without sense, and the metrics that it fools; None: not measured."""
    if not evaluation.controls:
        return None
    names = {name for found in evaluation.controls.values() for name in found}
    metrics = [m for m in in_order(names) if m.name in DIRECTIONS]
    marks = Marks.of([(label, evaluation)])
    body = [(name, *(m.write(found.get(m.name)) for m in metrics)) for name, found in evaluation.controls.items()]
    body.append((real.label, *(m.write(real.metrics.get(m.name)) for m in metrics)))
    return Table(
        title=f"{label}: negative controls",
        header=("text without sense", *map(marks.label, metrics)),
        rows=tuple(body),
        caption=f"What is written without a model, to please one metric each. {BLIND} marks a metric that is blind: it "
        "ranks such text above real text, or above a row of the model.",
        notes=marks.notes(DIRECTIONS),
    )


def equal_entropy_table(comparison: Comparison) -> Table | None:
    """Perplexity of each model as a multiple of the first one's, where both sweeps have the entropy; None: nowhere."""
    body = []
    for label, evaluation in (*comparison.pairs[1:], *comparison.swept_alternatives.items()):
        for first, other in _swept(comparison.evaluations[0], evaluation):
            sweeps = _sweep(comparison.evaluations[0], first), _sweep(evaluation, other)
            if sweeps[0] is None or sweeps[1] is None:
                continue
            steps = str(other) if first == other else f"{other} against {first}"
            for at in compare_frontiers(sweeps[0], sweeps[1]):
                ratio = f"{at.ratio.value:.3f} [{at.ratio.low:.3f}, {at.ratio.high:.3f}]"
                shown = f"**{ratio}**" if at.decided else ratio
                body.append((label, steps, f"{at.entropy_bits:.2f}", shown))
    if not body:
        return None
    return Table(
        title=f"At equal entropy: perplexity{_sign(comparison)} as a multiple of {comparison.labels[0]}'s",
        header=("model", "steps", "entropy, bits", "ratio"),
        rows=tuple(body),
        caption="From sweeps over temperature, straight between two of them; below 1 is better, **bold** where the "
        "95 % interval leaves out 1.",
        notes=_how(comparison, (metric_named("token_perplexity"),)),
    )


def against_alternatives_table(comparison: Comparison) -> Table | None:
    """The same with the first autoregressive model as the measure of the others; None: none was swept."""
    for name, alternative in comparison.swept_alternatives.items():
        return equal_entropy_table(
            Comparison((name, *comparison.labels), (alternative, *comparison.evaluations), alone=True)
        )
    return None


def _sign(comparison: Comparison) -> str:
    return comparison.marks.sign("token_perplexity")


def across_budgets_table(comparison: Comparison) -> Table | None:
    """Every row of a model beside the first model's rows of nearly its entropy, whatever their calls; None: none is.

    All files of the first model count, so that its rows at another temperature may stand in a file of their own.
    The ratio b / a of two perplexities has the interval of `change`; rows whose entropies differ by more than NEAR_BITS
    are no pair, because cooling alone would tell them apart.
    """
    body, notes = [], Notes()
    perplexity = metric_named("token_perplexity")
    same = [each for each in comparison.evaluations if each.name == comparison.evaluations[0].name]
    baseline = [row for each in same for row in (*each.plain, *each.frontier) if _bits(row)]
    others = [(label, each) for label, each in comparison.pairs if each.name != comparison.evaluations[0].name]
    for label, evaluation in others:
        for row in evaluation.plain:
            near = [base for base in baseline if abs((_bits(row) or math.inf) - (_bits(base) or 0.0)) <= NEAR_BITS]
            for base in sorted(near, key=lambda each: (each.steps, each.temperature)):
                c = change_of_rows(base, row, "token_perplexity", relative=True)
                if c is None or math.isnan(c.measured.value):
                    continue
                ratio = f"{1 + c.measured.value:.3f} [{1 + c.measured.low:.3f}, {1 + c.measured.high:.3f}]"
                body.append(
                    (
                        label,
                        f"{row.num_calls:,}",
                        notes.write(perplexity, row.metrics, row.flags),
                        f"{_bits(row):.2f}",
                        f"{base.num_calls:,} at {base.temperature:.3g}",
                        notes.write(perplexity, base.metrics, base.flags),
                        f"{_bits(base):.2f}",
                        f"**{ratio}**" if c.decided else ratio,
                    )
                )
    if not body:
        return None
    first = comparison.labels[0]
    return Table(
        title=f"Across budgets, at equal entropy: perplexity{_sign(comparison)} as a multiple of {first}'s",
        header=("model", "calls", "perplexity", "bits", f"{first}, calls", "perplexity", "bits", "ratio"),
        rows=tuple(body),
        notes=(*notes.lines(), *_how(comparison, (perplexity,))),
        caption=f"Rows whose entropies are within {NEAR_BITS} bit, whatever their calls; below 1 is better, **bold** "
        "where the 95 % interval leaves out 1.",
    )


def _bits(row: Row) -> float | None:
    measured = row.metrics.get("entropy_bits")
    return None if measured is None or not math.isfinite(measured.value) else measured.value


def _swept(first: Evaluation, other: Evaluation) -> list[tuple[int, int]]:
    """Budgets to compare sweeps at: those that both swept, or, where they have none in common, each with each."""
    ours, theirs = (
        [steps for steps in sorted({row.steps for row in (*e.plain, *e.frontier)}) if _sweep(e, steps) is not None]
        for e in (first, other)
    )
    common = [(steps, steps) for steps in ours if steps in theirs]
    return common or [(a, b) for a in ours for b in theirs]


def _sweep(evaluation: Evaluation, steps: int) -> Frontier | None:
    """The rows of a budget at all temperatures as a frontier, if there are two or more."""
    rows = [row for row in (*evaluation.plain, *evaluation.frontier) if row.steps == steps]
    try:
        return frontier_of(rows)
    except ValueError:
        return None


def _model_table(
    title: str, rows: Sequence[Row], real: Real, *, metrics: list[Metric], timed: bool, marks: Marks
) -> Table:
    notes = Notes()
    further: dict[str, list[str]] = {}
    if any(row.num_calls != row.steps for row in rows):
        further["calls"] = [str(row.num_calls) for row in rows]
    if any(row.temperature != 1 for row in rows):
        further["temperature"] = [f"{row.temperature:.3g}" for row in rows]
    seconds = {"seconds per sample": [_seconds(row.seconds_per_sample) for row in rows]} if timed else {}
    if all(text == GAP for text in seconds.get("seconds per sample", [])):
        seconds = {}
    body = [
        (
            _row_name(row),
            *(column[n] for column in further.values()),
            *(notes.write(metric, row.metrics, row.flags) for metric in metrics),
            *(column[n] for column in seconds.values()),
        )
        for n, row in enumerate(rows)
    ]
    last = (metric.write(real.metrics.get(metric.name)) for metric in metrics)
    body.append((real.label, *[GAP] * len(further), *last, *[GAP] * len(seconds)))
    header = ("steps", *further, *map(marks.label, metrics), *seconds)
    blind = marks.notes(metric.name for metric in metrics) if timed or marks.measured else ()
    return Table(title=title, header=header, rows=tuple(body), notes=(*notes.lines(), *blind))


def _row_name(row: Row) -> str:
    """The steps; of an autoregressive model its name, too."""
    return f"{row.facts['name']}, autoregressive: {row.steps}" if "name" in row.facts else str(row.steps)


def matched_table(comparison: Comparison) -> Table | None:
    """Perplexities at an entropy that was matched by temperature; None where none was."""
    names = {name for e in comparison.evaluations for row in e.matched for name in row.metrics}
    metrics = [m for m in in_order(names) if m.main]
    notes, body = Notes(), []
    for label, evaluation in comparison.pairs:
        for row in evaluation.matched:
            assert row.matched is not None
            shown = (notes.write(metric, row.metrics, row.flags) for metric in metrics)
            body.append((label, str(row.steps), str(row.matched.get("to", GAP)), f"{row.temperature:.3g}", *shown))
    if not body:
        return None
    for real in comparison.reals:
        cells = (metric.write(real.metrics.get(metric.name)) for metric in metrics)
        body.append((real.label, GAP, GAP, GAP, *cells))
    return Table(
        title="At matched entropy",
        header=("model", "steps", "matched to", "temperature", *map(comparison.marks.label, metrics)),
        rows=tuple(body),
        caption="The temperature is found so that the entropy equals that of what is named: lower perplexity is then "
        "not bought with diversity.",
        notes=(*notes.lines(), *_how(comparison, metrics)),
    )


# --- changes ----------------------------------------------------------------------------------------------------------


def changes_table(comparison: Comparison, other: str) -> Table:
    """What changes from the baseline, the first model, to another, with intervals."""
    base, evaluation = comparison.evaluations[0], comparison.evaluations[comparison.labels.index(other)]
    common = [steps for steps in comparison.budgets if base.row(steps) and evaluation.row(steps)]
    metrics, labels = _compared(comparison), comparison.marks.label
    notes = Notes()
    body = []
    for steps in common:
        a, b = _row(base, steps), _row(evaluation, steps)
        changes = [change_of_rows(a, b, m.name, relative=m.is_perplexity) for m in metrics]
        body.append((str(steps), *(_write_change(c, m, notes) for c, m in zip(changes, metrics, strict=True))))
    if common:
        a, real = _row(base, common[-1]), comparison.real_of(comparison.labels[0]).metrics
        changes = [
            change(a.metrics.get(m.name), real.get(m.name), relative=m.is_perplexity, flags=a.flags) for m in metrics
        ]
        cells = (_write_change(c, m, notes) for c, m in zip(changes, metrics, strict=True))
        body.append((f"{REAL} against {comparison.labels[0]} at {common[-1]}", *cells))
    else:
        body.append((REAL, *[GAP] * len(metrics)))
    return Table(
        title=f"{other} against {comparison.labels[0]}",
        header=(
            "steps",
            *(f"{m.label}, %{comparison.marks.sign(m.name)}" if m.is_perplexity else labels(m) for m in metrics),
        ),
        rows=tuple(body),
        caption="Change of perplexity in per cent, of the rest as a difference, with the 95 % interval that follows "
        "from both models' (taken as independent); **bold** where it leaves out zero.",
        notes=(*notes.lines(), *_how(comparison, metrics)),
    )


def _compared(comparison: Comparison) -> list[Metric]:
    present = comparison.metric_names()
    names = [name for name in COMPARED if name in present]
    if "token_perplexity" not in present and "perplexity" in present:
        names.insert(0, "perplexity")
    return [metric_named(name) for name in names]


def _row(evaluation: Evaluation, steps: int) -> Row:
    row = evaluation.row(steps)
    assert row is not None
    return row


def _write_change(c: Change | None, metric: Metric, notes: Notes) -> str:
    if c is None:
        return GAP
    scale, decimals = (100, 1) if c.relative else (1, 3 if metric.decimals is None else metric.decimals)
    value, low, high = (_signed(scale * end, decimals) for end in (c.measured.value, c.measured.low, c.measured.high))
    text = f"{value} [{low}, {high}]" if c.measured.has_interval else value
    return (f"**{text}**" if c.decided else text) + notes.mark(metric, c.flags)


def _signed(value: float, decimals: int) -> str:
    text = write_number(value, decimals)
    return f"+{text}" if round(value, decimals) > 0 else text


# --- files for other programs -----------------------------------------------------------------------------------------


def results_csv(comparison: Comparison) -> str:
    """Every row of every model, and real data: a line per row, three columns per metric."""
    metrics = [metric.name for metric in in_order(comparison.metric_names())]
    header = ["model", "kind", "steps", "calls", "temperature", "matched_to", "flags", "num_samples"]
    lines: list[list[Any]] = [
        [*header, "seconds_per_sample", *(f"{name}{end}" for name in metrics for end in ("", "_low", "_high"))]
    ]
    for label, evaluation in comparison.pairs:
        kinds = {"budget": evaluation.plain, "matched": evaluation.matched, "frontier": evaluation.frontier}
        lines += [[label, kind, *_csv_row(row, metrics)] for kind, rows in kinds.items() for row in rows]
        for name, found in evaluation.controls.items():
            lines.append([f"{label}: {name}", "control", *[None] * 7, *_csv_metrics(found, metrics)])
    for real in comparison.reals:
        lines.append([real.label, "real", *[None] * 7, *_csv_metrics(real.metrics, metrics)])
    return _csv(lines)


def changes_csv(comparison: Comparison) -> str:
    """Every change from the baseline to another model: a line per budget and metric; perplexities as shares of one."""
    header = ["baseline", "model", "steps", "metric", "kind", "change", "low", "high", "flags"]
    lines: list[list[Any]] = [header]
    base, name = comparison.evaluations[0], comparison.labels[0]
    for label, evaluation in comparison.pairs[1:]:
        for steps in comparison.budgets:
            a, b = base.row(steps), evaluation.row(steps)
            for m in in_order(comparison.metric_names()):
                found = a and b and change_of_rows(a, b, m.name, relative=m.is_perplexity)
                if found:
                    kind, x = "relative" if found.relative else "difference", found.measured
                    lines.append([name, label, steps, m.name, kind, x.value, x.low, x.high, "; ".join(found.flags)])
    return _csv(lines)


def _csv_row(row: Row, metrics: list[str]) -> list[Any]:
    to = None if row.matched is None else row.matched.get("to")
    counts = [row.steps, row.num_calls, row.temperature, to, "; ".join(row.flags), row.num_samples]
    return [*counts, row.seconds_per_sample, *_csv_metrics(row.metrics, metrics)]


def _csv_metrics(values: Mapping[str, Measured], metrics: list[str]) -> list[Any]:
    found = [values.get(name) for name in metrics]
    return [end for m in found for end in ([None] * 3 if m is None else [m.value, m.low, m.high])]


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_csv_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """NaN as nothing; a text that a spreadsheet would take for a formula as text."""
    if isinstance(value, float) and math.isnan(value):
        return ""
    return f"'{value}" if isinstance(value, str) and value[:1] in _FORMULA else value


# --- texts ------------------------------------------------------------------------------------------------------------


def _seconds(seconds: float | None) -> str:
    return GAP if seconds is None else metric_named("seconds").write_value(Measured(seconds))


def _letter(count: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[count] if count < 26 else str(count)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(plain_markdown, cells))} |"


def plain_markdown(text: str) -> str:
    """A text of somebody else's as it is: its HTML is shown, not obeyed, and its links and pictures are no links.

    Its own backslashes come first: before a bar, one would end the cell that the bar should stand in.
    """
    text = (
        text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("](", "]\\(")
    )
    return " ".join(text.replace("|", "\\|").split())
