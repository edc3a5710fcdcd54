"""What the embedded models do, their cards, and demonstrations where the truth is known: checkerboard, truth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.options import OutOption, SeedOption, console
from fsdfm.terminal import say

__all__ = ["card", "checkerboard", "demo", "truth"]


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
    model: Annotated[str, typer.Argument(help="The folder of a model, or the name of an embedded one.")],
    results: Annotated[list[Path], typer.Argument(help="Result files of `fsdfm evaluate` of these weights.")],
) -> None:
    """Write what was measured into a model's card, its README.md; the rest of the card is left as it is."""
    from fsdfm.demo import write_card

    say(console, f"{write_card(model, results)}: measured part written")


def checkerboard(
    out: OutOption,
    seed: SeedOption = 0,
    samples: Annotated[int, typer.Option(help="Samples in every panel.")] = 6000,
    frames: Annotated[int, typer.Option(help="Steps of the long trajectories.")] = 100,
    train_steps: Annotated[int, typer.Option(help="Training steps of the small networks.")] = 2000,
) -> None:
    """Draw the paper's checkerboard (appendix B.3) with what is true about it: pictures, GIFs, captions, numbers."""
    from fsdfm.studies.checkerboard import run_checkerboard

    numbers = run_checkerboard(out, seed=seed, samples=samples, frames=frames, train_steps=train_steps)
    say(console, f"{len(numbers.outcomes)} settings measured; look at {out}/captions.md and the pictures beside it.")


def truth(
    out: OutOption,
    full: Annotated[bool, typer.Option("--full", help="Every world, method and four seeds: hours, resumable.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds; 2, or 4 with --full.")] = None,
) -> None:
    """Measure what few-step training gains where everything can be computed; the same command again goes on."""
    from fsdfm.studies.truth import run_truth

    run_truth(out, full=full, seeds=seeds)
    say(console, f"look at {out}/truth.md and {out}/truth.png")
