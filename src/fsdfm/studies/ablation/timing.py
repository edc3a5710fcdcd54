"""What a training step costs: steps of every variant, one of each a round, so that a slow moment meets them all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fsdfm.config import load_recipe
from fsdfm.learn.report import Report
from fsdfm.learn.trainer import Hooks, Trainer
from fsdfm.run import make_rows, make_trainer, start
from fsdfm.runtime import Runtime
from fsdfm.studies.ablation.cells import CORPUS, recipe_overrides
from fsdfm.studies.ablation.factors import FineTuning, Variant
from fsdfm.studies.ablation.setting import RECIPE, AblationFiles, AblationSetting
from fsdfm.studies.runner import Cell

__all__ = ["timing_cells"]


def timing_cells(variants: Sequence[Variant], seeds: int) -> list[Cell]:
    """A cell per seed; all in one process, for timings beside each other say little."""
    trainings = tuple(variant.training for variant in variants if variant.training is not None)
    spec = partial(_time, trainings)
    return [CORPUS, *(Cell("time", seed, spec=spec, needs=(CORPUS.name,), unit="time") for seed in range(seeds))]


def _time(
    trainings: Sequence[FineTuning], files: AblationFiles, *, setting: AblationSetting, seed: int
) -> dict[str, Any]:
    """Steps of all trainings with one seed, interleaved: seconds by training and round."""
    rounds: dict[str, list[float]] = {training.name: [] for training in trainings}
    trainers = {training.name: _trainer(files, setting, training, seed=seed) for training in trainings}
    for round_ in range(setting.rounds + 1):
        for name, trainer in trainers.items():
            spent = _one_step(trainer)
            if round_ > 0:  # the first round warms caches and pools
                rounds[name].append(spent)
    return {"rounds": rounds}


def _trainer(files: AblationFiles, setting: AblationSetting, training: FineTuning, *, seed: int) -> Trainer:
    timed = [f"train.steps={setting.rounds + 1}", "train.log_every=1"]
    recipe = load_recipe(RECIPE, [*recipe_overrides(files, setting, training, seed=seed), *timed])
    checkpoint = start(recipe, Path(recipe.out))
    return make_trainer(
        recipe, checkpoint, make_rows(recipe, checkpoint, Path(recipe.out)), runtime=Runtime(recipe.runtime)
    )


def _one_step(trainer: Trainer) -> float:
    """Let a trainer take one step; the seconds that it says it spent, reports and saving not counted."""
    said: list[Report] = []
    trainer.hooks = Hooks(report=said.append)
    before = trainer.training_step
    trainer.fit(stop=lambda: trainer.training_step > before)
    (report,) = said
    return (report.tokens / trainer.training_step) / report.tokens_per_second
