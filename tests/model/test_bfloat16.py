"""Linears in bfloat16: rounded operands, results in the caller's precision, a head that is not touched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdfm.bench.generate import make_model
from fsdfm.model import DiT, ModelConfig, multiplies_bfloat16, to_bfloat16
from fsdfm.model.bfloat16 import Bfloat16Linear

SMALL = ModelConfig.preset("tiny", width=64, num_blocks=2, num_heads=4, cond_width=8, vocab_size=300)


@pytest.mark.parametrize("bias", [True, False])
def test_numbers_of_eight_bits_come_out_exact(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(8, 30, bias=bias).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    x = torch.randint(-4, 5, (2, 9, 8), generator=generator).float()
    rounded = Bfloat16Linear(linear)
    assert rounded(x).dtype == torch.float32
    assert torch.equal(rounded(x), linear(x))
    assert torch.equal(rounded.part(x, 5, 9), linear(x)[..., 5:9])


@torch.no_grad()
def test_a_narrow_model_is_nearly_the_same_and_has_its_own_head() -> None:
    model = make_model(SMALL)
    rounded = copy.deepcopy(model)
    to_bfloat16(rounded)
    assert rounded.head.weight.dtype == torch.float32
    assert (model.precision, rounded.precision) == ("float32", "bfloat16")
    x_t = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.2, 0.7])
    logits, found = model(x_t, t), rounded(x_t, t)
    assert found.dtype == torch.float32
    error = float((found - logits).norm() / logits.norm())
    assert 0 < error < 0.02
    rows = torch.tensor([3, 7, 41, 79])
    torch.testing.assert_close(rounded.features_at(x_t, t, rows=rows), rounded.trunk(x_t, t).flatten(0, 1)[rows])


def test_a_machine_says_whether_it_multiplies_bfloat16() -> None:
    assert multiplies_bfloat16() in (True, False)
    with torch.device("meta"):
        model = DiT(SMALL)
    with pytest.raises(ValueError, match="use autocast"):
        to_bfloat16(model)
