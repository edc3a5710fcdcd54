"""A folder of pages and pictures: tried before the work, every file whole at every moment, a bar meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fsdfm.files import replace_file
from fsdfm.terminal import draws_bars, say

__all__ = ["Tick", "progress", "writable_folder"]

_SECONDS_BETWEEN_LINES = 15.0  # in a log


def writable_folder(name: str | os.PathLike[str]) -> Path:
    """The folder, made if it was missing and tried out before minutes of work depend on it."""
    folder = Path(name)
    trial = folder / "writable.test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(trial, lambda file: file.touch())
        trial.unlink()
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}; choose a folder you may write to") from error
    return folder


class Tick(Protocol):
    """Moves a bar: one on, or to `done`; it says what is being done."""

    def __call__(self, doing: str, *, done: int | None = None) -> None:
        """Say it."""


@contextmanager
def progress(what: str, total: int, console: Console | None = None) -> Iterator[Tick]:
    """A bar of `total` parts on standard error, or on the console that is given; in a log, a line now and then."""
    screen = console or Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = told = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=screen, disable=not draws_bars(screen)) as bar:
        task = bar.add_task(what, total=total)

        def tick(doing: str, *, done: int | None = None) -> None:
            nonlocal told
            bar.update(task, description=doing, advance=1 if done is None else None, completed=done)
            now = time.monotonic()
            if not draws_bars(screen) and now - told >= _SECONDS_BETWEEN_LINES:
                told, finished = now, int(bar.tasks[0].completed)
                say(screen, f"{doing}: {finished} of {total} after {(now - began) / 60:.1f} min")

        yield tick
        bar.update(task, description=f"{what}: done")
