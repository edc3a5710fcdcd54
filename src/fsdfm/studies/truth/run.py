"""`fsdfm study truth`: the cells of worlds and seeds, computed by the common runner, and their report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console

from fsdfm.show.plots import require_plots
from fsdfm.studies.report import StudyReport
from fsdfm.studies.runner import Study, StudyResults, require_seeds, run_study
from fsdfm.studies.truth.cells import TruthSetting, cells_of, compute_cell, methods_of
from fsdfm.studies.truth.methods import FULL, Method
from fsdfm.studies.truth.summary import TruthNumbers
from fsdfm.studies.truth.tables import truth_report
from fsdfm.studies.truth.worlds import WORLDS, make_world

__all__ = ["FULL_SETTING", "QUICK_SETTING", "run_truth"]

QUICK_SETTING = TruthSetting(parent_steps=1600, child_steps=400)
FULL_SETTING = TruthSetting(parent_steps=4800, child_steps=600)


def run_truth(
    out: str | os.PathLike[str],
    *,
    full: bool = False,
    seeds: int | None = None,
    worlds: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    workers: int | None = None,
    setting: TruthSetting | None = None,
    console: Console | None = None,
) -> TruthNumbers:
    """Measure what few-step training gains where the truth is known, and write truth.json, truth.md and truth.png.

    full      every method, world and four seeds, for hours; else the headline methods, one world and two seeds
    seeds     how many; seed n is the n-th initialisation and the noise of its training
    worlds    some of `WORLDS`
    methods   only these, of all, and what they build on
    workers   processes, each on one thread, a (world, seed) at a time; by default a core each, at most two
    setting   how long to train
    console   where the progress bar is drawn; standard error by default

    The folder keeps a file per (world, seed, method); run again, the same command computes only what is missing.
    """
    require_plots()
    setting = setting or (FULL_SETTING if full else QUICK_SETTING)
    names = list(worlds or (WORLDS if full else WORLDS[:1]))
    count = (4 if full else 2) if seeds is None else seeds
    require_seeds(count)
    chosen = {make_world(world).name: _chosen(world, methods, full=full) for world in names}
    cells = [cell for seed in range(count) for world in names for cell in cells_of(world, seed, chosen[world])]
    study = Study("truth", cells, partial(compute_cell, setting), partial(_report, setting), asdict(setting))
    return _numbers(run_study(study, out, workers=workers, console=console))


def _numbers(results: StudyResults) -> TruthNumbers:
    """By world, then by seed."""
    worlds = list(dict.fromkeys(cell.spec[0] for cell in results.cells))
    by_world = sorted(results.cells, key=lambda cell: worlds.index(cell.spec[0]))
    return TruthNumbers(results.values[cell.name] for cell in by_world)


def _report(setting: TruthSetting, results: StudyResults) -> StudyReport:
    return truth_report(_numbers(results), setting)


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
