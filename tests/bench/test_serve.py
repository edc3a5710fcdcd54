"""A small crowd against a real server: nothing lost, nothing wrong, nothing undocumented."""

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fsdfm.bench.serve import ServeBench, _last_words, _most_by_part, bench_serve
from fsdfm.checkpoint import save_model
from tiny_models import random_bundle


@pytest.mark.slow
def test_a_small_crowd(tmp_path):
    save_model(tmp_path / "tiny", random_bundle(length=64))
    setting = ServeBench(
        model=str(tmp_path / "tiny"), seconds=3, rounds=1, running=2, waiting=2, together=2, steps=2, length=16
    )
    result = bench_serve(setting)
    assert result["lost"] == 0
    assert result["undocumented"] == 0
    assert result["wrong_texts"] == 0
    assert result["checked_texts"] > 0
    assert result["broken"] == 0
    assert result["left_in_the_engine"] == 0
    assert not any("no envelope" in outcome for outcome in result["ended"])
    memory = result["memory_mib"]
    assert max(memory["most_by_tenth"]) == memory["most"] >= memory["last"]
    assert result["texts_per_second"] > 0


def test_a_stream_that_is_given_up_is_no_broken_one():
    state, error = b'data: {"choices": []}\n', b'data: {"error": {"code": "timeout"}}\n'
    assert _last_words([state, b"\n", error, b"\n"]) == "200, then timeout"
    assert _last_words([state, b"\n"]) == "no end"
    assert _last_words([]) == "no end"


def test_memory_is_told_by_parts_of_the_run():
    assert _most_by_part([1.0, 3.0, 2.0, 5.0, 4.0], 2) == [3.0, 5.0]
    assert _most_by_part([1.0, 2.0], 10) == [1.0, 2.0]
