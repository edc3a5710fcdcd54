"""A small study whose cells say who computed them; processes that are started import it."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from fsdfm.studies.report import StudyReport, markdown_table
from fsdfm.studies.runner import Cell, Study, run_study

QUIET = Console(quiet=True)


def compute(trouble, cell, folder):
    """A number of variant and seed; `trouble` is what happens to some cells."""
    with (folder.path / "log").open("a") as log:
        log.write(f"{cell.name}\n")
    what = trouble.get(cell.name, "")
    if what == "bad":
        raise ValueError("the moon is not there; choose the sun")
    if what == "broken":
        raise KeyError("gone")
    if what == "interrupted":
        raise KeyboardInterrupt
    if what == "dies":
        os._exit(1)
    if what == "waits":
        (folder.path / "waiting").touch()
        while not (folder.path / "go").exists():
            time.sleep(0.02)
    if what == "meets":  # until another process is at a cell, too
        (folder.path / f"pid-{os.getpid()}").touch()
        while len(list(folder.path.glob("pid-*"))) < 2:
            time.sleep(0.02)
    before = [folder.read(name)["error"] for name in cell.needs]
    folder.keep(cell.name, ".txt", lambda file: file.write_text(cell.variant))
    return {
        "error": len(cell.variant) + cell.seed + sum(before),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


def report(results):
    rows = [["method", "error"], *([v, f"{results.interval(v, 'error'):.3f}"] for v in results.variants)]
    errors = {v: [value["error"] for value in results.of(v)] for v in results.variants}
    picture = {"names.txt": lambda file: file.write_text(" ".join(results.variants))}
    return StudyReport("toy", markdown_table(rows) + "\n", {"errors": errors}, picture)


CELLS = [Cell(variant, seed) for seed in range(3) for variant in ("euler", "heun")]


def toy(cells=CELLS, *, trouble=None, **rest):
    """The study; `rest` is a setting, part."""
    return Study("toy", cells, partial(compute, trouble or {}), report, **{"setting": {"samples": 10}, **rest})


def run(out, cells=CELLS, *, workers=1, console=QUIET, **rest):
    return run_study(toy(cells, **rest), out, workers=workers, console=console)


def computed(out):
    """The cells that were computed, each as often as it was begun."""
    return (Path(out) / "log").read_text().split()


if __name__ == "__main__":  # OUT WORKERS NAME=TROUBLE...
    folder, workers, *troubles = sys.argv[1:]
    run(folder, workers=int(workers), trouble=dict(word.split("=") for word in troubles))
