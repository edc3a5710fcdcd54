"""Where an evaluation's samples come from: written by the model now, or read from a sample file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fsdfm.data import Tokenizer
from fsdfm.generate import Begin
from fsdfm.measure.archive import Archive
from fsdfm.measure.nll_bound import Bound, nll_bound
from fsdfm.measure.results import Row
from fsdfm.measure.rows import Reader, TokenRows
from fsdfm.measure.sampling import Continuations, Drawn, Repairs, SamplingPlan, Task, TaskSampler, Texts

__all__ = ["AGAIN", "FreshSamples", "SampleSource", "SavedSamples"]


AGAIN = "another continuation"  # of the same prompts, independent of the first


class SampleSource(Protocol):
    """Samples on demand."""

    @property
    def reader(self) -> Reader:
        """Reads the rows."""
        ...

    @property
    def border(self) -> int:
        """Where a continuation begins."""
        ...

    def draw(self, kind: str, steps: int, *, temperature: float, num: int, pilot: bool = False) -> Drawn:
        """Samples 0 .. num-1 of a kind: text, continuation, another continuation or repair; a pilot's are not kept."""
        ...

    def bound(self, batch_size: int, /) -> Bound | None:
        """The likelihood bound on the real rows."""
        ...

    def mark(self, place: str, row: Row) -> None:
        """Note that all samples of a row are there."""
        ...


@dataclass(frozen=True)
class FreshSamples:
    """Samples that a model writes; with an archive they are kept there, and those that are there are not written anew.

    real          rows to be continued, repaired and bounded
    archive       the first process alone has it
    on_progress   hears of progress
    """

    sampler: TaskSampler
    plan: SamplingPlan
    real: TokenRows | None
    archive: Archive | None
    on_progress: Callable[[str, int, int], None]

    @property
    def reader(self) -> Reader:
        """By the model's tokenizer."""
        return Reader(self.sampler.lm.checkpoint.tokenizer, self.sampler.lm.checkpoint.bos_id)

    @property
    def border(self) -> int:
        """The middle of a row."""
        task = self._task("continuation")
        assert isinstance(task, Continuations)
        return task.border

    def draw(self, kind: str, steps: int, *, temperature: float, num: int, pilot: bool = False) -> Drawn:
        """What the archive has, then what is missing."""
        task, archive = self._task(kind), None if pilot else self.archive
        name = f"steps {steps}: {'pilot' if pilot else kind} at temperature {temperature:g}"

        def read() -> Drawn | None:
            return None if archive is None else archive.drawn(kind, steps, temperature=temperature, num=num)

        known = self.sampler.lm.runtime.processes.on_rank0(read)
        parts = [] if known is None else [known]
        count = sum(map(len, parts))
        self.on_progress(name, count, num)
        config = self.plan.at(steps, temperature)
        for drawn in self.sampler.draw(task, range(count, num), config=config, noted=not pilot):
            if archive is not None:
                archive.add(kind, steps, drawn, temperature=temperature, first=count, text=self.reader.text)
            parts.append(drawn)
            count += len(drawn)
            self.on_progress(name, count, num)
        return Drawn.join(parts)

    def warm_up(self) -> None:
        """Before the first text that is timed."""
        self.sampler.warm_up(self._task("text"), self.plan.at(1))

    def bound(self, batch_size: int, /) -> Bound | None:
        """Measured now."""
        if self.real is None:
            return None
        parts: list[Bound] = []
        starts = range(0, len(self.real), batch_size)
        self.on_progress("likelihood bound", 0, len(self.real))
        for found in self.sampler.lm.runtime.processes.rounds(
            lambda first: self._bound_part(first, batch_size), starts
        ):
            parts += found
            self.on_progress("likelihood bound", sum(len(part.rows) for part in parts), len(self.real))
        bound = Bound(torch.cat([part.rows for part in parts]), parts[0].draws_per_row)
        if self.archive is not None:
            self.archive.add_record("bound", rows=bound.rows.tolist(), draws=bound.draws_per_row)
        return bound

    def _bound_part(self, first: int, num: int) -> Bound:
        """Of real rows `first` .. `first` + `num` - 1."""
        assert self.real is not None
        lm = self.sampler.lm
        x_1 = torch.from_numpy(self.real[first : first + num].astype(np.int64)).to(lm.runtime.device)
        given = torch.zeros_like(x_1, dtype=torch.bool)
        given[:, : self.reader.num_bos] = True
        seed = self.plan.config.seed
        return nll_bound(lm.network, lm.checkpoint.path, x_1, seed=seed, given=given, first=first, batch_size=num)

    def mark(self, place: str, row: Row) -> None:
        """In the archive."""
        if self.archive is not None:
            matched = None if row.matched is None else dict(row.matched)
            self.archive.add_record(
                "row", place=place, steps=row.steps, temperature=row.temperature, matched=matched, num=row.num_samples
            )

    def _task(self, kind: str) -> Task:
        if kind == "text":
            begin: Begin = "anywhere" if self.sampler.lm.checkpoint.bos_id is None else "document"
            return Texts(self.sampler.lm.encoder.continuation(None, None, length=self.plan.length, begin=begin))
        assert self.real is not None
        if kind == "repair":
            return Repairs(self.real, self.reader.num_bos)
        return Continuations(self.real, self.reader.num_bos, copy=int(kind == AGAIN))


class SavedSamples:
    """Samples of a sample file, and nothing else."""

    def __init__(self, archive: Archive):
        self.archive, self.real = archive, archive.real()
        header = archive.header
        self.reader = Reader(Tokenizer(header["tokenizer"]), header["bos_id"])
        self.border = max(int(header["sampler"]["length"]) // 2, self.reader.num_bos)

    def draw(self, kind: str, steps: int, *, temperature: float, num: int, **_: bool) -> Drawn:
        """What the file has; too few are an error."""
        drawn = self.archive.drawn(kind, steps, temperature=temperature, num=num)
        if drawn is None or len(drawn) < num:
            found = 0 if drawn is None else len(drawn)
            raise ValueError(
                f"{self.archive.file} holds {found} of {num} samples ({kind}, {steps} steps); take the metric "
                "out of --metrics, or evaluate the model again with --samples"
            )
        return drawn

    def holds(self, metric: str) -> bool:
        """Whether the file has what a metric is measured on."""
        kind = {"accuracy": "repair", "continuation": "continuation", "brier": AGAIN, "bound": "bound"}.get(metric)
        return kind is None or self.archive.has(kind)

    def bound(self, _: int, /) -> Bound | None:
        """As it was measured, if it was."""
        found = self.archive.records("bound")
        return Bound(torch.tensor(found[-1]["rows"], dtype=torch.float64), found[-1]["draws"]) if found else None

    def mark(self, place: str, row: Row) -> None:
        """It is marked already."""
