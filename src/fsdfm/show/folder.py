"""A folder of pages and pictures: tried before the work, every file whole at every moment, a bar meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fsdfm.files import replace_file

__all__ = ["progress", "writable_folder"]


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


@contextmanager
def progress(what: str, total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A bar of `total` ticks, each of which says what is being done; on standard error unless a console is given."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda doing: bar.update(task, advance=1, description=doing)
        bar.update(task, description=f"{what}: done")
