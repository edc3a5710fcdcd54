"""Showing what was measured: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.options import OutOption, console
from fsdfm.terminal import say

__all__ = ["report"]


def report(
    files: Annotated[list[Path], typer.Argument(help="Result files of `fsdfm evaluate`; the first is the baseline.")],
    out: OutOption,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="What to call a model, one a file in their order.")
    ] = None,
) -> None:
    """Turn result files into the paper's tables (Markdown, CSV) and figures (PNG)."""
    from fsdfm.show.quality import write_report

    written = write_report(files, out, names=name or ())
    say(console, f"look at {written[0]}; beside it: {', '.join(file.name for file in written[1:])}")
