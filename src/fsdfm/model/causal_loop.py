"""One text through a causal head, position by position, with as few operations as the law allows.

A draw at t = 0 cannot be guessed, so every position is a pass of its own, and what it costs is the overhead of calling:
modules, views, masks. Here a pass is the same arithmetic on vectors, each product one call. For heads of Llama's style,
on a CPU, in float32; `CausalHead.settle` goes in windows elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.model.layers import Attention, Block, Cache, Mlp, Norm, Rotary

__all__ = ["VectorStack", "can_loop"]


def can_loop(blocks: nn.ModuleList, features: Tensor) -> bool:
    """Whether these blocks, over such features, are what `VectorStack` computes."""
    plain = features.device.type == "cpu" and features.dtype == torch.float32 and not blocks.training
    return plain and all(_is_plain(block) for block in blocks)


def _is_plain(block: nn.Module) -> bool:
    if not isinstance(block, Block) or not block.mlp.gated or block.attention.grouped:
        return False
    products = (block.attention.qkv, block.attention.out, block.mlp.into, block.mlp.out)
    return all(isinstance(part, nn.Linear) and part.weight.dtype == torch.float32 for part in products)


@dataclass
class _Layer:
    """The weights of a block, and the keys and values of the positions so far, [H, L, D] each."""

    attention: Attention
    mlp: Mlp
    norms: tuple[Norm, Norm]
    keys: Tensor
    values: Tensor

    def __call__(self, x: Tensor, rotary: Rotary, i: int) -> Tensor:
        """The block on position i: [C] -> [C]."""
        heads, width = self.attention.num_heads, self.attention.head_width
        qkv = torch.mv(self.attention.qkv.weight, _normed(x, self.norms[0])).view(3, heads, width)
        turned = torch.addcmul(qkv[:2].roll(width // 2, -1) * rotary[1][i], qkv[:2], rotary[0][i])
        self.keys[:, i], self.values[:, i] = turned[1], qkv[2]
        seen = F.scaled_dot_product_attention(turned[0][:, None], self.keys[:, : i + 1], self.values[:, : i + 1])
        x = torch.addmv(x, self.attention.out.weight, seen.reshape(-1))
        gate, up = torch.mv(self.mlp.into.weight, _normed(x, self.norms[1])).chunk(2)
        return torch.addmv(x, self.mlp.out.weight, F.silu(gate).mul_(up))


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return norm.normalise(x, norm.weight.shape, norm.weight, eps=norm.eps)


class VectorStack:
    """Causal blocks over one text of so many positions: call it for position 0, 1, 2, ..."""

    def __init__(self, blocks: nn.ModuleList, norm: Norm, rotary: Rotary):
        length, self.norm, self.rotary = len(rotary[0]), norm, rotary
        self.layers: list[_Layer] = []
        for block in blocks:
            assert isinstance(block, Block)
            shape = (block.attention.num_heads, length, block.attention.head_width)
            keys, values = torch.empty(shape), torch.empty(shape)
            norms = (block.norm_attention, block.norm_mlp)
            self.layers.append(_Layer(block.attention, block.mlp, norms, keys, values))

    def fill(self, caches: list[Cache]) -> None:
        """Take over keys and values of the first positions, [1, H, n, D] each: the next to call for is n."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.keys[:, : cache.length] = cache.keys[0, :, : cache.length]
            layer.values[:, : cache.length] = cache.values[0, :, : cache.length]

    def __call__(self, z: Tensor, i: int) -> Tensor:
        """g_i from z_i: [C] -> [C]."""
        for layer in self.layers:
            z = layer(z, self.rotary, i)
        return _normed(z, self.norm)
