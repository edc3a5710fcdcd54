"""N-gram models: they are laws, they agree with a slow version written from the formula, and both directions see."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest

from fsdfm.measure.ngrams import NgramModel, cross_entropy_bits, perplexity_bits

V = 5


def slow(rows: list[list[int]], order: int) -> object:
    """The formula of the module's docstring with dictionaries."""
    tables = []
    for n in range(1, order + 1):
        if n == order:
            counts = Counter(tuple(r[i : i + n]) for r in rows for i in range(len(r) - n + 1))
        else:
            pairs = {(tuple(r[i : i + n]), r[i - 1] if i else None) for r in rows for i in range(len(r) - n + 1)}
            counts = Counter(gram for gram, _ in pairs)
        once, twice = (sum(c == k for c in counts.values()) for k in (1, 2))
        discount = min(max(once / (once + 2 * twice), 0.05), 0.95) if once + twice else 0.05
        totals: dict[tuple[int, ...], int] = defaultdict(int)
        kinds: dict[tuple[int, ...], int] = defaultdict(int)
        for gram, count in counts.items():
            totals[gram[:-1]] += count
            kinds[gram[:-1]] += 1
        tables.append((counts, discount, totals, kinds))

    def prob(history: tuple[int, ...], word: int) -> float:
        p = 1 / V
        for n, (counts, discount, totals, kinds) in enumerate(tables, start=1):
            if n - 1 > len(history):
                break
            h = history[len(history) - (n - 1) :]
            if h in totals:
                p = max(counts[(*h, word)] - discount, 0) / totals[h] + discount * kinds[h] / totals[h] * p
        return p

    return prob


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.choice(V - 1, size=n, p=[0.4, 0.3, 0.2, 0.1]).tolist() for n in (12, 9, 1, 0, 20)]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_it_is_the_formula(rows: list[list[int]], order: int) -> None:
    model, prob = NgramModel.fit([np.array(r) for r in rows], order=order, vocab_size=V), slow(rows, order)
    for text in ([0, 1, 2, 3, 4, 0, 1], [4, 4, 0], [3], rows[0], []):
        want = [math.log2(prob(tuple(text[:i]), w)) for i, w in enumerate(text)]  # type: ignore[operator]
        assert model.log2_probs(np.array(text, dtype=np.int64)).tolist() == pytest.approx(want, abs=1e-12)


def test_probabilities_of_all_texts_add_up_to_one(rows: list[list[int]]) -> None:
    model = NgramModel.fit([np.array(r) for r in rows], order=3, vocab_size=V)
    total = sum(2 ** float(model.log2_probs(np.array(text)).sum()) for text in product(range(V), repeat=4))
    assert total == pytest.approx(1.0, abs=1e-12)


def test_recall_sees_lost_variety_and_precision_sees_foreign_text() -> None:
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(30, 0.3), size=30)

    def draw(count: int) -> list[np.ndarray]:
        found = []
        for _ in range(count):
            row = [0]
            for _ in range(39):
                row.append(rng.choice(30, p=law[row[-1]]))
            found.append(np.array(row))
        return found

    real, other, poor = draw(60), draw(60), draw(3) * 20
    noisy = [np.where(rng.random(40) < 0.3, rng.integers(0, 30, 40), row) for row in draw(60)]
    under_real = NgramModel.fit(real, vocab_size=30)
    bits = {
        name: (perplexity_bits(NgramModel.fit(rows, vocab_size=30), real), perplexity_bits(under_real, rows))
        for name, rows in {"other": other, "poor": poor, "noisy": noisy}.items()
    }
    assert bits["poor"][0] > bits["other"][0] + 0.5  # recall
    assert bits["poor"][1] < bits["other"][1] + 0.5  # precision does not see it
    assert bits["noisy"][1] > bits["other"][1] + 0.5


def test_rows_are_counted_one_by_one_and_refused_where_they_do_not_fit() -> None:
    model = NgramModel.fit([np.array([0, 1, 0, 1])], vocab_size=2)
    sums = cross_entropy_bits(model, [np.array([0, 1]), np.array([1])])
    assert sums[:, 1].tolist() == [2, 1]
    assert perplexity_bits(model, [np.array([0, 1]), np.array([1])]) == pytest.approx(sums[:, 0].sum() / 3)
    with pytest.raises(ValueError, match="outside 0 .. 1"):
        model.log2_probs(np.array([2]))
    with pytest.raises(ValueError, match="no token"):
        NgramModel.fit([np.array([], dtype=np.int64)], vocab_size=2)
    with pytest.raises(ValueError, match="order is 0"):
        NgramModel.fit([np.array([0])], order=0, vocab_size=2)
