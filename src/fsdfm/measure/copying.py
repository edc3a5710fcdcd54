"""Copying: how much of the samples stands word for word in a training text.

    copying = find_copies(samples, corpus.tokens)
    copying.share, copying.longest.max()

Measure held-out text in the same way: a language repeats itself, and only what exceeds its share is copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdfm.measure.metrics import Integers, Samples, to_row

__all__ = ["Copying", "find_copies"]

Hashes = npt.NDArray[np.uint64]

_CHUNK = 2**20  # tokens of the training text looked at together
_BASE = np.uint64(0x9E3779B97F4A7C15)
_TABLE_BITS = 22  # of the first, coarse test of membership


@dataclass(frozen=True)
class Copying:
    """What of each of N samples stands in the training text.

    copied       n-grams that do: int64 [N]
    num_ngrams   n-grams it has: int64 [N]
    longest      tokens of the longest span that does, 0 if it is shorter than n: int64 [N]
    """

    n: int
    copied: Integers
    num_ngrams: Integers
    longest: Integers

    @property
    def share(self) -> float:
        """The share of the set's n-grams that stand in the training text."""
        return float(self.copied.sum() / max(1, self.num_ngrams.sum()))


def find_copies(samples: Samples, text: npt.NDArray[np.integer], *, n: int = 8) -> Copying:
    """Which n-grams of the samples stand in a stream of tokens, and the longest span of each sample that does.

    The text is read once, in chunks (a memory map stays on the disk): only places where it shows an n-gram of the
    samples are kept. Longer spans grow from there, one token per round, on both sides at once. N-grams are compared by
    a 64-bit hash; with 10^5 of them against 10^7 a wrong match has probability 10^-7.
    """
    if n < 1:
        raise ValueError(f"n is {n}; allowed are n >= 1; 8 is usual")
    rows = [to_row(sample) for sample in samples]
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    joined = np.concatenate([*rows, np.empty(0, dtype=np.int64)])
    ends = np.cumsum([len(row) for row in rows])[owners] if rows else owners
    places = np.flatnonzero(np.arange(len(joined)) + n <= ends)
    hashes = _hash(joined, places, n)
    kept = np.concatenate([np.empty(0, dtype=np.int64), *_matching(text, hashes, n)])
    grown = _hash(text, kept, n)
    places, hashes = _found(places, hashes, grown)
    copied = np.bincount(owners[places], minlength=len(rows))
    longest = np.zeros(len(rows), dtype=np.int64)
    span = n
    while len(places):
        longest[owners[places]] = span
        places, hashes = _grow(joined, places, hashes, ends=ends, span=span)
        kept, grown = _grow(text, kept, grown, ends=np.broadcast_to(np.int64(len(text)), len(text)), span=span)
        (kept, grown), (places, hashes) = _found(kept, grown, hashes), _found(places, hashes, grown)
        span += 1
    num_ngrams = np.array([max(0, len(row) - n + 1) for row in rows], dtype=np.int64)
    return Copying(n, copied, num_ngrams, longest)


def _mix(tokens: npt.NDArray[np.integer]) -> Hashes:
    """Spread token ids over 64 bits (splitmix64), so that sums of them do not meet."""
    x = tokens.astype(np.uint64) + _BASE
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _power(k: int) -> Any:
    return np.uint64(pow(int(_BASE), k, 2**64))


def _hash(tokens: npt.NDArray[np.integer], places: Integers, n: int) -> Hashes:
    """sum_k mix(token at place + k) * base^k modulo 2^64, for every place."""
    total = np.zeros(len(places), dtype=np.uint64)
    for k in range(n):
        total += _mix(tokens[places + k]) * _power(k)
    return total


def _matching(text: npt.NDArray[np.integer], hashes: Hashes, n: int) -> Iterator[Integers]:
    """Where the text shows one of the n-grams, chunk by chunk."""
    wanted = np.unique(hashes)
    shift = np.uint64(64 - _TABLE_BITS)
    table = np.zeros(2**_TABLE_BITS, dtype=bool)
    table[wanted >> shift] = True
    for start in range(0, len(text) - n + 1, _CHUNK):
        mixed = _mix(np.asarray(text[start : start + _CHUNK + n - 1]))
        count = len(mixed) - n + 1
        total = np.zeros(count, dtype=np.uint64)
        for k in range(n):
            total += mixed[k : k + count] * _power(k)
        likely = np.flatnonzero(table[total >> shift])
        yield start + likely[_is_in(total[likely], wanted)]


def _is_in(hashes: Hashes, wanted: Hashes) -> npt.NDArray[np.bool_]:
    if not len(wanted):
        return np.zeros(len(hashes), dtype=bool)
    place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
    found: npt.NDArray[np.bool_] = wanted[place] == hashes
    return found


def _found(places: Integers, hashes: Hashes, wanted: Hashes) -> tuple[Integers, Hashes]:
    """The places whose hash is wanted."""
    keep = _is_in(hashes, np.unique(wanted))
    return places[keep], hashes[keep]


def _grow(
    tokens: npt.NDArray[np.integer], places: Integers, hashes: Hashes, *, ends: Integers, span: int
) -> tuple[Integers, Hashes]:
    """Spans one token longer, where there is one before the sample's end."""
    inside = places + span < ends[places]
    places, hashes = places[inside], hashes[inside]
    return places, hashes + _mix(tokens[places + span]) * _power(span)
