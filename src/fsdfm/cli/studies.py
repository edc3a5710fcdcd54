"""Demonstrations where the truth is known: checkerboard, truth."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdfm.cli.options import OutOption, SeedOption, console

__all__ = ["checkerboard", "truth"]


def checkerboard(
    out: OutOption,
    seed: SeedOption = 0,
    samples: Annotated[int, typer.Option(help="Samples in every panel.")] = 6000,
    frames: Annotated[int, typer.Option(help="Steps of the long trajectories.")] = 100,
    train_steps: Annotated[int, typer.Option(help="Training steps of the small networks.")] = 2000,
) -> None:
    """Draw the paper's checkerboard (appendix B.3) with what is true about it: pictures, GIFs, captions, numbers."""
    from fsdfm.show.checkerboard import run_checkerboard

    numbers = run_checkerboard(out, seed=seed, samples=samples, frames=frames, train_steps=train_steps)
    console.print(f"{len(numbers.outcomes)} settings measured; look at {out}/captions.md and the pictures beside it.")


def truth(
    out: OutOption,
    full: Annotated[bool, typer.Option("--full", help="Every world, method and four seeds: hours, resumable.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds; 2, or 4 with --full.")] = None,
) -> None:
    """Measure what few-step training gains where everything can be computed; the same command again goes on."""
    from fsdfm.truth import run_truth

    run_truth(out, full=full, seeds=seeds)
    console.print(f"look at {out}/truth.md and {out}/truth.png")
