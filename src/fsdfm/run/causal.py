"""The causal model of a recipe: the baseline that few-step models are compared with, and a judge of their text.

Its run's folder holds `recipe.toml`, `run.json`, `metrics.jsonl`, `training.safetensors` (what a run needs to resume,
in one file) and, once it has finished, `model/`: what `fsdfm evaluate --judge` takes.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fsdfm import data
from fsdfm.config import FlowConfig, Recipe, SampleConfig
from fsdfm.files import lock, replace_file
from fsdfm.learn import NextTokenConfig
from fsdfm.learn.optim import EMA, Optimiser
from fsdfm.learn.trainer import Hook, Trainer, TrainingState
from fsdfm.measure.judges import save_causal
from fsdfm.model import PRESETS, CausalConfig, CausalModel
from fsdfm.run.build import make_blocks, make_feed, make_objective, make_path
from fsdfm.run.corpora import corpus_folder, prepare_corpus
from fsdfm.run.fitting import Result, check_same, describe, fit
from fsdfm.run.validation import make_validation
from fsdfm.runtime import Runtime, require_strategy

__all__ = ["causal_config", "check_causal", "train_causal"]

_STATE, _MODEL = "training.safetensors", "model"
_SIZES = ("width", "num_blocks", "num_heads", "num_kv_heads", "mlp_width", "style", "dropout")


def check_causal(recipe: Recipe) -> None:
    """Raise for what a causal model has no use for."""
    if not isinstance(recipe.objective, NextTokenConfig):
        raise ValueError(
            f'objective.kind is "{recipe.objective.kind}", but model.architecture = "causal" is trained on "next-token"'
        )
    if recipe.model.preset is None:
        raise ValueError('model.preset is missing: model.architecture = "causal" starts from fresh weights of a size')
    others = ("parent", "llama2c", "llama2c_tokenizer", "min_count", "cond_width", "transition_rank", "causal_blocks")
    unused = [f"model.{name}" for name in others if getattr(recipe.model, name) is not None]
    unused += [f"data.{name}" for name in ("pairs", "step_pairs", "given_share") if getattr(recipe.data, name)]
    unused += [
        name
        for name, default in (("flow", FlowConfig()), ("sample", SampleConfig()))
        if getattr(recipe, name) != default
    ]
    if unused:
        raise ValueError(f'{unused[0]} is not used by model.architecture = "causal"; remove it')
    if recipe.runtime.strategy == "fsdp":
        raise ValueError('runtime.strategy is "fsdp"; allowed are single and ddp with model.architecture = "causal"')


def causal_config(recipe: Recipe, vocab_size: int) -> CausalConfig:
    """The network of a recipe: its preset, and what it changes."""
    preset = PRESETS.get(str(recipe.model.preset))
    if preset is None:
        raise ValueError(f"model.preset is {recipe.model.preset!r}; allowed are {', '.join(PRESETS)}")
    said = {name: getattr(recipe.model, name) for name in _SIZES}
    sizes = {name: getattr(preset, name) if value is None else value for name, value in said.items()}
    return CausalConfig(vocab_size=vocab_size, max_length=recipe.data.length, **sizes)


def train_causal(recipe: Recipe, console: Console | None = None) -> Result:
    """Train the causal model of a recipe, or resume it."""
    check_causal(recipe)
    causal_config(recipe, vocab_size=2)
    require_strategy(recipe.runtime)
    out = Path(recipe.out)
    with Runtime(recipe.runtime) as runtime, ExitStack() as held:
        processes = runtime.processes
        processes.on_rank0(lambda: held.enter_context(lock(out)))
        speaks = (console or Console(stderr=True)) if processes.is_rank0 else Console(quiet=True)
        with processes.in_turn():
            corpus = prepare_corpus(recipe.data, corpus_folder(recipe, out))
            bos_id = corpus.header.eos_id  # what stands between two documents stands before the first
            path = make_path(recipe.flow, corpus.header.vocab_size)
            held_out = make_validation(recipe, path, tokenizer=corpus.tokenizer, bos_id=bos_id, processes=processes)
        if (out / _STATE).exists():
            check_same(out / "recipe.toml", recipe)
        processes.on_rank0(lambda: describe(out, recipe))
        model = CausalModel(causal_config(recipe, corpus.header.vocab_size), seed=recipe.train.seed)
        ema = EMA(model, recipe.optim.ema)
        for network in (model, ema.module):
            runtime.place(network)
        trainer = Trainer(
            model,
            make_objective(recipe.objective, path),
            make_feed(
                make_blocks(recipe, corpus),
                recipe.train.batch_size,
                recipe.train.accumulate,
                bos_id=bos_id,
                processes=processes,
            ),
            optimiser=Optimiser(model, recipe.optim, steps=recipe.train.steps),
            ema=ema,
            runtime=runtime,
            config=recipe.train,
        )
        if (out / _STATE).exists():
            _load(out / _STATE, trainer)
        with processes.watch(f"what {out} has saved is whole"):
            result = fit(trainer, recipe, save=_save(out), write_texts=None, held_out=held_out, console=speaks)
        if result.finished:
            processes.on_rank0(lambda: _publish(out, trainer, corpus.tokenizer, bos_id=bos_id))
        return result


def _save(out: Path) -> Hook:
    def save(trainer: Trainer) -> None:
        state = trainer.state()
        average = {f"average.{name}": value for name, value in trainer.ema.module.state_dict().items()}
        tensors = {name: value.cpu().contiguous() for name, value in {**state.tensors, **average}.items()}
        numbers = {"numbers": json.dumps(state.numbers)}
        trainer.processes.on_rank0(
            lambda: replace_file(out / _STATE, lambda side: save_file(tensors, side, metadata=numbers))
        )

    return save


def _load(file: Path, trainer: Trainer) -> None:
    try:
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            numbers = json.loads((stored.metadata() or {})["numbers"])
        average = {
            name.removeprefix("average."): value for name, value in tensors.items() if name.startswith("average.")
        }
        trainer.ema.module.load_state_dict(average)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be resumed ({error}); remove it to begin anew") from error
    trainer.load(TrainingState({name: v for name, v in tensors.items() if not name.startswith("average.")}, numbers))


def _publish(out: Path, trainer: Trainer, tokenizer: data.Tokenizer, *, bos_id: int) -> None:
    """Write the averaged weights as a judge's folder, whole or not at all."""
    assert isinstance(trainer.ema.module, CausalModel)
    side = out / (_MODEL + ".tmp")
    for old in (side, out / _MODEL):
        shutil.rmtree(old, ignore_errors=True)
    save_causal(side, trainer.ema.module, tokenizer, bos_id=bos_id)
    side.replace(out / _MODEL)
