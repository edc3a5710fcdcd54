"""Samples to be measured: texts from noise, continuations and repairs of real rows.

They are made as a user would make them, by `fsdfm.generate`: sample k of the texts is copy k of the empty prompt, so
that what is measured is what `fsdfm generate` writes. Sample k is a function of the model, the options, the seed and k,
whatever else is in the batch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.flow import Rows, Source
from fsdfm.generate import LanguageModel, Request, SamplerConfig
from fsdfm.generate.run import GenerationRun
from fsdfm.measure.metrics import EntropyMeter, token_accuracy
from fsdfm.measure.rows import TokenRows
from fsdfm.noise import Noise, Purpose

__all__ = ["Continuations", "Drawn", "Repairs", "SamplingPlan", "Task", "TaskSampler", "Texts", "read_clock"]

_SHORTEST = 8  # tokens: below, n-grams say nothing
_LONG = 64  # steps of a text that takes so long that it is kept as soon as it is there
_UNASKED = -1  # no token: the last step did not ask the model for this position
_DAMAGE_STREAM = 2 << 40  # sample indices of the damage, apart from those of texts
_DAMAGED = 0.5  # the share of tokens that a repair has to bring back, as in the paper


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How samples are drawn at every budget.

    length   tokens of a sample, a first BOS included
    config   the options of the sampler; what they leave open is the model's advice for so many steps
    advice   the `sampling` of the model's config.json
    """

    length: int
    config: SamplerConfig = field(default_factory=SamplerConfig)
    advice: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.length < _SHORTEST:
            raise ValueError(f"length is {self.length}; allowed are {_SHORTEST} tokens and more")
        self.at(1)

    def at(self, steps: int, temperature: float | None = None) -> SamplerConfig:
        """The options at a budget, at the temperature that they say, or at another."""
        config = replace(self.config, steps=steps)
        if temperature is not None:
            config = replace(config, temperature=temperature)
        return config.advised(self.advice)

    def temperature(self, steps: int) -> float:
        """The temperature at a budget."""
        chosen = self.at(steps).temperature
        return 1.0 if chosen is None else chosen

    def to_json(self) -> dict[str, Any]:
        """What a result file says of the sampler; `advice` is what the model had to say beyond it."""
        record = {"length": self.length, **self.config.advised(self.advice).to_json()}
        advised = self.config.temperature is None and bool(self.advice and self.advice.get("temperature"))
        if advised and self.config.final_temperature is None and self.advice is not None:
            record["temperature"] = {str(steps): value for steps, value in self.advice["temperature"].items()}
        return {"temperature": 1.0, **record}


# --- what is asked ----------------------------------------------------------------------------------------------------


class Task(ABC):
    """A kind of sample: what is asked for as sample k, and the true rows where there are any."""

    name: str

    @abstractmethod
    def requests(self, samples: Sequence[int], seed: int, /) -> list[Request]:
        """What is asked for as these samples."""

    def truth(self, samples: Sequence[int]) -> Tensor | None:
        """What a repair has to bring back: the true rows [B, L]."""
        del samples  # only a repair has one
        return None


@dataclass(frozen=True)
class Texts(Task):
    """Texts from nothing but noise, a first BOS given where the model has one: copies of the empty prompt."""

    request: Request
    name = "text"

    def requests(self, samples: Sequence[int], _: int, /) -> list[Request]:
        """Copy k of the request."""
        return [replace(self.request, copy=k) for k in samples]


@dataclass(frozen=True)
class Continuations(Task):
    """The second half of real rows, the first half given; another `copy` has noise of its own."""

    rows: TokenRows
    num_bos: int
    copy: int = 0
    name = "continuation"

    @property
    def border(self) -> int:
        """Where the continuation begins."""
        return max(int(self.rows.shape[1]) // 2, self.num_bos)

    def requests(self, samples: Sequence[int], _: int, /) -> list[Request]:
        """The first half of each row as its prompt."""
        length = self.rows.shape[1]
        frozen = (True,) * self.border + (False,) * (length - self.border)
        rows = (tuple(self.rows[k].tolist()) for k in samples)
        given = {"frozen": frozen, "num_bos": self.num_bos, "ends": True, "copy": self.copy}
        return [Request(tokens=row, **given) for row in rows]


@dataclass(frozen=True)
class Repairs(Task):
    """Real rows with half of their tokens damaged, at positions that the sampler is told."""

    rows: TokenRows
    num_bos: int
    name = "repair"

    def requests(self, samples: Sequence[int], seed: int, /) -> list[Request]:
        """Each row with a random half of its tokens marked as damaged."""
        marks = self._damaged(samples, seed)
        return [
            Request(
                tokens=tuple(self.rows[k].tolist()),
                frozen=tuple((~marked).tolist()),
                damaged=tuple(marked.tolist()),
                num_bos=self.num_bos,
                ends=True,
            )
            for k, marked in zip(samples, marks, strict=True)
        ]

    def truth(self, samples: Sequence[int]) -> Tensor:
        """The rows themselves."""
        return torch.from_numpy(self.rows[list(samples)].astype(np.int64))

    def _damaged(self, samples: Sequence[int], seed: int) -> Tensor:
        """The damaged positions of each row, as many in every row: bool [B, L]."""
        length = self.rows.shape[1] - self.num_bos
        order = Noise(seed, [_DAMAGE_STREAM + k for k in samples]).uniform(Purpose.DATA, length).argsort(-1).argsort(-1)
        marked = order < max(1, round(_DAMAGED * length))
        return torch.cat([torch.zeros(len(marked), self.num_bos, dtype=torch.bool), marked], 1)


# --- what comes of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """N samples and what was noted on their way.

    tokens    [N, L]
    columns   numbers [N] by name: `jumps` (changes of positions), `calls` (that asked for anything), `free` (positions
              not given), `bits` and `logits` (summed entropy and number of the model's distributions), `seconds`; of
              repairs also `hits` and `argmax_hits` among the free positions: the last step's draws, and its likeliest
              tokens in their place
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
class TaskSampler:
    """Draws samples of a model, some at a time; of several processes each draws its share, and all get all."""

    lm: LanguageModel
    batch_size: int = 16

    def draw(self, task: Task, samples: Sequence[int], *, config: SamplerConfig, noted: bool = True) -> Iterator[Drawn]:
        """The samples with these indices, a batch per process at a time; none depends on its batch or process.

        noted   whether the model's distributions are looked at on the way: `bits`, `logits`, `argmax_hits`
        """
        processes = self.lm.runtime.processes
        at_once = self._together(config.num_steps()) * processes.count
        for start in range(0, len(samples), at_once):
            mine = processes.share(samples[start : start + at_once])
            drawn = self._batch(task, mine, config=config, noted=noted) if mine else None
            yield Drawn.join([part for part in processes.gather(drawn) if part is not None])

    def warm_up(self, task: Task, config: SamplerConfig) -> None:
        """A text of a joint posterior that nobody reads: what is compiled for the first one is no text's time."""
        if getattr(self.lm.checkpoint.model, "joint", None) is not None:
            self._batch(task, [0], config=config, noted=False)

    def _together(self, steps: int) -> int:
        """How many texts are on their way at a time; where a CPU needs long for one, one, so that a stop keeps it.

        A CPU computes the rows of a batch one after the other, so a batch would only delay the first of its texts.
        """
        return 1 if steps >= _LONG and self.lm.runtime.device.type == "cpu" else self.batch_size

    def _batch(self, task: Task, samples: Sequence[int], *, config: SamplerConfig, noted: bool) -> Drawn:
        lm = self.lm
        requests = task.requests(samples, config.seed)
        free = ~torch.tensor([request.frozen for request in requests])
        note = _Note(free, task.truth(samples), lm.checkpoint.path.source)
        began = read_clock(lm.runtime.device)
        run = GenerationRun(lm.checkpoint, lm.network, requests, config=config, observe=note if noted else None)
        for _ in run.run():
            pass
        seconds = (read_clock(lm.runtime.device) - began - note.seconds) / len(samples)
        columns = {
            "jumps": run.changes.sum(1),
            "calls": run.asked,
            "seconds": torch.full((len(samples),), seconds),
            **note.columns(run.x),
        }
        return Drawn(run.x.numpy().astype(np.int32), {k: v.double().numpy() for k, v in columns.items()})


def read_clock(device: torch.device) -> float:
    """Seconds: on a CPU with one thread those that the process computed, so that other work beside it has no say."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Note:
    """Notes what the model says and changes nothing; its own time is not the sampler's."""

    def __init__(self, free: Tensor, truth: Tensor | None, source: Source):
        self.free, self.truth, self.mask = free, truth, source.mask_token
        self.meter = EntropyMeter(len(free))
        self.likeliest = torch.full(free.shape, _UNASKED)
        self.seconds = 0.0

    def __call__(self, logits: Tensor, rows: Rows) -> None:
        began = read_clock(logits.device)
        if self.mask is not None:
            logits[:, self.mask] = -torch.inf  # never emitted, so no part of the distribution
        self.meter(logits, rows)
        if self.truth is not None and bool((rows.t_next == 1).all()):
            self.likeliest[rows.sample.cpu(), rows.position.cpu()] = logits.argmax(-1).cpu()
        self.seconds += read_clock(logits.device) - began

    def columns(self, x: Tensor) -> dict[str, Tensor]:
        """What was noted of samples that have come to x."""
        noted = {"free": self.free.sum(1), "bits": self.meter.total_bits, "logits": self.meter.num_logits}
        if self.truth is not None:
            decided = torch.where(self.likeliest == _UNASKED, x, self.likeliest)
            noted |= {
                "hits": token_accuracy(x, self.truth, self.free)[0],
                "argmax_hits": token_accuracy(decided, self.truth, self.free)[0],
            }
        return noted
