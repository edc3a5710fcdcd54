"""Samples to be measured: texts from noise, continuations and repairs of real rows.

Sample k is a function of the model, the settings, the seed and k: its noise is `Noise(seed, [k])` and the network's
arithmetic does not depend on what else is in the batch (`fsdfm.generate.invariant`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.checkpoint import Checkpoint
from fsdfm.flow import RULES, Filter, Grid, Rows, Schedule, Source, trajectory
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.measure.metrics import EntropyMeter, replace_tokens, token_accuracy
from fsdfm.measure.rows import TokenRows
from fsdfm.noise import Noise
from fsdfm.runtime import Runtime

__all__ = ["GRIDS", "Beginning", "Continuations", "Drawn", "Repairs", "Sampler", "Sampling", "Task", "Texts"]

GRIDS = ("uniform", "kappa")
_STREAM = 40  # bits of a sample index below the number of its task
_SHORTEST = 8  # tokens: below, n-grams say nothing
_UNASKED = -1  # no token: the last step did not ask the model for this position
_REPLACED = 0.5  # the share of tokens that a repair has to bring back, as in the paper


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How samples are drawn, whatever the number of steps.

    length   tokens of a sample, a first BOS included
    final_temperature   that of the last step, the temperature being that of the first; None: the same throughout
    start    t_0 where tokens are given (continuation, repair); None: kappa^-1(share given); texts begin at 0
    """

    length: int
    jump: str = "exact"
    grid: str = "uniform"
    temperature: float = 1.0
    final_temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    start: float | None = None

    def __post_init__(self) -> None:
        if self.length < _SHORTEST:
            raise ValueError(f"length is {self.length}; allowed are {_SHORTEST} tokens and more")
        if self.jump not in RULES:
            raise ValueError(f"jump is {self.jump!r}; allowed are {', '.join(RULES)}")
        if self.grid not in GRIDS:
            raise ValueError(f"grid is {self.grid!r}; allowed are {', '.join(GRIDS)}")
        if self.start is not None and not 0 <= self.start < 1:
            raise ValueError(f"start is {self.start}; allowed are 0 <= start < 1")
        self.filter(self.temperature)

    def filter(self, temperature: float) -> Filter | None:
        """Temperature, top-k, top-p; None where they change nothing."""
        made = Filter(temperature, self.top_k, self.top_p, self.final_temperature)
        return None if made == Filter() else made

    def times(self, steps: int, t_0: float, schedule: Schedule) -> Grid:
        """The grid's shape over [0, 1], laid over [t_0, 1]."""
        shape = Grid.uniform(steps).times
        times = t_0 + (1 - t_0) * (schedule.kappa_inverse(shape) if self.grid == "kappa" else shape)
        times[-1] = 1.0
        return Grid(times)

    def to_json(self) -> dict[str, Any]:
        """What a result file says of the sampler; what came later than the first files is left out where unused."""
        record = asdict(self)
        if self.final_temperature is None:
            del record["final_temperature"]
        return record


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beginning:
    """Where samples set out: tokens [B, L], which of them are given, and the share of the text that these are.

    truth   what a repair has to bring back: the true rows [B, L]
    """

    x: Tensor
    frozen: Tensor
    known: float
    truth: Tensor | None = None


class Task(ABC):
    """A kind of sample: how sample k sets out."""

    name: str
    stream: int  # keeps the noise of one kind from that of another

    @abstractmethod
    def begin(self, samples: Sequence[int], noise: Noise, source: Source) -> Beginning:
        """The beginning of these samples."""

    def noise(self, seed: int, samples: Sequence[int]) -> Noise:
        """The noise of these samples."""
        return Noise(seed, [(self.stream << _STREAM) + k for k in samples])


@dataclass(frozen=True)
class Texts(Task):
    """Texts from nothing but noise, a first BOS given where the model has one."""

    length: int
    bos_id: int | None
    name = "text"
    stream = 0

    def begin(self, samples: Sequence[int], noise: Noise, source: Source) -> Beginning:
        """x_0 ~ p_0."""
        x = source.sample(noise, self.length)
        frozen = torch.zeros_like(x, dtype=torch.bool)
        if self.bos_id is not None:
            frozen[:, 0], x[:, 0] = True, self.bos_id
        return Beginning(x, frozen, 0.0)


@dataclass(frozen=True)
class Continuations(Task):
    """The second half of real rows, the first half given."""

    rows: TokenRows
    lead: int
    name = "continuation"
    stream = 1

    @property
    def border(self) -> int:
        """Where the continuation begins."""
        return max(int(self.rows.shape[1]) // 2, self.lead)

    def begin(self, samples: Sequence[int], noise: Noise, source: Source) -> Beginning:
        """The first half of each row, noise behind it."""
        x_1 = torch.from_numpy(self.rows[list(samples)].astype(np.int64))
        length = x_1.shape[1]
        frozen = (torch.arange(length) < self.border).expand_as(x_1).clone()
        known = (self.border - self.lead) / (length - self.lead)
        return Beginning(torch.where(frozen, x_1, source.sample(noise, length)), frozen, known)


@dataclass(frozen=True)
class Repairs(Task):
    """Real rows with half of their tokens replaced by noise, at positions that the sampler is told."""

    rows: TokenRows
    lead: int
    name = "repair"
    stream = 2

    def begin(self, samples: Sequence[int], noise: Noise, source: Source) -> Beginning:
        """The damaged rows."""
        x_1 = torch.from_numpy(self.rows[list(samples)].astype(np.int64))
        damaged, replaced = replace_tokens(x_1[:, self.lead :], source, noise, share=_REPLACED)
        front = x_1[:, : self.lead]
        frozen = torch.cat([torch.ones_like(front, dtype=torch.bool), ~replaced], 1)
        known = 1 - float(replaced[0].sum()) / replaced.shape[1]
        return Beginning(torch.cat([front, damaged], 1), frozen, known, x_1)


# --- what comes of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """N samples and what was noted on their way.

    tokens    [N, L]
    columns   numbers [N] by name: `jumps` (changes of positions), `free` (positions not given), `bits` and `logits`
              (summed entropy and number of the model's distributions), `seconds`; of repairs also `hits` and
              `argmax_hits` among the free positions: the last step's draws, and its likeliest tokens in their place
    """

    tokens: TokenRows
    columns: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def join(cls, parts: Sequence[Drawn]) -> Drawn:
        """The samples of several parts, in their order."""
        names = parts[0].columns if parts else ()
        return cls(
            np.concatenate([part.tokens for part in parts]),
            {name: np.concatenate([part.columns[name] for part in parts]) for name in names},
        )


@dataclass(frozen=True)
class Sampler:
    """Draws samples of a model, some at a time; of several processes each draws its share, and all get all."""

    bundle: Checkpoint
    sampling: Sampling
    runtime: Runtime
    seed: int = 0
    batch_size: int = 16

    def draw(
        self, task: Task, steps: int, samples: Sequence[int], *, temperature: float, noted: bool = True
    ) -> Iterator[Drawn]:
        """The samples with these indices, a batch a process at a time; no sample depends on its batch or process.

        noted   whether the model's distributions are looked at on the way: `bits`, `logits`, `argmax_hits`
        """
        processes = self.runtime.processes
        at_once = self.batch_size * processes.count
        for start in range(0, len(samples), at_once):
            mine = processes.share(samples[start : start + at_once])
            drawn = self._batch(task, steps, mine, temperature=temperature, noted=noted) if mine else None
            yield Drawn.join([part for part in processes.gather(drawn) if part is not None])

    def _batch(self, task: Task, steps: int, samples: Sequence[int], *, temperature: float, noted: bool) -> Drawn:
        path, device = self.bundle.path, self.runtime.device
        noise = task.noise(self.seed, samples)
        beginning = task.begin(samples, noise, path.source)
        t_0 = self._start(beginning.known)
        note = _Note(beginning, path.source)
        began = self._now()
        jumps = torch.zeros(len(samples), dtype=torch.int64)
        x = beginning.x.to(device)
        for step in trajectory(
            BatchInvariant(self.bundle.model, self.runtime),
            path,
            x,
            grid=self.sampling.times(steps, t_0, path.schedule),
            noise=noise,
            rule=RULES[self.sampling.jump],
            frozen=beginning.frozen.to(device),
            filter=self.sampling.filter(temperature),
            hook=note if noted else None,
        ):
            jumps += step.jumps.sum(1).cpu()
            x = step.x_next
        seconds = (self._now() - began - note.seconds) / len(samples)
        columns = {"jumps": jumps, "seconds": torch.full((len(samples),), seconds), **note.columns(x.cpu())}
        return Drawn(x.cpu().numpy().astype(np.int32), {k: v.double().numpy() for k, v in columns.items()})

    def _start(self, known: float) -> float:
        if not known:
            return 0.0
        kappa = torch.tensor(known, dtype=torch.float64)
        chosen = self.sampling.start
        return float(self.bundle.path.schedule.kappa_inverse(kappa)) if chosen is None else chosen

    def _now(self) -> float:
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
        return time.perf_counter()


class _Note:
    """A hook that notes what the model says and changes nothing; its own time is not the sampler's."""

    def __init__(self, beginning: Beginning, source: Source):
        self.beginning, self.mask = beginning, source.mask_token
        self.meter = EntropyMeter(len(beginning.x))
        self.likeliest = torch.full_like(beginning.x, _UNASKED)
        self.seconds = 0.0

    def __call__(self, logits: Tensor, rows: Rows) -> Tensor:
        began = time.perf_counter()
        if self.mask is not None:
            logits[:, self.mask] = -torch.inf  # never emitted, so no part of the distribution
        self.meter(logits, rows)
        if self.beginning.truth is not None and bool((rows.t_next == 1).all()):
            self.likeliest[rows.sample.cpu(), rows.position.cpu()] = logits.argmax(-1).cpu()
        self.seconds += time.perf_counter() - began
        return logits

    def columns(self, x: Tensor) -> dict[str, Tensor]:
        """What was noted of samples that have come to x."""
        free = ~self.beginning.frozen
        noted = {"free": free.sum(1), "bits": self.meter.total_bits, "logits": self.meter.num_logits}
        if (truth := self.beginning.truth) is not None:
            decided = torch.where(self.likeliest == _UNASKED, x, self.likeliest)
            noted |= {
                "hits": token_accuracy(x, truth, free)[0],
                "argmax_hits": token_accuracy(decided, truth, free)[0],
            }
        return noted
