"""The cells of an ablation: the packed text, models, and measurements of a variant with one seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdfm.checkpoint import Checkpoint, load_model, save_model
from fsdfm.flow import MaskSource, MixturePath
from fsdfm.learn import PathConfig
from fsdfm.measure.evaluation import EvaluationRequest
from fsdfm.model import build_network
from fsdfm.run import prepare_corpus
from fsdfm.studies.ablation.factors import BASE, MASKED, FineTuning, Setup, Variant
from fsdfm.studies.ablation.setting import RECIPE, AblationFiles, AblationSetting, flow_overrides, parse_recipe
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.models import measure_model, quoted, train_model
from fsdfm.studies.runner import Cell

__all__ = ["CORPUS", "cell_variant", "cells_of", "compute_cell", "recipe_overrides", "with_mask"]


ANNEALINGS = 50  # doublings that the annealed policy has time for: the paper's every 10,000 of 500,000 steps


def cells_of(variants: Sequence[Variant], seeds: int) -> list[Cell]:
    """The text, models that several seeds start from, then every seed's models and measurements, costly ones early."""
    setups: dict[FineTuning | None, list[Setup]] = {}
    for variant in variants:
        setups.setdefault(variant.training, []).append(variant.setup)
    shared = dict.fromkeys(start for training in setups for start in _starts(training))
    cells = [CORPUS]
    if any(training.start == MASKED for training in shared):
        cells.append(Cell(MASKED, spec=_add_mask))
    cells += [_model_cell(training, 0) for training in shared]
    for seed in range(seeds):
        for training in sorted(setups, key=_is_cheap):
            if training is not None and not training.shared:
                cells.append(_model_cell(training, seed))
            cells += [_measured_cell(training, setup, seed) for setup in dict.fromkeys(setups[training])]
    return cells


def compute_cell(files: AblationFiles, setting: AblationSetting, cell: Cell, _folder: StudyFolder) -> dict[str, Any]:
    """What a cell's own function says; models and corpora stand in `files`, which is the same folder."""
    found: dict[str, Any] = cell.spec(files, setting=setting, seed=cell.seed)
    return found


def cell_variant(training: FineTuning | None, setup: Setup) -> str:
    """What was trained and how it was sampled: the name of a cell without its seed."""
    return f"{BASE if training is None else training.name}@{setup.name}"


def _model_cell(training: FineTuning, seed: int) -> Cell:
    start = training.start
    made = f"{start.name}.0" if isinstance(start, FineTuning) else f"{MASKED}.0" if start == MASKED else None
    return Cell(
        training.name,
        seed,
        spec=partial(_fine_tune, training),
        needs=(CORPUS.name,) if made is None else (CORPUS.name, made),
        unit=f"{training.name}.{seed}",
    )


def _measured_cell(training: FineTuning | None, setup: Setup, seed: int) -> Cell:
    return Cell(
        cell_variant(training, setup),
        seed,
        spec=partial(_measure, training, setup),
        needs=() if training is None else (f"{training.name}.{_trained_seed(training, seed)}",),
        unit=f"{BASE if training is None else training.name}.{seed}",
    )


def _trained_seed(training: FineTuning, seed: int) -> int:
    return 0 if training.shared else seed


def _starts(training: FineTuning | None) -> list[FineTuning]:
    """The shared trainings that a training needs, itself included."""
    found = []
    while isinstance(training, FineTuning):
        if training.shared:
            found.append(training)
        training = training.start if isinstance(training.start, FineTuning) else None
    return found[::-1]


def _is_cheap(training: FineTuning | None) -> bool:
    return training is None or training.shared


# --- training ---------------------------------------------------------------------------------------------------------


def _pack(files: AblationFiles, *, setting: AblationSetting, **_: Any) -> dict[str, Any]:
    """Pack the text once."""
    section = replace(
        parse_recipe(setting.overrides).data,
        inputs=files.text,
        separator=files.separator,
        field=files.field,
        max_documents=None,
        tokenizer=None,
    )
    prepare_corpus(section, files.corpus, load_model(files.base).tokenizer)
    return {"corpus": files.corpus.name}


CORPUS = Cell("corpus", spec=_pack)


def _add_mask(files: AblationFiles, **_: Any) -> dict[str, Any]:
    if not files.masked.exists():
        save_model(files.masked, with_mask(load_model(files.base)))
    return {"model": files.masked.name}


def _fine_tune(training: FineTuning, files: AblationFiles, *, setting: AblationSetting, seed: int) -> dict[str, Any]:
    """The finished model is in half precision."""
    overrides = recipe_overrides(files, setting, training, seed=seed)
    run, model = files.run(training.name, seed), files.model(training.name, seed)
    return train_model(RECIPE, overrides, run=run, model=model, half=True)


def recipe_overrides(files: AblationFiles, setting: AblationSetting, training: FineTuning, *, seed: int) -> list[str]:
    """Everything in which a training's recipe differs from base.toml."""
    start, steps = _start(files, training), setting.train_steps * training.stretch
    return [
        f"data.inputs={json.dumps([str(name) for name in files.text])}",
        f"data.separator={json.dumps(files.separator)}",
        f"data.field={json.dumps(files.field)}",
        "data.max_documents=none",
        f"data.corpus={quoted(files.corpus)}",
        f"data.length={setting.length}",
        f"model.parent={quoted(start)}",
        *flow_overrides(load_model(start, device="meta")),
        *([f"objective.anneal_every={max(1, steps // ANNEALINGS)}"] if _anneals(training) else []),
        f"train.steps={steps}",
        f"train.seed={seed + 1}",
        f"runtime.device={files.device}",
        "runtime.threads=1",
        *(override for override in setting.overrides if _is_used(override, training)),
        *training.overrides,
    ]


def _is_used(override: str, training: FineTuning) -> bool:
    """The path loss has no use for what a user says of the step sizes and the teacher of the others."""
    section, _, key = override.partition("=")[0].strip().partition(".")
    known = {f.name for f in fields(PathConfig)}
    return section != "objective" or "objective.kind=path" not in training.overrides or key in known


def _anneals(training: FineTuning) -> bool:
    return "objective.weights=AG" in training.overrides


def _start(files: AblationFiles, training: FineTuning) -> Path:
    """The model that a training starts from."""
    if isinstance(training.start, FineTuning):
        return files.model(training.start.name, 0)
    if training.start == MASKED:
        return files.masked
    return files.base


def with_mask(checkpoint: Checkpoint) -> Checkpoint:
    """A uniform model with one token more, [MASK]: its embedding is the mean of all, its logit is never used.

    The logits of the other tokens stay what they were.
    """
    old, size = checkpoint.model, checkpoint.model.config.vocab_size
    model = build_network(replace(old.config, vocab_size=size + 1)).to(old.embedding.weight)
    state = model.state_dict()
    for name, value in old.state_dict().items():
        if state[name].shape == value.shape:
            state[name] = value
            continue
        row = value.mean(0, keepdim=True) if name.startswith("embedding.") else torch.zeros_like(value[:1])
        state[name] = torch.cat([value, row])
    model.load_state_dict(state)
    return replace(checkpoint, model=model.eval(), path=MixturePath(MaskSource(size + 1), checkpoint.path.schedule))


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    training: FineTuning | None, setup: Setup, files: AblationFiles, *, setting: AblationSetting, seed: int
) -> dict[str, Any]:
    model = files.base if training is None else files.model(training.name, _trained_seed(training, seed))
    request = EvaluationRequest(
        model=str(model),
        judge=files.judge,
        held_out=files.held_out,
        separator=files.separator,
        field=files.field,
        steps=",".join(map(str, setting.steps)),
        num=setting.num,
        length=setting.length,
        seed=seed,
        jump=setup.jump,
        start=setup.start,
        metrics=setup.metrics,
        frontier=",".join(map(str, setting.temperatures)) if setup.frontier else "none",
        controls=False,
        json=files.rows(f"{cell_variant(training, setup)}.{seed}"),
        device=files.device,
        threads=1,
    )
    return measure_model(request)
