"""What the embedded models do, and their cards: demo, card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.completion import complete_models
from fsdfm.cli.options import OutOption, console
from fsdfm.terminal import say

__all__ = ["card", "demo"]


def demo(
    out: OutOption = Path("demo"),
    long: Annotated[int, typer.Option(help="Network calls of the parent's long story.", min=1)] = 1024,
    stored: Annotated[
        Path | None, typer.Option(help="Results and stories to show; those of the package unless said.")
    ] = None,
) -> None:
    """Let the embedded models write stories, and show them beside what was measured, on one page."""
    from fsdfm.demo import write_demo

    index, story = write_demo(out, long=long, stored=stored)
    console.print(story.to_rich())
    say(console, f"\nlook at {index}; beside it: the pictures")


def card(
    model: Annotated[
        str,
        typer.Argument(help="The folder of a model, or the name of an embedded one.", autocompletion=complete_models),
    ],
    results: Annotated[list[Path], typer.Argument(help="Result files of `fsdfm evaluate` of these weights.")],
) -> None:
    """Write what was measured into a model's card, its README.md; the rest of the card is left as it is."""
    from fsdfm.demo import write_card

    say(console, f"{write_card(model, results)}: measured part written")
