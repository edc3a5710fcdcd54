"""The cells of a comparison: the packed text, every training, every row's measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdfm.checkpoint import load_model
from fsdfm.checkpoint.embedded import find_model
from fsdfm.config import load_recipe
from fsdfm.measure.evaluation import EvaluationRequest
from fsdfm.run import PairsConfig, make_timed_pairs, prepare_corpus
from fsdfm.runtime import RuntimeConfig
from fsdfm.studies.compare.setting import CompareFiles, CompareSetting
from fsdfm.studies.compare.systems import BASE, NAMED, SHIPPED, TRAININGS, PeerTraining, SystemRow
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.models import measure_model, quoted, train_model
from fsdfm.studies.runner import Cell

__all__ = ["cells_of", "compute_cell", "measured", "needed_trainings", "recipe_overrides"]

_METRICS = "perplexity,diversity,distances"
_PAIRS = PairsConfig(steps=16, jump="exact", temperature=1.0)  # what a start makes of noised text


def cells_of(variants: Sequence[SystemRow]) -> list[Cell]:
    """The text, the trainings that the rows need, each behind what it starts from, then the rows."""
    needed = needed_trainings(variants)
    cells = [Cell("corpus", spec=_pack)] if needed else []
    for name in needed:
        start = TRAININGS[name].start
        before = () if start == BASE else (f"{start}.0",)
        cells.append(Cell(name, spec=partial(_train, name), needs=("corpus.0", *before)))
    for variant in variants:
        made = (f"{variant.model}.0",) if variant.model in TRAININGS else ()
        cells.append(Cell(measured(variant), spec=partial(_measure, variant), needs=made))
    return cells


def needed_trainings(variants: Sequence[SystemRow]) -> list[str]:
    """The trainings of some rows, each behind what it starts from."""
    wanted = [name for name in TRAININGS if name in {v.model for v in variants}]
    return [name for name in TRAININGS if any(name in _line(each) for each in wanted)]


def measured(variant: SystemRow) -> str:
    """The cell with a row's measurements."""
    return f"{variant.name}@"


def _line(name: str) -> list[str]:
    """A training and all that it builds on."""
    start = TRAININGS[name].start
    return [name] if start == BASE else [*_line(start), name]


def compute_cell(files: CompareFiles, setting: CompareSetting, cell: Cell, _folder: StudyFolder) -> dict[str, Any]:
    """What a cell's own function says; models stand in `files`, which is the same folder."""
    found: dict[str, Any] = cell.spec(files, setting)
    return found


# --- training ---------------------------------------------------------------------------------------------------------


def _pack(files: CompareFiles, _setting: CompareSetting) -> dict[str, Any]:
    section = replace(
        load_recipe("peer-mdlm").data, inputs=files.text, separator=files.separator, max_documents=None, tokenizer=None
    )
    prepare_corpus(section, files.corpus, load_model(files.base).tokenizer)
    return {"corpus": files.corpus.name}


def _train(name: str, files: CompareFiles, setting: CompareSetting) -> dict[str, Any]:
    training = TRAININGS[name]
    overrides = recipe_overrides(training, files, setting)
    if training.repeats is not None:
        rows = -(-_steps(training, setting) * setting.batch_size // training.repeats)
        config = replace(_PAIRS, num=rows, length=setting.length, seed=setting.seed)
        runtime = RuntimeConfig(device=files.device, threads=1, precision=setting.precision)
        start, quiet = _start(training, files), Console(quiet=True)
        make_timed_pairs(start, files.corpus, files.pairs(name), config=config, runtime=runtime, console=quiet)
        overrides.append(f"data.pairs={quoted(files.pairs(name))}")
    return train_model(training.recipe, overrides, run=files.run(name), model=files.model(name))


def recipe_overrides(training: PeerTraining, files: CompareFiles, setting: CompareSetting) -> list[str]:
    """Everything in which a training differs from its recipe: text, tokens and start are everybody's."""
    steps, soft = _steps(training, setting), training.curriculum
    return [
        f"data.inputs={json.dumps([str(name) for name in files.text])}",
        f"data.separator={json.dumps(files.separator)}",
        f"data.corpus={quoted(files.corpus)}",
        "data.max_documents=none",
        f"data.length={setting.length}",
        f"model.parent={quoted(_start(training, files))}",
        f"optim.warmup={max(1, min(50, steps // 10))}",
        f"optim.ema={max(0.5, 1 - 10 / steps):.4f}",  # over the last tenth, however short the run is
        *([] if soft is None else [f"objective.curriculum_steps={round(soft * steps)}"]),
        f"train.steps={steps}",
        f"train.batch_size={setting.batch_size}",
        f"train.seed={setting.seed}",
        "train.keep=1",
        f"runtime.device={files.device}",
        "runtime.threads=1",
        f"runtime.precision={setting.precision}",
        *training.overrides,
    ]


def _steps(training: PeerTraining, setting: CompareSetting) -> int:
    return max(1, round(training.share * setting.train_steps))


def _start(training: PeerTraining, files: CompareFiles) -> Path:
    return files.base if training.start == BASE else files.model(training.start)


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(variant: SystemRow, files: CompareFiles, setting: CompareSetting) -> dict[str, Any]:
    request = EvaluationRequest(
        model=str(_model(variant, files)),
        judge=files.judge,
        held_out=files.held_out,
        separator=files.separator,
        steps=",".join(map(str, setting.steps)),
        num=setting.num,
        length=setting.length,
        seed=setting.seed,
        temperature=1.0,
        jump=variant.jump,
        grid=variant.grid,
        metrics=_METRICS + (",continuation" if variant.continued else ""),
        frontier=",".join(map(str, setting.temperatures)) if variant.frontier else "none",
        controls=variant.name == BASE,  # they are the same for all
        name=variant.label,
        json=files.rows(variant.name),
        device=files.device,
        threads=1,
        precision=setting.precision,
    )
    return measure_model(request)


def _model(variant: SystemRow, files: CompareFiles) -> Path:
    """The folder of a row's model."""
    if variant.model.startswith(NAMED):
        return Path(files.weights[variant.model.removeprefix(NAMED)])
    if variant.model == BASE:
        return files.base
    return find_model("fewstep") if variant.model == SHIPPED else files.model(variant.model)
