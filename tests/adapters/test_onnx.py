"""Exported models: the same noise, the same law, the same texts, without PyTorch."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="pip install 'fsdfm[onnx]'")
pytest.importorskip("onnxscript", reason="pip install 'fsdfm[onnx]'")

from fsdfm.adapters.onnx import export_onnx
from fsdfm.adapters.portable import PortableModel, draw, filtered, uniforms
from fsdfm.checkpoint import save_model
from fsdfm.flow import Filter
from fsdfm.flow import draw as exact_draw
from fsdfm.generate import load
from fsdfm.model import CausalHeadConfig
from fsdfm.noise import Noise, Purpose
from tiny_models import random_bundle

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("seed", "sample", "step"), [(0, 0, 0), (2**63 + 5, 2**55 + 3, 7), (12345, 1 << 28, 1)])
def test_uniforms_are_the_same_numbers(seed: int, sample: int, step: int) -> None:
    for purpose in (Purpose.SOURCE, Purpose.COIN, Purpose.PHASE):
        ours = Noise(seed, [sample]).uniform(purpose, 33, step)[0].numpy()
        assert np.array_equal(uniforms(seed, sample, int(purpose), length=33, step=step), ours)


def test_draws_are_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(200, 700, generator=generator) * 3, Noise(1, [0]).uniform(Purpose.COIN, 200)[0]
    exclude = torch.randint(700, (200,), generator=generator)
    for options in ((1.0, None, None), (0.7, 50, None), (0.9, None, 0.8)):
        shaped = filtered(logits.numpy(), options)
        tokens, left = draw(shaped, u.numpy(), exclude.numpy())
        found = exact_draw(logits, u, exclude=exclude, filter=Filter(*options))
        assert np.array_equal(tokens, found.tokens.numpy())
        assert found.log_p_excluded is not None
        np.testing.assert_allclose(left, -np.expm1(found.log_p_excluded.numpy()), rtol=1e-4, atol=1e-12)
        assert np.array_equal(draw(shaped, u.numpy())[0], exact_draw(logits, u, filter=Filter(*options)).tokens.numpy())


def test_a_sure_token_is_kept() -> None:
    logits = np.array([[0.0, -math.inf, -math.inf]], dtype=np.float32)
    tokens, left = draw(logits, np.array([0.5]), np.array([0]))
    assert (tokens.tolist(), left.tolist()) == ([0], [0.0])


HEADS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "mask": {"source": "mask"},
    "mixture": {"source": "mixture"},
    "step-aware": {"budgets": (1, 2, 4)},
    "causal": {"bos_id": 256, "posterior": CausalHeadConfig(num_blocks=2, cond_width=8), "style": "llama"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_an_exported_model_writes_the_same_texts(name: str, tmp_path: Path) -> None:
    options = dict(HEADS[name])
    bundle = random_bundle(length=24, **options)
    save_model(tmp_path / "model", bundle)
    lm, exported = load(tmp_path / "model"), PortableModel(export_onnx(tmp_path / "model", tmp_path / "out"))
    asked: list[tuple[str, dict[str, Any]]] = [
        ("the cat", {"steps": 4, "seed": 1}),
        ("", {"steps": 3, "seed": 2, "jump": "spaced"}),
        ("a", {"steps": 2, "seed": 3, "temperature": 0.7, "top_k": 20, "length": 16}),
        ("a", {"steps": 1, "seed": 4, "top_p": 0.9}),
    ]
    for prompt, settings in asked:
        assert exported.generate(prompt, **settings) == lm.generate(prompt or None, **settings).text
    if name == "uniform":
        x, t = np.arange(24) % 257, 0.3
        logits = bundle.model(torch.from_numpy(x)[None], torch.tensor([t]), torch.tensor([0.1]))[0]
        np.testing.assert_allclose(exported.logits(x, t, 0.1), logits.detach().numpy(), atol=1e-4)


@pytest.mark.slow
def test_the_embedded_model_writes_without_pytorch(tmp_path: Path) -> None:
    export_onnx("fewstep", tmp_path / "out")
    (tmp_path / "out" / "torch.py").write_text("raise ImportError('no PyTorch here')")  # found first if asked for
    command = [sys.executable, "generate.py", "Once upon a time", "--seed", "1", "--length", "64"]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == load("fewstep").generate("Once upon a time", seed=1, length=64).text
    shutil.rmtree(tmp_path / "out")


def test_what_numpy_has_no_law_for_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "crf", random_bundle(transition_rank=2))
    with pytest.raises(ValueError, match="the posterior is a TransitionTables; exported models know"):
        export_onnx(tmp_path / "crf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
