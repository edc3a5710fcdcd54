"""`fsdfm ablate`: one loop that trains, measures and tabulates every factor, in as many processes as you like."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fsdfm.checkpoint import Checkpoint
from fsdfm.data import SEPARATOR
from fsdfm.files import lock
from fsdfm.flow import UniformSource
from fsdfm.measure.evaluation import parse_steps
from fsdfm.measure.judges import make_judge
from fsdfm.run import prepare_corpus
from fsdfm.runtime import commit, interrupt_on_sigterm, versions
from fsdfm.show.quality.figures import require_plots
from fsdfm.studies.ablation.cells import StoppedError, Unit, cell_name, finished_cell, run_unit, units_of
from fsdfm.studies.ablation.factors import Factor, Variant, find_factor
from fsdfm.studies.ablation.report import Tables, write_report
from fsdfm.studies.ablation.setting import Place, Setting, base_facts, base_folder, parse_recipe, text_sha256
from fsdfm.studies.ablation.summary import Scores, Verdict, verdicts
from fsdfm.studies.ablation.timing import run_timing, timing_name

__all__ = ["Ask", "Outcome", "run_ablation"]

FEWEST_SEEDS = 2
_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a user asks for, in the words of the command line (`fsdfm ablate --help`)."""

    factor: str
    out: Path
    text: tuple[str, ...]
    held_out: str | None
    overrides: tuple[str, ...] = ()
    base: str | None = None
    judge: str = "smollm2"
    seeds: int = 3
    steps: str = "1,2,4,8"
    train_steps: int | None = None
    num: int = 32
    separator: str = SEPARATOR
    field: str = "text"
    full: bool = False
    workers: int | None = None
    device: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What came of it; without verdicts it was stopped, and the same command goes on."""

    report: Path
    markdown: str = ""
    verdicts: tuple[Verdict, ...] = ()
    finished: bool = True


def run_ablation(ask: Ask, *, console: Console | None = None) -> Outcome:
    """Run one factor's table, or go on with it; Ctrl-C and SIGTERM end it early with what is finished."""
    screen = console or Console(stderr=True)
    factor = find_factor(ask.factor)
    place, setting, bundle = _prepare(ask, factor)
    variants = factor.chosen(full=ask.full)
    folder = place.folder / factor.name
    with lock(place.folder), interrupt_on_sigterm():
        started = time.perf_counter()
        try:
            _corpus(ask, place, bundle)
            _compute(ask, factor, place, setting=setting, console=screen)
        except (KeyboardInterrupt, StoppedError):
            return Outcome(folder / "ablation.md", finished=False)
        scores = read_scores(factor, variants, place, setting=setting, seeds=ask.seeds)
        found = verdicts(factor, scores, variants)
        stamp = {
            **{"commit": commit(), "versions": versions(), "setting": setting.to_json(), "seeds": ask.seeds},
            "seconds": round(time.perf_counter() - started, 1),
        }
        tables = Tables(factor, variants, scores, found, setting, ask.seeds)
        text = write_report(folder, tables, stamp=stamp)
    return Outcome(folder / "ablation.md", text, tuple(found))


# --- before the first step --------------------------------------------------------------------------------------------


def _prepare(ask: Ask, factor: Factor) -> tuple[Place, Setting, Checkpoint]:
    """Everything that can be wrong is found here."""
    _check(ask, factor)
    recipe, steps = parse_recipe(ask.overrides), parse_steps(ask.steps)
    base = base_folder(ask.base)
    bundle, weights = base_facts(base)
    if factor.name == "source" and type(bundle.path.source) is not UniformSource:
        raise ValueError(
            f"--base has the source {bundle.path.source}; to compare sources give a model of the uniform one"
        )
    length = recipe.data.length
    if not any(override.startswith("data.length") for override in ask.overrides):
        length = min(length, bundle.length)
    timed = factor.kind == "time"
    setting = Setting(
        base=weights,
        text=text_sha256(ask.text),
        held_out=None if ask.held_out is None or timed else text_sha256([ask.held_out]),
        judge=None if timed else _public_judge(ask.judge),
        steps=steps,
        train_steps=recipe.train.steps if ask.train_steps is None else ask.train_steps,
        num=ask.num,
        length=length,
        overrides=ask.overrides,
    )
    place = Place(
        folder=ask.out.resolve(),
        base=base,
        text=tuple(name if _is_named(name) else str(Path(name).resolve()) for name in ask.text),
        **{name: getattr(ask, name) for name in ("held_out", "separator", "field", "judge", "device")},
    )
    place.claim(setting)
    return place, setting, bundle


def _check(ask: Ask, factor: Factor) -> None:
    """Raise for what can be told from the words alone."""
    if ask.seeds < FEWEST_SEEDS:
        raise ValueError(f"--seeds is {ask.seeds}; allowed are {FEWEST_SEEDS} and more: one seed has no interval")
    if ask.num < 2:
        raise ValueError(f"--num is {ask.num}; allowed are 2 samples and more: one has no interval")
    if ask.train_steps is not None and ask.train_steps < 1:
        raise ValueError(f"--train-steps is {ask.train_steps}; allowed are whole numbers >= 1")
    if not ask.text:
        raise ValueError("the training text is missing; name it with --text FILE")
    if ask.held_out is None and factor.kind != "time":
        raise ValueError("held-out text is missing; name it with --held-out FILE: without it no number has a scale")
    for name in filter(None, (*ask.text, ask.held_out)):
        if not _is_named(name) and not Path(name).exists():
            raise ValueError(f"{name} is not there; give a text file, or hf:NAME")
    if factor.figure is not None:
        require_plots()
    if factor.kind != "time":
        make_judge(ask.judge)


def _is_named(text: str) -> bool:
    """Whether a text is somewhere else than in a file."""
    return text.startswith(("hf:", "builtin:"))


def _public_judge(name: str) -> str:
    """A judge without the folders of somebody's machine."""
    kind, colon, file = name.rpartition(":")
    return f"{kind}{colon}{Path(file).name}" if Path(file).exists() else name


def _corpus(ask: Ask, place: Place, bundle: Checkpoint) -> None:
    """Pack the text once, before processes that would all want to."""
    recipe = parse_recipe(ask.overrides)
    section = replace(
        recipe.data, inputs=place.text, separator=place.separator, field=place.field, max_documents=None, tokenizer=None
    )
    prepare_corpus(section, place.corpus, bundle.tokenizer)


# --- the loop ---------------------------------------------------------------------------------------------------------

Job = Callable[[], None]
"""Something that a process does in one go; what is finished it does not do again."""


def _compute(ask: Ask, factor: Factor, place: Place, *, setting: Setting, console: Console) -> None:
    variants = factor.chosen(full=ask.full)
    if factor.kind == "time":
        jobs: list[Job] = [partial(run_timing, place, setting, variants, seed) for seed in range(ask.seeds)]
        files = [place.cell(timing_name(v.training, s)) for s in range(ask.seeds) for v in variants if v.training]
        _run_jobs([jobs], files, workers=1, console=console, title=factor.name)
        return
    first, then = units_of(variants, ask.seeds)
    phases: list[list[Job]] = [[partial(run_unit, place, setting, unit) for unit in units] for units in (first, then)]
    files = [file for unit in (*first, *then) for file in _files(place, unit)]
    workers = ask.workers or min(2, os.cpu_count() or 1)
    _run_jobs(phases, files, workers=workers, console=console, title=factor.name)


def _files(place: Place, unit: Unit) -> list[Path]:
    """What a unit leaves behind."""
    training = unit.training
    model = [] if training is None else [place.model(training.name, 0 if training.shared else unit.seed)]
    return [*model, *map(place.cell, unit.cells)]


def _run_jobs(
    phases: Sequence[Sequence[Job]], files: Sequence[Path], *, workers: int, console: Console, title: str
) -> None:
    """Run jobs, a phase after the other; what is counted, by a bar or in lines, is the files that are there."""
    wanted, told = list(dict.fromkeys(files)), -1
    began = time.perf_counter()
    columns = (TextColumn(f"ablate {title}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=len(wanted))

        def tell() -> None:
            nonlocal told
            done = sum(file.exists() for file in wanted)
            progress.update(task, completed=done)
            if done != told and not console.is_terminal:
                minutes = (time.perf_counter() - began) / 60
                console.print(f"ablate {title}: {done} of {len(wanted)} after {minutes:.1f} min", highlight=False)
            told = done

        tell()
        for jobs in phases:
            if workers == 1 or len(jobs) < 2:
                for job in jobs:
                    _on_one_thread(job)
                    tell()
            else:
                _in_processes(jobs, workers=min(workers, len(jobs)), tell=tell)


def _in_processes(jobs: Sequence[Job], *, workers: int, tell: Callable[[], None]) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads
    stopped = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_hear_of, initargs=(stopped,))
    with pool, _ended_with_us(pool, stopped):
        running: list[Future[None]] = [pool.submit(_unless_stopped, job) for job in jobs]
        while not all(job.done() for job in running):
            failed = next((job for job in running if job.done() and job.exception() is not None), None)
            if failed is not None:
                failed.result()
            tell()
            time.sleep(_POLL_SECONDS)
        for job in running:
            job.result()
        tell()


@contextmanager
def _ended_with_us(pool: ProcessPoolExecutor, stopped: Event) -> Iterator[None]:
    """Where something goes wrong here, the processes are told to save and stop, nothing new begins, and we wait."""
    try:
        yield
    except BaseException:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        children = multiprocessing.active_children()
        for process in children:
            process.terminate()
        for process in children:
            process.join()
        raise


_stopped: Event | None = None  # in a process of the pool: whether to begin nothing more


def _hear_of(stopped: Event) -> None:
    global _stopped
    _stopped = stopped


def _unless_stopped(job: Job) -> None:
    """A job of the pool, which hands out one more than it has processes for."""
    if _stopped is not None and _stopped.is_set():
        raise StoppedError
    _on_one_thread(job)


def _on_one_thread(job: Job) -> None:
    """A process a core: two of them with a thread each do more than one with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with interrupt_on_sigterm():
            job()
    except KeyboardInterrupt:
        raise StoppedError from None
    finally:
        torch.set_num_threads(threads)


def read_scores(factor: Factor, variants: Sequence[Variant], place: Place, *, setting: Setting, seeds: int) -> Scores:
    """The numbers of all cells, by variant and seed."""
    scores = Scores(setting.steps)
    for variant in variants:
        for seed in range(seeds):
            if factor.kind == "time":
                assert variant.training is not None
                scores.add_times(variant.label, seed, place.cell(timing_name(variant.training, seed)))
                continue
            name = cell_name(variant.training, variant.setup, seed)
            cell = finished_cell(place, setting, name, variant.setup)
            assert cell is not None
            scores.add(variant.label, seed, cell)
    return scores
