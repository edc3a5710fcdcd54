"""What every run has: a folder that is its own, a bar, files that say what it does, an end that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from fsdfm.config import Recipe, differences, to_toml
from fsdfm.files import write_json, write_text
from fsdfm.learn.journal import JsonLines, ProgressBar
from fsdfm.learn.report import Report
from fsdfm.learn.trainer import Every, Hook, Hooks, Trainer
from fsdfm.run.history import read_recipe
from fsdfm.run.tracking import open_tracker
from fsdfm.run.validation import Validation
from fsdfm.runtime import commit, stop_on_signal, versions
from fsdfm.show.timeline import Timeline

__all__ = ["Result", "check_same", "describe", "fit"]

# What may change between a run and its resumption; `train.steps` re-plans the learning rate's cosine.
_FREE = (
    "out",  # a run's folder may be moved
    "train.steps",
    "train.accumulate",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.entropy_alarm",
    "train.tracker",
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


def describe(out: Path, recipe: Recipe) -> None:
    """Write down what a run is."""
    write_text(out / "recipe.toml", to_toml(recipe))
    write_json(out / "run.json", {"commit": commit(), "versions": versions()}, indent=2)


class _Journal:
    """What a run writes down and says: the files of its folder, its tracker, the bar.

    All processes call its methods, since they may share the weights; the first writes.
    """

    def __init__(self, recipe: Recipe, bar: ProgressBar, trainer: Trainer):
        out = Path(recipe.out)
        self.bar, self.speaks = bar, trainer.processes.is_rank0
        self.metrics, self.samples, self.held_out = (
            JsonLines(out / f"{name}.jsonl") for name in ("metrics", "samples", "held-out")
        )
        self.tracker = None
        if self.speaks:
            self.tracker = open_tracker(recipe.train.tracker, out, asdict(recipe), say=bar.say)
            for file in (self.metrics, self.samples, self.held_out):
                file.rewind(trainer.training_step)

    def report(self, report: Report) -> None:
        """The numbers of a training step."""
        if self.speaks:
            self.metrics.write(report.to_json())
            self.bar.report(report)
            if self.tracker is not None:
                self.tracker.log(report.training_step, report.scalars())

    def show_texts(self, trainer: Trainer, write_texts: Callable[[Trainer], list[Timeline]]) -> None:
        """What the averaged weights write."""
        with trainer.runtime.autocast():
            timelines = write_texts(trainer)
        trainer.runtime.settle(trainer.ema.module)
        if self.speaks:
            texts, steps = ["".join(timeline.pieces) for timeline in timelines], timelines[0].steps
            if self.tracker is not None:
                self.tracker.show(trainer.training_step, timelines)
            self.samples.write({"training_step": trainer.training_step, "steps": steps, "texts": texts})
            self.bar.say(f"sample at step {trainer.training_step}: {' '.join(texts[0].split())[:200]}")

    def measure(self, trainer: Trainer, validation: Validation) -> None:
        """The loss on held-out text."""
        record = validation(trainer)
        if self.speaks:
            self.held_out.write(record)
            self.bar.say(f"held-out loss at step {trainer.training_step}: {record['held_out_loss']:.4g}")
            if self.tracker is not None:
                self.tracker.log(trainer.training_step, {"held_out_loss": record["held_out_loss"]})

    def close(self) -> None:
        """The tracker's end."""
        if self.tracker is not None:
            self.tracker.close()


def fit(
    trainer: Trainer,
    recipe: Recipe,
    *,
    save: Hook,
    write_texts: Callable[[Trainer], list[Timeline]] | None,
    held_out: Validation | None,
    console: Console,
    others: Sequence[Every] = (),
) -> Result:
    """Train with everything written down; `write_texts` shows what the averaged weights write."""
    out = Path(recipe.out)
    with ProgressBar(console, recipe.train.steps, trainer.training_step) as bar, stop_on_signal() as stop:
        journal = _Journal(recipe, bar, trainer)
        if trainer.training_step:
            bar.say(f"resuming {out} at training step {trainer.training_step} of {recipe.train.steps}")
        hooks = [*others, Every(1, bar.step)]
        if recipe.sample.every and write_texts is not None:
            hooks.append(Every(recipe.sample.every, lambda trainer: journal.show_texts(trainer, write_texts)))
        if held_out is not None:
            hooks.append(Every(recipe.held_out.every, lambda trainer: journal.measure(trainer, held_out)))
        trainer.hooks = Hooks(save=save, report=journal.report, others=hooks)
        finished = trainer.fit(stop)
        journal.close()
    return Result(out, trainer.training_step, finished, speaks=journal.speaks)


def check_same(file: Path, recipe: Recipe) -> None:
    """Raise if a run would resume with other data, another model or another objective than it began with."""
    if not file.exists():
        return
    for key, (old, new) in differences(read_recipe(file), recipe).items():
        if not key.startswith(_FREE):
            raise ValueError(
                f"{file.parent} was begun with {key} = {old!r}, now it is {new!r}; "
                "resume with the old value, or start another run with out=FOLDER"
            )
