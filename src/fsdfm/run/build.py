"""From a recipe's names to objects: path, objective, rows, feed, trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdfm import data, flow
from fsdfm.checkpoint import Checkpoint, make_schedule, make_source
from fsdfm.config import FlowConfig, Recipe
from fsdfm.learn import RewardObjective
from fsdfm.learn.objective import OBJECTIVES, Objective, SectionConfig, TrainableDenoiser
from fsdfm.learn.optim import EMA, Optimiser, WithoutDropout
from fsdfm.learn.trainer import Feed, Trainer
from fsdfm.model import CausalModel, Network
from fsdfm.run.corpora import corpus_folder, prepare_corpus
from fsdfm.runtime import ALONE, Processes, Runtime

__all__ = ["make_blocks", "make_feed", "make_objective", "make_path", "make_rows", "make_trainer"]


def make_path(config: FlowConfig, num_tokens: int, mask_token: int | None = None) -> flow.MixturePath:
    """Source and schedule over the tokens of a tokenizer, with one more for the mask where the source has one.

    mask_token   the mask where it is one of the tokenizer's own tokens
    """
    source: dict[str, Any] = {"name": config.source, "vocab_size": num_tokens + (config.source != "uniform")}
    if mask_token is not None and mask_token < num_tokens and config.source != "uniform":
        source |= {"vocab_size": num_tokens, "mask_token": mask_token}
    schedule = {"name": config.schedule, "exponent": config.exponent, "rate": config.rate}
    return flow.MixturePath(
        make_source({**source, **_set(mask_share=config.mask_share)}), make_schedule(_set(**schedule))
    )


def _set(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def make_objective(config: SectionConfig, path: flow.MixturePath) -> Objective:
    """The objective that a recipe's section names."""
    objective: Objective = OBJECTIVES.build(config, path)
    return objective


def make_trainer(
    recipe: Recipe,
    checkpoint: Checkpoint,
    rows: data.RowSource,
    *,
    runtime: Runtime,
    parent: Network | CausalModel | None = None,
) -> Trainer:
    """The trainer of a recipe, at its start: the checkpoint's weights are both the model's and their average's.

    parent   the frozen network that an objective may ask as its teacher
    """
    model = checkpoint.model
    ema = EMA(model, recipe.optim.ema)
    objective = make_objective(recipe.objective, checkpoint.path)
    if getattr(objective, "frozen_trunk", False):
        freeze_trunk(model)
    for network in (model, ema.module):
        runtime.place(network)
    if isinstance(objective, RewardObjective):
        objective = objective.reading(checkpoint.tokenizer)
    teacher: TrainableDenoiser | CausalModel | None = None
    if objective.teacher is not None and objective.teacher.network == "student":
        teacher = WithoutDropout(model)
    elif objective.teacher is not None and objective.teacher.network == "parent":
        if parent is None:
            raise ValueError("the objective learns from a parent; name it as model.parent")
        runtime.place(parent)
        teacher = parent
    elif objective.teacher is not None and objective.teacher.network == "autoregressive":
        if parent is None:
            raise ValueError("the objective learns from an autoregressive model; name it as objective.teacher")
        teacher = parent.to(runtime.device)
    return Trainer(
        model,
        objective,
        make_feed(
            rows,
            recipe.train.batch_size,
            recipe.train.accumulate,
            bos_id=checkpoint.bos_id,
            processes=runtime.processes,
        ),
        optimiser=Optimiser(model, recipe.optim, steps=recipe.train.steps),
        ema=ema,
        runtime=runtime,
        config=recipe.train,
        teacher=teacher,
    )


def freeze_trunk(model: Network) -> None:
    """Leave the gradients of a joint head, of the vocabulary and of the embedding, which the head reads."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("joint.", "head.", "embedding.")))


def make_rows(recipe: Recipe, checkpoint: Checkpoint, out: Path) -> data.RowSource:
    """The training rows of a recipe: blocks of its corpus, pairs that a parent made, or some of both."""
    section = recipe.data
    rows: data.RowSource
    if section.pairs is None:
        rows = _text(recipe, checkpoint, out)
    else:
        rows = _pairs(recipe, checkpoint, section.pairs)
        if section.text_share:
            rows = data.PairsAndText(rows, _text(recipe, checkpoint, out), section.text_share)
    if not section.step_pairs:
        return rows
    folders = zip(section.step_pairs_from, section.step_pairs, strict=True)
    return data.StepPairs(rows, tuple((h, _pairs(recipe, checkpoint, folder)) for h, folder in folders))


def _text(recipe: Recipe, checkpoint: Checkpoint, out: Path) -> data.Blocks:
    return make_blocks(recipe, prepare_corpus(recipe.data, corpus_folder(recipe, out), checkpoint.tokenizer))


def make_blocks(recipe: Recipe, corpus: data.Corpus) -> data.Blocks:
    """The rows of text of a recipe."""
    section = recipe.data
    return data.Blocks(
        corpus,
        section.length,
        recipe.train.seed,
        short_share=section.short_share,
        shortest=section.shortest,
        document_starts=section.document_starts,
        given_share=section.given_share,
    )


def _pairs(recipe: Recipe, checkpoint: Checkpoint, folder: str) -> data.Pairs:
    pairs = data.Pairs(folder, recipe.train.seed)
    found = (pairs.header.length, pairs.header.vocab_size)
    wanted = (recipe.data.length, checkpoint.path.source.vocab_size)
    if found != wanted:
        raise ValueError(
            f"the pairs in {folder} have rows of {found[0]} of {found[1]} tokens, the recipe and its parent have "
            f"{wanted[0]} of {wanted[1]}; set data.length, or make pairs with this parent"
        )
    if pairs.header.timed and (recipe.objective.kind != "path" or recipe.data.text_share or recipe.data.step_pairs):
        raise ValueError(
            f"the pairs in {folder} remember their times, which only the path loss on nothing but them can use; set "
            'objective.kind to "path" and leave data.text_share and data.step_pairs out'
        )
    return pairs


def make_feed(
    rows: data.RowSource,
    batch_size: int,
    accumulate: int = 1,
    *,
    bos_id: int | None = None,
    processes: Processes = ALONE,
) -> Feed:
    """Portions of batches of training rows; with `bos_id`, every row begins with that token, which is given."""
    source = rows if bos_id is None else data.BeginWith(bos_id, rows)
    share = {"portions": accumulate, "rank": processes.rank, "num_ranks": processes.count}
    data.batches(source, batch_size, **share)  # raises for what cannot be shared out
    return lambda start: data.batches(source, batch_size, start, **share)
