"""Where a run writes what it says: a progress bar and `metrics.jsonl`; `fsdfm.run.tracking` has the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from fsdfm.files import read_lines, replace_file, require_plain
from fsdfm.learn.report import Report
from fsdfm.learn.trainer import Trainer
from fsdfm.terminal import draws_bars, moving_bar, say

__all__ = ["JsonLines", "ProgressBar", "duration"]


class JsonLines:
    """A file of one JSON object per line, each with its `training_step`."""

    def __init__(self, path: Path):
        self.path = path

    def rewind(self, training_step: int) -> None:
        """Drop what was written after a training step: the run resumes there and will say it again."""
        if not self.path.exists():
            return
        require_plain(self.path)

        def copy(side: Path) -> None:
            with side.open("w", encoding="utf-8") as file:
                for line in read_lines(self.path):
                    if _step_of(line) <= training_step:
                        file.write(line if line.endswith("\n") else line + "\n")

        replace_file(self.path, copy)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise ValueError(f"cannot write {self.path}: {error.strerror}; make room and run again") from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["training_step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # half a line: the process died there
        return float("inf")


class ProgressBar:
    """Losses, tokens/s and time left: a moving line on a terminal or in a notebook, a line per report anywhere else."""

    def __init__(self, console: Console, total: int, done: int):
        self.console = console
        columns = (
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}{task.fields[parts]}  {task.fields[speed]}  {task.fields[left]}"),
            TimeElapsedColumn(),
        )
        self.progress = moving_bar(console, *columns)
        self.task = self.progress.add_task("train", total=total, completed=done, loss="?", parts="", speed="", left="")

    def __enter__(self) -> ProgressBar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def step(self, trainer: Trainer) -> None:
        """Move on; a hook for every training step."""
        self.progress.update(self.task, completed=trainer.training_step, loss=f"{trainer.last_loss:.4g}")

    def report(self, report: Report) -> None:
        """Show the parts of the loss, the speed and the time left."""
        speed, left = f"{report.tokens_per_second:,.0f} tokens/s", duration(report.seconds_left) + " left"
        parts = _parts(report.logs)
        self.progress.update(self.task, parts=parts, speed=speed, left=left)
        if not draws_bars(self.console):
            self.say(f"step {report.training_step}  loss {report.loss:.4g}{parts}  {speed}  {left}")
        if report.alarm:
            self.say(f"warning: {report.alarm}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        say(self.console, text)


def _parts(logs: Mapping[str, float]) -> str:
    """The losses that a loss is made of, such as (path 5.1, distil 0.2), where there are any."""
    known = [f"{name.removesuffix('_loss')} {value:.4g}" for name, value in logs.items() if name.endswith("_loss")]
    return f" ({', '.join(known)})" if known else ""


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 20 s, 5 h 10 min, 3 d 4 h."""
    whole = round(seconds)
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {smaller_name}"
    return f"{whole} s"
