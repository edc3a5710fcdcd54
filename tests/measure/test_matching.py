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


def test_entropy_that_falls_with_the_temperature_is_found_too():
    match = find_temperature(lambda t: 5 - math.log(t), 5.8, tolerance=0.01)
    assert match.reached
    assert match.temperature == pytest.approx(math.exp(-0.8), rel=0.02)


def test_of_two_crossings_the_colder_one_is_taken_where_there_is_too_much_entropy():
    """A hump: 5 bits at 0.25 and at 1.6, more between them."""

    def entropy(temperature):
        return 6 - (math.log(temperature) - math.log(0.632)) ** 2 / math.log(1.6 / 0.632) ** 2

    match = find_temperature(entropy, 5.0, tolerance=0.01, ends=(0.05, 20.0))
    assert match.reached
    assert match.temperature == pytest.approx(0.25, rel=0.02)
