"""The report of a study: Markdown for people, JSON with every number and where it comes from, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdfm.files import replace_file, write_json, write_text
from fsdfm.measure.statistics import Interval

__all__ = ["StudyReport", "interval_json", "markdown_table", "save_figure", "write_report"]

SavePicture = Callable[[Path], object]
"""Writes a picture to the path it is given."""


@dataclass(frozen=True)
class StudyReport:
    """What a study says: NAME.md, NAME.json and its pictures by their file names."""

    name: str
    markdown: str
    record: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, SavePicture] = field(default_factory=dict)


def write_report(
    folder: Path,
    report: StudyReport,
    *,
    stamp: Mapping[str, Any],
    on_file: Callable[[str], object] = lambda _: None,
) -> None:
    """Write every file of a report, each whole or not at all; the stamp goes before the record."""
    for name, save in report.pictures.items():
        on_file(name)
        replace_file(folder / name, save)
    write_json(folder / f"{report.name}.json", {**stamp, **report.record})
    write_text(folder / f"{report.name}.md", report.markdown)


def markdown_table(rows: Sequence[Sequence[object]], *, numbers: bool = True) -> str:
    """A table whose first row is its head; columns beside the first hold `numbers`, which stand on the right."""
    head, *body = rows
    rule = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, rule, *body))


def save_figure(draw: Callable[[], Any], *, dpi: int = 150) -> SavePicture:
    """A matplotlib figure, drawn when it is written, as a PNG."""
    return lambda file: draw().savefig(file, format="png", dpi=dpi)


def interval_json(interval: Interval) -> dict[str, float | None]:
    """value, low and high, null where one value says nothing of the spread."""
    return {name: None if math.isnan(value) else value for name, value in asdict(interval).items()}
