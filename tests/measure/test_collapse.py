"""The collapse guard: a collapsed sampler is flagged, real text is not."""

from __future__ import annotations

import math

import pytest
import torch

from fsdfm.measure.collapse import Tolerance, leave_band
from fsdfm.measure.metrics import distinct_n, unigram_entropy_bits
from fsdfm.measure.statistics import Interval, bootstrap_mean, jackknife


def draw(seed: int, sharpness: float) -> list[torch.Tensor]:
    """64 samples of 100 tokens from a Zipf law; a larger sharpness is a smaller vocabulary in use."""
    weights = torch.arange(1, 501).double() ** -sharpness
    generator = torch.Generator().manual_seed(seed)
    return list(torch.multinomial(weights, 6400, replacement=True, generator=generator).view(64, 100))


def numbers(samples: list[torch.Tensor]) -> dict[str, Interval]:
    return {
        "entropy_bits": bootstrap_mean([unigram_entropy_bits(row) for row in samples]),
        "distinct_1": jackknife(lambda part: distinct_n(part, 1), samples),
        "distinct_2": jackknife(lambda part: distinct_n(part, 2), samples),
    }


def values(samples: list[torch.Tensor]) -> dict[str, float]:
    return {name: interval.value for name, interval in numbers(samples).items()}


def test_a_collapsed_sampler_is_flagged_and_real_text_is_not() -> None:
    real = numbers(draw(0, 1.0))
    assert leave_band(values(draw(1, 1.0)), real) == ()
    collapsed = leave_band(values(draw(2, 1.6)), real)
    assert {flag.metric for flag in collapsed} == {"entropy_bits", "distinct_1", "distinct_2"}
    assert all(flag.side == "below" for flag in collapsed)
    assert str(collapsed[0]).startswith("collapse: entropy_bits")
    noise = leave_band(values(draw(3, 0.0)), real)
    assert noise
    assert all(flag.side == "above" and str(flag).startswith("noise") for flag in noise)


def test_the_band_is_the_interval_and_its_tolerance() -> None:
    real = {"entropy_bits": Interval(6.0, 5.9, 6.1)}
    assert leave_band({"entropy_bits": 5.76}, real) == ()
    (flag,) = leave_band({"entropy_bits": 5.74}, real)
    assert flag.band == pytest.approx((5.75, 6.25))
    assert leave_band({"entropy_bits": 5.0}, real, tolerance={"entropy_bits": Tolerance(relative=0.2)}) == ()
    assert leave_band({"entropy_bits": math.nan}, real)
    assert leave_band({"perplexity": 3.0}, real) == ()
    with pytest.raises(ValueError, match="lacks distinct_2"):
        leave_band({"distinct_2": 0.5}, real)
