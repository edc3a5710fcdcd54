"""N-gram language models of token rows: what a set of samples lacks, and what it should not have.

    recall    = cross_entropy_bits(NgramModel.fit(samples), real)     # held-out text under a model of the samples
    precision = cross_entropy_bits(NgramModel.fit(real), samples)     # samples under a model of real text

Recall rises where the samples lack variety, precision where they hold what real text has not; neither needs a network.
Interpolated Kneser-Ney smoothing (Kneser and Ney 1995) with one discount D for each order:

    p_n(w | h) = max(c(h w) - D, 0) / c(h) + D N(h) / c(h) * p_{n-1}(w | h'),     p_0 = 1 / V

c counts n-grams at the highest order and different left neighbours below it, N(h) is the number of different followers
of h, h' is h without its first token, and D = n_1 / (n_1 + 2 n_2) from the numbers of n-grams seen once and twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NgramModel", "cross_entropy_bits", "perplexity_bits"]

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Rows = Sequence[npt.NDArray[np.integer]]
_LEAST, _MOST = 0.05, 0.95  # of a discount; small sets have estimates of 0 or 1


@dataclass(frozen=True)
class _Order:
    """The n-grams of one order.

    grams      numbers of the n-grams, sorted; `shares` beside it: max(c - D, 0) / c(h)
    contexts   numbers of the contexts, sorted; `weights` beside it: D N(h) / c(h), what is left for shorter ones
    """

    grams: Integers
    shares: Floats
    contexts: Integers
    weights: Floats


@dataclass(frozen=True)
class NgramModel:
    """An interpolated Kneser-Ney model over tokens 0 .. vocab_size - 1."""

    vocab_size: int
    orders: tuple[_Order, ...]
    numbers: tuple[Integers, ...]

    @classmethod
    def fit(cls, rows: Rows, *, order: int = 3, vocab_size: int) -> NgramModel:
        """Count the n-grams of rows; each row begins anew."""
        if order < 1 or vocab_size < 1:
            raise ValueError(f"order is {order} and vocab_size {vocab_size}; allowed are 1 and more")
        arrays = [_checked(row, vocab_size) for row in rows]
        if not sum(map(len, arrays)):
            raise ValueError("the rows hold no token; give at least one text")
        names: list[Integers] = []
        levels = [_number(arrays, n, names, vocab_size=vocab_size) for n in range(1, order + 1)]
        orders = []
        for n in range(order):
            if n == order - 1:
                grams, counts = np.unique(levels[n], return_counts=True)
            else:  # different left neighbours of each n-gram
                longer = _distinct_suffixes(arrays, n + 1, names, vocab_size=vocab_size)
                grams, counts = np.unique(longer, return_counts=True)
            orders.append(_estimate(grams, counts, vocab_size))
        return cls(vocab_size, tuple(orders), tuple(names))

    def log2_probs(self, row: npt.NDArray[np.integer]) -> Floats:
        """log2 p(x_i | the tokens before it in the row), for every token: [L]."""
        tokens = _checked(row, self.vocab_size)
        probs = np.full(len(tokens), 1.0 / self.vocab_size)
        for n, order in enumerate(self.orders, start=1):
            places = np.arange(n - 1, len(tokens))  # where there are so many tokens before
            contexts = _lookup_numbers(
                tokens, places - (n - 1), n - 1, numbers=self.numbers, vocab_size=self.vocab_size
            )
            known = contexts >= 0
            weights, seen = _find(order.contexts, order.weights, contexts, known=known)
            grams = np.where(known, contexts * self.vocab_size + tokens[places], -1)
            shares, _ = _find(order.grams, order.shares, grams, known=known)
            mixed = shares + weights * probs[places]
            probs[places] = np.where(seen, mixed, probs[places])
        found: Floats = np.log2(probs)
        return found


def cross_entropy_bits(model: NgramModel, rows: Rows) -> Floats:
    """-log2 p of each row, and its number of tokens: float64 [N, 2]; the ratio of sums is bits per token."""
    return np.array([(-float(model.log2_probs(row).sum()), len(row)) for row in rows], dtype=np.float64)


def perplexity_bits(model: NgramModel, rows: Rows) -> float:
    """Bits per token of all rows together."""
    total, count = cross_entropy_bits(model, rows).sum(0)
    return float(total / count)


def _checked(row: Any, vocab_size: int) -> Integers:
    tokens = np.asarray(row, dtype=np.int64)
    if tokens.ndim != 1 or (len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size)):
        raise ValueError(f"a row has shape {tokens.shape} or a token outside 0 .. {vocab_size - 1}; give [L] token ids")
    return tokens


# An n-gram is named by (number of its first n - 1 tokens) * V + its last token; numbers of one order are places in the
# sorted names of the order below, so that names stay small however long the n-grams are.


def _names_at(tokens: Integers, starts: Integers, n: int, *, numbers: Sequence[Integers], vocab_size: int) -> Integers:
    """The names of the n-grams that begin at `starts`; -1 where a part of one was never seen."""
    contexts = _lookup_numbers(tokens, starts, n - 1, numbers=numbers, vocab_size=vocab_size)
    names: Integers = np.where(contexts >= 0, contexts * vocab_size + tokens[starts + n - 1], -1)
    return names


def _lookup_numbers(
    tokens: Integers, starts: Integers, n: int, *, numbers: Sequence[Integers], vocab_size: int
) -> Integers:
    """The numbers of the n-grams that begin at `starts`; -1 where one was never seen; 0 for n = 0."""
    found = np.zeros(len(starts), dtype=np.int64)
    for k in range(n):
        names = np.where(found >= 0, found * vocab_size + tokens[starts + k], -1)
        table = numbers[k]
        place = np.minimum(np.searchsorted(table, names), len(table) - 1)
        found = np.where((names >= 0) & (table[place] == names), place, -1)
    return found


def _number(arrays: Sequence[Integers], n: int, names: list[Integers], *, vocab_size: int) -> Integers:
    """The names of all n-grams of the rows; their sorted different ones become the numbers of order n."""
    parts = [
        _names_at(row, np.arange(max(0, len(row) - n + 1)), n, numbers=names, vocab_size=vocab_size)
        for row in arrays
        if len(row) >= n
    ]
    found = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    different = np.unique(found)
    names.append(different if len(different) else np.array([-2], dtype=np.int64))
    return found


def _distinct_suffixes(arrays: Sequence[Integers], n: int, names: Sequence[Integers], *, vocab_size: int) -> Integers:
    """Of every different (n+1)-gram the name of its last n tokens; n-grams that begin a row count once for that."""
    pairs = []
    for tokens in arrays:
        starts = np.arange(max(0, len(tokens) - n + 1))
        if len(starts):
            before = np.concatenate(([vocab_size], tokens))[starts]  # the left neighbour; V: a row's beginning
            pairs.append(np.stack((_names_at(tokens, starts, n, numbers=names, vocab_size=vocab_size), before)))
    joined = np.unique(np.concatenate(pairs, axis=1), axis=1) if pairs else np.empty((2, 0), dtype=np.int64)
    suffixes: Integers = joined[0]
    return suffixes


def _estimate(grams: Integers, counts: npt.NDArray[np.integer], vocab_size: int) -> _Order:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = min(max(once / (once + 2 * twice), _LEAST), _MOST) if once + twice else _LEAST
    contexts, first = np.unique(grams // vocab_size, return_index=True)
    totals, followers = np.add.reduceat(counts, first), np.diff(np.append(first, len(grams)))
    total_of = np.repeat(totals, followers)
    return _Order(grams, (counts - discount) / total_of, contexts, discount * followers / totals)


def _find(
    table: Integers, values: Floats, wanted: Integers, *, known: npt.NDArray[np.bool_]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The values beside what is wanted, 0 where it is not in the table, and whether it is."""
    if not len(table):
        return np.zeros(len(wanted)), np.zeros(len(wanted), dtype=bool)
    place = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    seen = known & (table[place] == wanted)
    return np.where(seen, values[place], 0.0), seen
