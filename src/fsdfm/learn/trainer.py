"""The visible loop: one trainer for every objective.

The state of a run is (training step, next sample), the weights, their average and the optimiser's moments. All noise
is addressed by sample, dropout by (seed, training step, sample), so a resumed run is the same run and so is one on
another number of processes. Every process runs this loop on its rows; what they must agree on passes `processes`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdfm.data import TrainingBatch
from fsdfm.learn.objective import Objective, Outcome, TrainableDenoiser
from fsdfm.learn.optim import EMA, Optimiser
from fsdfm.learn.report import EntropyAlarm, Report, Tally, own_entropy
from fsdfm.model import CausalModel
from fsdfm.noise import Noise
from fsdfm.runtime import Runtime

__all__ = ["Every", "Feed", "Hooks", "Trainer", "TrainerConfig", "TrainingState"]

_REFERENCE_BATCHES = 4


TRACKER_NAMES = ("auto", "none", "tensorboard", "trackio", "wandb")  # what they mean: fsdfm.run.tracking


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and in which portions a run trains, and when it speaks and saves."""

    steps: int = 1_000_000
    batch_size: int = 128  # samples per training step
    accumulate: int = 1  # in so many portions, one after the other: less memory, the same gradient
    seed: int = 0  # of the weights, the order of the data, all noise and dropout
    log_every: int = 100  # training steps between two reports
    save_every: int = 1000  # training steps between two checkpoints
    keep: int = 2  # checkpoints kept
    tracker: str = (
        "auto"  # where numbers and texts go, too: none, tensorboard, trackio, wandb; auto: TensorBoard, if any
    )
    entropy_alarm: float = 0.8  # warn when targets fall below this share of the student's entropy at the start

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are whole numbers >= 1")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate is {self.accumulate}; allowed are divisors of batch_size = {self.batch_size}")
        if self.tracker not in TRACKER_NAMES:
            raise ValueError(f"tracker is {self.tracker!r}; allowed are {', '.join(TRACKER_NAMES)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; allowed are 0 <= seed < 2**63")


Feed = Callable[[int], Iterator[TrainingBatch]]
"""From the index of the next sample to the portions of batches from there on, without end."""


@dataclass(frozen=True)
class TrainingState:
    """What a run needs beyond its averaged weights to resume: tensors by name, and plain numbers."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


class Hook(Protocol):
    """Something to do with a trainer between two steps; it must leave the weights alone."""

    def __call__(self, trainer: Trainer) -> None:
        """Do it."""
        ...


@dataclass(frozen=True)
class Every:
    """A hook after every so many training steps."""

    steps: int
    hook: Hook


@dataclass(frozen=True)
class Hooks:
    """What happens around the steps: saving, reporting, and anything else."""

    save: Hook | None = None
    report: Callable[[Report], None] | None = None
    others: Sequence[Every] = field(default_factory=tuple)


class Trainer:
    """Trains a model on a feed of data with an objective.

        trainer = Trainer(model, objective, feed, optimiser=optimiser, ema=ema, runtime=runtime, config=config)
        finished = trainer.fit()

    `teacher` is the network that objectives with a teacher ask: the moving average unless another is given.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        feed: Feed,
        *,
        optimiser: Optimiser,
        ema: EMA,
        runtime: Runtime,
        config: TrainerConfig,
        teacher: TrainableDenoiser | CausalModel | None = None,
        hooks: Hooks | None = None,
    ):
        self.model, self.objective, self.feed = model, objective, feed
        self.optimiser, self.ema, self.runtime, self.config = optimiser, ema, runtime, config
        self.teacher: Any = ema.module if teacher is None else teacher
        self.hooks = hooks or Hooks()
        self.processes, self.student = runtime.processes, runtime.student(model)
        self.alarm = EntropyAlarm(config.entropy_alarm)
        self.training_step = self.next_sample = self.tokens = 0
        self.last_loss = math.nan
        self._saved_step = -1
        self._tally = Tally()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def fit(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the last step and save; True if it came that far, False if `stop` said to save and end before."""
        self._learn_reference()
        portions = self.feed(self.next_sample)
        while self.training_step < self.config.steps:
            if self.processes.any(stop()):
                self._save()
                return False
            started = time.perf_counter()
            self._train_step(portions)
            self._tally.seconds += time.perf_counter() - started
            self._between_steps()
        self._save()
        return True

    def _train_step(self, portions: Iterator[TrainingBatch]) -> None:
        """One step of the optimiser: gradients of all portions, clipped; weights, then their average."""
        self.model.train()
        self.optimiser.forget()
        seen: list[TrainingBatch] = []
        losses: list[float] = []
        for left in reversed(range(self.config.accumulate)):
            portion = next(portions)
            seen.append(portion)
            with self.runtime.accumulating(self.student) if left else nullcontext():
                losses.append(self._learn(portion))
        norm = self.optimiser.clip()
        if not math.isfinite(norm):
            raise self._diverged(f"the gradient's norm is {norm}", torch.cat([part.samples for part in seen]).tolist())
        self.optimiser.step(self.training_step)
        self.runtime.settle(self.model, self.ema.module)
        self.ema.update(self.model, self.training_step)
        self._tally.add_step(norm)
        self.last_loss = sum(losses) / len(losses)
        self.tokens += self.processes.count * sum(part.x_1.numel() for part in seen)
        self.training_step += 1
        self.next_sample = seen[-1].next_sample

    def _learn(self, portion: TrainingBatch) -> float:
        """Add the gradient of a portion; its loss over all processes."""
        outcome = self._outcome(portion)
        loss = self.processes.mean(outcome.logs["loss"])
        if not math.isfinite(loss):  # on every process: none waits for another's gradient
            raise self._diverged(f"the loss is {loss}", _broken_samples(portion, outcome))
        (outcome.loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
        self._tally.add(outcome, portion.x_1.numel())
        return loss

    def _outcome(self, portion: TrainingBatch) -> Outcome:
        seed, samples = self.config.seed, portion.samples
        batch = portion.to(self.runtime.device)

        def outcome(model: Any) -> Outcome:
            return self.objective(
                model, batch, Noise(seed, samples), training_step=self.training_step, ema=self.teacher
            )

        with self.runtime.dropout(seed, self.training_step, samples), self.runtime.autocast():
            result: Outcome = outcome(self.model) if self.student is None else self.student(outcome)
            return result

    def _between_steps(self) -> None:
        if self.training_step % self.config.log_every == 0 or self.training_step == self.config.steps:
            self._report()
        for other in self.hooks.others:
            if self.training_step % other.steps == 0:
                other.hook(self)
        if self.training_step % self.config.save_every == 0:
            self._save()

    def _save(self) -> None:
        if self.hooks.save is not None and self._saved_step != self.training_step:
            self.hooks.save(self)
        self._saved_step = self.training_step

    def _diverged(self, what: str, samples: list[int]) -> ValueError:
        self.optimiser.forget()
        samples = sorted(sample for part in self.processes.gather(samples) for sample in part)
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        return ValueError(
            f"{what} at training step {self.training_step}, on the samples {shown}; what was saved before is whole: "
            "lower optim.lr or lengthen optim.warmup and run again"
        )

    # --- what it says -------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        tally = self._joined(self._tally)
        self._tally, seconds = Tally(), max(tally.seconds, 1e-9)
        if not tally.steps:
            return
        means = tally.means()
        report = Report(
            training_step=self.training_step,
            loss=means["loss"],
            learning_rate=self.optimiser.learning_rate(self.training_step - 1),
            grad_norm=tally.norms / tally.steps,
            tokens=self.tokens,
            tokens_per_second=tally.tokens / seconds,
            seconds_left=(self.config.steps - self.training_step) * seconds / tally.steps,
            logs=means,
            loss_by_h_t=tally.loss_by_h_t(),
            alarm=self.alarm.check(means.get("target_entropy")),
            averaged=tally.steps,
        )
        if self.hooks.report is not None:
            self.hooks.report(report)

    def _learn_reference(self) -> None:
        """Measure the student's own entropy at the start, once in the life of a run."""
        objective = own_entropy(self.objective)
        if objective is None or self.alarm.reference is not None or self.training_step:
            return
        portions = islice(self.feed(self.next_sample), _REFERENCE_BATCHES * self.config.accumulate)
        self.alarm.reference = self.assess(self.model, objective, portions).means().get("target_entropy")

    @torch.no_grad()
    def assess(self, network: nn.Module, objective: Objective, portions: Iterable[TrainingBatch]) -> Tally:
        """What an objective says of a network about some portions, over all processes; nothing is learnt from them."""
        tally = Tally()
        asked: TrainableDenoiser = network.eval()  # type: ignore[assignment]
        for portion in portions:
            noise, batch = Noise(self.config.seed, portion.samples), portion.to(self.runtime.device)
            with self.runtime.autocast():
                tally.add(objective(asked, batch, noise, training_step=0, ema=asked), batch.x_1.numel())
        self.runtime.settle(network)
        return self._joined(tally)

    def _joined(self, tally: Tally) -> Tally:
        """What all processes noted."""
        mine, *others = self.processes.gather(tally)
        for other in others:
            mine.take(other)
        return mine

    # --- its state ----------------------------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        """Everything but the averaged weights, which are `ema.module`'s."""
        self.runtime.settle(self.model, self.ema.module)
        weights = _over("model.", self.model.state_dict())
        moments = _over("optimiser.", self.optimiser.state())
        numbers: dict[str, Any] = {
            "training_step": self.training_step,
            "next_sample": self.next_sample,
            "tokens": self.tokens,
            "entropy_reference": self.alarm.reference,
            "since_report": self._joined(copy.deepcopy(self._tally)).to_json(),
        }
        return TrainingState({**weights, **moments}, numbers)

    def blank(self) -> dict[str, Tensor]:
        """Tensors of the names, shapes and places of a state, for a reader to fill: the weights are the model's own."""
        self.runtime.settle(self.model)
        return {**_over("model.", self.model.state_dict()), **_over("optimiser.", self.optimiser.blank())}

    def load(self, state: TrainingState) -> None:
        """Take up a state; the averaged weights are the caller's to load."""
        try:
            self.model.load_state_dict(_under("model.", state.tensors))
        except RuntimeError as error:
            raise ValueError(f"this training state is another model's: {error}; start a new run") from error
        self.optimiser.load(_under("optimiser.", state.tensors))
        numbers = state.numbers
        self.training_step = self._saved_step = int(numbers["training_step"] or 0)
        self.next_sample, self.tokens = int(numbers["next_sample"] or 0), int(numbers["tokens"] or 0)
        self.alarm.reference = numbers["entropy_reference"]
        if "since_report" in numbers:  # not in a state of an earlier version
            self._tally = Tally.from_json(numbers["since_report"], whole=self.processes.is_rank0)


def _over(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _broken_samples(portion: TrainingBatch, outcome: Outcome) -> list[int]:
    """The samples whose own loss is not finite; all where each one's is but their sum is not."""
    if math.isfinite(outcome.logs["loss"]):
        return []  # another process has them
    broken = ~torch.isfinite(outcome.sample_loss.cpu())
    chosen: list[int] = portion.samples[broken if bool(broken.any()) else slice(None)].tolist()
    return chosen
