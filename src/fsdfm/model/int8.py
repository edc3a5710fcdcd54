"""Linears in 8-bit integers, for CPUs: weights rounded once, activations as they come, products and sums exact.

Row i of the weights is rounded to w_i = s_i k_i, k_i in -127 .. 127, and a row of activations to x = a j with j in
-63 .. 63; then x . w_i = a s_i (j . k_i), and the sum of integers is exact. Seven bits of activation are what a CPU
without VNNI adds up without overflow (it adds pairs of products in 16 bits), and every machine computes the same.

Every row of activations has a scale of its own, so it is rounded alike whatever rows stand beside it: the batch changes
no token here either, and one loud position costs the others no digits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.model.architecture import Network
from fsdfm.model.layers import gelu_tanh, replace_linears
from fsdfm.model.stack import Transformer

__all__ = ["Int8Linear", "to_int8"]

_WEIGHT_LEVELS = 127
_LEVELS = 63
_ROWS = 64  # a few rows at a time stay in the cache while they are rounded
_ALIGN = 64  # outputs are filled up to a multiple of this, so that rows of the result are aligned


class Int8Linear(nn.Module):
    """x W^T + b with W and x rounded to 8 and 7 bits, a scale for every row of each: no gradients, CPU only."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = F.pad(linear.weight.detach().float(), (0, 0, 0, -self.out_features % _ALIGN))
        self._scales = weight.abs().amax(-1).div_(_WEIGHT_LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
        levels = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., out_features], float32."""
        rows = x.reshape(-1, self.in_features)
        largest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
        scales = largest.div_(_LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
        y = _product(_round(rows, scales), self._packed, self._scales, zeros=self._zeros)[:, : self.out_features]
        if self._bias is None:
            y.mul_(scales)
        else:
            torch.addcmul(self._bias, y, scales, out=y)
        return y.view(*x.shape[:-1], self.out_features)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs start .. stop-1; all are computed, for packed weights cannot be cut."""
        return cast(Tensor, self(x)[..., start:stop])

    def gelu(self, x: Tensor) -> Tensor:
        """`gelu_tanh` of the outputs."""
        return gelu_tanh(self(x))


def _round(rows: Tensor, scales: Tensor) -> Tensor:
    """round(x / scale) + 64 as bytes."""
    levels = torch.empty(rows.shape, dtype=torch.uint8)
    for part, own, into in zip(
        torch.split(rows, _ROWS), torch.split(scales, _ROWS), torch.split(levels, _ROWS), strict=True
    ):
        into.copy_((part / own).round_().add_(_LEVELS + 1))
    return levels


def _product(levels: Tensor, packed: Tensor, scales: Tensor, *, zeros: Tensor) -> Tensor:
    """(levels - 64) W^T in float32, W dequantised: [N, C] -> [N, out]."""
    product: Any = torch.ops.onednn.qlinear_pointwise
    plain: Any = (1.0, 0, torch.float32, "none", [], "")  # the result is not rounded, and nothing is done to it
    return cast(Tensor, product(levels, 1.0, _LEVELS + 1, packed, scales, zeros, None, *plain))


@torch.no_grad()
def to_int8(model: Network) -> None:
    """Replace, in place, the Linears of every block and the head by 8-bit ones; the rest is too small to matter.

    The model must be on a CPU, and it can no longer be trained or saved.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise ValueError("precision is int8, which needs a torch with oneDNN; use float32")
    if model.embedding.weight.device.type != "cpu":
        raise ValueError(f"precision is int8 on {model.embedding.weight.device}; allowed on a CPU only: use bfloat16")
    replace_linears(model, Int8Linear)
    if isinstance(model, Transformer):
        model.untie()
    assert isinstance(model.head, nn.Linear)
    model.add_module("head", Int8Linear(model.head))
    model.precision = "int8"
    model.requires_grad_(False).eval()
