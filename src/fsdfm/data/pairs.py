"""Coupled pairs (x_0, x_1) on the disk: noise and the text that a parent made of it.

They are a draw of the coupling pi(x_0, x_1); the path loss on them is discrete reflow. *Timed* pairs (x_t, x_1) begin
on the way from noise to a real text and remember their time: a function of seed and number, which need not be stored.
Rows are appended and synced, so
a run that is interrupted resumes where it was, and what is there can be trained on while more is being made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.checks import require_whole
from fsdfm.data.batches import Blocks, RowSource, TrainingBatch, permute
from fsdfm.files import lock, read_json, require_plain, write_json
from fsdfm.noise import Noise, Purpose

__all__ = ["PairHeader", "PairWriter", "Pairs", "PairsAndText", "StepPairs", "pair_times"]

FORMAT_VERSION = 1
_HEADER = "pairs.json"
_ROWS = "pairs.bin"


@dataclass(frozen=True)
class PairHeader:
    """What a set of pairs says about itself; `about` names the parent, the sampler and the seed."""

    length: int
    vocab_size: int
    about: Mapping[str, Any]
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if any(type(value) is not int or value < 1 for value in (self.length, self.vocab_size)):
            raise ValueError(
                f"length {self.length!r:.80} and vocab_size {self.vocab_size!r:.80} must both be 1 or more"
            )
        if not isinstance(self.about, Mapping):
            raise ValueError(f"about is {self.about!r:.80}; it must be an object")
        if self.timed:
            require_whole("seed", self.about.get("seed"), 0, high=2**64 - 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a stored token."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @property
    def timed(self) -> bool:
        """Whether a pair begins at a time of its own."""
        return bool(self.about.get("timed", False))

    @property
    def row_bytes(self) -> int:
        """The size of a pair."""
        return 2 * self.length * self.dtype.itemsize

    @classmethod
    def read(cls, folder: Path) -> PairHeader:
        """The header in a folder."""
        try:
            record = read_json(folder / _HEADER)
            version = record["version"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{folder} holds no pairs ({error}); make them with `fsdfm reflow`") from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{folder} holds pairs of format version {version!r:.80}; this program reads {FORMAT_VERSION}"
            )
        if set(record) != {field.name for field in fields(cls)}:
            raise ValueError(f"{folder / _HEADER} is damaged: its keys are {sorted(record)}; make the pairs again")
        try:
            return cls(**record)
        except ValueError as error:
            raise ValueError(f"{folder / _HEADER} is damaged: {error}; make the pairs again") from error


class PairWriter:
    """Appends pairs to a folder, alone; opening it again with the same header resumes after the last whole row."""

    def __init__(self, folder: str | Path, header: PairHeader):
        self.folder, self.header = Path(folder), header
        self._held = ExitStack()
        try:
            self._held.enter_context(lock(self.folder))
            self._open()
        except ValueError:
            self._held.close()
            raise
        except OSError as error:
            self._held.close()
            raise ValueError(f"cannot write to {folder}: {error.strerror}; choose a folder you may write to") from error

    def _open(self) -> None:
        if (self.folder / _HEADER).exists():
            found = PairHeader.read(self.folder)
            if found != self.header:
                raise ValueError(
                    f"{self.folder} holds other pairs ({found.about}, length {found.length}); "
                    "choose another folder, or remove it"
                )
        else:
            write_json(self.folder / _HEADER, asdict(self.header), indent=2)
        self._file = (self.folder / _ROWS).open("ab")
        self._file.truncate(self.count * self.header.row_bytes)  # an interrupted row is made again

    @property
    def count(self) -> int:
        """Whole pairs that are stored."""
        return (self.folder / _ROWS).stat().st_size // self.header.row_bytes

    def append(self, x_0: Tensor, x_1: Tensor) -> None:
        """Store pairs, int64 [B, L] each, and bring them to the disk."""
        if x_0.shape != x_1.shape or x_0.ndim != 2 or x_0.shape[1] != self.header.length:
            raise ValueError(f"x_0 {tuple(x_0.shape)} and x_1 {tuple(x_1.shape)} must be [pairs, {self.header.length}]")
        rows = torch.stack([x_0, x_1], 1).cpu().numpy()
        if rows.size and (rows.min() < 0 or rows.max() >= self.header.vocab_size):
            raise ValueError(f"a token is outside 0 .. {self.header.vocab_size - 1}")
        self._file.write(rows.astype(self.header.dtype).tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._held.close()

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pairs:
    """Saved pairs as training rows, shuffled anew in every epoch; sample k depends on (pairs, seed, k) only."""

    def __init__(self, folder: str | Path, seed: int = 0):
        Noise(seed)  # checks the seed
        self.folder, self.seed = Path(folder), seed
        self.header = PairHeader.read(self.folder)
        try:
            require_plain(self.folder / _ROWS)
            count = (self.folder / _ROWS).stat().st_size // self.header.row_bytes
        except FileNotFoundError:
            count = 0
        if not count:
            raise ValueError(f"{folder} holds no finished pair yet; make some with `fsdfm reflow`")
        shape = (count, 2, self.header.length)
        try:
            self.tokens: npt.NDArray[Any] = np.memmap(self.folder / _ROWS, self.header.dtype, "r", shape=shape)
        except OSError as error:
            raise ValueError(f"cannot read {self.folder / _ROWS}: {error.strerror}; make the pairs again") from error

    def __len__(self) -> int:
        """The number of pairs, which is the number of samples in an epoch."""
        return len(self.tokens)

    def rows(self, samples: Sequence[int] | Tensor) -> TrainingBatch:
        """The pairs with these sample indices, in this order."""
        index = Noise(self.seed, samples).samples
        place = permute(index % len(self), len(self), index // len(self), seed=self.seed)
        pairs = torch.from_numpy(self.tokens[place.numpy()].astype(np.int64))
        if pairs.numel() and int(pairs.max()) >= self.header.vocab_size:
            raise ValueError(
                f"{self.folder / _ROWS} is damaged: it holds the token {int(pairs.max())}, and tokens are below "
                f"{self.header.vocab_size}; make the pairs again"
            )
        real = torch.ones(len(index), self.header.length, dtype=torch.bool)
        end = int(index.max()) + 1 if len(index) else 0
        t = pair_times(int(self.header.about["seed"]), place) if self.header.timed else None
        return TrainingBatch(pairs[:, 1], x_0=pairs[:, 0], real=real, t=t, samples=index, next_sample=end)


def pair_times(seed: int, numbers: Sequence[int] | Tensor) -> Tensor:
    """The times at which timed pairs of these numbers begin: uniform on (0, 1), float64 [B]."""
    return Noise(seed, numbers).uniform(Purpose.TIME, 1)[:, 0]


@dataclass(frozen=True)
class PairsAndText:
    """Pairs, but a share of the rows is text whose noise is still to be drawn: its x_0 is -1."""

    pairs: Pairs
    text: Blocks
    text_share: float

    def __post_init__(self) -> None:
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share is {self.text_share}; allowed are 0 <= text_share <= 1")

    def rows(self, samples: Sequence[int] | Tensor) -> TrainingBatch:
        """The rows with these sample indices, in this order; which are text depends on seed and index only."""
        pairs, text = self.pairs.rows(samples), self.text.rows(samples)
        assert pairs.x_0 is not None
        assert pairs.real is not None
        assert text.real is not None
        chosen = Noise(self.pairs.seed, samples).uniform(Purpose.BATCH, 1, step=1) < self.text_share
        return replace(
            pairs,
            x_1=torch.where(chosen, text.x_1, pairs.x_1),
            real=torch.where(chosen, text.real, pairs.real),
            x_0=torch.where(chosen, -1, pairs.x_0),
            given=None if text.given is None else text.given & chosen,
        )


@dataclass(frozen=True)
class StepPairs:
    """Rows of another source, and pairs that take their place where training draws a large step.

    larger   (h, pairs): these serve steps of size h and larger, those of the largest h that is not above the step
    """

    smaller: RowSource
    larger: tuple[tuple[float, Pairs], ...]

    def rows(self, samples: Sequence[int] | Tensor) -> TrainingBatch:
        """The rows with these sample indices, and what stands for each at larger steps."""
        found = [(h, pairs.rows(samples)) for h, pairs in sorted(self.larger, key=lambda entry: entry[0])]
        larger = tuple((h, rows.x_0, rows.x_1) for h, rows in found if rows.x_0 is not None)
        return replace(self.smaller.rows(samples), larger=larger)
