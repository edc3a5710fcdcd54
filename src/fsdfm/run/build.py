"""From a recipe's names to objects: path, objective, rows, feed, trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsdfm import data, flow
from fsdfm.checkpoint import Checkpoint, make_schedule, make_source
from fsdfm.config import FlowConfig, ObjectiveConfig, Recipe
from fsdfm.files import nearest
from fsdfm.flow.grid import AnnealedGeometricWeights, MirroredWeights
from fsdfm.learn.objective import (
    Batch,
    CrossEntropy,
    FewStepObjective,
    FineTimes,
    GeneralisedKL,
    MultiplesOfH,
    Objective,
    PathLoss,
    PathObjective,
    TimeGrid,
)
from fsdfm.learn.optim import EMA, Optimiser, WithoutDropout
from fsdfm.learn.teacher import TABLEAUS, ShortcutTeacher
from fsdfm.learn.trainer import Feed, MicroBatch, Trainer
from fsdfm.run.corpora import corpus_folder, prepare_corpus
from fsdfm.runtime import ALONE, Processes, Runtime

__all__ = ["begin_with", "make_feed", "make_objective", "make_path", "make_rows", "make_trainer", "named"]

_T = TypeVar("_T")

LOSSES: dict[str, PathLoss] = {"generalised-kl": GeneralisedKL(), "cross-entropy": CrossEntropy()}


def _jump(name: str) -> flow.Jump:
    rule = flow.RULES[name]
    assert isinstance(rule, flow.Jump)
    return rule


def make_path(config: FlowConfig, num_tokens: int) -> flow.MixturePath:
    """Source and schedule over the tokens of a tokenizer, with one more for the mask where the source has one."""
    source: dict[str, Any] = {"name": config.source, "vocab_size": num_tokens + (config.source != "uniform")}
    if config.source == "mixture":
        source["mask_share"] = config.mask_share
    options = {"polynomial": {"exponent": config.exponent}, "cosine": {}, "exponential": {"rate": config.rate}}
    return flow.MixturePath(make_source(source), make_schedule({"name": config.schedule, **options[config.schedule]}))


def make_objective(config: ObjectiveConfig, path: flow.MixturePath) -> Objective:
    """Path loss or few-step training."""
    if not -30 <= config.smallest_h <= 0:
        raise ValueError(f"objective.smallest_h is {config.smallest_h}; allowed are -30 .. 0, the log2 of a step size")
    smallest = 2.0**config.smallest_h
    times: TimeGrid = MultiplesOfH() if config.times == "multiples-of-h" else FineTimes(smallest)
    loss = LOSSES[config.loss]
    if config.kind == "path":
        return PathObjective(path, loss=loss, h=smallest, times=times, spaced_share=config.spaced_share)
    weights = named(flow.POLICIES, config.weights, "objective.weights")
    if isinstance(weights, AnnealedGeometricWeights):
        weights = AnnealedGeometricWeights(config.anneal_every)
    tableau = named(TABLEAUS, config.teacher, "objective.teacher")
    return FewStepObjective(
        path,
        teacher=ShortcutTeacher(tableau, jump=_jump(config.jump), average=config.average),
        weights=MirroredWeights(weights) if config.mirrored else weights,
        step_sizes=flow.dyadic_step_sizes(config.smallest_h),
        path_below_h=config.path_below_h,
        loss=loss,
        times=times,
        temperature=config.temperature,
        spaced_share=config.spaced_share,
    )


def make_trainer(recipe: Recipe, bundle: Checkpoint, rows: data.RowSource, *, runtime: Runtime) -> Trainer:
    """The trainer of a recipe, at its start: the bundle's weights are both the model's and their average's."""
    model = bundle.model
    ema = EMA(model, recipe.optim.ema)
    for network in (model, ema.module):
        runtime.place(network)
    return Trainer(
        model,
        make_objective(recipe.objective, bundle.path),
        make_feed(
            rows,
            recipe.train.batch_size,
            recipe.train.accumulate,
            bos_id=bundle.bos_id,
            processes=runtime.processes,
        ),
        optimiser=Optimiser(model, recipe.optim, steps=recipe.train.steps),
        ema=ema,
        runtime=runtime,
        config=recipe.train,
        teacher=WithoutDropout(model) if recipe.objective.network == "student" else None,
    )


def make_rows(recipe: Recipe, bundle: Checkpoint, out: Path) -> data.RowSource:
    """The training rows of a recipe: blocks of its corpus, pairs that a parent made, or some of both."""
    section = recipe.data
    rows: data.RowSource
    if section.pairs is None:
        rows = _text(recipe, bundle, out)
    else:
        rows = _pairs(recipe, bundle, section.pairs)
        if section.text_share:
            rows = data.PairsAndText(rows, _text(recipe, bundle, out), section.text_share)
    if not section.step_pairs:
        return rows
    folders = zip(section.step_pairs_from, section.step_pairs, strict=True)
    return data.StepPairs(rows, tuple((h, _pairs(recipe, bundle, folder)) for h, folder in folders))


def _text(recipe: Recipe, bundle: Checkpoint, out: Path) -> data.Blocks:
    section = recipe.data
    return data.Blocks(
        prepare_corpus(section, corpus_folder(recipe, out), bundle.tokenizer),
        section.length,
        recipe.train.seed,
        short_share=section.short_share,
        shortest=section.shortest,
        document_starts=section.document_starts,
        given_share=section.given_share,
    )


def _pairs(recipe: Recipe, bundle: Checkpoint, folder: str) -> data.Pairs:
    pairs = data.Pairs(folder, recipe.train.seed)
    found = (pairs.header.length, pairs.header.vocab_size)
    wanted = (recipe.data.length, bundle.path.source.vocab_size)
    if found != wanted:
        raise ValueError(
            f"the pairs in {folder} have rows of {found[0]} of {found[1]} tokens, the recipe and its parent have "
            f"{wanted[0]} of {wanted[1]}; set data.length, or make pairs with this parent"
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
    """Micro-batches of training rows; with `bos_id`, a row of text begins with that token, given, and loses its last.

    Pairs come from a sampler, which has put the token there already.
    """
    portion, count = batch_size // accumulate, processes.count
    if portion % count:
        raise ValueError(
            f"train.batch_size is {batch_size} in {accumulate} portions over {count} processes; "
            f"allowed are multiples of {accumulate * count}, so that every process has as many rows"
        )

    def feed(start: int) -> Iterator[MicroBatch]:
        for part in data.batches(rows, portion, start, rank=processes.rank, num_ranks=count):
            x_1, real, given = part.x_1, part.real, part.given
            if bos_id is not None:
                given = torch.zeros_like(real) if given is None else given.roll(1, 1)
                given[:, 0] = True
                is_text = torch.ones_like(real[:, :1]) if part.x_0 is None else part.x_0[:, :1] < 0
                x_1 = torch.where(is_text, begin_with(bos_id, x_1), x_1)
                real = torch.where(is_text, torch.cat([real[:, :1], real[:, :-1]], 1), real)
            whole = bool(real.all())
            real_or_all = None if whole else real
            batch = Batch(
                x_1,
                x_0=part.x_0,
                real=real_or_all,
                given=given,
                larger=part.larger,
                size=batch_size,
                processes=count,
            )
            yield MicroBatch(batch, part.samples, part.next_sample)

    return feed


def begin_with(token: int, x_1: Tensor) -> Tensor:
    """Rows [B, L] behind a first token; each loses its last."""
    return torch.cat([torch.full_like(x_1[:, :1], token), x_1[:, :-1]], 1)


def named(known: Mapping[str, _T], name: str, where: str) -> _T:
    """What a name means; `where` it stands is said if it means nothing."""
    if name in known:
        return known[name]
    near = nearest(name, known)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ValueError(f"{where} is {name!r}; allowed are {', '.join(known)}{hint}")
