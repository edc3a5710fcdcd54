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
from fsdfm.checkpoint import causal_over
from fsdfm.config import FlowConfig, ModelSection, Recipe, SampleConfig
from fsdfm.files import lock, replace_file, require_plain
from fsdfm.learn import NextTokenConfig
from fsdfm.learn.optim import EMA, Optimiser
from fsdfm.learn.trainer import Hook, Trainer, TrainingState
from fsdfm.measure.judges import save_causal
from fsdfm.model import PRESETS, CausalConfig, CausalModel
from fsdfm.run.build import make_blocks, make_feed, make_objective, make_path
from fsdfm.run.corpora import corpus_folder, prepare_corpus
from fsdfm.run.fitting import Result, check_same, describe, fit
from fsdfm.run.validation import make_validation
from fsdfm.run.weights import require_files
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
    _check_start(recipe.model)
    others = ("parent", "cond_width", "transition_rank", "transition_gates", "causal_blocks")
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


def _check_start(section: ModelSection) -> None:
    """Raise unless the weights are fresh ones of a size, or those of a llama2.c file, nothing else said of them."""
    if (section.preset is None) == (section.llama2c is None):
        raise ValueError(
            'model.preset is missing, or model.llama2c is set beside it: model.architecture = "causal" starts from '
            "fresh weights of a size, or from an autoregressive model"
        )
    if section.preset is not None:
        decided = ["llama2c_tokenizer"] if section.llama2c_tokenizer is not None else []
        decided += ["min_count"] if section.min_count is not None else []
    else:
        decided = [name for name in _SIZES if getattr(section, name) is not None]
        decided += ["min_count"] if section.min_count != 1 else []
    if decided:
        start = "preset" if section.preset is not None else "llama2c"
        raise ValueError(
            f'model.{decided[0]} is not used by model.architecture = "causal" with model.{start}; remove it'
        )


def causal_config(recipe: Recipe, vocab_size: int) -> CausalConfig:
    """The network of a recipe: its preset, and what it changes."""
    preset = PRESETS.get(str(recipe.model.preset))
    if preset is None:
        raise ValueError(f"model.preset is {recipe.model.preset!r}; allowed are {', '.join(PRESETS)}")
    said = {name: getattr(recipe.model, name) for name in _SIZES}
    sizes = {name: getattr(preset, name) if value is None else value for name, value in said.items()}
    return CausalConfig(vocab_size=vocab_size, max_length=recipe.data.length, **sizes)


def _make_model(recipe: Recipe, tokenizer: data.Tokenizer) -> CausalModel:
    """Fresh weights of a preset, or a llama2.c model's over the tokens of a tokenizer that was made of its own."""
    section = recipe.model
    if section.llama2c is None:
        return CausalModel(causal_config(recipe, tokenizer.vocab_size), seed=recipe.train.seed)
    require_files(section.llama2c, section.llama2c_tokenizer)
    model = causal_over(section.llama2c, tokenizer.pieces, section.llama2c_tokenizer)
    if recipe.data.length > model.config.max_length:
        raise ValueError(
            f"data.length is {recipe.data.length}, but {section.llama2c} knows at most {model.config.max_length} "
            "tokens; take shorter blocks"
        )
    return model


def train_causal(recipe: Recipe, console: Console | None = None) -> Result:
    """Train the causal model of a recipe, or resume it."""
    check_causal(recipe)
    if recipe.model.llama2c is None:
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
        model = _make_model(recipe, corpus.tokenizer)
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
        require_plain(file)
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            numbers = json.loads((stored.metadata() or {})["numbers"])
        average = {
            name.removeprefix("average."): value for name, value in tensors.items() if name.startswith("average.")
        }
        trainer.ema.module.load_state_dict(average)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:  # one of deep nesting, too
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
