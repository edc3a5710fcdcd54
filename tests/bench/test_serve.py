"""A small crowd against a real server: nothing lost, nothing wrong, nothing undocumented."""

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fsdfm.bench.serve import ServeBench, bench_serve
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
    assert not any("no envelope" in outcome or "no end" in outcome for outcome in result["ended"])
    assert result["texts_per_second"] > 0
