"""Released files, made here by an independent implementation of their architecture, imported and compared with it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fsdfm.checkpoint import ReleasedConfig, load_model, open_released, preset_settings, read_settings
from fsdfm.cli import app, main
from fsdfm.flow import MaskSource, PolynomialSchedule, UniformSource
from fsdfm.model import DiT, ModelConfig
from fsdfm.run import import_released, train
from released_files import Released, inputs

GOLDEN = Path(os.environ.get("FSDFM_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
FEWSTEP, DFM = Released(), Released(step_aware=False)


def load(path: Path, **options: object) -> DiT:
    with open_released(path, **options) as weights:  # type: ignore[arg-type]
        model = DiT(weights.config)
        model.load_state_dict(dict(weights))
    return model.eval()


def largest_error(model: DiT, released: Released, seed: int = 0) -> float:
    x_t, t, h = inputs(released.vocab_size)
    with torch.no_grad():
        return float((model(x_t, t, h) - released.logits(released.weights(seed), x_t, t, h)).abs().max())


# --- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("released", [FEWSTEP, DFM], ids=["few-step", "dfm"])
def test_an_imported_checkpoint_computes_the_released_logits(released: Released, tmp_path: Path) -> None:
    file = released.save(tmp_path / "released.pth")
    result = CliRunner().invoke(app, ["import", str(file), "--out", str(tmp_path / "model"), "--tokenizer", "bytes"])
    assert result.exit_code == 0, result.output
    bundle = load_model(tmp_path / "model")
    assert largest_error(bundle.model, released) < 1e-5
    assert bundle.model.config.is_step_aware == released.step_aware
    assert (bundle.path.source, bundle.path.schedule) == (UniformSource(257), PolynomialSchedule(1.0))
    assert bundle.length == 1024
    assert bundle.budgets == (tuple(2**k for k in range(11)) if released.step_aware else None)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    group = "student_ema_model" if released.step_aware else "model"
    assert bundle.facts["imported"] == {"file": "released.pth", "group": group, "sha256": digest}
    assert bundle.facts["training_step"] == 7
    assert ("averaged weights" if released.step_aware else "weights as trained") in bundle.loaded
    card = (tmp_path / "model" / "README.md").read_text()
    assert digest in card
    assert "| Licence | that of the weights" in card


@pytest.mark.parametrize("name", ["fewstep", "dfm"])
def test_the_golden_files_logits(name: str, tmp_path: Path) -> None:
    if not GOLDEN.is_dir():
        pytest.skip("no golden files: FSDFM_GOLDEN names no folder")
    stem = GOLDEN / f"companion_{name}_tiny"
    vectors = torch.load(stem.with_suffix(".vectors.pt"), weights_only=True)
    file, settings = stem.with_suffix(".pth"), stem.with_suffix(".json")
    import_released(file, tmp_path / "model", config=settings, tokenizer="bytes")
    bundle = load_model(tmp_path / "model")
    assert bundle.length == 48
    with torch.no_grad():
        logits = bundle.model(vectors["x_t"], vectors["t"], vectors["h"])
    assert float((logits - vectors["logits"]).abs().max()) < 1e-5


def test_ema_raw_and_teacher_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "both.pth"
    torch.save({**FEWSTEP.content(), "teacher_model": DFM.weights(9)}, file)
    assert largest_error(load(file), FEWSTEP) < 1e-5
    assert largest_error(load(file, weights="ema"), FEWSTEP) < 1e-5
    assert largest_error(load(file, weights="raw"), FEWSTEP, seed=1) < 1e-5
    assert largest_error(load(file, weights="teacher"), DFM, seed=9) < 1e-5
    assert largest_error(load(file, weights="raw"), FEWSTEP) > 1e-2
    with pytest.raises(ValueError, match=r"has no ema weights; it has raw"):
        open_released(DFM.save(tmp_path / "dfm.pth"), weights="ema")
    with pytest.raises(ValueError, match="allowed are ema, raw, teacher"):
        open_released(file, weights="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_leave_no_trace(prefix: str, tmp_path: Path) -> None:
    wrapped = OrderedDict((prefix + name, torch.nn.Parameter(value)) for name, value in FEWSTEP.weights().items())
    torch.save({"student_ema_model": {**wrapped, "n_averaged": torch.tensor(5)}}, tmp_path / "wrapped.pth")
    assert largest_error(load(tmp_path / "wrapped.pth"), FEWSTEP) < 1e-5
    torch.save({"model": {**wrapped, **FEWSTEP.weights()}}, tmp_path / "twice.pth")
    with pytest.raises(ValueError, match="with and without a wrapper's prefix"):
        open_released(tmp_path / "twice.pth")


def test_a_bare_state_dict_is_enough(tmp_path: Path) -> None:
    torch.save(DFM.weights(), tmp_path / "bare.pth")
    assert largest_error(load(tmp_path / "bare.pth"), DFM) < 1e-5


# --- as a parent ------------------------------------------------------------------------------------------------------


def test_a_released_dfm_becomes_step_aware_without_a_change(tmp_path: Path) -> None:
    parent = load(DFM.save(tmp_path / "dfm.pth"))
    x_t, t, h = inputs(DFM.vocab_size)
    assert torch.equal(parent.step_aware()(x_t, t, h), parent(x_t, t))
    with pytest.raises(ValueError, match="step-aware already"):
        load(FEWSTEP.save(tmp_path / "fewstep.pth")).step_aware()


@pytest.mark.parametrize("released", [FEWSTEP, DFM], ids=["few-step", "dfm"])
@pytest.mark.parametrize("kind", ["fewstep", "path"])
def test_released_weights_are_trained_further(released: Released, kind: str, tmp_path: Path) -> None:
    import_released(released.save(tmp_path / "released.pth"), tmp_path / "parent", tokenizer="bytes")
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 99)
    recipe = tmp_path / "child.toml"
    recipe.write_text(
        f"""
        out = "{tmp_path / "child"}"
        data = {{ inputs = ["{tmp_path / "text.txt"}"], length = 16 }}
        model = {{ parent = "{tmp_path / "parent"}" }}
        objective = {{ kind = "{kind}"{', teacher = { tableau = "rk2" }' if kind == "fewstep" else ""} }}
        train = {{ steps = 2, batch_size = 4 }}
        runtime = {{ device = "cpu", threads = 1 }}
        """
    )
    assert train(recipe).finished
    child = load_model(tmp_path / "child")
    expected = "fused" if released.step_aware else "step" if kind == "fewstep" else "time"
    assert child.model.config.conditioning == expected
    assert (child.budgets is not None) == child.model.config.is_step_aware


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_come_from_a_preset_by_either_name() -> None:
    assert preset_settings("1.3B") == preset_settings("1300m")
    assert preset_settings("1.7b").num_blocks == ModelConfig.preset("1700m").num_blocks
    assert preset_settings("0.17b").cond_width == 128
    with pytest.raises(ValueError, match=r"allowed are 0.17b, 1.3b, 1.7b, 170m"):
        preset_settings("tiny")


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    theirs = {"hidden_size": 24, "cond_dim": 12, "length": 48, "n_blocks": 2, "n_heads": 3, "dropout": 0.2}
    expected = ReleasedConfig(
        vocab_size=257, width=24, cond_width=12, num_blocks=2, num_heads=3, length=48, dropout=0.2, source="uniform"
    )
    file.write_text(json.dumps({"model": {**theirs, "compile": False}, "vocab_size": 257, "source": "uniform"}))
    assert read_settings(file) == expected
    file.write_text(json.dumps({**theirs, "vocab_size": 257, "source": "uniform"}))
    assert read_settings(file) == expected
    path = FEWSTEP.save(tmp_path / "released.pth")
    with open_released(path, expected) as weights:
        assert weights.config.dropout == 0.2
    arguments = ["import", str(path), "--config", str(file), "--out", str(tmp_path / "model"), "--tokenizer", "bytes"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert load_model(tmp_path / "model").length == 48


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"n_heads": ' + "9" * 5000 + "}", "is not JSON|from 1 to"),
        ("[1]", "holds no settings"),
        ('{"model": 3}', "holds no settings"),
        ('{"n_head": 3}', "did you mean 'n_heads'"),
        ('{"n_heads": 3, "num_heads": 3}', "stands there twice"),
        ('{"n_heads": "3"}', "num_heads is '3'"),
        ('{"n_heads": 0}', "from 1 to"),
        ('{"dropout": 1.5}', "dropout is 1.5"),
        ('{"source": "tea"}', "'uniform' or 'mask'"),
        (" " * 2**21, "name a small JSON file"),
    ],
)
def test_bad_settings_say_what_is_allowed(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_settings(tmp_path / "settings.json")


def test_settings_that_disagree_with_the_file_are_named(tmp_path: Path) -> None:
    file = FEWSTEP.save(tmp_path / "released.pth")
    with pytest.raises(
        ValueError, match=r"vocab_size is 257 in the file and 50257 in the settings; width is 24.*2 more"
    ):
        open_released(file, preset_settings("1.3b"))
    with pytest.raises(ValueError, match="num_heads is 3 in the file and 2 in the settings"):
        open_released(file, ReleasedConfig(num_heads=2))
    with pytest.raises(ValueError, match="step_aware is True in the file and False"):
        open_released(file, ReleasedConfig(step_aware=False))
    with pytest.raises(ValueError, match="the settings come from one"):
        import_released(file, tmp_path / "model", preset="1.3b", config="settings.json")


def test_heads_need_the_rotary_buffer_or_settings(tmp_path: Path) -> None:
    weights = FEWSTEP.weights()
    del weights["rotary_emb.inv_freq"]
    torch.save({"model": weights}, tmp_path / "no-rotary.pth")
    with pytest.raises(ValueError, match="give a preset or a config"):
        open_released(tmp_path / "no-rotary.pth")
    assert largest_error(load(tmp_path / "no-rotary.pth", settings=ReleasedConfig(num_heads=3)), FEWSTEP) < 1e-5


@pytest.mark.slow
def test_the_tokenizer_is_gpt2s_unless_another_is_named(tmp_path: Path) -> None:
    file = Released(vocab_size=50257, width=8, num_heads=2, num_blocks=1).save(tmp_path / "released.pth")
    import_released(file, tmp_path / "model")
    bundle = load_model(tmp_path / "model")
    assert bundle.tokenizer.encode("Hello world") == [15496, 995]
    assert bundle.path.source == UniformSource(50257)


def test_one_more_token_than_the_tokenizer_is_the_mask(tmp_path: Path) -> None:
    masked = Released(vocab_size=258)
    file = masked.save(tmp_path / "released.pth")
    assert import_released(file, tmp_path / "mask", tokenizer="bytes").path.source == MaskSource(258)
    for stated in (257, 258):  # with and without the mask
        (tmp_path / "s.json").write_text(json.dumps({"vocab_size": stated, "source": "mask"}))
        import_released(file, tmp_path / f"mask-{stated}", config=tmp_path / "s.json", tokenizer="bytes")
        assert load_model(tmp_path / f"mask-{stated}").path.source == MaskSource(258)
    file = Released(vocab_size=300).save(tmp_path / "large.pth")
    with pytest.raises(ValueError, match="has 300 tokens and the tokenizer only 257"):
        import_released(file, tmp_path / "large", tokenizer="bytes")
    import_released(Released(vocab_size=200).save(tmp_path / "small.pth"), tmp_path / "small", tokenizer="bytes")


# --- what a file may not hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 2e-1)])
def test_other_floats_are_converted(dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    torch.save({"model": {name: value.to(dtype) for name, value in FEWSTEP.weights().items()}}, tmp_path / "other.pth")
    model = load(tmp_path / "other.pth")
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert largest_error(model, FEWSTEP) < bound


def with_tensor(name: str, value: object, path: Path) -> Path:
    weights: dict[str, object] = dict(FEWSTEP.weights())
    weights[name] = value
    torch.save({"student_ema_model": {name: value for name, value in weights.items() if value is not None}}, path)
    return path


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("blocks.0.qw.weight", torch.zeros(24, 24, dtype=torch.int32), "is torch.int32; allowed are torch.float32"),
        ("blocks.0.qw.weight", torch.zeros(24, 24, dtype=torch.complex64), "is torch.complex64"),
        ("blocks.0.qw.weight", torch.zeros(24, 23), r"qw.weight has shape \(24, 23\), not \(24, 24\)"),
        ("blocks.0.qw.weight", torch.zeros(24, 0), "empty"),
        ("blocks.0.qw.weight", torch.zeros(1, 1).expand(24, 24), "repeats 1 values"),
        ("blocks.0.qw.weight", torch.full((24, 24), torch.nan), "qw.weight of student_ema_model holds values"),
        ("blocks.0.qw.weight", torch.full((24, 24), 1e300, dtype=torch.float64), "not finite as torch.float32"),
        ("blocks.0.qw.weight", None, "blocks.0.qw.weight is missing"),
        ("blocks.0.qw.weight", 3, "is no tensor"),
        ("blocks.0.extra", torch.zeros(3), "'blocks.0.extra' has no place"),
        ("blocks.5.qw.weight", torch.zeros(24, 24), "3 blocks that are not 0, 1, 2"),
        ("vocab_embed.weight", None, "vocab_embed.weight is not a matrix"),
        ("rotary_emb.inv_freq", torch.rand(4), "positions would be read wrongly"),
        ("rotary_emb.inv_freq", torch.rand(5), "fits no heads"),
    ],
)
def test_what_is_wrong_is_said(name: str, value: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load(with_tensor(name, value, tmp_path / "wrong.pth"))
    assert "\n" not in str(caught.value)


def test_weights_too_large_for_half_precision_are_refused(tmp_path: Path) -> None:
    file = with_tensor("blocks.0.qw.weight", torch.full((24, 24), 1e5), tmp_path / "large.pth")
    import_released(file, tmp_path / "whole", tokenizer="bytes")
    with pytest.raises(ValueError, match="not finite as torch.float16"):
        import_released(file, tmp_path / "half", tokenizer="bytes", half=True)
    assert not list(tmp_path.glob("half*"))


@pytest.mark.parametrize("content", [3, [1], {"weights": {}}, {"model": 3}, {"model": {}}])
def test_other_checkpoints_are_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"holds no named weights|but none of|is not a matrix"):
        open_released(tmp_path / "other.pth")


def test_on_the_command_line_a_bad_file_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.pth").write_bytes(b"<!DOCTYPE html>")
    command = ["fsdfm", "import", str(tmp_path / "bad.pth"), "--out", str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "bad.pth is no .pth file" in said
    assert not (tmp_path / "model").exists()


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from fsdfm.run import import_released
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
import_released(sys.argv[1], sys.argv[2], tokenizer="bytes")
before = peak()
import_released(sys.argv[3], sys.argv[4], tokenizer="bytes")
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_memory_is_that_of_one_tensor_and_not_of_the_file(tmp_path: Path) -> None:
    large = Released(width=512, num_blocks=8, num_heads=8, cond_width=32)  # 111 MB
    moments = {i: {"exp_avg": torch.zeros(25_000_000)} for i in range(5)}
    torch.save({"model": large.weights(), "optimizer": {"state": moments}}, tmp_path / "large.pth")
    assert (tmp_path / "large.pth").stat().st_size > 600e6
    arguments = [FEWSTEP.save(tmp_path / "small.pth"), tmp_path / "a", tmp_path / "large.pth", tmp_path / "b"]
    result = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 40  # MiB; the largest tensor has 4
    assert (tmp_path / "b" / "model.safetensors").stat().st_size > 100e6


def test_the_file_is_what_safetensors_writes(tmp_path: Path) -> None:
    import_released(FEWSTEP.save(tmp_path / "released.pth"), tmp_path / "model", tokenizer="bytes")
    state = load(tmp_path / "released.pth").state_dict()
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_tensors_that_share_their_values_are_counted_once(tmp_path):
    """A hundred tensors over one storage took a hundred times the memory of the file."""
    table = torch.zeros(64, 64)
    torch.save({f"blocks.{i}.qw.weight": table for i in range(100)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="describes 1638400 bytes of tensors and holds 16384"):
        open_released(tmp_path / "a.pth")
