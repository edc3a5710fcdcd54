"""Texts through causal blocks side by side, position by position, with as few operations as the law allows.

A draw at t = 0 cannot be guessed, so every position is a pass of its own, and what it costs is reading the weights and
the overhead of calling: modules, views, masks. Here a pass is the same arithmetic on a row per text, each product one
call that reads the weights for all of them (`few_rows`), attention one call, too. Where numba is installed, the loop is
compiled for blocks of Llama's style (`fsdfm.model.compiled`). On a CPU; `CausalHead.settle` goes in windows elsewhere.
What a text is does not depend on the texts beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.flow.categorical import Filter, RowDraws
from fsdfm.model import compiled
from fsdfm.model.few_rows import SMALL, filled, row_product
from fsdfm.model.layers import Block, Cache, Norm, Rotary, gelu_tanh, rotary_phases

__all__ = ["CausalParts", "CausalTexts", "Places", "RowStack", "are_plain", "can_loop", "draw_texts", "lockstep"]


def can_loop(blocks: nn.ModuleList, features: Tensor) -> bool:
    """Whether these blocks, over such features, are what `RowStack` computes."""
    plain = features.device.type == "cpu" and features.dtype == torch.float32 and not blocks.training
    return plain and all(isinstance(block, Block) and not block.attention.grouped for block in blocks)


def are_plain(blocks: nn.ModuleList) -> bool:
    """Whether these blocks have Llama's style and nothing but float32 Linears."""
    return all(_is_plain(block) for block in blocks)


def _is_plain(block: nn.Module) -> bool:
    if not isinstance(block, Block) or not block.mlp.gated or block.attention.grouped:
        return False
    products = (block.attention.qkv, block.attention.out, block.mlp.into, block.mlp.out)
    return all(isinstance(part, nn.Linear) and part.weight.dtype == torch.float32 for part in products)


@dataclass(frozen=True)
class Places:
    """Where texts stand: a position each, and which of the texts go on."""

    at: list[int]
    going: list[bool]

    @cached_property
    def same(self) -> int | None:
        """The position of all; None: they differ."""
        return self.at[0] if len(set(self.at)) == 1 else None

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """Texts and positions, to index with: int64 [n] each."""
        return torch.arange(len(self.at)), torch.tensor(self.at)

    def of(self, values: Tensor) -> Tensor:
        """What values [n, L, ...] say there: [n, ...]."""
        return values[self.index] if self.same is None else values[:, self.same]


def lockstep(starts: Sequence[int], ends: Sequence[int]) -> Iterator[Places]:
    """Positions of texts that go from their start to behind their end; who has ended waits at the last."""
    for step in range(max((end - start for start, end in zip(starts, ends, strict=True)), default=0)):
        going = [start + step < end for start, end in zip(starts, ends, strict=True)]
        yield Places([max(0, min(start + step, end - 1)) for start, end in zip(starts, ends, strict=True)], going)


class _Layer:
    """The products of a block at hand, and the keys and values of the positions so far: [2, n, H, L, D]."""

    def __init__(self, block: Block, texts: int, length: int):
        attention, mlp = block.attention, block.mlp
        self.qkv, self.out = row_product(attention.qkv), row_product(attention.out)
        self.into, self.down = row_product(mlp.into), row_product(mlp.out)
        self.norms = (_normed(block.norm_attention), _normed(block.norm_mlp))
        self.shape = (-1, 3, attention.num_heads, attention.head_width)
        self.gated, self.half = mlp.gated, attention.head_width // 2
        self.seen = torch.zeros(2, texts, attention.num_heads, length, attention.head_width)
        self.found = torch.zeros(filled(texts), attention.num_heads, 1, attention.head_width)

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor], places: Places) -> Tensor:
        """The block on a row per text: [rows, C] -> [rows, C]; the rotation of q, k and v, which stays as it is."""
        cos, sin = turn
        heads = self.qkv(self.norms[0](x)).view(self.shape)
        turned = torch.addcmul(heads.roll(self.half, -1).mul_(sin), heads, cos)
        x = self.out(self._attend(turned[: self.seen.shape[1]], places).flatten(1)).add_(x)
        inside = self.into(self.norms[1](x))
        if self.gated:
            gate, up = inside.chunk(2, -1)
            return self.down(F.silu(gate).mul_(up)).add_(x)
        return self.down(gelu_tanh(inside)).add_(x)

    def _attend(self, turned: Tensor, places: Places) -> Tensor:
        """What the texts' q, k and v [n, 3, H, D] find in the positions so far: [rows, H, 1, D]."""
        q, new = turned[:, 0, :, None], turned[:, 1:]
        if places.same is not None:
            self.seen[:, :, :, places.same] = new.transpose(0, 1)
            keys, values = self.seen[:, :, :, : places.same + 1]
            found = F.scaled_dot_product_attention(q, keys, values)
            if len(found) == len(self.found):
                return found
            self.found[: len(found)] = found
            return self.found
        texts, positions = places.index
        self.seen[:, texts, :, positions] = new
        for text, i in enumerate(places.at):
            own = slice(text, text + 1)
            keys, values = self.seen[:, own, :, : i + 1]
            self.found[own] = F.scaled_dot_product_attention(q[own], keys, values)
        return self.found


def _normed(norm: Norm) -> Callable[[Tensor], Tensor]:
    """The norm as a function of rows."""
    normalise, shape, weight, eps = norm.normalise, norm.weight.shape, norm.weight, norm.eps
    return lambda x: normalise(x, shape, weight, eps=eps)


class RowStack:
    """Causal blocks over some texts of so many positions: call it for one position of each text after the other."""

    def __init__(self, blocks: nn.ModuleList, norm: Norm, rotary: Rotary, *, texts: int):
        cos, sin = rotary
        still = torch.ones_like(cos), torch.zeros_like(sin)
        self.turns = [torch.stack([a, a, b], 1) for a, b in zip((cos, sin), still, strict=True)]  # [L, 3, 1, D]
        self.norm = _normed(norm)
        self.layers = [_Layer(block, texts, len(cos)) for block in blocks if isinstance(block, Block)]
        self.rows = torch.zeros(filled(texts), norm.weight.shape[0])
        self.texts = texts

    def fill(self, text: int, caches: list[Cache]) -> None:
        """Take over keys and values of a text's first positions, [1, H, n, D] each: its next position is n."""
        for layer, cache in zip(self.layers if caches[0].length else [], caches, strict=False):
            layer.seen[0, text, :, : cache.length] = cache.keys[0, :, : cache.length]
            layer.seen[1, text, :, : cache.length] = cache.values[0, :, : cache.length]

    def __call__(self, z: Tensor, places: Places) -> Tensor:
        """g from z, a row per text: [n, C] -> [filled(n), C], of which the first n rows are the texts'."""
        x = z
        if len(z) < len(self.rows):
            x = self.rows
            x[: len(z)] = z
        turn = self._turn(places)
        for layer in self.layers:
            x = layer(x, turn, places)
        return self.norm(x)

    def _turn(self, places: Places) -> tuple[Tensor, Tensor]:
        cos, sin = self.turns
        if places.same is not None:
            return cos[places.same], sin[places.same]
        at = places.at + [0] * (len(self.rows) - self.texts)
        return cos[at], sin[at]


@dataclass(frozen=True)
class CausalParts:
    """A law from left to right: p(x_i | x_<i) = softmax(V (base_i + W norm(blocks(E[x_{i-1}] + inputs_i))))."""

    blocks: nn.ModuleList
    norm: Norm
    table: Tensor  # E
    vocabulary: nn.Module | Callable[[Tensor], Tensor]  # V
    combine: nn.Module | None = None  # W; None: the identity


@dataclass(frozen=True)
class CausalTexts:
    """Texts to be drawn, in place.

    x        tokens, int64 [n, L]; what is not free, and what stands before a start or behind an end, stays
    free     bool [n, L]
    inputs   [n, L, C]; there is no token before position 0, and no E
    base     [n, L, C]; None: 0
    caches   keys and values of what stands before a text's start, by layers; empty where it is 0
    u        uniforms, float64 [n, L]
    banned   added to the logits of every text, 0 or -inf: [n, V]; None: `shaped` changes logits [m, V] instead, told
             which texts they are of, and at which positions, int64 [m] each
    """

    x: Tensor
    free: Tensor
    inputs: Tensor
    base: Tensor | None
    starts: list[int]
    ends: list[int]
    caches: list[list[Cache]]
    u: Tensor
    filter: Filter | None = None
    banned: Tensor | None = None
    shaped: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


@torch.no_grad()
def draw_texts(parts: CausalParts, texts: CausalTexts) -> Tensor:
    """x, drawn where it is free: texts side by side, position by position."""
    if compiled.can_compile(parts):
        return compiled.draw_texts(parts, texts)
    count, length = texts.x.shape
    head_width = parts.blocks[0].attention.head_width  # type: ignore[union-attr]
    stack = RowStack(parts.blocks, parts.norm, rotary_phases(length, head_width), texts=count)  # type: ignore[arg-type]
    for text, caches in enumerate(texts.caches):
        stack.fill(text, caches)
    combine = None if parts.combine is None else row_product(parts.combine)
    logits_of, draws = _vocabulary(parts), RowDraws(parts.table.shape[0], texts.filter, rows=count)
    free = texts.free.tolist()
    for places in lockstep(texts.starts, texts.ends):
        g = stack(_with_token_before(texts, parts.table, places), places)
        asked = [text for text, i in enumerate(places.at) if places.going[text] and free[text][i]]
        if asked:
            read = g if combine is None else combine(g)
            if texts.base is not None:
                read[:count] += places.of(texts.base)
            _draw_places(texts, logits_of(read)[:count], places, asked=asked, draws=draws)
    return texts.x


def _draw_places(texts: CausalTexts, logits: Tensor, places: Places, *, asked: list[int], draws: RowDraws) -> None:
    """Draw the texts that are asked for, from the logits of all."""
    (own, at), u = places.index, places.of(texts.u)
    if len(asked) < len(logits):
        logits, own, at, u = logits[asked], own[asked], at[asked], u[asked]
    if texts.banned is not None:
        logits = logits.add_(texts.banned[own])
    elif texts.shaped is not None:
        logits = texts.shaped(logits, own, at)
    texts.x[own, at] = draws(logits, u)


def _vocabulary(parts: CausalParts) -> Callable[[Tensor], Tensor]:
    """The vocabulary's head on rows as `few_rows` has them."""
    logits_of = parts.vocabulary
    if isinstance(logits_of, nn.Module):
        return row_product(logits_of)
    return lambda rows: torch.cat([logits_of(part) for part in torch.split(rows, SMALL)])


def _with_token_before(texts: CausalTexts, table: Tensor, places: Places) -> Tensor:
    """E[x_{i-1}] + inputs_i of the places, without E at position 0: [n, C]."""
    own = places.of(texts.inputs)
    if places.same is not None:
        return own + table[texts.x[:, places.same - 1]] if places.same else own
    number, at = places.index
    before = table[texts.x[number, (at - 1).clamp(min=0)]]
    return own + torch.where((at > 0)[:, None], before, 0.0)
