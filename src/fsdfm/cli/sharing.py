"""A model for others: push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.options import console
from fsdfm.terminal import say

__all__ = ["push"]


def push(
    *,
    folder: Annotated[str, typer.Argument(help="A checkpoint, a run, or the name of an embedded model.")],
    name: Annotated[str, typer.Argument(help="owner/name on the hub, or owner/name@branch.", metavar="OWNER/NAME")],
    results: Annotated[
        list[Path] | None,
        typer.Option(help="A result file of `fsdfm evaluate` of these weights, for the card; may be repeated."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
) -> None:
    """Put a model, its card and what was measured of it on the Hugging Face hub; log in first: hf auth login."""
    from fsdfm.run.sharing import push as run_push

    say(console, run_push(folder, name, results=results or [], private=private, message=message))
