"""What all cells of a comparison share, and where its files stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fsdfm.data import SEPARATOR

__all__ = ["FULL", "QUICK", "CompareFiles", "ComparePrecision", "CompareScale", "CompareSetting"]

ComparePrecision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class CompareScale:
    """How much is done.

    train_steps    of every system, `batch_size` rows of `length` tokens each
    num            samples per budget and temperature
    temperatures   of the frontier, beside 1
    """

    train_steps: int
    length: int
    num: int
    temperatures: tuple[float, ...]
    steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batch_size: int = 16


FULL = CompareScale(train_steps=1000, length=256, num=48, temperatures=(0.6, 0.8))
QUICK = CompareScale(train_steps=40, length=48, num=10, temperatures=(0.7,))


@dataclass(frozen=True)
class CompareSetting:
    """What a folder belongs to: other values need another folder."""

    base: str
    text: str
    held_out: str
    judge: str
    train_steps: int
    length: int
    num: int
    temperatures: tuple[float, ...]
    steps: tuple[int, ...]
    batch_size: int
    seed: int = 0
    separator: str = SEPARATOR
    weights: Mapping[str, str] = field(default_factory=dict)
    precision: ComparePrecision = "float32"  # of matrix products, in training and in sampling; a judge has its own

    @property
    def tokens(self) -> int:
        """Of a training."""
        return self.train_steps * self.batch_size * self.length


@dataclass(frozen=True)
class CompareFiles:
    """Where the files of a comparison stand, and what they are made of: all that depends on the machine.

    corpus/           the packed training text
    pairs/TRAINING/   what a start made of noised text, for those that learn from it
    runs/             a training on its way; rows of an evaluation that is not finished
    models/TRAINING/  a finished training: averaged weights
    cells/NAME.json   TRAINING: its model is there; VARIANT@: a result file of `fsdfm evaluate`
    """

    folder: Path
    base: Path
    text: tuple[str, ...]
    held_out: str
    judge: str
    device: str = "auto"
    separator: str = SEPARATOR
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def corpus(self) -> Path:
        """The packed training text."""
        return self.folder / "corpus"

    def run(self, training: str) -> Path:
        """A training on its way."""
        return self.folder / "runs" / training

    def model(self, training: str) -> Path:
        """A finished training."""
        return self.folder / "models" / training

    def pairs(self, training: str) -> Path:
        """What a training learns from, where that is pairs."""
        return self.folder / "pairs" / training

    def rows(self, name: str) -> Path:
        """A measurement on its way."""
        return self.folder / "runs" / f"{name.replace('/', '~')}.json"
