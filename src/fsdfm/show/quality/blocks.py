"""Numbers in documents that come from result files: marked places of Markdown, written and checked by one command.

A table stands between two comments, a single number inside of a line between two others:

    <!-- results few-steps parent.json fewstep-8.json -->
    (the table)
    <!-- /results -->

    ... in 8 calls <!-- number fewstep-8.json 8 token_perplexity -->47.6 [45.9, 49.3]<!-- /number --> against ...

    ... <!-- number few.json 1 token_perplexity over real alone -->1.76<!-- /number --> times real text

`over` divides by the same number of another text, `alone` leaves the interval out. Beside metrics a row has `texts`,
`temperature`, `seconds` (of a text), and `guard`, what the collapse guard flags, in words. A picture is drawn from
results and holds the digest of what it was drawn from, so that one that is out of date is found:

    <!-- picture latency fewstep*.json -->
    ![Perplexity against seconds](assets/latency.png)

The least and the largest ratio that two sweeps have at equal entropy stand inside of a line, too; FILE:NAME is the
sweep of an autoregressive model:

    <!-- equal-entropy sweeps/parent.json sweeps/fewstep.json -->0.160 to 0.290<!-- /equal-entropy --> times

A section of a study's report, which is Markdown already, is taken over as it stands:

    <!-- study sudoku-4x4.md Easy -->
    (what stands under that heading)
    <!-- /study -->

Files are looked for in one folder, `fewstep*.json` means all of that beginning; files of one model, such as
fewstep-1.json and fewstep-8.json, are taken as one. What stands outside of the marks, or in a block of code, is never
touched.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdfm.files import read_bytes, read_text, replace_file, write_text
from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation
from fsdfm.show.plots import require_plots
from fsdfm.show.quality.claims import claims_table, headline_table
from fsdfm.show.quality.comparison import Comparison, change
from fsdfm.show.quality.figures import draw_frontier, draw_latency, draw_quality
from fsdfm.show.quality.metrics import GAP, metric_named, write_number
from fsdfm.show.quality.tables import (
    Table,
    against_alternatives_table,
    controls_table,
    equal_entropy_table,
    few_steps_table,
    matched_table,
    model_tables,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["fill_blocks", "join_evaluations", "stale_documents", "write_documents"]

_LARGEST = 2**24  # bytes of a document or its picture
_TABLE = re.compile(r"(<!-- results ([a-z-]+) ([^>]*?) ?-->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_NUMBER = re.compile(r"(<!-- number (\S+) (\S+) (\w+)(?: over (\S+))?( alone)? -->)(.*?)(<!-- /number -->)", re.DOTALL)
_PICTURE = re.compile(r"<!-- picture ([a-z-]+) ([^>]*?) -->\n!\[[^\]]*\]\(([^)\s]+\.png)\)")
_ALWAYS = {"entropy_bits", "distinct_1", "distinct_2", "distinct_4"}  # measured whatever is asked for
_RATIOS = re.compile(r"(<!-- equal-entropy (\S+) (\S+) -->)(.*?)(<!-- /equal-entropy -->)", re.DOTALL)
_STUDY = re.compile(r"(<!-- study (\S+) ([^>]*?) ?-->\n)(.*?)(<!-- /study -->)", re.DOTALL)
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)  # code, which may show what a mark looks like
_REAL, _ALTERNATIVE = "real", "alternative"
_DIGEST, _DPI = "fsdfm-results", 160


def fill_blocks(text: str, folder: Path) -> str:
    """A document with every marked table and number as the result files in a folder have it."""

    def fill(part: str) -> str:
        part = _STUDY.sub(lambda found: _section(found, folder), part)
        part = _RATIOS.sub(lambda found: _ratios(found, folder), part)
        return _NUMBER.sub(lambda found: _number(found, folder), _TABLE.sub(lambda found: _table(found, folder), part))

    return "".join(part if part.startswith("```") else fill(part) for part in _FENCED.split(text))


def stale_documents(documents: Iterable[Path], folder: Path) -> list[Path]:
    """The documents, and their pictures, that say something else than the result files."""
    found = []
    for file in documents:
        found += [file] if _differs(file, folder) else []
        found += [picture.file for picture in _pictures(file, folder) if picture.is_stale]
    return list(dict.fromkeys(found))


def write_documents(documents: Iterable[Path], folder: Path) -> list[Path]:
    """Bring documents and their pictures up to date; those that changed."""
    files = list(documents)
    stale = stale_documents(files, folder)
    for file in files:
        if file in stale:
            write_text(file, fill_blocks(read_text(file, _LARGEST), folder))
        for picture in _pictures(file, folder):
            if picture.is_stale:
                picture.draw()
    return stale


def _differs(file: Path, folder: Path) -> bool:
    text = read_text(file, _LARGEST)
    try:
        return fill_blocks(text, folder) != text
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


@dataclass(frozen=True)
class _Picture:
    """A figure of result files that a document shows."""

    file: Path
    kind: str
    comparison: Comparison

    @property
    def digest(self) -> str:
        """Of all that is drawn."""
        drawn = [(label, e.to_json()["rows"], e.to_json()["frontier"]) for label, e in self.comparison.pairs]
        beside = [
            [row.to_json() for row in (*e.alternatives, *e.alternative_frontier)] for e in self.comparison.evaluations
        ]
        real = [{name: m.to_json() for name, m in each.metrics.items()} for each in self.comparison.reals]
        said = json.dumps([self.kind, drawn, beside, real, sorted(self.comparison.marks.found)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def is_stale(self) -> bool:
        """Whether the file is missing or was drawn from other numbers."""
        return not self.file.is_file() or self.digest.encode() not in read_bytes(self.file, _LARGEST)

    def draw(self) -> None:
        """Draw it; the digest stands in the PNG as a text."""
        require_plots()
        figure = _FIGURES[self.kind](self.comparison)
        if figure is None:
            raise ValueError(f"{self.file.name}: the files have no numbers for the picture {self.kind}")
        about = {_DIGEST: self.digest}
        replace_file(self.file, partial(figure.savefig, format="png", dpi=_DPI, metadata=about))


def _pictures(document: Path, folder: Path) -> list[_Picture]:
    """The pictures of result files in a document; code blocks are left out."""
    text = read_text(document, _LARGEST)
    found = []
    for part in _FENCED.split(text):
        for kind, names, target in [] if part.startswith("```") else _PICTURE.findall(part):
            if kind not in _FIGURES:
                raise ValueError(f"{document}: the picture {kind!r} is not known; allowed are {', '.join(_FIGURES)}")
            comparison = _comparison([file for name in names.split() for file in _files(folder, name)])
            found.append(_Picture((document.parent / target).resolve(), kind, comparison))
    return found


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


def _ratios(found: re.Match[str], folder: Path) -> str:
    """The least and the largest ratio of perplexities at the entropies that both sweeps have."""
    begin, first, other, _, end = found.groups()
    table = equal_entropy_table(_two_sweeps(folder, first, other))
    if table is None:
        raise ValueError(f"{first} and {other} have no entropy in common; sweep both: --frontier 0.8,0.9,1")
    ratios = [row[-1].strip("*").partition(" ")[0] for row in table.rows]
    return f"{begin}{min(ratios, key=float)} to {max(ratios, key=float)}{end}"


def _two_sweeps(folder: Path, first: str, other: str) -> Comparison:
    """Two models of two files; FILE:NAME is the autoregressive model NAME that FILE swept."""
    found = []
    for name, _, alternative in (each.partition(":") for each in (first, other)):
        evaluation = load_evaluation(folder / name)
        if alternative and alternative not in evaluation.swept_alternatives:
            raise ValueError(f"{name} holds no sweep of {alternative}; measure it: --alternative-frontier 0.8,0.9")
        found.append(evaluation.swept_alternatives[alternative] if alternative else evaluation)
    return Comparison(tuple(evaluation.name for evaluation in found), tuple(found), alone=True)


def _number(found: re.Match[str], folder: Path) -> str:
    begin, name, which, metric, over, alone, _, end = found.groups()
    evaluation = load_evaluation(folder / name)
    if metric in _FACTS:
        row = _row(evaluation, which)
        if row is None or over is not None:
            raise ValueError(f"{name} has no {metric} at {which}; it is a row's own: give its steps")
        return f"{begin}{_FACTS[metric](row)}{end}"

    def of(text: str) -> Measured:
        measured = _metrics(evaluation, text).get(metric)
        if measured is None:
            raise ValueError(
                f"{name} has no {metric} at {text}; it has the steps {[row.steps for row in evaluation.plain]}"
            )
        return measured

    if over is not None:
        ratio = change(of(over), of(which), relative=True)
        assert ratio is not None
        value, low, high = (1 + part for part in (ratio.measured.value, ratio.measured.low, ratio.measured.high))
        return f"{begin}{value:.3g}{end}" if alone else f"{begin}{value:.3g} [{low:.3g}, {high:.3g}]{end}"
    shown = metric_named(metric)
    return f"{begin}{shown.write_value(of(which)) if alone else shown.write(of(which))}{end}"


def _metrics(evaluation: Evaluation, which: str) -> Mapping[str, Measured]:
    """Of a number of steps, real text, the first autoregressive model beside it, or of one or a control by name."""
    if which == _REAL:
        return evaluation.real
    if which == _ALTERNATIVE:
        return evaluation.alternatives[0].metrics if evaluation.alternatives else {}
    if which in evaluation.controls:
        return evaluation.controls[which]
    row = _row(evaluation, which)
    return {} if row is None else row.metrics


def _row(evaluation: Evaluation, which: str) -> Row | None:
    """The row of a number of steps, or of an autoregressive model by name."""
    if which.isdecimal():
        return evaluation.row(int(which))
    return next((row for row in evaluation.alternatives if row.facts.get("name") == which), None)


def _guard(row: Row) -> str:
    """What the collapse guard says of a row: distinct-2 (collapse), or nothing."""
    flags = [flag.partition(": ") for flag in row.flags]
    kinds = {
        kind: [metric_named(rest.partition(" ")[0]).label for k, _, rest in flags if k == kind] for kind, *_ in flags
    }
    return "; ".join(f"{', '.join(names)} ({kind})" for kind, names in kinds.items()) or "nothing"


_FACTS: dict[str, Callable[[Row], str]] = {
    "texts": lambda row: str(row.num_samples),
    "temperature": lambda row: f"{row.temperature:.3g}",
    "seconds": lambda row: GAP if row.seconds_per_sample is None else write_number(row.seconds_per_sample, 2),
    "guard": _guard,
}
"""What a row says of itself beside its metrics."""


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
        merged[evaluation.name] = _join(*_same_model(known, evaluation))
    return merged


def _same_model(known: Evaluation, later: Evaluation) -> tuple[Evaluation, Evaluation]:
    """Both, if they are of the same weights; one with no row of its own says nothing of any weights."""
    if known.model.get("checkpoint_sha256") == later.model.get("checkpoint_sha256"):
        return known, later
    for own, other in ((known, later), (later, known)):
        if not (other.rows or other.frontier):
            return own, Evaluation(
                model=own.model,
                judge=_judge_of(other),
                alternatives=other.alternatives,
                alternative_frontier=other.alternative_frontier,
            )
    raise ValueError(f"two result files of {known.name} have different weights; measure one of them again")


def _judge_of(evaluation: Evaluation) -> Mapping[str, Any]:
    """Who judges, without what was said of the real text beside other weights."""
    return {name: value for name, value in evaluation.judge.items() if name not in ("real", "shuffled")}


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
        alternative_frontier=tuple(
            {(row.facts.get("name"), row.key): row for e in (other, main) for row in e.alternative_frontier}.values()
        ),
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
    "equal-entropy-alternative": against_alternatives_table,
    "model": _first(lambda label, e, c: model_tables(label, e, c.real_of(label), marks=c.marks_of(label))[0]),
    "controls": _first(lambda label, e, c: controls_table(label, e, c.real_of(label))),
}
_FIGURES: dict[str, Callable[[Comparison], Figure | None]] = {
    "latency": draw_latency,
    "frontier": draw_frontier,
    "quality": draw_quality,
}
