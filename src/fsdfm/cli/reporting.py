"""Showing what was measured: report, results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.options import OutOption, console
from fsdfm.terminal import say

__all__ = ["report", "results"]


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


def results(
    *,
    documents: Annotated[
        list[Path] | None, typer.Argument(help="Markdown with marked tables and numbers. [default: README.md, docs]")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--from", help="Where result files are; those of the package unless said.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a document is out of date.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Only remove result files of the models that ship that are of other weights."),
    ] = False,
) -> None:
    """Write the numbers of result files into documents, their pictures and model cards, or check that they agree."""
    from fsdfm.checkpoint.embedded import embedded_models, stored_demo
    from fsdfm.demo.card import prune_results, stale_card
    from fsdfm.files import write_text
    from fsdfm.show.quality.blocks import stale_documents, write_documents

    source = folder or stored_demo() / "results"
    if prune:
        if check or documents:
            raise ValueError("--prune stands alone; give documents or --check to a command after it")
        gone = prune_results(source)
        typer.echo(f"removed: {', '.join(map(str, gone))}" if gone else "every result file is of the weights that ship")
        return
    files = documents or [file for file in (Path("README.md"), *sorted(Path("docs").rglob("*.md"))) if file.is_file()]
    cards = [] if documents else [card for name in embedded_models() if (card := stale_card(name, source)) is not None]
    stale = [*(stale_documents if check else write_documents)(files, source), *(file for file, _ in cards)]
    said = ", ".join(map(str, stale))
    if check and stale:
        typer.echo(f"out of date: {said}; fsdfm results writes them anew", err=True)
        raise typer.Exit(1)
    for file, text in cards:
        write_text(file, text)
    typer.echo(f"written anew: {said}" if stale else "documents, cards and result files agree")
