import numpy as np
import pytest

from fsdfm.checks import require_number, require_whole
from fsdfm.flow import Filter
from fsdfm.generate import SamplerConfig


@pytest.mark.parametrize("value", [2.0, "3", None, True, float("inf"), float("nan"), 0, 9, [1]])
def test_what_is_no_whole_number_is_a_sentence(value):
    with pytest.raises(ValueError, match="n is .*; allowed are whole numbers 1 <= n <= 8"):
        require_whole("n", value, 1, high=8)


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    assert require_whole("n", np.int64(3), 1) == 3
    assert require_whole("n", 8, 1, high=8) == 8


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), [1.0]])
def test_what_is_no_number_is_a_sentence(value):
    with pytest.raises(ValueError, match="x is .*; allowed are small ones"):
        require_number("x", value, "small ones")


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 2.0},
        {"steps": "2"},
        {"steps": float("inf")},
        {"top_k": "3"},
        {"top_k": 2.5},
        {"top_p": "0.5"},
        {"temperature": "1"},
        {"temperature": float("nan")},
        {"final_temperature": None, "start": "0.5"},
        {"start": float("nan")},
    ],
)
def test_options_of_a_wrong_type_are_sentences(options):
    with pytest.raises(ValueError, match="; allowed are"):
        SamplerConfig(**options)


def test_the_filter_itself_says_so_too():
    for wrong in ({"top_k": 0}, {"top_k": 1.0}, {"top_p": 0}, {"temperature": float("inf")}):
        with pytest.raises(ValueError, match="; allowed are"):
            Filter(**wrong)
