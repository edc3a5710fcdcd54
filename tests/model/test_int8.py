"""Linears in 8 bits: exact integers, a scale a row, and a model that is nearly the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdfm.model import DiT, ModelConfig, to_int8
from fsdfm.model.int8 import Int8Linear


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
def test_numbers_on_the_levels_come_out_exact(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(50, 30, bias=bias)
    levels = torch.randint(-127, 128, (30, 50), generator=generator)
    levels[:, 0] = 127  # the largest of every row, so that the scale is known
    activations = torch.randint(-63, 64, (9, 50), generator=generator)
    activations[:, 3] = -63
    rows = 2.0 ** torch.arange(-4, 5)[:, None]
    with torch.no_grad():
        linear.weight.copy_(levels / 128)
        expected = (activations.double() @ levels.double().t() / 128) * rows
        if bias:
            expected += linear.bias
    torch.testing.assert_close(Int8Linear(linear)(activations * rows), expected.float(), rtol=1e-5, atol=1e-5)


def test_no_sum_overflows_however_large() -> None:
    linear = nn.Linear(4096, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4096))
    found = Int8Linear(linear)(torch.full((2, 4096), 3.0))
    torch.testing.assert_close(found, torch.tensor([[12288.0, -12288.0, 6144.0]]).expand(2, 3), rtol=0.01, atol=0)


def test_a_row_is_rounded_by_itself() -> None:
    rounded, x = Int8Linear(nn.Linear(64, 40)), draw(200, 64)
    x[7] *= 1000
    whole = rounded(x)
    for rows in (slice(0, 1), slice(3, 8), slice(8, 200)):
        assert torch.equal(rounded(x[rows]), whole[rows])
    assert torch.equal(rounded(x.view(2, 100, 64)), whole.view(2, 100, 40))
    assert torch.equal(rounded.part(x, 5, 9), whole[:, 5:9])
    assert bool(rounded(torch.zeros(1, 64)).isfinite().all())


def test_the_error_is_that_of_seven_bits() -> None:
    linear, x = nn.Linear(256, 300).requires_grad_(False), draw(50, 256)
    linear.weight.copy_(draw(300, 256, seed=1))
    error = Int8Linear(linear)(x) - linear(x)
    assert float(error.norm() / linear(x).norm()) < 0.02


@pytest.mark.parametrize("style", ["paper", "llama"])
def test_a_rounded_model_is_nearly_the_same(style: str) -> None:
    model = DiT(ModelConfig(vocab_size=300, width=64, num_blocks=3, num_heads=4, cond_width=16, style=style)).eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.data.add_(draw(*parameter.shape, seed=index), alpha=0.05)
    rounded = copy.deepcopy(model)
    to_int8(rounded)
    x_t, t = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1)), torch.tensor([0.1, 0.8])
    with torch.no_grad():
        expected, found = model(x_t, t), rounded(x_t, t)
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.1
        rows = torch.tensor([3, 50, 79])
        torch.testing.assert_close(
            rounded.logits_at(rounded.features_at(x_t, t, rows=rows)), found.flatten(0, 1)[rows], rtol=0.05, atol=0.05
        )
    assert not any(isinstance(m, nn.Linear) for block in rounded.blocks for m in (block.attention.qkv, block.mlp.out))


def test_only_a_cpu_can() -> None:
    with torch.device("meta"):
        model = DiT(ModelConfig.preset("tiny"))
    with pytest.raises(ValueError, match="on a CPU only: use bfloat16"):
        to_int8(model)
