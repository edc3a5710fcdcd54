import importlib.util
import json

import pytest
import torch
from typer.testing import CliRunner

from fsdfm.bench.figure import draw_generate, require_picture
from fsdfm.bench.generate import COMPARISONS, GenerateBench, bench_generate, make_model, trunk_flops
from fsdfm.bench.textbook import textbook_sample
from fsdfm.cli import app
from fsdfm.flow import PolynomialSchedule, SingleJump
from fsdfm.model import ModelConfig, multiplies_bfloat16

SMALL = {"width": 32, "num_blocks": 2, "num_heads": 2, "cond_width": 8, "vocab_size": 60}


def test_the_textbook_sampler_follows_the_papers_rule():
    probs = torch.tensor([0.6, 0.3, 0.1])
    seen = []

    def denoiser(x_t, t, h):
        seen.append(x_t)
        return probs.log().expand(*x_t.shape, 3)

    x_0 = torch.arange(3).repeat_interleave(20_000).view(3, -1)
    x_1 = textbook_sample(denoiser, x_0, 2)
    redraws = SingleJump().redraws(PolynomialSchedule(), torch.tensor(0.0), torch.tensor(0.5))
    law = SingleJump().kernel(probs.double().expand(3, 3), torch.arange(3), redraws.expand(3))
    for start in range(3):
        shares = torch.bincount(seen[1][start], minlength=3) / 20_000
        torch.testing.assert_close(shares.double(), law[start], rtol=0, atol=0.015)
        shares = torch.bincount(x_1[start], minlength=3) / 20_000
        torch.testing.assert_close(shares, probs, rtol=0, atol=0.015)  # the last step redraws


def test_flops_are_those_of_every_linear():
    config = ModelConfig.preset("170m")
    linears, attention = trunk_flops(config, 1024)
    model = make_model(ModelConfig.preset("tiny"))
    counted = sum(
        2 * 7 * layer.weight.numel()
        for block in model.blocks
        for layer in (block.attention.qkv, block.attention.out, block.mlp.into, block.mlp.out)
    )
    assert trunk_flops(model.config, 7)[0] == counted
    assert linears == pytest.approx(2 * 1024 * 12 * 12 * 768**2)
    assert attention == pytest.approx(4 * 1024**2 * 768 * 12)


def test_a_model_of_the_benchmark_has_no_idle_weights():
    model = make_model(ModelConfig.preset("tiny", **SMALL))
    assert all(bool(parameter.any()) for parameter in model.parameters())


@pytest.mark.slow
def test_every_key_is_measured():
    compare = COMPARISONS if importlib.util.find_spec("transformers") else COMPARISONS[:-1]
    setting = GenerateBench("tiny", 8, 2, 1, compare=compare, batch=(1, 2), lengths=(4, 8), changes=SMALL)
    result = json.loads(json.dumps(bench_generate(setting)))
    keys = ["trunk_gemm_fraction", "over_trunk", "speedup_over_textbook", "textbook_over_forwards"]
    keys += ["speedup_over_1024_steps", "int8_speedup", "causal_text_over_autoregressive", "head_steps"]
    keys += ["bf16_speedup"] if multiplies_bfloat16() else []
    assert all(result[key] > 0 for key in keys)
    assert result["crf_draw_over_trunk"] is not None
    assert result["textbook_is_void"] in (True, False)
    assert result["memory_over_textbook"] is None or 0 < result["memory_over_textbook"] < 2
    assert [row["length"] for row in result["sweeps"]["lengths"]] == [4, 8]
    assert [row["batch"] for row in result["sweeps"]["batch"]] == [1, 2]
    if importlib.util.find_spec("matplotlib"):
        assert len(draw_generate(result).axes) == 3


def test_a_sweep_alone_compares_nothing(tmp_path):
    setting = GenerateBench("tiny", 8, 2, 1, compare=(), lengths=(4,), clock="cpu", changes=SMALL)
    result = bench_generate(setting)
    assert result["seconds"] == result["peak_mib"] == {}
    assert result["over_trunk"] is None
    row = result["sweeps"]["lengths"][0]
    assert row["tokens_per_second"] == pytest.approx(4 / row["seconds"])


@pytest.mark.slow
def test_what_a_joint_posterior_costs():
    setting = GenerateBench("stories", 6, 2, 1, compare=("trunk", "causal", "crf", "ar"), clock="cpu", changes=SMALL)
    result = bench_generate(setting)
    seconds = result["seconds"]
    trunk = seconds["trunk"] / 2
    assert result["causal_draw_over_trunk"] == pytest.approx((seconds["causal call"] - trunk) / trunk)
    assert result["causal_draw_over_trunks_of_a_text"] == pytest.approx(result["causal_draw_over_trunk"] / 2)
    of_16 = (seconds["causal call of 16"] / 16 - trunk) / trunk
    assert result["causal_draw_over_trunk_of_16"] == pytest.approx(of_16)
    assert result["causal_text_over_autoregressive"] == seconds["causal text"] / seconds["autoregressive"]
    assert result["causal_call_over_autoregressive"] == seconds["causal call"] / seconds["autoregressive"]
    together = seconds["causal call of 16"] / seconds["autoregressive of 16"]
    assert result["causal_call_over_autoregressive_of_16"] == together
    assert result["head_steps"] == 6
    assert result["over_trunk"] > 0


@pytest.mark.parametrize(
    "bad",
    [
        {"preset": "huge"},
        {"length": 0},
        {"steps": 0},
        {"repeats": 0},
        {"compare": ("us",)},
        {"batch": (0,)},
        {"clock": "sun"},
    ],
)
def test_impossible_settings_are_errors(bad):
    with pytest.raises(ValueError, match="allowed"):
        GenerateBench(**bad)


def test_the_command_says_what_it_cannot_read(tmp_path):
    runner = CliRunner()
    for arguments, told in (
        (["--batch", "1,x"], "whole numbers with commas"),
        (["--compare", "gpt3"], "allowed are gemm"),
        (["--clock", "cpu"], "allowed is 1"),
        (["--plot", str(tmp_path / "x.doc")], ".png"),
    ):
        done = runner.invoke(app, ["bench", "generate", *arguments])
        assert isinstance(done.exception, ValueError)
        assert told in str(done.exception)
    require_picture(None)
