"""One text through a causal head, position by position, with as few operations as the law allows.

A draw at t = 0 cannot be guessed, so every position is a pass of its own, and what it costs is the overhead of calling:
modules, views, masks. Here a pass is the same arithmetic on vectors, each product one call. For heads of Llama's style,
on a CPU, in float32; `CausalHead.settle` goes in windows elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.model.layers import Block, Cache, Norm, Rotary

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


class _Layer:
    """The weights of a block at hand, and the keys and values of the positions so far: [2, H, L, D]."""

    def __init__(self, block: Block, length: int):
        attention, mlp = block.attention, block.mlp
        self.qkv, self.out = attention.qkv.weight, attention.out.weight
        self.into, self.down = mlp.into.weight, mlp.out.weight
        self.norms = (_normed(block.norm_attention), _normed(block.norm_mlp))
        self.shape = (3, attention.num_heads, attention.head_width)
        self.half = attention.head_width // 2
        self.seen = torch.empty(2, attention.num_heads, length, attention.head_width)

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor], i: int) -> Tensor:
        """The block on position i: [C] -> [C]; the rotation of q, k and v, which stays as it is, [3, 1, D] each."""
        cos, sin = turn
        heads = torch.mv(self.qkv, self.norms[0](x)).view(self.shape)
        turned = torch.addcmul(heads.roll(self.half, -1).mul_(sin), heads, cos)
        self.seen[:, :, i] = turned[1:]
        keys, values = self.seen[:, :, : i + 1]
        found = F.scaled_dot_product_attention(turned[0][:, None], keys, values)
        x = torch.addmv(x, self.out, found.reshape(-1))
        gate, up = torch.mv(self.into, self.norms[1](x)).chunk(2)
        return torch.addmv(x, self.down, F.silu(gate, inplace=True).mul_(up))


def _normed(norm: Norm) -> Callable[[Tensor], Tensor]:
    """The norm as a function of one vector."""
    normalise, shape, weight, eps = norm.normalise, norm.weight.shape, norm.weight, norm.eps
    return lambda x: normalise(x, shape, weight, eps=eps)


class VectorStack:
    """Causal blocks over one text of so many positions: call it for position 0, 1, 2, ..."""

    def __init__(self, blocks: nn.ModuleList, norm: Norm, rotary: Rotary):
        cos, sin = rotary
        still = torch.ones_like(cos), torch.zeros_like(sin)
        self.turns = [torch.stack([a, a, b], 1).unbind() for a, b in zip((cos, sin), still, strict=True)]
        self.norm = _normed(norm)
        self.layers = [_Layer(block, len(cos)) for block in blocks if isinstance(block, Block)]

    def fill(self, caches: list[Cache]) -> None:
        """Take over keys and values of the first positions, [1, H, n, D] each: the next to call for is n."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.seen[0, :, : cache.length] = cache.keys[0, :, : cache.length]
            layer.seen[1, :, : cache.length] = cache.values[0, :, : cache.length]

    def __call__(self, z: Tensor, i: int) -> Tensor:
        """g_i from z_i: [C] -> [C]."""
        turn = self.turns[0][i], self.turns[1][i]
        for layer in self.layers:
            z = layer(z, turn, i)
        return self.norm(z)
