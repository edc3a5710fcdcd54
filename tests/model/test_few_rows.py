"""Products of few rows: the module's own, and the same bits in any company."""

import pytest
import torch
from torch import nn

from fsdfm.model.bfloat16 import Bfloat16Linear
from fsdfm.model.few_rows import LARGE, SMALL, RowProduct, filled, row_product
from fsdfm.model.int8 import Int8Linear
from fsdfm.model.layers import linear

SHAPES = [(24, 16), (864, 288), (288, 768), (1001, 48)]


def made(shape: tuple[int, int], *, bias: bool = False) -> nn.Linear:
    module = linear(shape[1], shape[0], bias=bias)
    generator = torch.Generator().manual_seed(0)
    for value in module.parameters():
        nn.init.normal_(value, std=0.1, generator=generator)
    return module


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 16, 17, 40])
def test_rows_are_filled_up(count):
    assert filled(count) >= count
    assert filled(count) % (SMALL if count <= 2 * SMALL else LARGE) == 0
    assert filled(count) - count < (SMALL if count <= 2 * SMALL else LARGE)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["linear", "bias", "bfloat16", "int8", "unlike"])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(shape, kind, monkeypatch):
    if kind == "unlike":  # a machine on which many rows at once round otherwise
        monkeypatch.setattr(RowProduct, "_are_alike", lambda product, module: False)
    module = made(shape, bias=kind == "bias")
    if kind in ("bfloat16", "int8"):
        module = {"bfloat16": Bfloat16Linear, "int8": Int8Linear}[kind](module)
    product, rows = RowProduct(module), torch.randn(48, shape[1], generator=torch.Generator().manual_seed(1))
    together = product(rows)
    torch.testing.assert_close(together, module(rows), atol=2e-2 if kind == "bfloat16" else 1e-5, rtol=1e-2)
    for count in (SMALL, 2 * SMALL, LARGE, 2 * LARGE):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(product(rows[order]), together[order])
    alone = torch.zeros(SMALL, shape[1])
    alone[2] = rows[7]
    assert torch.equal(product(alone)[2], together[7])


@torch.no_grad()
def test_an_embedding_multiplies_as_a_head():
    table = nn.Embedding(9, 16)
    rows = torch.randn(SMALL, 16)
    torch.testing.assert_close(row_product(table)(rows), rows @ table.weight.t())


@torch.no_grad()
def test_weights_are_packed_once_and_again_when_they_have_changed():
    module, rows = made((24, 16)), torch.ones(SMALL, 16)
    before = row_product(module)
    assert row_product(module) is before
    module.weight.mul_(2)
    assert row_product(module) is not before
    torch.testing.assert_close(row_product(module)(rows), 2 * before(rows))
    module.weight = nn.Parameter(torch.zeros(24, 16))
    assert not bool(row_product(module)(rows).any())
