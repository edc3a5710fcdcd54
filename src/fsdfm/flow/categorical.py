"""The exact categorical draw: one uniform per row, no random number per vocabulary entry, no second [N, V] tensor.

Inverse CDF in two levels. A row's weights e_v = exp(logit_v - max) are summed in blocks of a few hundred tokens; the
block in which the target u * total falls is found first, then the token inside it. Sums are float64 (or, where the
device has none, unevaluated pairs of float32), and u has 52 random bits, so a token of probability 1e-12 has an
interval of its own and is returned for the u inside it. Gumbel-max in float32 and `torch.rand` in float32 (24 bits)
silently never return such tokens.

Rows are worked on a few at a time in one small buffer that stays in the cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fsdfm.checks import require_number, require_whole

__all__ = ["CompensatedSums", "Draw", "Filter", "Float64Sums", "RowDraws", "Sums", "draw"]

_BLOCK = 256  # tokens a first-level block
_BUFFER_CPU = 1 << 20  # entries of the working buffer: 4 MiB of float32 stay in the cache
_BUFFER_GPU = 1 << 26


@dataclass(frozen=True)
class Filter:
    """What is done to the logits before anybody uses them: temperature, then top-k, then top-p.

    The probability of staying and the destination are both taken from the filtered distribution. With a
    `final_temperature` a sampler goes from the one temperature to the other in equal strides, step by step (`at`).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    final_temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "final_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < require_number(name, value, "finite numbers > 0") < math.inf:
                raise ValueError(f"{name} is {value}; allowed are finite numbers > 0")
        if self.top_k is not None:
            require_whole("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < require_number("top_p", self.top_p, "0 < top_p <= 1") <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed are 0 < top_p <= 1 (0 would filter out every token)")

    def at(self, step: int, steps: int) -> Filter:
        """The filter of step number `step` of `steps`, the first being 0; a single step has the first temperature."""
        if self.final_temperature is None:
            return self
        share = step / max(1, steps - 1)
        temperature = self.temperature + share * (self.final_temperature - self.temperature)
        return replace(self, temperature=temperature, final_temperature=None)

    def __call__(self, logits: Tensor) -> Tensor:
        """Filtered logits [N, V] in place: removed tokens become -inf, the likeliest token always stays."""
        if self.temperature != 1:
            least = torch.finfo(logits.dtype).tiny  # a smaller temperature would be 0, and the likeliest token 0 / 0
            logits.sub_(logits.amax(-1, keepdim=True)).div_(max(self.temperature, least))  # so it cannot overflow
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            removed = torch.ones_like(logits, dtype=torch.bool)
            removed.scatter_(-1, logits.topk(self.top_k, dim=-1).indices, False)
            logits.masked_fill_(removed, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True, stable=True)
            probs = torch.softmax(ordered, -1)
            mass_before = probs.cumsum(-1) - probs
            removed = mass_before >= self.top_p
            removed[:, 0] = False
            logits.masked_fill_(removed.gather(-1, order.argsort(-1)), -math.inf)
        return logits


class Sums(ABC):
    """An arithmetic for sums of weights: items are tensors of some representation, the last axis is summed over."""

    @abstractmethod
    def lift(self, weights: Tensor) -> Tensor:
        """Floating-point weights [..., n] in this representation."""

    @abstractmethod
    def total(self, weights: Tensor) -> Tensor:
        """The sum over the last axis of floating-point weights [..., n]."""

    @abstractmethod
    def cumulate(self, items: Tensor) -> Tensor:
        """Cumulative sums over the last axis of items [..., n]."""

    @abstractmethod
    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b."""

    @abstractmethod
    def scale(self, u: Tensor, item: Tensor) -> Tensor:
        """u * item for float64 uniforms u."""

    @abstractmethod
    def value(self, item: Tensor) -> Tensor:
        """An item as an ordinary floating-point number."""

    @abstractmethod
    def pick(self, items: Tensor, index: Tensor) -> Tensor:
        """items[..., index] for one index [...] an item row."""

    @abstractmethod
    def spread(self, item: Tensor) -> Tensor:
        """A new axis of size 1 behind the last summed axis."""


class Float64Sums(Sums):
    """Sums in float64."""

    def lift(self, weights: Tensor) -> Tensor:
        """Converted."""
        return weights.to(torch.float64)

    def total(self, weights: Tensor) -> Tensor:
        """Summed in float64, whatever the weights are."""
        return weights.sum(-1, dtype=torch.float64)

    def cumulate(self, items: Tensor) -> Tensor:
        """The library's cumulative sum."""
        return items.cumsum(-1)

    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        """The plain difference."""
        return a - b

    def scale(self, u: Tensor, item: Tensor) -> Tensor:
        """The plain product."""
        return u.to(item.device) * item

    def value(self, item: Tensor) -> Tensor:
        """Itself."""
        return item

    def pick(self, items: Tensor, index: Tensor) -> Tensor:
        """Gathered."""
        return items.gather(-1, index[..., None])[..., 0]

    def spread(self, item: Tensor) -> Tensor:
        """A last axis of size 1."""
        return item[..., None]


class CompensatedSums(Sums):
    """Sums as unevaluated pairs high + low of float32, about 48 bits, for devices without float64.

    A pair is a trailing axis of size 2.
    """

    def lift(self, weights: Tensor) -> Tensor:
        """Paired with a zero."""
        return torch.stack([weights, torch.zeros_like(weights)], -1)

    def total(self, weights: Tensor) -> Tensor:
        """A tree of error-free additions."""
        pairs = self.lift(weights)
        while pairs.shape[-2] > 1:
            if pairs.shape[-2] % 2:
                pairs = torch.nn.functional.pad(pairs, (0, 0, 0, 1))
            pairs = _add(pairs[..., ::2, :], pairs[..., 1::2, :])
        return pairs[..., 0, :]

    def cumulate(self, items: Tensor) -> Tensor:
        """An inclusive scan by doubling."""
        shift = 1
        while shift < items.shape[-2]:
            shifted = _add(items[..., shift:, :], items[..., :-shift, :])
            items = torch.cat([items[..., :shift, :], shifted], -2)
            shift *= 2
        return items

    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        """Error-free in the high parts."""
        return _add(a, -b)

    def scale(self, u: Tensor, item: Tensor) -> Tensor:
        """Dekker's product of two pairs; u is split while it still is float64."""
        high = u.to(torch.float32)
        low = (u - high.to(torch.float64)).to(torch.float32).to(item.device)
        high = high.to(item.device)
        product = high * item[..., 0]
        (a1, a2), (b1, b2) = _split(high), _split(item[..., 0])
        error = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2
        return _normalise(product, error + high * item[..., 1] + low * item[..., 0])

    def value(self, item: Tensor) -> Tensor:
        """The pair rounded to float32."""
        return item.sum(-1)

    def pick(self, items: Tensor, index: Tensor) -> Tensor:
        """Gathered, both halves."""
        return items.gather(-2, index[..., None, None].expand(*index.shape, 1, 2))[..., 0, :]

    def spread(self, item: Tensor) -> Tensor:
        """An axis of size 1 before the pair."""
        return item[..., None, :]


def _normalise(high: Tensor, low: Tensor) -> Tensor:
    total = high + low
    return torch.stack([total, low - (total - high)], -1)


def _add(a: Tensor, b: Tensor) -> Tensor:
    """Knuth's error-free addition of the high parts; the low parts join the error."""
    high = a[..., 0] + b[..., 0]
    virtual = high - a[..., 0]
    error = (a[..., 0] - (high - virtual)) + (b[..., 0] - virtual)
    return _normalise(high, error + a[..., 1] + b[..., 1])


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dekker's split of a float32 into two halves of 12 bits."""
    scaled = x * 4097.0
    high = scaled - (scaled - x)
    return high, x - high


def sums_for(device: torch.device) -> Sums:
    """Float64 sums wherever the device has float64."""
    return CompensatedSums() if device.type == "mps" else Float64Sums()


class Draw(NamedTuple):
    """Drawn tokens, int64 [N], and log p of the excluded token before its exclusion, [N], where one was excluded."""

    tokens: Tensor
    log_p_excluded: Tensor | None


@torch.no_grad()
def draw(
    logits: Tensor,
    u: Tensor,
    *,
    rows: Tensor | None = None,
    exclude: Tensor | None = None,
    forbidden: int | None = None,
    filter: Filter | None = None,
    sums: Sums | None = None,
) -> Draw:
    """Draw one token per row from softmax(logits): the token v with F(v-1) <= u < F(v), F the cumulative distribution.

    logits     [M, V], never changed
    u          uniforms in (0, 1), float64 [N]
    rows       which rows of `logits` to draw from, int64 [N]; None means every row once (N = M)
    exclude    a token per row, int64 [N], that is not drawn: p renormalised over the others; its log p is returned.
               Where it is the only possible token it is returned all the same.
    forbidden  a token that no row may draw and that has no probability, such as the mask
    """
    num_rows = len(logits) if rows is None else len(rows)
    vocab_size = logits.shape[-1] if logits.ndim == 2 else 0
    if vocab_size == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; it must be [rows, vocabulary] with at least 1 token")
    if u.shape != (num_rows,) or u.dtype != torch.float64:
        raise ValueError(
            f"u is {u.dtype} {tuple(u.shape)}; one float64 uniform for each of the {num_rows} rows is needed"
        )
    if not bool(((u > 0) & (u < 1)).all()):
        raise ValueError("a uniform is outside the open interval (0, 1)")
    if exclude is not None and (exclude.shape != u.shape or not _are_tokens(exclude, vocab_size)):
        raise ValueError(f"exclude must be one token per row, [{num_rows}] of 0 .. {vocab_size - 1}")
    if forbidden is not None and not 0 <= forbidden < vocab_size:
        raise ValueError(f"forbidden is {forbidden}; allowed are tokens 0 .. {vocab_size - 1}")
    sums = sums or sums_for(logits.device)
    size = _BUFFER_CPU if logits.device.type == "cpu" else _BUFFER_GPU
    chunk = max(1, min(num_rows, size // vocab_size))
    num_blocks = -(-vocab_size // _BLOCK)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    buffer = torch.zeros(chunk, num_blocks * _BLOCK, dtype=dtype, device=logits.device)
    drawn = [
        _draw_chunk(
            _load(buffer, logits, rows, chunk=slice(start, start + chunk), forbidden=forbidden, filter=filter),
            u[start : start + chunk],
            exclude[start : start + chunk] if exclude is not None else None,
            sums=sums,
        )
        for start in range(0, num_rows, chunk)
    ]
    if not drawn:
        empty = torch.empty(0, device=logits.device)
        return Draw(empty.to(torch.int64), empty if exclude is not None else None)
    log_p = [part.log_p_excluded for part in drawn if part.log_p_excluded is not None]
    return Draw(torch.cat([part.tokens for part in drawn]), torch.cat(log_p) if log_p else None)


class RowDraws:
    """`draw` for few rows of the same width again and again, on a CPU: the same tokens, without checks and allocations.

    draws = RowDraws(vocab_size, filter, rows=16)  # at most
    tokens = draws(logits, u)  # logits [n, V] in float32, uniforms u [n] in float64: int64 [n]
    """

    def __init__(self, vocab_size: int, filter: Filter | None = None, *, rows: int = 1):
        self.filter = filter
        self.buffer = torch.zeros(rows, -(-vocab_size // _BLOCK) * _BLOCK)
        self.weights, self.blocks = self.buffer[:, :vocab_size], self.buffer.view(rows, -1, _BLOCK)

    def __call__(self, logits: Tensor, u: Tensor) -> Tensor:
        """The token v with F(v-1) <= u < F(v) of every row."""
        weights, blocks, logits = self.weights[: len(logits)], self.blocks[: len(logits)], logits.float()
        if self.filter is not None:
            logits = self.filter(weights.copy_(logits))
        torch.sub(logits, logits.amax(-1, keepdim=True), out=weights).exp_()
        totals = blocks.sum(-1, dtype=torch.float64)
        cumulative = totals.cumsum(-1)
        total = cumulative[:, -1]
        if not math.isfinite(float(total.sum())):
            raise ValueError(
                "a row of logits holds NaN or +inf, or -inf for every token: there is nothing to draw from"
            )
        block, target = _find_quickly(totals, cumulative, u * total)
        inside = blocks[torch.arange(len(blocks)), block].to(torch.float64)
        return block * _BLOCK + _find_quickly(inside, inside.cumsum(-1), target)[0]


def _find_quickly(items: Tensor, cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`_find` in float64: where a sum first exceeds the target there is an item of positive weight."""
    index = torch.searchsorted(cumulative, target[:, None], right=True)
    if int(index.max()) == items.shape[-1]:
        return _find(items, cumulative, target, sums=Float64Sums())
    before = cumulative.gather(-1, index).sub_(items.gather(-1, index))
    return index[:, 0], target - before[:, 0]


def _are_tokens(tokens: Tensor, vocab_size: int) -> bool:
    return bool(((tokens >= 0) & (tokens < vocab_size)).all())


def _load(
    buffer: Tensor, logits: Tensor, rows: Tensor | None, *, chunk: slice, forbidden: int | None, filter: Filter | None
) -> Tensor:
    """The unnormalised weights exp(logit - max) of some rows, in the buffer: [n, blocks, _BLOCK], padded with 0."""
    picked = (logits[chunk] if rows is None else logits[rows[chunk]]).to(buffer.dtype)  # before any difference is taken
    weights = buffer[: len(picked), : logits.shape[-1]]
    if forbidden is not None or filter is not None:
        picked = weights.copy_(picked)
        if forbidden is not None:
            picked[:, forbidden] = -math.inf
        if filter is not None:
            filter(picked)
    torch.sub(picked, picked.amax(-1, keepdim=True), out=weights).exp_()
    return buffer[: len(picked)].view(len(picked), -1, _BLOCK)


def _draw_chunk(blocks: Tensor, u: Tensor, exclude: Tensor | None, *, sums: Sums) -> Draw:
    flat = blocks.view(len(blocks), -1)
    if exclude is not None:
        excluded_weight = flat.gather(-1, exclude[:, None])[:, 0]
        flat.scatter_(-1, exclude[:, None], 0.0)
    block_totals = sums.total(blocks)
    cumulative = sums.cumulate(block_totals)
    last = torch.full_like(u, blocks.shape[1] - 1, dtype=torch.int64, device=blocks.device)
    total = sums.pick(cumulative, last)
    rest_of_mass = sums.value(total)
    if not bool(torch.isfinite(rest_of_mass).all()):
        raise ValueError("a row of logits holds NaN or +inf, or -inf for every token: there is nothing to draw from")
    block, target = _find(block_totals, cumulative, sums.scale(u, total), sums=sums)
    weights = sums.lift(blocks[torch.arange(len(blocks), device=blocks.device), block])
    within, _ = _find(weights, sums.cumulate(weights), target, sums=sums)
    tokens = block * _BLOCK + within
    if exclude is None:
        return Draw(tokens, None)
    # log p = -log(1 + rest/e) keeps its digits when p is nearly 1, where log(e / total) would not.
    log_p = -torch.log1p(rest_of_mass / excluded_weight.to(rest_of_mass.dtype))
    return Draw(torch.where(rest_of_mass > 0, tokens, exclude), log_p)


def _find(items: Tensor, cumulative: Tensor, target: Tensor, *, sums: Sums) -> tuple[Tensor, Tensor]:
    """The first item of positive weight whose cumulative weight exceeds the target, and the target's rest inside it.

    Where rounding leaves no such item, the last one of positive weight: an item without weight is never found.
    """
    positive = sums.value(items) > 0
    reached = positive & (sums.value(sums.subtract(cumulative, sums.spread(target))) > 0)
    last_positive = positive.shape[-1] - 1 - positive.flip(-1).to(torch.uint8).argmax(-1)
    index = torch.where(reached.any(-1), reached.to(torch.uint8).argmax(-1), last_positive)
    before = sums.subtract(sums.pick(cumulative, index), sums.pick(items, index))
    return index, sums.subtract(target, before)
