import math
import os
import time

import pytest
import torch

from fsdfm.bench.measure import in_fresh_process, interleaved_medians, peak_extra_mib


def test_medians_are_of_interleaved_rounds():
    order = []
    jobs = {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), time.sleep(0.01))}
    seconds = interleaved_medians(jobs, repeats=2, title="test")
    assert order == ["a", "b"] * 3
    assert seconds["b"] > seconds["a"]
    with pytest.raises(ValueError, match="allowed"):
        interleaved_medians(jobs, repeats=0, title="test")


def test_peak_memory_sees_what_is_freed_again():
    peak = peak_extra_mib(lambda: torch.zeros(64 << 18).sum())
    if peak is None:
        pytest.skip("this kernel does not tell the peak")
    assert 60 < peak < 200


def test_a_fresh_process_is_another_one_and_its_errors_come_back():
    assert in_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="math domain error"):
        in_fresh_process(math.sqrt, -1)
