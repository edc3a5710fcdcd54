import math

import pytest

from fsdfm.measure.matching import COLDEST, HOTTEST, find_temperature


@pytest.mark.parametrize("target", [2.0, 5.0, 7.3, 8.6])
def test_it_finds_the_temperature_in_a_few_askings(target):
    asked = []

    def entropy(temperature):
        asked.append(temperature)
        return 8 + math.log(temperature) * 3 if temperature > 0.5 else 11.84 * temperature

    match = find_temperature(entropy, target, tolerance=0.01)
    assert match.reached
    assert entropy(match.temperature) == pytest.approx(target, abs=0.01)
    assert len(set(asked)) < 18
    assert len(set(asked)) == len(asked) - 1  # none twice


def test_the_start_may_be_right_already():
    asked = []
    assert find_temperature(lambda t: asked.append(t) or 5.0, 5.0, start=0.7).temperature == 0.7
    assert asked == [0.7]


@pytest.mark.parametrize(("target", "end"), [(100.0, HOTTEST), (-100.0, COLDEST)])
def test_what_is_out_of_reach_is_said(target, end):
    match = find_temperature(lambda t: t, target)
    assert (match.temperature, match.reached) == (end, False)
