"""Numbers in documents that come from result files: marked places of Markdown, written and checked by one command.

A table stands between two comments, a single number inside of a line between two others:

    <!-- results few-steps parent.json fewstep-8.json -->
    (the table)
    <!-- /results -->

    ... in 8 calls <!-- number fewstep-8.json 8 token_perplexity -->47.6 [45.9, 49.3]<!-- /number --> against ...

A section of a study's report, which is Markdown already, is taken over as it stands:

    <!-- study sudoku-4x4.md Easy -->
    (what stands under that heading)
    <!-- /study -->

Files are looked for in one folder, `fewstep*.json` means all of that beginning; files of one model, such as
fewstep-1.json and fewstep-8.json, are taken as one. What stands outside of the marks, or in a block of code, is never
touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fsdfm.files import read_text, write_text
from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation
from fsdfm.show.quality.claims import claims_table, headline_table
from fsdfm.show.quality.comparison import Comparison
from fsdfm.show.quality.metrics import metric_named
from fsdfm.show.quality.tables import (
    Table,
    controls_table,
    equal_entropy_table,
    few_steps_table,
    matched_table,
    model_tables,
)

__all__ = ["fill_blocks", "join_evaluations", "stale_documents", "write_documents"]

_LARGEST = 2**24  # bytes of a document
_TABLE = re.compile(r"(<!-- results ([a-z-]+) ([^>]*?) ?-->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_NUMBER = re.compile(r"(<!-- number (\S+) (\S+) (\w+) -->)(.*?)(<!-- /number -->)", re.DOTALL)
_ALWAYS = {"entropy_bits", "distinct_1", "distinct_2", "distinct_4"}  # measured whatever is asked for
_STUDY = re.compile(r"(<!-- study (\S+) ([^>]*?) ?-->\n)(.*?)(<!-- /study -->)", re.DOTALL)
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)  # code, which may show what a mark looks like
_REAL, _ALTERNATIVE = "real", "alternative"


def fill_blocks(text: str, folder: Path) -> str:
    """A document with every marked table and number as the result files in a folder have it."""

    def fill(part: str) -> str:
        part = _STUDY.sub(lambda found: _section(found, folder), part)
        return _NUMBER.sub(lambda found: _number(found, folder), _TABLE.sub(lambda found: _table(found, folder), part))

    return "".join(part if part.startswith("```") else fill(part) for part in _FENCED.split(text))


def stale_documents(documents: Iterable[Path], folder: Path) -> list[Path]:
    """The documents that say something else than the result files."""
    return [file for file in documents if _differs(file, folder)]


def write_documents(documents: Iterable[Path], folder: Path) -> list[Path]:
    """Bring documents up to date; those that changed."""
    changed = stale_documents(documents, folder)
    for file in changed:
        write_text(file, fill_blocks(read_text(file, _LARGEST), folder))
    return changed


def _differs(file: Path, folder: Path) -> bool:
    text = read_text(file, _LARGEST)
    try:
        return fill_blocks(text, folder) != text
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _table(found: re.Match[str], folder: Path) -> str:
    begin, kind, names, _, end = found.groups()
    comparison = _comparison([file for name in names.split() for file in _files(folder, name)])
    if kind not in _TABLES:
        raise ValueError(f"the table {kind!r} is not known; allowed are {', '.join(_TABLES)}")
    table = _TABLES[kind](comparison)
    if table is None:
        raise ValueError(f"{names} have no numbers for the table {kind}; measure them, or take the mark out")
    _, _, body = table.to_markdown().partition("\n\n")  # the document has its own heading
    return f"{begin}{body}{end}"


def _files(folder: Path, name: str) -> list[Path]:
    """The file of a name, or those of a pattern such as fewstep*.json."""
    if "*" not in name:
        return [folder / name]
    return sorted(folder.glob(name))


def _section(found: re.Match[str], folder: Path) -> str:
    begin, name, heading, _, end = found.groups()
    try:
        report = read_text(folder / name, _LARGEST)
    except OSError as error:
        raise ValueError(f"cannot read {folder / name}: {error.strerror}; copy the study's report there") from error
    parts = {head.strip(): body for head, _, body in (part.partition("\n") for part in report.split("\n## ")[1:])}
    if heading not in parts:
        raise ValueError(f"{name} has no section {heading!r}; it has {', '.join(parts)}")
    return f"{begin}{parts[heading].strip()}\n{end}"


def _number(found: re.Match[str], folder: Path) -> str:
    begin, name, which, metric, _, end = found.groups()
    evaluation = load_evaluation(folder / name)
    metrics = _metrics(evaluation, which)
    measured: Measured | None = metrics.get(metric)
    if measured is None:
        raise ValueError(
            f"{name} has no {metric} at {which}; it has the steps {[row.steps for row in evaluation.plain]}"
        )
    return f"{begin}{metric_named(metric).write(measured)}{end}"


def _metrics(evaluation: Evaluation, which: str) -> Mapping[str, Measured]:
    """Of a number of steps, real text, the first autoregressive model beside it, or of one or a control by name."""
    if which == _REAL:
        return evaluation.real
    if which == _ALTERNATIVE:
        return evaluation.alternatives[0].metrics if evaluation.alternatives else {}
    named = {str(row.facts.get("name")): row.metrics for row in evaluation.alternatives}
    if which in named:
        return named[which]
    if which in evaluation.controls:
        return evaluation.controls[which]
    row = evaluation.row(int(which)) if which.isdecimal() else None
    return {} if row is None else row.metrics


def _comparison(files: Sequence[Path]) -> Comparison:
    if not files:
        raise ValueError("a table names no result file; write <!-- results few-steps a.json -->")
    merged = join_evaluations(load_evaluation(file) for file in files)
    return Comparison(tuple(merged), tuple(merged.values()))


def join_evaluations(evaluations: Iterable[Evaluation]) -> dict[str, Evaluation]:
    """Evaluations of one model as one, by its name: the rows of the later ones are added to the first."""
    merged: dict[str, Evaluation] = {}
    for evaluation in evaluations:
        if (known := merged.get(evaluation.name)) is None:
            merged[evaluation.name] = evaluation
            continue
        if known.model.get("checkpoint_sha256") != evaluation.model.get("checkpoint_sha256"):
            raise ValueError(f"two result files of {known.name} have different weights; measure one of them again")
        merged[evaluation.name] = _join(known, evaluation)
    return merged


def _join(known: Evaluation, later: Evaluation) -> Evaluation:
    """Two evaluations of one model; the one that says more of real text, or has more, lends judge and facts."""
    joined = known
    for row in later.rows:
        joined = joined.with_row(_joined(joined, row))
    for row in later.frontier:
        joined = joined.with_frontier(row)
    main, other = (known, later) if _weight(known) >= _weight(later) else (later, known)
    return replace(
        main,
        rows=joined.rows,
        frontier=joined.frontier,
        controls=main.controls or other.controls,
        alternatives=_join_alternatives(main, other),
    )


def _weight(evaluation: Evaluation) -> tuple[int, int]:
    return len(evaluation.real), int(evaluation.facts.get("num_samples") or 0)


def _join_alternatives(main: Evaluation, other: Evaluation) -> tuple[Row, ...]:
    """Autoregressive models by name, with what either evaluation measured of them."""
    found = {str(row.facts.get("name")): row for row in other.alternatives}
    for row in main.alternatives:
        name = str(row.facts.get("name"))
        beside = found[name].metrics if name in found else {}
        found[name] = replace(row, metrics={**beside, **row.metrics})
    return tuple(found.values())


def _joined(known: Evaluation, row: Row) -> Row:
    """The row with what is known of it already, where the two measured different things; else the later one stands.

    Its seconds are those of the one that measured more.
    """
    same = next((each for each in known.rows if each.key == row.key), None)
    if same is None or same.metrics.keys() & row.metrics.keys() - _ALWAYS:
        return row
    more, less = (same, row) if len(same.metrics) >= len(row.metrics) else (row, same)
    return replace(more, metrics={**less.metrics, **more.metrics})


def _first(make: Callable[[str, Evaluation, Comparison], Table | None]) -> Callable[[Comparison], Table | None]:
    """A table of the first model."""
    return lambda comparison: make(comparison.labels[0], comparison.evaluations[0], comparison)


_TABLES: dict[str, Callable[[Comparison], Table | None]] = {
    "headline": headline_table,
    "claims": claims_table,
    "few-steps": few_steps_table,
    "matched": matched_table,
    "equal-entropy": equal_entropy_table,
    "model": _first(lambda label, e, c: model_tables(label, e, c.real_of(label))[0]),
    "controls": _first(lambda label, e, c: controls_table(label, e, c.real_of(label))),
}
