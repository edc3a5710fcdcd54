"""One cell: a variant trained with one seed, its samples measured; what is finished is on the disk and stays."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from rich.console import Console

from fsdfm.checkpoint import Checkpoint, load_model, save_model
from fsdfm.flow import MaskSource, MixturePath
from fsdfm.learn import PathConfig
from fsdfm.measure.evaluation import EvaluationRequest, run_evaluation
from fsdfm.measure.results import Evaluation, load_evaluation
from fsdfm.model import DiT
from fsdfm.run import export, train
from fsdfm.studies.ablation.factors import BASE, MASKED, Setup, Training, Variant
from fsdfm.studies.ablation.setting import RECIPE, Place, Setting, flow_overrides

__all__ = [
    "StoppedError",
    "Unit",
    "cell_name",
    "finished_cell",
    "recipe_overrides",
    "run_unit",
    "units_of",
    "with_mask",
]


ANNEALINGS = 50  # doublings that the annealed policy has time for: the paper's every 10,000 of 500,000 steps


class StoppedError(Exception):
    """A signal ended a training or a measurement; what is finished is kept."""


@dataclass(frozen=True)
class Unit:
    """What one process does in one go: a training with one seed, and the setups that measure it.

    training   None: the base itself
    """

    training: Training | None
    seed: int
    setups: tuple[Setup, ...] = ()

    @property
    def cells(self) -> list[str]:
        """The names of its cells."""
        return [cell_name(self.training, setup, self.seed) for setup in self.setups]


def cell_name(training: Training | None, setup: Setup, seed: int) -> str:
    """The name of a cell: what was trained, how it was sampled, the seed."""
    return f"{BASE if training is None else training.name}@{setup.name}.{seed}"


def units_of(variants: Sequence[Variant], seeds: int) -> tuple[list[Unit], list[Unit]]:
    """What has to be trained first, once for all seeds, and everything else: costly things early."""
    first: dict[str, Unit] = {}
    setups: dict[str, list[Setup]] = {}
    trainings: dict[str, Training | None] = {}
    for variant in variants:
        name = BASE if variant.training is None else variant.training.name
        trainings[name] = variant.training
        if variant.setup not in setups.setdefault(name, []):
            setups[name].append(variant.setup)
        for training in _starts(variant.training):
            first[training.name] = Unit(training, 0)
    then = [
        Unit(trainings[name], seed, tuple(setups[name]))
        for seed in range(seeds)
        for name in sorted(trainings, key=lambda name: _is_cheap(trainings[name]))
    ]
    return list(first.values()), then


def _starts(training: Training | None) -> list[Training]:
    """The shared trainings that a training needs, itself included."""
    found = []
    while isinstance(training, Training):
        if training.shared:
            found.append(training)
        training = training.start if isinstance(training.start, Training) else None
    return found[::-1]


def _is_cheap(training: Training | None) -> bool:
    return training is None or training.shared


def run_unit(place: Place, setting: Setting, unit: Unit) -> None:
    """Train unless the model is there, then measure what is missing."""
    model = place.base if unit.training is None else _trained(place, setting, unit.training, unit.seed)
    for setup in unit.setups:
        name = cell_name(unit.training, setup, unit.seed)
        if finished_cell(place, setting, name, setup) is None:
            _measure(place, setting, model, setup=setup, seed=unit.seed, file=place.cell(name))


# --- training ---------------------------------------------------------------------------------------------------------


def _trained(place: Place, setting: Setting, training: Training, seed: int) -> Path:
    """The folder of a finished training; the training itself where there is none yet."""
    seed = 0 if training.shared else seed
    model, run = place.model(training.name, seed), place.run(training.name, seed)
    if not model.exists():
        overrides = recipe_overrides(place, setting, training, seed)
        if not train(RECIPE, [*overrides, f"out={_quoted(run)}"], console=_silence()).finished:
            raise StoppedError
        export(run, model, half=True)
    shutil.rmtree(run, ignore_errors=True)  # its weights are the model now, the rest served to go on
    return model


def recipe_overrides(place: Place, setting: Setting, training: Training, seed: int) -> list[str]:
    """Everything in which a training's recipe differs from base.toml."""
    start, steps = _start(place, training), setting.train_steps * training.stretch
    return [
        f"data.inputs={json.dumps([str(name) for name in place.text])}",
        f"data.separator={json.dumps(place.separator)}",
        f"data.field={json.dumps(place.field)}",
        "data.max_documents=none",
        f"data.corpus={_quoted(place.corpus)}",
        f"data.length={setting.length}",
        f"model.parent={_quoted(start)}",
        *flow_overrides(load_model(start, device="meta")),
        *([f"objective.anneal_every={max(1, steps // ANNEALINGS)}"] if _anneals(training) else []),
        f"train.steps={steps}",
        f"train.seed={seed + 1}",
        f"runtime.device={place.device}",
        "runtime.threads=1",
        *(override for override in setting.overrides if _is_used(override, training)),
        *training.overrides,
    ]


def _is_used(override: str, training: Training) -> bool:
    """The path loss has no use for what a user says of the step sizes and the teacher of the others."""
    section, _, key = override.partition("=")[0].strip().partition(".")
    known = {f.name for f in fields(PathConfig)}
    return section != "objective" or "objective.kind=path" not in training.overrides or key in known


def _anneals(training: Training) -> bool:
    return "objective.weights=AG" in training.overrides


def _start(place: Place, training: Training) -> Path:
    """The model that a training starts from."""
    if isinstance(training.start, Training):
        return place.model(training.start.name, 0)
    if training.start == MASKED:
        if not place.masked.exists():
            save_model(place.masked, with_mask(load_model(place.base)))
        return place.masked
    return place.base


def with_mask(bundle: Checkpoint) -> Checkpoint:
    """A uniform model with one token more, [MASK]: its embedding is the mean of all, its logit is never used.

    The logits of the other tokens stay what they were.
    """
    old, size = bundle.model, bundle.model.config.vocab_size
    model = DiT(replace(old.config, vocab_size=size + 1)).to(old.embedding.weight)
    state = model.state_dict()
    for name, value in old.state_dict().items():
        if state[name].shape == value.shape:
            state[name] = value
            continue
        row = value.mean(0, keepdim=True) if name.startswith("embedding.") else torch.zeros_like(value[:1])
        state[name] = torch.cat([value, row])
    model.load_state_dict(state)
    return replace(bundle, model=model.eval(), path=MixturePath(MaskSource(size + 1), bundle.path.schedule))


def _quoted(path: Path) -> str:
    return json.dumps(str(path))


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(place: Place, setting: Setting, model: Path, *, setup: Setup, seed: int, file: Path) -> None:
    request = EvaluationRequest(
        model=str(model),
        judge=place.judge,
        held_out=place.held_out,
        separator=place.separator,
        field=place.field,
        steps=",".join(map(str, setting.steps)),
        num=setting.num,
        length=setting.length,
        seed=seed,
        jump=setup.jump,
        start=setup.start,
        metrics=setup.metrics,
        frontier=",".join(map(str, setting.temperatures)) if setup.frontier else None,
        json=file,
        device=place.device,
        threads=1,
    )
    if not run_evaluation(request, console=_silence()).finished:
        raise StoppedError


def finished_cell(place: Place, setting: Setting, name: str, setup: Setup) -> Evaluation | None:
    """A cell that has all its rows; None: it has yet to be measured, or to be finished."""
    if not place.cell(name).exists():
        return None
    found = load_evaluation(place.cell(name))
    swept = {(row.steps, row.temperature) for row in found.frontier}
    wanted = {(s, t) for s in setting.steps for t in setting.temperatures} if setup.frontier else set()
    whole = all(found.row(steps) is not None for steps in setting.steps) and wanted <= swept
    return found if whole else None


def _silence() -> Console:
    return Console(file=io.StringIO())
