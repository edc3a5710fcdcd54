"""What a run will need, before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdfm import data
from fsdfm.checkpoint import load_model
from fsdfm.checkpoint.embedded import NAMES
from fsdfm.config import Recipe, load_recipe, recipe_names
from fsdfm.model import ModelConfig, TransformerConfig
from fsdfm.plan import Workload
from fsdfm.run.build import make_objective, make_path
from fsdfm.run.weights import check, is_step_aware, model_config

__all__ = ["make_workload"]


def make_workload(recipe: Recipe) -> Workload:
    """The numbers of a recipe that decide its memory and time; nothing is read but the header of its parent."""
    check(recipe)
    objective = make_objective(recipe.objective, make_path(recipe.flow, num_tokens=2))
    share = objective.teacher_share
    on_cpu = recipe.runtime.device == "cpu"
    return Workload(
        model=_planned_model(recipe),
        length=recipe.data.length,
        batch_size=recipe.train.batch_size,
        accumulate=recipe.train.accumulate,
        steps=recipe.train.steps,
        bfloat16=recipe.runtime.precision == "bfloat16" or (recipe.runtime.precision == "auto" and not on_cpu),
        stages=0 if objective.teacher is None or not share else objective.teacher.calls,
        teacher_share=share,
    )


def _planned_model(recipe: Recipe) -> ModelConfig | TransformerConfig:
    """The network that a run would train, without its weights: a parent may still be a recipe itself."""
    section = recipe.model
    if section.preset is not None:
        return model_config(recipe, make_path(recipe.flow, _num_tokens(recipe)).source.vocab_size)
    if section.architecture != "dit":
        raise ValueError(f'model.architecture is "{section.architecture}"; only dit and transformer can be planned')
    if section.parent is None:
        raise ValueError("model.llama2c decides the size when it is converted; fsdfm import it, and name model.parent")
    if section.parent in NAMES or Path(section.parent).is_dir():
        config = load_model(section.parent, device="meta").model.config
    else:
        recipes = [load_recipe(name) for name in recipe_names()]
        parents = [other for other in recipes if other.out == section.parent]
        if not parents:
            raise ValueError(f"model.parent {section.parent} is not there, and no recipe makes it; train it first")
        config = _planned_model(parents[0])
    if not isinstance(config, ModelConfig | TransformerConfig):
        raise ValueError(
            f"model.parent is {section.parent}, a network of your own; only dit and transformer can be planned"
        )
    if is_step_aware(recipe) and not config.is_step_aware:
        config = replace(config, conditioning="step")
    return config if section.dropout is None else replace(config, dropout=section.dropout)


def _num_tokens(recipe: Recipe) -> int:
    spec = recipe.data.tokenizer or ""
    if spec.startswith("bpe:") and spec[4:].isdecimal():
        return int(spec[4:])
    return {"gpt2": 50257, "bytes": 257}.get(spec) or data.make_tokenizer(spec).vocab_size
