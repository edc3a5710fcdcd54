"""The whole demonstration in one call: measure, draw, and write a folder of pictures, numbers and captions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from fsdfm.files import replace_file, write_json, write_text
from fsdfm.show.folder import progress, writable_folder
from fsdfm.studies.checkerboard.board import Board
from fsdfm.studies.checkerboard.captions import captions
from fsdfm.studies.checkerboard.figures import DPI, draw_few_steps, draw_jumps, draw_trajectories, film, require_plots
from fsdfm.studies.checkerboard.study import SOURCES, CheckerboardNumbers, States, count_work, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run_checkerboard"]

NUM_FIGURES = 3


def run_checkerboard(
    out_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    samples: int = 6000,
    frames: int = 100,
    train_steps: int = 2000,
    board: Board | None = None,
    console: Console | None = None,
) -> CheckerboardNumbers:
    """Write the demonstration of appendix B.3 into a folder and return its numbers.

    trajectories.png, jumps.png, few-steps.png, trajectory-uniform.gif, trajectory-mask.gif, numbers.json, captions.md

    samples      samples of each setting; they decide the error of every share
    frames       steps of the long trajectories, 100 in the paper
    train_steps  steps of each of the two networks
    console      where the progress bar is drawn; standard error by default
    """
    if samples < 1 or frames < 1:
        raise ValueError(f"samples is {samples} and frames is {frames}; both must be at least 1")
    require_plots()
    folder = writable_folder(out_dir)
    work = count_work(frames, train_steps) + NUM_FIGURES + len(SOURCES) * (frames + 1)
    start = time.perf_counter()
    with progress("checkerboard", work, console) as tick, _one_thread():
        numbers, states = measure(
            board or Board(), seed=seed, samples=samples, frames=frames, train_steps=train_steps, tick=tick
        )
        _write_pictures(folder, numbers, states, tick)
    numbers = replace(numbers, seconds=time.perf_counter() - start)
    write_json(folder / "numbers.json", numbers.to_json())
    write_text(folder / "captions.md", captions(numbers))
    return numbers


def _write_pictures(
    folder: FilePath, numbers: CheckerboardNumbers, states: States, tick: Callable[[str], None]
) -> None:
    drawings: dict[str, Callable[[], Figure]] = {
        "trajectories.png": partial(draw_trajectories, numbers, states),
        "jumps.png": partial(draw_jumps, numbers),
        "few-steps.png": partial(draw_few_steps, numbers, states),
    }
    for name, draw in drawings.items():
        replace_file(folder / name, partial(draw().savefig, format="png", dpi=DPI))
        tick(f"drawing {name}")
    for source in SOURCES:
        name = f"trajectory-{source}.gif"
        first, *rest = film(numbers, states, source, on_frame=partial(tick, f"drawing {name}"))
        timing = [700, *[60] * (len(rest) - 1), 2000]
        save = partial(first.save, format="GIF", save_all=True, append_images=rest, duration=timing, loop=0)
        replace_file(folder / name, save)


@contextmanager
def _one_thread() -> Iterator[None]:
    """These tensors are too small to share: with two threads on busy cores a step takes four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
