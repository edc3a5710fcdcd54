"""Clean context: text that is given, read once, and seen by what is written after it.

A *canvas model* writes a text canvas after canvas, C tokens each. What is written already is read as it is (under the
fixed condition t = 1) and block-causally: a token of canvas b sees canvases <= b of the clean text, so that its keys
and values never change and are computed once. The canvas that is being written sees the clean canvases before it, and
itself, noise and all, at every call. With a `window` of W tokens all of them see no further back than W/C canvases;
what was before reaches them only through the layers.

    clean i sees clean j      iff  b(j) <= b(i)  and  b(i) - b(j) <= W/C
    noised i sees clean j     iff  b(j) <  b(i)  and  b(i) - b(j) <= W/C          b(i) = floor(i / C)
    noised i sees noised j    iff  b(j) == b(i)

Training shows all canvases of a row at once under these masks, sampling reads them one after the other: the same
numbers (a test compares). Calls cost what the canvas costs, however long the text, plus the keys that it looks at.

In a next-token model the output for i comes from i-1, so that a canvas is led by the clean token before it, which is
one of the canvas: it has the canvas's condition and sees its noise. The first canvas has none, and its first token, the
beginning of the text, is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Beside", "CanvasPattern", "Context", "attend"]


@dataclass(frozen=True)
class CanvasPattern:
    """Who sees whom: `size` is C, `window` is W, None for all; `noised` whether queries are of canvases being written.

    Where there are both, the keys are those of the clean text [L] and then those of the noised one.

    led   whether a noised canvas has C + 1 tokens, the first of them the clean one before it; nobody sees that of the
          first canvas
    """

    size: int
    window: int | None = None
    noised: bool = False
    led: bool = False

    def num_clean(self, queries: int) -> int:
        """Tokens of the clean text beside so many queries."""
        return queries - queries // (self.size + 1) if self.led else queries

    def num_keys(self, queries: int) -> int:
        """What so many queries see, or do not."""
        return queries + self.num_clean(queries) if self.noised else queries

    def sees(self, i: Tensor, j: Tensor, clean: int) -> Tensor:
        """Whether query i sees key j, of which the first `clean` are of the clean text; bool like both broadcast."""
        own, other = i // (self.size + self.led), j // self.size
        near = own - other <= (own if self.window is None else self.window // self.size)
        if not self.noised:
            return (other <= own) & near
        beside = (own == (j - clean) // (self.size + self.led)) & ((j > clean) | (not self.led))
        return torch.where(j < clean, (other < own) & near, beside)

    def mask(self, queries: int, device: torch.device) -> Tensor:
        """Dense, for SDPA: bool [queries, keys]."""
        i, j = torch.arange(queries, device=device)[:, None], torch.arange(self.num_keys(queries), device=device)
        return self.sees(i, j, self.num_clean(queries))

    def block_mask(self, length: int, device: torch.device) -> Any:
        """The same for FlexAttention, which skips blocks that nobody sees."""
        return _flex_mask(self, length, str(device))


@lru_cache(maxsize=8)
def _flex_mask(pattern: CanvasPattern, length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001, PLR0917 (FlexAttention's signature)
        return pattern.sees(i, j, pattern.num_clean(length))

    return create_block_mask(sees, B=None, H=None, Q_LEN=length, KV_LEN=pattern.num_keys(length), device=device)


@dataclass
class Beside:
    """What one attention layer sees beside its own tokens, and what it leaves there.

    keys, values   [B, H, n, D] of the tokens before, turned by their positions; None: there are none
    pattern        who sees whom; None: everybody everything
    own            the keys and values of the tokens that passed, once they have
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    pattern: CanvasPattern | None = None
    own: tuple[Tensor, Tensor] | None = None

    def join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those before and these; these are kept."""
        self.own = keys, values
        if self.keys is None or self.values is None:
            return keys, values
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


@dataclass(frozen=True)
class Context:
    """The keys and values of a text that was read: one `Beside` per layer.

    start     the position of the first token that sees it
    pattern   who sees whom; None: everybody everything
    before    the last token before every canvas that sees it, [B, canvases]; None: it is not asked for
    """

    layers: tuple[Beside, ...]
    start: int
    pattern: CanvasPattern | None = None
    before: Tensor | None = None

    def lead(self, x_t: Tensor) -> tuple[Tensor, Tensor]:
        """(canvases [B, n C] with the token before each, [B, n (C + 1)]; their positions from start - 1 on)."""
        assert self.before is not None
        count, length = self.before.shape[1], x_t.shape[1]
        size = length // count
        canvases = torch.cat([self.before[:, :, None], x_t.view(-1, count, size)], 2)
        first = torch.arange(0, length, size, device=x_t.device)[:, None]
        return canvases.flatten(1), (first + torch.arange(size + 1, device=x_t.device)).flatten()

    def seen(self) -> tuple[Beside, ...]:
        """For a pass of what is written after it."""
        return self.beside(self.pattern)

    def beside(self, pattern: CanvasPattern | None = None) -> tuple[Beside, ...]:
        """For a pass that sees this text; a pass leaves its own keys in its own objects."""
        return tuple(Beside(layer.keys, layer.values, pattern) for layer in self.layers)

    @property
    def length(self) -> int:
        """Tokens whose keys are kept."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[2]

    def extended(self, passed: tuple[Beside, ...], *, most: int | None = None, before: Tensor | None = None) -> Context:
        """With the tokens of a pass appended; at most the last `most` are kept."""
        layers, count = [], 0
        for layer in passed:
            assert layer.own is not None
            count = layer.own[0].shape[2]
            keys, values = layer.join(*layer.own)
            if most is not None:
                keys, values = keys[:, :, -most:].contiguous(), values[:, :, -most:].contiguous()
            layers.append(Beside(keys, values))
        return Context(tuple(layers), self.start + count, before=before)

    @classmethod
    def empty(cls, num_blocks: int) -> Context:
        """Nothing was read."""
        return cls(tuple(Beside() for _ in range(num_blocks)), 0)


def attend(q: Tensor, k: Tensor, v: Tensor, *, pattern: CanvasPattern | None, grouped: bool) -> Tensor:
    """Attention of q [B, H, L, D] to k, v under a pattern: canvas by canvas on a CPU, FlexAttention on a GPU."""
    if pattern is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    if q.device.type == "cpu":
        return by_canvas(q, k, v, pattern=pattern, grouped=grouped)
    if q.device.type == "cuda":
        return flex(q, k, v, pattern=pattern, grouped=grouped)
    return F.scaled_dot_product_attention(q, k, v, pattern.mask(q.shape[2], q.device), enable_gqa=grouped)


def by_canvas(q: Tensor, k: Tensor, v: Tensor, *, pattern: CanvasPattern, grouped: bool) -> Tensor:
    """The same without a mask: a canvas is shown what it sees, and what nobody sees costs nothing.

    In float32: the gradients of torch's attention on a CPU take twice as long in bfloat16.
    """
    given, (q, k, v) = q.dtype, (x.float() for x in (q, k, v))
    (size, own), clean = (pattern.size, pattern.size + pattern.led), pattern.num_clean(q.shape[2])
    read = [torch.split(x[:, :, :clean], size, 2) for x in (k, v)]
    written = [torch.split(x[:, :, clean:], own, 2) for x in (k, v)]
    found = []
    for canvas, asking in enumerate(torch.split(q, own, 2)):
        first = 0 if pattern.window is None else max(0, canvas - pattern.window // size)
        seen = [each[first : canvas + (not pattern.noised)] for each in read]
        if pattern.noised:
            hidden = int(pattern.led and canvas == 0)
            seen = [(*before, each[canvas][:, :, hidden:]) for before, each in zip(seen, written, strict=True)]
        keys, values = (torch.cat(each, 2) for each in seen)
        with torch.autocast(q.device.type, enabled=False):
            found.append(F.scaled_dot_product_attention(asking, keys, values, enable_gqa=grouped))
    return torch.cat(found, 2).to(given)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(q: Tensor, k: Tensor, v: Tensor, *, pattern: CanvasPattern, grouped: bool) -> Tensor:
    """The same by FlexAttention, compiled on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = _compiled() if q.device.type == "cuda" else flex_attention
    found: Tensor = run(q, k, v, block_mask=pattern.block_mask(q.shape[2], q.device), enable_gqa=grouped)
    return found
