"""The loss on text that a run is not trained on, always at the same rows and noise."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fsdfm import data, flow
from fsdfm.config import Recipe
from fsdfm.learn.objective import Objective
from fsdfm.learn.trainer import Feed, Trainer
from fsdfm.run.build import make_feed, make_objective
from fsdfm.run.corpora import prepare_corpus
from fsdfm.runtime import Processes

__all__ = ["Validation", "make_validation"]


class Validation:
    """Measures a trainer's averaged weights by the validation loss of its objective."""

    def __init__(self, objective: Objective, feed: Feed, num_batches: int):
        self.objective, self.feed, self.num_batches = objective, feed, num_batches

    def __call__(self, trainer: Trainer) -> dict[str, Any]:
        """The loss, by the quarter of [0, 1) that t lies in, and that of each kind of row where there are several."""
        portions = islice(self.feed(0), self.num_batches * trainer.config.accumulate)
        tally = trainer.assess(trainer.ema.module, self.objective, portions)
        by_step, means = tally.loss_by_h_t(), tally.means()
        by_time = {"by_t": next(iter(by_step.values()))} if len(by_step) == 1 else {"by_h_t": by_step}
        kinds = {name: value for name, value in means.items() if name.endswith("_loss")}
        return {"training_step": trainer.training_step, "held_out_loss": means["loss"], **by_time, **kinds}


def make_validation(
    recipe: Recipe, path: flow.MixturePath, *, tokenizer: data.Tokenizer, bos_id: int | None, processes: Processes
) -> Validation | None:
    """What a recipe wants measured, if anything; its text is packed inside the run's folder."""
    if not recipe.held_out.inputs:
        return None
    config = replace(recipe.data, inputs=recipe.held_out.inputs, max_documents=None)
    corpus = prepare_corpus(config, Path(recipe.out) / "held-out", tokenizer)
    rows = data.Blocks(corpus, recipe.data.length, document_starts=recipe.data.document_starts)
    train = recipe.train
    return Validation(
        make_objective(recipe.objective, path).validation,
        make_feed(rows, train.batch_size, train.accumulate, bos_id=bos_id, processes=processes),
        -(-recipe.held_out.num // train.batch_size),
    )
