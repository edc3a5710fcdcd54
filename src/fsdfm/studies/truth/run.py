"""`fsdfm truth`: run the study over worlds and seeds, in as many processes as you like, and write its report."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path as FilePath

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fsdfm.files import write_json
from fsdfm.studies.truth.figure import require_plots
from fsdfm.studies.truth.methods import FULL, Method
from fsdfm.studies.truth.report import write_report
from fsdfm.studies.truth.study import Setting, Study, methods_of
from fsdfm.studies.truth.summary import Results
from fsdfm.studies.truth.worlds import WORLDS, make_world

__all__ = ["FULL_SETTING", "QUICK_SETTING", "run_truth"]

QUICK_SETTING = Setting(parent_steps=1600, child_steps=400)
FULL_SETTING = Setting(parent_steps=4800, child_steps=600)
_POLL_SECONDS = 0.5

Unit = tuple[str, int, tuple[Method, ...]]
"""The cells of one (world, seed): they build on each other and run in one process."""


def run_truth(
    out: str | os.PathLike[str],
    *,
    full: bool = False,
    seeds: int | None = None,
    worlds: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    workers: int | None = None,
    setting: Setting | None = None,
    console: Console | None = None,
) -> Results:
    """Measure what few-step training gains where the truth is known, and write truth.json, truth.md and truth.png.

    full      every method, world and four seeds, for hours; else the headline methods, one world and two seeds
    seeds     how many; seed n is the n-th initialisation and the noise of its training
    worlds    some of `WORLDS`
    methods   only these, of all, and what they build on
    workers   processes, each on one thread, a (world, seed) at a time; by default a core each, at most two
    setting   how long to train
    console   where the progress bar is drawn; standard error by default

    The folder keeps a file a (world, seed, method); run again, the same command computes only what is missing.
    """
    require_plots()
    setting = setting or (FULL_SETTING if full else QUICK_SETTING)
    names = list(worlds or (WORLDS if full else WORLDS[:1]))
    count = (4 if full else 2) if seeds is None else seeds
    if count < 1:
        raise ValueError(f"seeds is {count}; allowed are whole numbers >= 1")
    folder = FilePath(out)
    units: list[Unit] = [
        (make_world(world).name, seed, _chosen(world, methods, full=full)) for seed in range(count) for world in names
    ]
    cells = _prepare(folder, setting)
    screen = console or Console(stderr=True)
    start = time.perf_counter()
    _run_units(cells, units, setting=setting, workers=workers or min(2, os.cpu_count() or 1), console=screen)
    by_world = sorted(units, key=lambda unit: names.index(unit[0]))
    results = Results(json.loads((cells / name).read_text()) for name in _names(by_world))
    stamp = {"setting": asdict(setting), "seeds": count, "torch": torch.__version__}
    stamp["seconds"] = round(time.perf_counter() - start, 1)
    for line in write_report(folder, results, setting=setting, stamp=stamp):
        screen.print(f"- {line}", markup=False, highlight=False)
    return results


def _prepare(folder: FilePath, setting: Setting) -> FilePath:
    """The folder of the cells; it belongs to one setting."""
    cells = folder / "cells"
    file = cells / "setting.json"
    try:
        cells.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_json(file, asdict(setting), indent=None)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose a folder you may write to") from error
    found = json.loads(file.read_text())
    if found != asdict(setting):
        raise ValueError(f"{folder} holds cells of another setting ({found}); choose another folder or remove it")
    return cells


def _chosen(world: str, wanted: Sequence[str] | None, *, full: bool) -> tuple[Method, ...]:
    """The wanted methods that mean something in a world and all they need, in the order of the study."""
    if wanted is None:
        return methods_of(world, full=full)
    known = [method.name for method in FULL]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; choose from {', '.join(known)}")
    methods = methods_of(world, full=True)
    by_name = {method.name: method for method in methods}
    keep, queue = {"exact", "dfm"}, [name for name in wanted if name in by_name]
    while queue:
        name = queue.pop()
        keep.add(name)
        queue += [need for need in by_name[name].needs if need not in keep]
    return tuple(method for method in methods if method.name in keep)


def _run_unit(cells: FilePath, unit: Unit, setting: Setting, tick: Callable[[], None] = lambda: None) -> None:
    """One unit on one thread: the tensors are tiny, and threads would only wait for each other."""
    world, seed, methods = unit
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        Study(cells, world, seed, setting=setting).run(methods, tick=tick)
    finally:
        torch.set_num_threads(threads)


def _run_units(cells: FilePath, units: Sequence[Unit], *, setting: Setting, workers: int, console: Console) -> None:
    total = sum(len(methods) for _, _, methods in units)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("truth"), *columns, console=console, transient=True) as progress:
        task = progress.add_task("truth", total=total)
        if workers == 1 or len(units) == 1:
            for unit in units:
                _run_unit(cells, unit, setting, partial(progress.advance, task))
            return
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads
        with ProcessPoolExecutor(min(workers, len(units)), mp_context=context) as pool:
            jobs = [pool.submit(_run_unit, cells, unit, setting) for unit in units]
            while not all(job.done() for job in jobs):
                _stop_on_error(jobs)
                progress.update(task, completed=sum((cells / name).exists() for name in _names(units)))
                time.sleep(_POLL_SECONDS)
            for job in jobs:
                job.result()


def _stop_on_error(jobs: Sequence[Future[None]]) -> None:
    failed = next((job for job in jobs if job.done() and job.exception() is not None), None)
    if failed is not None:
        for job in jobs:
            job.cancel()
        failed.result()


def _names(units: Sequence[Unit]) -> list[str]:
    return [Study.cell_name(world, seed, method.name) for world, seed, methods in units for method in methods]
