"""`fsdfm train`: a denoiser, or the causal model that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fsdfm import flow
from fsdfm.checkpoint import CHECKPOINTS, Checkpoint, load_model, load_training, recover, save_checkpoint
from fsdfm.config import Recipe, load_recipe
from fsdfm.files import lock
from fsdfm.generate import pieces_of
from fsdfm.learn.trainer import Every, Hook, Trainer, TrainingState
from fsdfm.model import Network, Transformer
from fsdfm.noise import Noise
from fsdfm.run.build import make_rows, make_trainer
from fsdfm.run.causal import train_causal
from fsdfm.run.fitting import Result, check_same, describe, fit
from fsdfm.run.validation import make_validation
from fsdfm.run.weights import autoregressive_teacher, check, frozen_parent, start
from fsdfm.runtime import Runtime, require_strategy
from fsdfm.show.timeline import Timeline
from fsdfm.terminal import say

__all__ = ["train"]


def train(name: str | Path, overrides: Sequence[str] = (), *, console: Console | None = None) -> Result:
    """Train what a recipe says, or resume it; SIGTERM and SIGINT save and end it early."""
    recipe = load_recipe(name, overrides)
    return (train_causal if recipe.model.architecture == "causal" else _train_denoiser)(recipe, console)


def _train_denoiser(recipe: Recipe, console: Console | None) -> Result:
    check(recipe)
    require_strategy(recipe.runtime)
    out = Path(recipe.out)
    with Runtime(recipe.runtime) as runtime, ExitStack() as held:
        processes = runtime.processes
        speaks = (console or Console(stderr=True)) if processes.is_rank0 else Console(quiet=True)
        place = processes.on_rank0(lambda: _claim(out, recipe, held, console=speaks))
        with processes.in_turn():
            checkpoint = start(recipe, out) if place is None else load_model(place)
            rows = make_rows(recipe, checkpoint, out)
            held_out = make_validation(
                recipe, checkpoint.path, tokenizer=checkpoint.tokenizer, bos_id=checkpoint.bos_id, processes=processes
            )
            parent = frozen_parent(recipe, checkpoint.path) or autoregressive_teacher(recipe, checkpoint)
        processes.on_rank0(lambda: describe(out, recipe))
        trainer = make_trainer(recipe, checkpoint, rows, runtime=runtime, parent=parent)
        if place is not None:
            trainer.load(TrainingState(*load_training(place, trainer.blank())))
        with processes.watch(f"what {out} has saved is whole"):
            return fit(
                trainer,
                recipe,
                save=_saver(recipe, checkpoint),
                write_texts=lambda trainer: sample_texts(trainer.ema.module, checkpoint, recipe),
                held_out=held_out,
                others=_opening(trainer, recipe.model.open_steps),
                console=speaks,
            )


def _opening(trainer: Trainer, steps: int | None) -> list[Every]:
    """What opens the attention of an imported model, from the step on at which the run stands."""
    if not steps:
        return []
    open_attention(trainer, steps)
    return [Every(1, lambda trainer: open_attention(trainer, steps))]


def open_attention(trainer: Trainer, steps: int) -> None:
    """Give later positions the weight n / steps in attention at training step n: 0 the causal mask, 1 none."""
    for network in (trainer.model, trainer.ema.module):
        assert isinstance(network, Transformer)
        network.see_future(min(1.0, trainer.training_step / steps))


def _claim(out: Path, recipe: Recipe, held: ExitStack, *, console: Console) -> Path | None:
    """Lock a run's folder; the checkpoint to resume from, if there is one and the recipe is still its own."""
    held.enter_context(lock(out))
    place, problems = recover(out / CHECKPOINTS)
    for problem in problems:
        say(console, f"warning: {problem}; using {place}")
    if place is not None:
        check_same(out / "recipe.toml", recipe)
    return place


def _saver(recipe: Recipe, checkpoint: Checkpoint) -> Hook:
    """Writes a checkpoint: the averaged weights for everybody, the training state for the run."""

    def save(trainer: Trainer) -> None:
        state = trainer.state()
        facts = {**checkpoint.facts, "training_step": trainer.training_step, "tokens_seen": trainer.tokens}
        assert isinstance(trainer.ema.module, Network)
        average = replace(checkpoint, model=trainer.ema.module, facts=facts)
        save_checkpoint(
            Path(recipe.out) / CHECKPOINTS,
            average,
            state.tensors,
            numbers=state.numbers,
            keep=recipe.train.keep,
            processes=trainer.processes,
        )

    return save


def sample_texts(model: Any, checkpoint: Checkpoint, recipe: Recipe) -> list[Timeline]:
    """Some texts of a model; the same noise at every training step, so that only the model changes."""
    config = recipe.sample
    noise = Noise(recipe.train.seed, range(config.num))
    x = checkpoint.path.source.sample(noise, config.length or recipe.data.length)
    frozen = torch.zeros_like(x, dtype=torch.bool)
    if checkpoint.bos_id is not None:
        frozen[:, 0], x[:, 0] = True, checkpoint.bos_id
    device = next(model.parameters()).device
    sampler = config.sampler().advised(checkpoint.facts.get("sampling"))
    last_changed = torch.zeros_like(x)
    for step in flow.trajectory(
        model,
        checkpoint.path,
        x.to(device),
        grid=sampler.make_grid(torch.zeros(config.num, dtype=torch.float64), checkpoint.path.schedule),
        rule=sampler.rule(),
        filter=sampler.filter(),
        noise=noise,
        frozen=frozen.to(device) if checkpoint.bos_id is not None else None,
    ):
        x = step.x_next.cpu()
        last_changed[step.jumps.cpu()] = step.index + 1
    return [
        Timeline(pieces_of(checkpoint.tokenizer, tokens), changed, sampler.num_steps(), given=given)
        for tokens, changed, given in zip(x.tolist(), last_changed.tolist(), frozen.tolist(), strict=True)
    ]
