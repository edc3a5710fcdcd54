import json

import pytest

from fsdfm.bench.rule import JUMPS, JumpBench, bench_jump


@pytest.mark.slow
def test_every_rule_has_its_ratios():
    result = bench_jump(JumpBench(length=16, vocab_size=300, repeats=1))
    for name in JUMPS:
        assert set(result[name]) == {
            "over_softmax",
            "mean_over_softmax",
            "speedup_over_multinomial",
            "peak_extra_mib",
        }
        assert result[name]["over_softmax"] > 0
    assert json.loads(json.dumps(result))["setting"]["vocab_size"] == 300


@pytest.mark.parametrize("bad", [{"vocab_size": 0}, {"length": -3}, {"repeats": 0}])
def test_impossible_settings_are_errors(bad):
    with pytest.raises(ValueError, match="allowed"):
        JumpBench(**bad)
