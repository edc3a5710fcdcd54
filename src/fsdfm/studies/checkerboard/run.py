"""`fsdfm study checkerboard`: its cells computed by the common runner, and the folder of pictures and captions."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from rich.console import Console

from fsdfm.show.plots import require_plots
from fsdfm.studies.checkerboard.board import Board
from fsdfm.studies.checkerboard.captions import captions
from fsdfm.studies.checkerboard.cells import (
    SOURCES,
    CheckerboardNumbers,
    CheckerboardSetting,
    States,
    cells_of,
    compute_cell,
    load_states,
    numbers_of,
)
from fsdfm.studies.checkerboard.figures import DPI, draw_few_steps, draw_jumps, draw_trajectories, film
from fsdfm.studies.report import StudyReport, save_figure
from fsdfm.studies.runner import Study, StudyResults, run_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run_checkerboard"]


def run_checkerboard(
    out_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    samples: int = 6000,
    frames: int = 100,
    train_steps: int = 2000,
    board: Board | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> CheckerboardNumbers:
    """Write the demonstration of appendix B.3 into a folder and return its numbers.

    trajectories.png, jumps.png, few-steps.png, trajectory-uniform.gif, trajectory-mask.gif, checkerboard.json and .md

    samples      samples of each case; they decide the error of every share
    frames       steps of the long trajectories, 100 in the paper
    train_steps  steps of each of the two networks
    workers      processes with one thread each; a core each, at most two, unless said
    console      where the progress bar is drawn; standard error by default
    """
    if samples < 1 or frames < 1 or train_steps < 1:
        raise ValueError(f"samples is {samples}, frames {frames}, train_steps {train_steps}; each must be at least 1")
    require_plots()
    setting = CheckerboardSetting(board or Board(), seed, samples, frames, train_steps)
    study = Study(
        "checkerboard",
        cells_of(setting),
        partial(compute_cell, setting),
        partial(_report, setting),
        asdict(setting),
    )
    return numbers_of(setting, run_study(study, out_dir, workers=workers, console=console))


def _report(setting: CheckerboardSetting, results: StudyResults) -> StudyReport:
    numbers = numbers_of(setting, results)
    states = {case: load_states(case, results.folder) for case in numbers.outcomes}
    drawings: dict[str, Callable[[], Figure]] = {
        "trajectories.png": partial(draw_trajectories, numbers, states),
        "jumps.png": partial(draw_jumps, numbers),
        "few-steps.png": partial(draw_few_steps, numbers, states),
    }
    pictures = {name: save_figure(draw, dpi=DPI) for name, draw in drawings.items()}
    films = {
        f"trajectory-{source}.gif": partial(_save_film, numbers=numbers, states=states, source=source)
        for source in SOURCES
    }
    return StudyReport("checkerboard", captions(numbers), numbers.to_json(), {**pictures, **films})


def _save_film(file: FilePath, *, numbers: CheckerboardNumbers, states: States, source: str) -> None:
    first, *rest = film(numbers, states, source)
    timing = [700, *[60] * (len(rest) - 1), 2000]
    first.save(file, format="GIF", save_all=True, append_images=rest, duration=timing, loop=0)
