"""Copies of a training text: against brute force, across chunks, and on a text that is far too long to compare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdfm.measure import copying
from fsdfm.measure.copying import find_copies

WORDS = st.lists(st.integers(0, 2), max_size=30)


def brute(sample: list[int], text: list[int], n: int) -> tuple[int, int]:
    spans = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + n, len(text) + 1)}
    inside = [(i, j) for i in range(len(sample)) for j in range(i + n, len(sample) + 1) if tuple(sample[i:j]) in spans]
    return sum(j - i == n for i, j in inside), max((j - i for i, j in inside), default=0)


@given(st.lists(WORDS, min_size=1, max_size=4), WORDS, st.integers(1, 4))
def test_shares_and_spans_are_those_of_brute_force(samples: list[list[int]], text: list[int], n: int) -> None:
    found = find_copies(samples, np.array(text, dtype=np.uint16), n=n)
    expected = [brute(sample, text, n) for sample in samples]
    assert list(zip(found.copied.tolist(), found.longest.tolist(), strict=True)) == expected
    assert found.num_ngrams.tolist() == [max(0, len(sample) - n + 1) for sample in samples]


def test_spans_across_chunks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_CHUNK", 100)
    text = np.random.default_rng(0).integers(0, 5000, 3000, dtype=np.uint16)
    foreign = np.random.default_rng(1).integers(5000, 9000, 200)
    mixed = foreign.copy()
    mixed[50:110] = text[170:230]
    found = find_copies([text[250:750], foreign, mixed], text)
    assert found.longest.tolist() == [500, 0, 60]
    assert found.copied.tolist() == [493, 0, 53]
    assert found.share == pytest.approx((493 + 53) / (493 + 193 + 193))


def test_two_spans_that_meet_only_in_the_sample_are_two() -> None:
    text = np.arange(100)
    assert find_copies([[*range(10, 20), *range(50, 62)]], text).longest.tolist() == [12]


def test_edges() -> None:
    text = np.arange(5)
    assert find_copies([[1, 2, 3]], text).share == 0  # shorter than 8
    assert find_copies([[0, 1, 2, 3, 4]], text, n=3).longest.tolist() == [5]
    with pytest.raises(ValueError, match="n >= 1"):
        find_copies([[1]], text, n=0)
