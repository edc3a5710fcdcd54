"""Frontiers: curves with a known ratio, points with known errors, and what has no common entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fsdfm.measure.frontier import common_entropies, compare_frontiers, frontier_of, mean_frontier
from fsdfm.measure.results import Measured, Row


def row(temperature: float, entropy: float, perplexity: float, *, half: float = 0.0) -> Row:
    """A row whose intervals reach `half` bits and `half` in log-perplexity to both sides."""
    metrics = {
        "entropy_bits": Measured(entropy, entropy - half, entropy + half),
        "token_perplexity": Measured(perplexity, perplexity * math.exp(-half), perplexity * math.exp(half)),
    }
    return Row(steps=8, temperature=temperature, metrics=metrics)


def sweep(level: float, entropies: list[float], *, half: float = 0.0) -> list[Row]:
    """log-perplexity = level + 0.7 entropy."""
    return [row(1 + n / 10, h, math.exp(level + 0.7 * h), half=half) for n, h in enumerate(entropies)]


def test_parallel_lines_have_one_ratio_at_every_common_entropy() -> None:
    a, b = frontier_of(sweep(0.0, [5.0, 5.5, 6.0])), frontier_of(sweep(math.log(0.8), [5.4, 6.3]))
    assert common_entropies(a, b, num=3) == pytest.approx([5.4, 5.7, 6.0])
    found = compare_frontiers(a, b)
    assert [at.entropy_bits for at in found] == pytest.approx(np.linspace(5.4, 6.0, 5).tolist())
    for at in found:
        assert (at.ratio.value, at.ratio.low, at.ratio.high) == pytest.approx((0.8, 0.8, 0.8))
        assert at.decided
    assert [at.ratio.value for at in compare_frontiers(b, a)] == pytest.approx([1.25] * 5)


def test_a_cooler_sampler_is_not_a_better_one() -> None:
    """A lower perplexity at a lower entropy on one curve is worth nothing."""
    curve = frontier_of(sweep(0.0, [5.0, 5.5, 6.0]))
    assert curve.excess(5.2, 0.7 * 5.2) == pytest.approx(0.0)
    assert curve.excess(5.2, 0.7 * 5.2 - 0.1) == pytest.approx(-0.1)
    assert math.isnan(curve.at(6.1))


def test_outside_both_sweeps_nothing_is_said() -> None:
    a, b = frontier_of(sweep(0.0, [5.0, 5.5])), frontier_of(sweep(0.0, [5.6, 6.0]))
    assert compare_frontiers(a, b) == []
    assert compare_frontiers(a, frontier_of(sweep(0.0, [5.2, 6.0])), entropies=[5.1, 5.3, 5.7])[0].entropy_bits == 5.3


def test_the_interval_is_that_of_independent_points() -> None:
    """At a measured entropy the ratio of two points has the variance sum of (sd_ppl^2 + slope^2 sd_entropy^2)."""
    half = 0.02
    a, b = (frontier_of(sweep(0.0, [4.0, 5.0, 6.0], half=half)) for _ in range(2))
    at = compare_frontiers(a, b, entropies=[5.0])[0]
    expected = half * math.sqrt(2 * (1 + 0.7**2))
    assert math.log(at.ratio.high) == pytest.approx(expected, rel=0.08)
    assert math.log(at.ratio.low) == pytest.approx(-expected, rel=0.08)
    assert not at.decided
    assert compare_frontiers(a, b, entropies=[5.0]) == [at]


def test_one_temperature_is_no_frontier() -> None:
    rows = [row(1.0, 5.0, 30.0), row(1.1, 5.0, 31.0), Row(steps=8, metrics={"entropy_bits": Measured(6.0)})]
    with pytest.raises(ValueError, match="two temperatures or more"):
        frontier_of(rows)


def test_the_mean_over_seeds_is_taken_temperature_by_temperature() -> None:
    found = mean_frontier([[(7.0, 3.0), (6.0, 2.0)], [(8.0, 4.0), (6.4, 2.2), (5.0, 1.0)]])  # the third is one seed's
    assert found.entropy.tolist() == pytest.approx([6.2, 7.5])
    assert found.log_perplexity.tolist() == pytest.approx([2.1, 3.5])
    assert found.extended(7.5 + 1.3) == pytest.approx(3.5 + 1.4)
    assert math.isnan(found.at(7.5 + 1.3))
    with pytest.raises(ValueError, match="two temperatures"):
        mean_frontier([])
