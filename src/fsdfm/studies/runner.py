"""The runner of studies: cells as data, a function that computes one cell, a function that makes the report.

    def compute(cell: Cell, folder: StudyFolder) -> dict[str, Any]:
        return {"error": measure_error(cell.variant, seed=cell.seed)}

    def report(results: StudyResults) -> StudyReport:
        rows = [["method", "error"]] + [[v, f"{results.interval(v, 'error'):.3f}"] for v in results.variants]
        return StudyReport("errors", markdown_table(rows))

    cells = [Cell(method, seed) for seed in range(3) for method in ("euler", "heun")]
    run_study(Study("errors", cells, compute, report, setting={"samples": 100}), "out", workers=2)

A finished cell is a file in the folder and never computed anew, so the same command resumes what was interrupted, and
several processes started by hand over one folder share the cells. A cell that builds on others names them in `needs`;
cells of one `unit` run in one process, one after the other (they share what that process keeps in memory, or a model on
the disk). A function that can be interrupted in its own way (it saves, and returns) raises `StoppedError` then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fsdfm.measure.statistics import Interval, student_mean
from fsdfm.plugins import import_plugin, imported_plugins
from fsdfm.runtime import commit, interrupt_on_sigterm, versions
from fsdfm.show.folder import progress
from fsdfm.studies.folder import CellValue, StudyFolder
from fsdfm.studies.report import StudyReport, write_report

__all__ = ["Cell", "StoppedError", "Study", "StudyResults", "require_seeds", "run_study"]

_PATIENCE_SECONDS = 30.0  # for a process that was told to stop to save what it has
_POLL_SECONDS = 0.5


class StoppedError(KeyboardInterrupt):
    """A signal ended a study; what is finished is kept, and the same command resumes."""


@dataclass(frozen=True)
class Cell:
    """One thing to compute.

    variant   what is computed; the same variant with several seeds gives an interval
    spec      what the function needs to know beside variant and seed; it can be pickled
    needs     names of the cells that must be finished before; they stand earlier in the study's list
    unit      cells of one unit run in one process in the order of the list; alone unless said
    """

    variant: str
    seed: int = 0
    spec: Any = None
    needs: tuple[str, ...] = ()
    unit: str = ""

    @property
    def name(self) -> str:
        """VARIANT.SEED, the name of its file."""
        return f"{self.variant}.{self.seed}"


Compute = Callable[[Cell, StudyFolder], Mapping[str, Any]]
"""Computes one cell: JSON values. It stands in a module, so that other processes find it; `partial` may bind more."""


@dataclass(frozen=True)
class StudyResults:
    """What all cells of a study computed."""

    cells: Sequence[Cell]
    values: Mapping[str, CellValue]
    folder: StudyFolder

    @property
    def variants(self) -> list[str]:
        """In the order of the study."""
        return list(dict.fromkeys(cell.variant for cell in self.cells))

    def of(self, variant: str) -> list[CellValue]:
        """The cells of a variant, one per seed."""
        return [self.values[cell.name] for cell in self.cells if cell.variant == variant]

    def interval(self, variant: str, key: str) -> Interval:
        """The mean of a number over seeds and its 95 % interval (Student's t)."""
        return student_mean([float(value[key]) for value in self.of(variant)])

    @property
    def seconds(self) -> float:
        """What all cells took together, whenever and wherever they were computed."""
        return sum(float(value["seconds"]) for value in self.values.values())


@dataclass(frozen=True)
class Study:
    """Cells as data, a function that computes one, a function that makes the report.

    setting   what all cells share, as JSON values: a folder belongs to one setting
    part      the report's own folder inside of the study's, where several reports share cells
    """

    name: str
    cells: Sequence[Cell]
    compute: Compute
    report: Callable[[StudyResults], StudyReport]
    setting: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""

    def __post_init__(self) -> None:
        known: set[str] = set()
        for cell in self.cells:
            if cell.name in known:
                raise ValueError(f"{self.name} has two cells called {cell.name}; give each a name of its own")
            if missing := next((need for need in cell.needs if need not in known), None):
                raise ValueError(f"{cell.name} needs {missing}, which does not stand before it in {self.name}")
            known.add(cell.name)

    @property
    def units(self) -> dict[str, list[Cell]]:
        """What runs in one process, by its name."""
        units: dict[str, list[Cell]] = {}
        for cell in self.cells:
            units.setdefault(cell.unit or cell.name, []).append(cell)
        return units


def require_seeds(count: int, *, least: int = 1) -> None:
    """Raise for a number of seeds that no study can have."""
    if count < least:
        reason = ": one seed has no interval" if least > 1 else ""
        raise ValueError(f"seeds is {count}; allowed are whole numbers >= {least}{reason}")


def run_study(
    study: Study, out: str | os.PathLike[str], *, workers: int | None = None, console: Console | None = None
) -> StudyResults:
    """Compute what is missing and write the report; the same call resumes after a crash or a `StoppedError`.

    workers   processes with one thread each; a core each, at most two, unless said
    console   where the progress bar is drawn; standard error unless said

    The first error ends the study and names its cell; Ctrl-C and SIGTERM raise `StoppedError`. What is finished stays.
    """
    count = min(2, os.cpu_count() or 1) if workers is None else workers
    if count < 1:
        raise ValueError(f"workers is {count}; allowed are whole numbers >= 1")
    folder = StudyFolder(Path(out).resolve())
    folder.claim({"study": study.name, **study.setting})
    try:
        with interrupt_on_sigterm(), progress(study.name, len(study.cells), console) as tick:
            _compute_all(study, folder, workers=count, tick=tick)
            values = {cell.name: folder.read(cell.name) for cell in study.cells}
            results = StudyResults(study.cells, values, folder)
            stamp = {
                **{"study": study.name, "setting": dict(study.setting), "commit": commit(), "versions": versions()},
                "seconds": round(results.seconds, 1),
            }
            write_report(
                folder.path / study.part,
                study.report(results),
                stamp=stamp,
                on_file=lambda name: tick(f"{study.name}: writing {name}", done=len(study.cells)),
            )
    except KeyboardInterrupt as stop:
        raise StoppedError(f"{study.name} was stopped; what is finished stands in {out}") from stop
    return results


# --- the loop ---------------------------------------------------------------------------------------------------------


def _compute_all(study: Study, folder: StudyFolder, *, workers: int, tick: Callable[..., None]) -> None:
    """Start every unit whose next cell can be computed and that no other process has, until nothing is missing."""
    units = study.units
    with _Pool(min(workers, len(units))) as pool:
        while True:
            done = {cell.name for cell in study.cells if folder.has(cell.name)}
            tick(study.name, done=len(done))
            if len(done) == len(study.cells) and not pool.running:
                return
            free = [name for name in units if name not in pool.running and _can_start(units[name], done)]
            ready = (name for name in free if not folder.is_held(name))
            while pool.has_room and (name := next(ready, None)) is not None:
                pool.start(name, study.compute, folder, cells=units[name], tick=lambda: tick(study.name))
                if pool.is_here:
                    break  # it has run, and others may be ready now
            else:
                pool.wait()


def _can_start(unit: Sequence[Cell], done: set[str]) -> bool:
    """Whether the next cell of a unit has all it needs; False where there is none."""
    cell = next((cell for cell in unit if cell.name not in done), None)
    return cell is not None and done.issuperset(cell.needs)


def _run_unit(
    name: str,
    compute: Compute,
    folder: StudyFolder,
    *,
    cells: Sequence[Cell],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Compute the missing cells of a unit as far as their needs are there, unless another process is at it."""
    with _one_thread(), folder.hold(name) as ours:
        for cell in cells if ours else ():
            if folder.has(cell.name):
                continue
            if not all(map(folder.has, cell.needs)):
                return
            start = time.perf_counter()
            value = _named(compute, cell, folder)
            folder.write(cell.name, {"seconds": time.perf_counter() - start, **value})
            tick()


def _named(compute: Compute, cell: Cell, folder: StudyFolder) -> Mapping[str, Any]:
    """The value of a cell; an error names the cell."""
    try:
        return compute(cell, folder)
    except ValueError as error:
        raise ValueError(f"cell {cell.name}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"cell {cell.name}: {type(error).__name__}: {error}") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """A process per core: two of them with a thread each do more than one with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- processes --------------------------------------------------------------------------------------------------------


class _Pool:
    """Units that run at the same time, each in a process of its own; with one worker they run here."""

    def __init__(self, workers: int):
        self.workers, self.is_here = workers, workers <= 1
        self.running: dict[str, Future[None]] = {}
        self._executor: ProcessPoolExecutor | None = None
        self._others: set[Any] = set()

    def __enter__(self) -> _Pool:
        if not self.is_here:
            self._others = set(active_children())
            context = get_context("spawn")  # a fork would inherit torch's threads
            self._executor = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=_begin_worker, initargs=(imported_plugins(),)
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Where something went wrong, the processes are told to save and stop, and we wait for them."""
        if self._executor is None:
            return
        if kind is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            children = set(active_children()) - self._others
            for process in children:
                process.terminate()
            for process in children:
                process.join(_PATIENCE_SECONDS)
                if process.is_alive():  # it waits for a lock of the queue that a process which died has taken along
                    process.kill()
                    process.join()
        self._executor.shutdown()

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.workers

    def start(
        self, name: str, compute: Compute, folder: StudyFolder, *, cells: Sequence[Cell], tick: Callable[[], None]
    ) -> None:
        if self._executor is None:
            _run_unit(name, compute, folder, cells=cells, tick=tick)
        else:
            self.running[name] = self._executor.submit(_run_interruptibly, name, compute, folder, cells=cells)

    def wait(self) -> None:
        """Until a unit has ended, or for a moment; the error of one is raised here."""
        if not self.running:
            time.sleep(_POLL_SECONDS)
            return
        wait(self.running.values(), timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        for name in [name for name, job in self.running.items() if job.done()]:
            try:
                self.running.pop(name).result()
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"a process died at {name} or beside it, perhaps for want of memory; the same command resumes, "
                    "with fewer workers if need be"
                ) from error


def _begin_worker(plugins: tuple[str, ...]) -> None:
    """Ctrl-C in a terminal reaches every process; the first of them hears it and tells the others to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for plugin in plugins:
        import_plugin(plugin)


def _run_interruptibly(name: str, compute: Compute, folder: StudyFolder, *, cells: Sequence[Cell]) -> None:
    """A unit in a process of the pool: SIGTERM ends it as Ctrl-C would."""
    try:
        with interrupt_on_sigterm():
            _run_unit(name, compute, folder, cells=cells)
    except KeyboardInterrupt:
        raise StoppedError(name) from None
