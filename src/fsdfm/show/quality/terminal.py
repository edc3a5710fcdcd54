"""One evaluation in the terminal: the tables of a report, folded to the width there is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fsdfm.measure.results import Evaluation
from fsdfm.show.quality.comparison import Comparison
from fsdfm.show.quality.metrics import GAP, metric_named
from fsdfm.show.quality.tables import Notes, Table, controls_table, matched_table, model_tables
from fsdfm.terminal import printable, say

__all__ = ["print_tables"]

_FRONTIER = ("token_perplexity", "perplexity", "entropy_bits", "distinct_1", "distinct_2", "distinct_4")


def print_tables(evaluation: Evaluation, console: Console) -> None:
    """Every number with its interval and its flags, real data last."""
    comparison = Comparison((evaluation.name,), (evaluation,))
    real = comparison.real_of(evaluation.name)
    for table in model_tables(evaluation.name, evaluation, real, marks=comparison.marks) if evaluation.plain else []:
        _print(table, console, keys=1)
    if (matched := matched_table(comparison)) is not None:
        _print(matched, console, keys=4)
    if (controls := controls_table(evaluation.name, evaluation, real)) is not None:
        _print(controls, console, keys=1)
    if evaluation.frontier:
        _print(_frontier(evaluation, comparison), console, keys=2)
    if (bound := evaluation.bound) is not None:
        console.print(
            f"likelihood bound: {bound.value:.3f} [{bound.low:.3f}, {bound.high:.3f}] nats per token, "
            f"perplexity <= {bound.facts['perplexity']:.1f}",
            highlight=False,
        )


def _frontier(evaluation: Evaluation, comparison: Comparison) -> Table:
    """Perplexity and diversity by temperature."""
    real, marks = comparison.real_of(evaluation.name), comparison.marks
    names = [name for name in _FRONTIER if any(name in row.metrics for row in evaluation.frontier)]
    metrics, notes = [metric_named(name) for name in names], Notes()
    rows = sorted(evaluation.frontier, key=lambda row: (row.steps, row.temperature))
    body = [
        (str(row.steps), f"{row.temperature:g}", *(notes.write(metric, row.metrics, row.flags) for metric in metrics))
        for row in rows
    ]
    body.append((real.label, GAP, *(metric.write(real.metrics.get(metric.name)) for metric in metrics)))
    header = ("steps", "temperature", *map(marks.label, metrics))
    return Table("Frontier", header, tuple(body), notes=notes.lines())


def _print(table: Table, console: Console, *, keys: int) -> None:
    """A table, its columns spread over several where the console is too narrow; each begins with its `keys`."""
    cells = [[cell.replace(" [", "\n[", 1) for cell in row] for row in table.rows]
    widths = [
        max(len(part) for part in [*name.split(), *(line for row in cells for line in row[n].splitlines())])
        for n, name in enumerate(table.header)
    ]
    for part in _fit(widths, keys, console.width):
        shown = RichTable(title=Text(printable(table.title)), title_justify="left")
        for n in part:
            shown.add_column(Text(table.header[n]), justify="left" if n == 0 else "right", width=widths[n])
        for row in cells:
            shown.add_row(*(Text(printable(row[n])) for n in part))
        console.print(shown)
    for note in table.notes:
        say(console, note)


def _fit(widths: Sequence[int], keys: int, width: int) -> list[list[int]]:
    """Columns that fit beside each other, the first `keys` in each part, and at least one more."""
    first = list(range(keys))
    parts = [[*first]]
    for n in range(keys, len(widths)):
        if len(parts[-1]) > keys and 1 + sum(widths[k] + 3 for k in [*parts[-1], n]) > width:
            parts.append([*first])
        parts[-1].append(n)
    return parts
