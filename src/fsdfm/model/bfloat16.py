"""Linears in bfloat16, for CPUs that multiply it (avx512_bf16, amx_bf16): twice and more the speed of float32.

The weights of the blocks are rounded to 8 significant bits once, activations as they enter a product; sums are float32
inside it, and its result is rounded once more. The residual stream, norms, attention and the head stay float32: there a
rounding would reach every logit.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.model.architecture import Network
from fsdfm.model.layers import gelu_tanh, replace_linears

__all__ = ["Bfloat16Linear", "multiplies_bfloat16", "to_bfloat16"]


class Bfloat16Linear(nn.Module):
    """x W^T + b with W, b and x rounded to bfloat16: no gradients."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = linear.weight.detach().to(torch.bfloat16)
        self._bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., out_features], in the precision of x."""
        return self.part(x, 0, self.out_features)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs start .. stop-1."""
        bias = None if self._bias is None else self._bias[start:stop]
        return F.linear(x.to(torch.bfloat16), self._weight[start:stop], bias).to(x.dtype)

    def gelu(self, x: Tensor) -> Tensor:
        """`gelu_tanh` of the outputs."""
        return gelu_tanh(self(x))


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; elsewhere it is computed all the same, more slowly than float32."""
    features = torch.cpu.get_capabilities()
    return any(cast(bool, features.get(name, False)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@torch.no_grad()
def to_bfloat16(model: Network) -> None:
    """Replace, in place, the Linears of every block by bfloat16 ones.

    The model must be on a CPU (elsewhere there is autocast), and it can no longer be trained or saved.
    """
    if model.embedding.weight.device.type != "cpu":
        raise ValueError(
            f"to_bfloat16 is for a CPU and the model on {model.embedding.weight.device}; use autocast there"
        )
    replace_linears(model, Bfloat16Linear)
    model.precision = "bfloat16"
    model.requires_grad_(False).eval()
