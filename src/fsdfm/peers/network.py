"""Our `DiT` with the peers' weights in it, run the ways the peers run theirs.

All of them are one trunk. What differs is what its time input carries (`Clock`), and three ways in that only they use:

    soft inputs        weights over the vocabulary instead of tokens: Duo's curriculum, softmax(w) E
    ragged times       a time per position [B, L]: HDLM under a hyperschedule
    hidden positions   an attention mask [L, L]: HDLM's settled and unborn blocks

    logits = run(model, x_t, clock(t))  # with a time per row and nothing hidden, bit for bit model(x_t, clock(t))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.flow.schedule import Time
from fsdfm.model import DiT
from fsdfm.model.layers import AdaptiveBlock, Rotary, rotary_phases, rotate
from fsdfm.peers.noising import LogLinear, Noising

__all__ = ["Clock", "ClockName", "blended_embedding", "embed_soft", "embed_sparse", "run"]

ClockName = Literal["none", "sigma", "time"]


@dataclass(frozen=True)
class Clock:
    """What a network's time input carries: 0 (MDLM, ReMDM, SDTT, epsilon-HDLM), sigma (SEDD, Duo, gamma-HDLM), or t."""

    name: ClockName = "time"
    noising: Noising = field(default_factory=LogLinear)

    def __post_init__(self) -> None:
        if self.name not in get_args(ClockName):
            raise ValueError(f"clock is {self.name!r}; allowed are {', '.join(map(repr, get_args(ClockName)))}")

    def __call__(self, t: Time) -> Tensor:
        """The number the network is told at our time t: float64."""
        time = torch.as_tensor(t, dtype=torch.float64)
        if self.name == "none":
            return torch.zeros_like(time)
        return self.noising.sigma(time) if self.name == "sigma" else time


def embed_soft(model: DiT, weights: Tensor) -> Tensor:
    """The mean embedding of weights over the vocabulary: [B, L, V] -> [B, L, C]."""
    mean: Tensor = weights.to(model.embedding.weight.dtype) @ model.embedding.weight
    return mean


def embed_sparse(model: DiT, tokens: Tensor, weights: Tensor) -> Tensor:
    """The same for weights at a few tokens: [B, L, k] twice -> [B, L, C]."""
    vectors = model.embedding(tokens)
    mean: Tensor = (weights[..., None].to(vectors) * vectors).sum(-2)
    return mean


def blended_embedding(model: DiT, x_t: Tensor, sigma: Tensor, *, gamma: float) -> Tensor:
    """gamma-HDLM's input: e^(-gamma sigma) E[x] + (1 - e^(-gamma sigma)) E[mask], sigma [B] or [B, L]."""
    kept = torch.exp(-gamma * sigma).to(model.embedding.weight.dtype)
    kept = (kept[:, None] if kept.ndim == 1 else kept)[..., None]
    blend: Tensor = kept * model.embedding(x_t) + (1 - kept) * model.embedding.weight[-1]
    return blend


def run(model: DiT, x_t: Tensor, s: Tensor, *, embedded: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
    """Logits [B, L, V] of a network told s, one per row [B] or one per position [B, L].

    embedded   in place of the tokens' embeddings: [B, L, C]
    hidden     bool [L, L], True where a position (row) may not look; one that may look nowhere looks everywhere alike
    """
    if s.ndim == 1 and embedded is None and hidden is None:
        return model(x_t, s)  # type: ignore[no-any-return]
    length = x_t.shape[1]
    told = s[:, None] if s.ndim == 1 else s
    conditions = [c.view(*told.shape, -1) for c in model.conditioning(told.flatten(), None)]
    rotary = rotary_phases(length, model.config.head_width, device=x_t.device)
    x = model.embedding(x_t) if embedded is None else embedded
    for block, c in zip(model.blocks, conditions[:-1], strict=True):
        assert isinstance(block, AdaptiveBlock)
        x = _block(block, x, c, rotary=rotary, hidden=hidden)
    shift, scale = model.modulation.linear(conditions[-1]).chunk(2, -1)
    return model.logits_at(model.norm(x, shift, scale))


def _block(block: AdaptiveBlock, x: Tensor, c: Tensor, *, rotary: Rotary, hidden: Tensor | None) -> Tensor:
    """`AdaptiveBlock` with a condition a position [B, 1 or L, cond_width] and an attention mask."""
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulation.linear(c).chunk(6, -1)
    y = _attention(block, block.norm_attention(x, shift_a, scale_a), rotary=rotary, hidden=hidden)
    x = x + gate_a * F.dropout(y, block.dropout, block.training)
    y = block.mlp(block.norm_mlp(x, shift_m, scale_m))
    out: Tensor = x + gate_m * F.dropout(y, block.dropout, block.training)
    return out


def _attention(block: AdaptiveBlock, x: Tensor, *, rotary: Rotary, hidden: Tensor | None) -> Tensor:
    attention = block.attention
    q, k, v = attention.qkv(x).view(*x.shape[:2], 3, attention.num_heads, attention.head_width).unbind(2)
    bias = None
    if hidden is not None:
        blind = hidden.all(-1, keepdim=True)
        bias = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill(hidden & ~blind, -torch.inf)
        q = torch.where(blind[:, None], 0.0, q)  # scores all 0: every position alike
    q, k = rotate(q, rotary), rotate(k, rotary)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    return attention.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
