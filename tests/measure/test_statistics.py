"""Intervals: they cover the truth as often as they say, and are the same whenever they are asked."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from fsdfm.measure import statistics
from fsdfm.measure.judges import Scores
from fsdfm.measure.metrics import distinct_n
from fsdfm.measure.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    draw_ratios,
    gap_closed,
    jackknife,
    sequence_perplexity,
    student_mean,
    token_perplexity,
)


def draws_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_mean_has_the_interval_of_the_central_limit() -> None:
    values = draws_of(0, 400)
    interval = bootstrap_mean(values)
    half = 1.96 * float(values.std()) / 20
    assert interval.value == pytest.approx(float(values.mean()))
    assert interval.low == pytest.approx(interval.value - half, rel=0.01)
    assert interval.high == pytest.approx(interval.value + half, rel=0.01)


def test_the_interval_of_a_ratio_covers_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 256)
    covered = 0
    for trial in range(100):
        tokens = 20 + 200 * draws_of(trial, 60)
        nll = tokens * (1.5 + draws_of(10_000 + trial, 60))  # 2 nats per token on average
        interval = bootstrap_ratio(nll, tokens, seed=trial)
        covered += interval.low <= 2 <= interval.high
    assert 88 <= covered <= 100  # 95 of 100, and three standard errors below


def test_perplexities_weigh_tokens_or_texts() -> None:
    scores = Scores(torch.tensor([10.0, 90.0, 0.0]).double(), torch.tensor([10, 30, 0]))
    assert token_perplexity(scores).value == pytest.approx(math.exp(100 / 40))
    assert sequence_perplexity(scores).value == pytest.approx((math.exp(1) + math.exp(3)) / 2)
    assert scores.token_perplexity == token_perplexity(scores).value
    assert scores.sequence_perplexity == sequence_perplexity(scores).value
    with pytest.raises(ValueError, match="none of the 1 texts"):
        _ = Scores(torch.zeros(1), torch.zeros(1, dtype=torch.int64)).token_perplexity


def test_draws_are_a_function_of_seed_stream_and_count() -> None:
    values, ones = draws_of(0, 50), torch.ones(50)
    again = draw_ratios(values, ones, seed=0)
    assert torch.equal(draw_ratios(values, ones, seed=0), again)
    shifted = draw_ratios(values + 1, ones, seed=0)
    torch.testing.assert_close(shifted - 1, again)  # the same sets: a paired difference has no noise
    assert not torch.equal(draw_ratios(values, ones, seed=1), again)
    assert not torch.equal(draw_ratios(values, ones, seed=0, stream=1), again)
    with pytest.raises(ValueError, match="N >= 1"):
        draw_ratios(values, ones[:3], seed=0)


def test_the_share_of_a_closed_gap() -> None:
    def scores(nats: float, seed: int) -> Scores:
        tokens = torch.full((200,), 250)
        return Scores(tokens * (nats - 0.1 + 0.2 * draws_of(seed, 200)), tokens)

    interval = gap_closed(scores(5.0, 1), scores(4.2, 2), scores(4.0, 3))
    assert interval.low < 0.8 < interval.high
    assert interval.high - interval.low < 0.05
    same = scores(5.0, 1)
    with pytest.raises(ValueError, match="no gap"):
        gap_closed(same, same, same)


def test_the_jackknife_of_a_mean_is_its_t_interval() -> None:
    values = draws_of(0, 20).tolist()
    interval = jackknife(lambda part: sum(part) / len(part), values)
    error = float(torch.tensor(values, dtype=torch.float64).std()) / math.sqrt(20)
    assert interval.high - interval.value == pytest.approx(2.093 * error)
    assert interval.value - interval.low == pytest.approx(2.093 * error)
    alone = jackknife(lambda part: 1.0, [1])
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_the_jackknife_of_distinct_n_covers_fresh_sets() -> None:
    sets = [torch.randint(300, (40, 30), generator=torch.Generator().manual_seed(k)) for k in range(60)]
    values = [distinct_n(rows, 2) for rows in sets]
    truth = sum(values) / len(values)
    intervals = [jackknife(lambda part: distinct_n(part, 2), list(rows)) for rows in sets[:20]]
    assert sum(i.low <= truth <= i.high for i in intervals) >= 16


def test_an_interval_reads_as_one() -> None:
    assert f"{Interval(1.0, 0.5, 2.0):.2f}" == "1.00 [0.50, 2.00]"
    assert Interval(0.0, -1.0, 1.0).map(math.exp) == Interval(1.0, math.exp(-1), math.e)


def test_intervals_of_a_few_values_are_students():
    values = [0.3, 0.1, 0.4, 0.15, 0.9]
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, loc=sum(values) / 5, scale=scipy.stats.sem(values))
    found = student_mean(values)
    assert (found.value, found.low, found.high) == pytest.approx((0.37, low, high), abs=1e-3)
    assert student_mean([1.0, 3.0]).high - 2 == pytest.approx(12.706)  # stdev sqrt 2 over sqrt 2, one degree of freedom
    assert student_mean([0.0] * 40).high == 0


def test_one_value_has_no_interval_and_shows_none():
    one = student_mean([0.5])
    assert one.value == 0.5
    assert math.isnan(one.low)
    assert f"{one:.2f}" == "0.50"
    assert math.isnan(student_mean([]).value)
