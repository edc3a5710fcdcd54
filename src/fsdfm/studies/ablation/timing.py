"""What a training step costs: steps of every variant, one of each a round, so that a slow moment meets them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdfm.config import load_recipe
from fsdfm.files import write_json
from fsdfm.learn.report import Report
from fsdfm.learn.trainer import Hooks, Trainer
from fsdfm.run import make_rows, make_trainer, start
from fsdfm.runtime import Runtime
from fsdfm.studies.ablation.cells import recipe_overrides
from fsdfm.studies.ablation.factors import Training, Variant
from fsdfm.studies.ablation.setting import RECIPE, Place, Setting

__all__ = ["run_timing", "timing_name"]


def timing_name(training: Training, seed: int) -> str:
    """The name of a cell of the factor time."""
    return f"time@{training.name}.{seed}"


def run_timing(place: Place, setting: Setting, variants: Sequence[Variant], seed: int) -> None:
    """Time steps of all variants with one seed, interleaved, and write a cell each: seconds by round."""
    trainings = [variant.training for variant in variants if variant.training is not None]
    files = {training.name: place.cell(timing_name(training, seed)) for training in trainings}
    if all(file.exists() for file in files.values()):
        return
    seconds: dict[str, list[float]] = {training.name: [] for training in trainings}
    trainers = {training.name: _trainer(place, setting, training, seed=seed) for training in trainings}
    for round_ in range(setting.rounds + 1):
        for name, trainer in trainers.items():
            spent = _one_step(trainer)
            if round_ > 0:  # the first round warms caches and pools
                seconds[name].append(spent)
    for name, file in files.items():
        write_json(file, {"training": name, "seed": seed, "seconds": seconds[name]})


def _trainer(place: Place, setting: Setting, training: Training, *, seed: int) -> Trainer:
    timed = [f"train.steps={setting.rounds + 1}", "train.log_every=1"]
    recipe = load_recipe(RECIPE, [*recipe_overrides(place, setting, training, seed), *timed])
    bundle = start(recipe, Path(recipe.out))
    return make_trainer(recipe, bundle, make_rows(recipe, bundle, Path(recipe.out)), runtime=Runtime(recipe.runtime))


def _one_step(trainer: Trainer) -> float:
    """Let a trainer take one step; the seconds that it says it spent, reports and saving not counted."""
    said: list[Report] = []
    trainer.hooks = Hooks(report=said.append)
    before = trainer.training_step
    trainer.fit(stop=lambda: trainer.training_step > before)
    (report,) = said
    return (report.tokens / trainer.training_step) / report.tokens_per_second
