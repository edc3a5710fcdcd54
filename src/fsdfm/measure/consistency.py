"""Consistency of long texts: do names and topics last beyond the block that they were written in?

    recurrence = name_recurrence(blocks, range(1, 8))     # of the names of a block, those that stand up to 7 before it
    likeness = topic_likeness(blocks, 4, rarity(real))    # of the words of blocks 4 apart

A text is given as its blocks in order. What matters is how both fall with the distance: common names and words recur at
any distance, those of one scene nearby. In independent blocks near and far are the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["find_names", "name_recurrence", "rarity", "topic_likeness"]

_NAME = re.compile(r"(?:(?<=[a-z,;] )|(?<=Mr\. )|(?<=Mrs\. )|(?<=Dr\. ))[A-Z][a-z]{2,}\b")
_TITLES = {"Mrs", "Miss", "Sir", "Lord", "Lady", "Madam", "Father", "Mother", "God"}
_WORD = re.compile(r"[A-Za-z]+")


def find_names(text: str) -> set[str]:
    """Capitalised words of three letters and more within a sentence, titles left out."""
    return set(_NAME.findall(text)) - _TITLES


def name_recurrence(blocks: Sequence[str], distances: range) -> tuple[Tensor, Tensor]:
    """(names that stand in a block at one of these distances before, names) of every block that has them: [N] each."""
    words = [set(_WORD.findall(block)) for block in blocks]
    found, count = [], []
    for place in range(distances[-1], len(blocks)):
        names = find_names(blocks[place])
        before = set[str]().union(*(words[place - distance] for distance in distances))
        found.append(len(names & before))
        count.append(len(names))
    return torch.tensor(found, dtype=torch.float64), torch.tensor(count, dtype=torch.float64)


def rarity(blocks: Iterable[str]) -> dict[str, float]:
    """log(N / blocks that hold it) of every word of some blocks, lower case: what a word says of a topic."""
    held, count = Counter[str](), 0
    for block in blocks:
        count += 1
        held.update(set(_words(block)))
    return {word: math.log(count / number) for word, number in held.items()}


def topic_likeness(blocks: Sequence[str], distance: int, weight: Mapping[str, float]) -> Tensor:
    """The cosine of the weighted word counts of every two blocks so far apart, words without a weight left out: [N]."""
    vectors = [_vector(block, weight) for block in blocks]
    pairs = zip(vectors, vectors[distance:], strict=False)
    return torch.tensor([_cosine(first, second) for first, second in pairs], dtype=torch.float64)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _vector(block: str, weight: Mapping[str, float]) -> dict[str, float]:
    return {word: number * weight[word] for word, number in Counter(_words(block)).items() if word in weight}


def _cosine(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    norm = math.sqrt(sum(v * v for v in first.values()) * sum(v * v for v in second.values()))
    return sum(value * second.get(word, 0.0) for word, value in first.items()) / norm if norm else 0.0
