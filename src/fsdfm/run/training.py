"""A run: its folder, its checkpoints, what it says while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fsdfm import flow
from fsdfm.checkpoint import CHECKPOINTS, Checkpoint, load_model, load_training, recover, save_checkpoint
from fsdfm.config import Recipe, differences, load_recipe, to_toml
from fsdfm.files import lock, write_json, write_text
from fsdfm.learn.journal import JsonLines, ProgressBar, tensorboard
from fsdfm.learn.report import Report
from fsdfm.learn.trainer import Every, Hooks, Trainer, TrainingState
from fsdfm.model import DiT
from fsdfm.noise import Noise
from fsdfm.run.build import make_rows, make_trainer
from fsdfm.run.validation import Validation, make_validation
from fsdfm.run.weights import check, start
from fsdfm.runtime import Runtime, commit, require_strategy, stop_on_signal, versions
from fsdfm.terminal import say

__all__ = ["Result", "train"]

# What may change between a run and its resumption; `train.steps` re-plans the learning rate's cosine.
_FREE = (
    "out",  # a run's folder may be moved
    "train.steps",
    "train.accumulate",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.entropy_alarm",
    "sample.",
    "held_out.",
    "runtime.",
)


@dataclass(frozen=True)
class Result:
    """Where a run is, how far it came, and whether this process speaks for it."""

    folder: Path
    training_step: int
    finished: bool
    speaks: bool = True


def train(name: str | Path, overrides: Sequence[str] = (), *, console: Console | None = None) -> Result:
    """Train what a recipe says, or go on with it; SIGTERM and SIGINT save and end it early."""
    recipe = load_recipe(name, overrides)
    check(recipe)
    require_strategy(recipe.runtime)
    out = Path(recipe.out)
    with Runtime(recipe.runtime) as runtime, ExitStack() as held:
        processes = runtime.processes
        speaks = (console or Console(stderr=True)) if processes.is_rank0 else Console(quiet=True)
        place = processes.on_rank0(lambda: _claim(out, recipe, held, console=speaks))
        with processes.in_turn():
            bundle = start(recipe, out) if place is None else load_model(place)
            rows = make_rows(recipe, bundle, out)
            held_out = make_validation(recipe, bundle, out, processes=processes)
        processes.on_rank0(lambda: _describe(out, recipe))
        trainer = make_trainer(recipe, bundle, rows, runtime=runtime)
        if place is not None:
            trainer.load(TrainingState(*load_training(place, trainer.blank())))
        with processes.watch(f"what {out} has saved is whole"):
            return _fit(trainer, recipe, bundle, out=out, held_out=held_out, console=speaks)


def _claim(out: Path, recipe: Recipe, held: ExitStack, *, console: Console) -> Path | None:
    """Lock a run's folder; the checkpoint to go on from, if there is one and the recipe is still its own."""
    held.enter_context(lock(out))
    place, problems = recover(out / CHECKPOINTS)
    for problem in problems:
        say(console, f"warning: {problem}; using {place}")
    if place is not None:
        _check_same(out / "recipe.toml", recipe)
    return place


def _describe(out: Path, recipe: Recipe) -> None:
    write_text(out / "recipe.toml", to_toml(recipe))
    write_json(out / "run.json", {"commit": commit(), "versions": versions()}, indent=2)


def _fit(
    trainer: Trainer, recipe: Recipe, bundle: Checkpoint, *, out: Path, held_out: Validation | None, console: Console
) -> Result:
    """Train with everything written down."""
    processes = trainer.processes
    metrics, samples, unseen = (JsonLines(out / f"{name}.jsonl") for name in ("metrics", "samples", "held-out"))
    board = None
    if processes.is_rank0:
        for file in (metrics, samples, unseen):
            file.rewind(trainer.training_step)
        board = tensorboard(out / "tensorboard")

    def save(trainer: Trainer) -> None:
        state = trainer.state()
        facts = {**bundle.facts, "training_step": trainer.training_step, "tokens_seen": trainer.tokens}
        assert isinstance(trainer.ema.module, DiT)
        average = replace(bundle, model=trainer.ema.module, facts=facts)
        save_checkpoint(
            out / CHECKPOINTS,
            average,
            state.tensors,
            numbers=state.numbers,
            keep=recipe.train.keep,
            processes=processes,
        )

    with ProgressBar(console, recipe.train.steps, trainer.training_step) as bar, stop_on_signal() as stop:
        if trainer.training_step:
            bar.say(f"resuming {out} at training step {trainer.training_step} of {recipe.train.steps}")

        def report(report: Report) -> None:
            if not processes.is_rank0:
                return
            metrics.write(report.to_json())
            bar.report(report)
            if board is not None:
                board(report.training_step, report.scalars())

        def show_samples(trainer: Trainer) -> None:  # by all processes, which may share the weights
            with trainer.runtime.autocast():
                texts = sample_texts(trainer.ema.module, bundle, recipe, training_step=trainer.training_step)
            trainer.runtime.settle(trainer.ema.module)
            if not processes.is_rank0:
                return
            samples.write({"training_step": trainer.training_step, "steps": recipe.sample.steps, "texts": texts})
            bar.say(f"sample at step {trainer.training_step}: {' '.join(texts[0].split())[:200]}")

        def measure(trainer: Trainer) -> None:
            assert held_out is not None
            record = held_out(trainer)
            if not processes.is_rank0:
                return
            unseen.write(record)
            bar.say(f"held-out loss at step {trainer.training_step}: {record['held_out_loss']:.4g}")
            if board is not None:
                board(trainer.training_step, {"held_out_loss": record["held_out_loss"]})

        others = [Every(1, bar.step)]
        if recipe.sample.every:
            others.append(Every(recipe.sample.every, show_samples))
        if held_out is not None:
            others.append(Every(recipe.held_out.every, measure))
        trainer.hooks = Hooks(save=save, report=report, others=others)
        finished = trainer.fit(stop)
    return Result(out, trainer.training_step, finished, speaks=processes.is_rank0)


def sample_texts(model: Any, bundle: Checkpoint, recipe: Recipe, *, training_step: int) -> list[str]:
    """Some texts of a model; the same noise at every training step, so that only the model changes."""
    config = recipe.sample
    noise = Noise(recipe.train.seed, range(config.num))
    x_0 = bundle.path.source.sample(noise, config.length or recipe.data.length)
    frozen = None
    if bundle.bos_id is not None:
        frozen = torch.zeros_like(x_0, dtype=torch.bool)
        frozen[:, 0], x_0[:, 0] = True, bundle.bos_id
    device = next(model.parameters()).device
    x_1 = flow.sample(
        model,
        bundle.path,
        x_0.to(device),
        grid=flow.Grid.uniform(config.steps),
        rule=flow.ExactJump(),
        noise=noise,
        frozen=None if frozen is None else frozen.to(device),
    )
    return [bundle.tokenizer.decode(row) for row in x_1.tolist()]


def _check_same(file: Path, recipe: Recipe) -> None:
    """Raise if a run would go on with other data, another model or another objective than it began with."""
    if not file.exists():
        return
    for key, (old, new) in differences(load_recipe(file), recipe).items():
        if not key.startswith(_FREE):
            raise ValueError(
                f"{file.parent} was begun with {key} = {old!r}, now it is {new!r}; "
                "go on with the old value, or start another run with out=FOLDER"
            )
