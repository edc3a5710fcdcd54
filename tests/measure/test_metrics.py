"""Metrics of tokens: known strings, brute force, and the limits each number must reach."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdfm.flow import Grid, MixturePath, UniformSource, trajectory
from fsdfm.measure import metrics
from fsdfm.noise import Noise

SETS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=2, max_size=6)


def test_entropy_of_known_strings() -> None:
    assert metrics.unigram_entropy_bits([7, 7, 7, 7]) == 0
    assert metrics.unigram_entropy_bits(list(range(8))) == pytest.approx(3)
    assert metrics.unigram_entropy_bits([1, 1, 2, 3]) == pytest.approx(1.5)
    letters = [ord(c) for c in "abracadabra"]  # 5 a, 2 b, 2 r, 1 c, 1 d
    expected = -sum(n / 11 * math.log2(n / 11) for n in (5, 2, 2, 1, 1))
    assert metrics.unigram_entropy_bits(torch.tensor(letters)) == pytest.approx(expected)
    assert metrics.unigram_entropy_nats(letters) == pytest.approx(expected * math.log(2))
    with pytest.raises(ValueError, match="empty"):
        metrics.unigram_entropy_bits([])


def test_entropy_of_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_ROWS_AT_ONCE", 2)
    logits = torch.log(torch.tensor([[[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]]]))
    assert metrics.distribution_entropy_bits(logits).tolist() == [pytest.approx([2, 1, 0])]
    assert float(metrics.distribution_entropy_bits(torch.zeros(32))) == pytest.approx(5)


def test_repetition_counts_ngrams_that_stood_before() -> None:
    assert metrics.repetition([1, 2, 3, 4, 5, 6]) == 0
    assert metrics.repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert metrics.repetition([9] * 11) == pytest.approx(7 / 8)
    assert metrics.repetition([9, 9, 9]) == 0
    assert metrics.repetition([5, 5, 5], n=1) == pytest.approx(2 / 3)


@given(SETS, st.integers(1, 4))
def test_distinct_n_is_a_count_of_different_tuples(samples: list[list[int]], n: int) -> None:
    grams = [tuple(row[i : i + n]) for row in samples for i in range(len(row) - n + 1)]
    if not grams:
        with pytest.raises(ValueError, match="longer"):
            metrics.distinct_n(samples, n)
        return
    assert metrics.distinct_n(samples, n) == len(set(grams)) / len(grams)


def test_distinct_n_at_its_ends() -> None:
    assert metrics.distinct_n(torch.arange(40).view(4, 10), 2) == 1
    assert metrics.distinct_n([[3] * 100] * 5, 4) == pytest.approx(1 / (5 * 97))
    assert metrics.distinct_n([np.array([70_000, 1, 1], dtype=np.uint32)], 1) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="one row of token ids"):
        metrics.distinct_n([[0.5, 1.0]], 1)  # type: ignore[list-item]


def test_duplicates() -> None:
    assert metrics.duplicates([[1, 2], [2, 1], [1, 2], [1, 2]]) == pytest.approx(1 / 2)
    assert metrics.duplicates([[1], [1, 1]]) == 0


def bleu(hypothesis: Sequence[int], references: Sequence[Sequence[int]]) -> float:
    """BLEU-4 written out from its definition."""
    logs = []
    for n in range(1, min(4, len(hypothesis)) + 1):
        count = lambda row, n=n: Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))  # noqa: E731
        mine, theirs = count(hypothesis), [count(row) for row in references]
        matched = sum(min(k, max(other[gram] for other in theirs)) for gram, k in mine.items())
        logs.append(math.log((matched or 0.1) / mine.total()))
    c = len(hypothesis)
    r = min((len(row) for row in references), key=lambda length: (abs(length - c), length))
    return min(1.0, math.exp(1 - r / c)) * math.exp(sum(logs) / len(logs))


@given(SETS)
def test_self_bleu_is_bleu_against_all_others(samples: list[list[int]]) -> None:
    expected = [bleu(row, samples[:i] + samples[i + 1 :]) for i, row in enumerate(samples)]
    assert metrics.self_bleu(samples).tolist() == pytest.approx(expected)


def test_self_bleu_at_its_ends() -> None:
    assert metrics.self_bleu([[1, 2, 3, 4, 5]] * 3).tolist() == pytest.approx([1, 1, 1])
    assert metrics.self_bleu([list(range(k, k + 50)) for k in (0, 100, 200)]).max() < 0.01
    with pytest.raises(ValueError, match="two or more"):
        metrics.self_bleu([[1, 2, 3]])


def test_repair_accuracy_of_an_oracle_and_of_nothing() -> None:
    source, noise = UniformSource(50), Noise(3, range(6))
    x_1 = torch.randint(50, (6, 40), generator=torch.Generator().manual_seed(0))
    damaged, replaced = metrics.replace_tokens(x_1, source, noise)
    assert replaced.sum(1).tolist() == [20] * 6
    assert torch.equal(damaged[~replaced], x_1[~replaced])
    correct, count = metrics.token_accuracy(x_1, x_1, replaced)
    assert torch.equal(correct, count)
    untouched, count = metrics.token_accuracy(damaged, x_1, replaced)
    assert int(untouched.sum()) / int(count.sum()) < 0.08  # 1/50 by chance
    alone, where = metrics.replace_tokens(x_1[4:5], source, noise[4:5])
    assert torch.equal(alone, damaged[4:5])
    assert torch.equal(where, replaced[4:5])
    with pytest.raises(ValueError, match="share"):
        metrics.replace_tokens(x_1, source, noise, share=1.5)
    with pytest.raises(ValueError, match="agree"):
        metrics.token_accuracy(x_1, x_1[:2], replaced)


def test_jumps_and_entropies_of_a_trajectory() -> None:
    vocab, rows, length = 8, 400, 10
    path, noise = MixturePath(UniformSource(vocab)), Noise(0, range(rows))
    meter = metrics.EntropyMeter(rows)
    steps = trajectory(
        lambda x, t, h: torch.zeros(*x.shape, vocab),
        path,
        path.source.sample(noise, length),
        grid=Grid.uniform(4),
        noise=noise,
        hook=meter,
    )
    jumps = metrics.count_jumps(step.jumps for step in steps)
    # Each of 4 steps redraws a share 1/4, 1/3, 1/2, 1 of the positions, and a redraw changes the token in 7 of 8 cases.
    expected = (1 / 4 + 1 / 3 + 1 / 2 + 1) * 7 / 8
    assert float(jumps.double().mean()) / length == pytest.approx(expected, abs=0.05)
    assert float(meter.total_bits.sum() / meter.num_logits.sum()) == pytest.approx(3)
    assert int(meter.num_logits.min()) > 0
    with pytest.raises(ValueError, match="no steps"):
        metrics.count_jumps([])
