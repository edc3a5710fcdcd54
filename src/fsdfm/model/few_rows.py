"""Products of few rows, bit for bit the same whatever rows stand beside them.

Texts that are drawn position by position multiply one row each, and what that costs is reading the weights. So texts go
side by side, and the weights are packed once as the CPU's library wants to read them (oneDNN, where torch has it).

A product rounds by its number of rows, so it always has SMALL of them, and what is missing is filled up. LARGE at once
take less time; where that gives the same bits, which is tried once with every weight, as many rows go together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LARGE", "SMALL", "RowProduct", "filled", "row_product"]

SMALL, LARGE = 4, 16
_SEVERAL = 2 * SMALL  # more rows than these are worth a large product

_Product = Callable[[Tensor], Tensor]


def filled(count: int) -> int:
    """How many rows are computed for so many texts."""
    size = SMALL if count <= _SEVERAL else LARGE
    return -(-count // size) * size


class RowProduct:
    """What a module makes of rows [filled(n), C]: -> [filled(n), out_features]; no gradients, on a CPU."""

    def __init__(self, module: nn.Module):
        self.multiply = _packed(module) if isinstance(module, nn.Linear | nn.Embedding) else module
        self.alike = self._are_alike(module)

    def __call__(self, rows: Tensor) -> Tensor:
        """Row for row what it would be among any others."""
        size = SMALL if len(rows) <= _SEVERAL or not self.alike else LARGE
        if len(rows) == size:
            return self.multiply(rows)
        return torch.cat([self.multiply(part) for part in torch.split(rows, size)])

    @torch.no_grad()
    def _are_alike(self, module: nn.Module) -> bool:
        """Whether many rows at once give the bits of few."""
        width = module.embedding_dim if isinstance(module, nn.Embedding) else module.in_features
        assert isinstance(width, int)
        rows = torch.randn(LARGE, width, generator=torch.Generator().manual_seed(0))
        parts = torch.cat([self.multiply(part) for part in torch.split(rows, SMALL)])
        return torch.equal(self.multiply(rows), parts)


def _packed(module: nn.Linear | nn.Embedding) -> _Product:
    """x W^T + b with W packed, where there is something to pack it with; then W takes twice its memory."""
    weight = module.weight.detach()
    bias = None if isinstance(module, nn.Embedding) or module.bias is None else module.bias.detach()
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda rows: F.linear(rows, weight.to(rows.dtype), bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), SMALL)
    product: Any = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows: product(rows, packed, bias, "none", [], "")


_KEPT: WeakKeyDictionary[nn.Module, tuple[tuple[int, int], RowProduct]] = WeakKeyDictionary()


def row_product(module: nn.Module) -> RowProduct:
    """The product of a module, packed once; again when its weights have changed."""
    weight = getattr(module, "weight", None)
    state = (0, 0) if weight is None else (weight.data_ptr(), weight._version)
    kept = _KEPT.get(module)
    if kept is None or kept[0] != state:
        kept = state, RowProduct(module)
        _KEPT[module] = kept
    return kept[1]
