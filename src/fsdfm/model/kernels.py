"""The functions that `fsdfm.model.compiled` runs; to import this file is to import numba."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["pick_rows", "read", "run"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    """The function as machine code; a product and a sum may be one operation (FMA), no more than that.

    It is kept on disk, unless there is no place to write to, as for a service without a home: then it is compiled anew
    in every process.
    """

    def make(*, cache: bool) -> _Function:
        made: _Function = njit(cache=cache, nogil=True, error_model="numpy", fastmath={"contract"})(function)
        return made

    try:
        return make(cache=True)
    except RuntimeError:  # "no locator available"
        return make(cache=False)


@intrinsic  # type: ignore[untyped-decorator]
def _number(_: Any, weight: Any) -> Any:
    """A weight as float32: itself, or the half that the bits of a uint16 are, which is exact."""

    def widen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        (bits,) = arguments
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType()) if weight == types.uint16 else bits

    return types.float32(weight), widen


@_compiled
def _multiply(x: Any, weights: Any, out: Any, count: int) -> None:
    """out[r] = W x[r] of the first rows; W is packed, [blocks of outputs, inputs, outputs], float32 or bits of halves.

    What it takes is reading W: halves are widened in registers, and summed as float32 are, bit for bit.
    """
    blocks, inputs, columns = weights.shape
    total = np.empty((count, columns), np.float32)
    for block in range(blocks):
        total[:] = 0
        for k in range(0, inputs, 4):
            for r in range(count):
                a, b, c, d = x[r, k], x[r, k + 1], x[r, k + 2], x[r, k + 3]
                for j in range(columns):
                    total[r, j] = (
                        total[r, j]
                        + a * _number(weights[block, k, j])
                        + b * _number(weights[block, k + 1, j])
                        + c * _number(weights[block, k + 2, j])
                        + d * _number(weights[block, k + 3, j])
                    )
        first = block * columns
        width = min(columns, out.shape[1] - first)
        for r in range(count):
            for j in range(width):
                out[r, first + j] = total[r, j]


@_compiled
def _normalise(x: Any, weight: Any, eps: float, out: Any) -> None:
    """RMSNorm of every row."""
    for r in range(len(x)):
        squares = 0.0
        for c in range(x.shape[1]):
            squares += np.float64(x[r, c]) * np.float64(x[r, c])
        scale = np.float32(1.0 / math.sqrt(squares / x.shape[1] + eps))
        for c in range(x.shape[1]):
            out[r, c] = x[r, c] * scale * weight[c]


@_compiled
def _turn(head: Any, cos: Any, sin: Any, out: Any) -> None:
    """The rotary turn of one head [D]; `sin` has its signs."""
    half = len(head) // 2
    for d in range(len(head)):
        out[d] = head[d] * cos[d] + head[(d + half) % len(head)] * sin[d]


@_compiled
def _attend(heads: Any, keys: Any, values: Any, turn: Any, i: int, out: Any) -> None:
    """One text at position i: q, k and v [3, H, D], keys [H, D, L] and values [H, L, D] so far -> out [H * D]."""
    cos, sin = turn
    count, width = heads.shape[1], heads.shape[2]
    q, weights, found = np.empty(width, np.float32), np.empty(i + 1, np.float32), np.empty(width, np.float32)
    scale = np.float32(1.0 / math.sqrt(width))
    for h in range(count):
        _turn(heads[1, h], cos, sin, q)
        for d in range(width):
            keys[h, d, i], values[h, i, d] = q[d], heads[2, h, d]
        _turn(heads[0, h], cos, sin, q)
        weights[:] = 0
        for d in range(width):
            a = q[d] * scale
            for j in range(i + 1):
                weights[j] += a * keys[h, d, j]
        top = weights.max()
        total = 0.0
        for j in range(i + 1):
            weights[j] = np.exp(weights[j] - top)
            total += weights[j]
        found[:] = 0
        for j in range(i + 1):
            a = weights[j]
            for d in range(width):
                found[d] += a * values[h, j, d]
        for d in range(width):
            out[h * width + d] = found[d] / np.float32(total)


@_compiled
def _block(x: Any, weights: Any, state: Any, layer: int, eps: float, who: Any, where: Any) -> None:
    """One block on a row per text, in place."""
    count, channels = x.shape
    normed, added = np.empty_like(x), np.empty_like(x)
    _normalise(x, weights.norms[layer, 0], eps, normed)
    heads = np.empty((count, 3 * channels), np.float32)
    _multiply(normed, weights.qkv[layer], heads, count)
    num_heads, width = state.keys.shape[2], state.keys.shape[3]
    for r in range(count):
        i = where[r]
        own = heads[r].reshape(3, num_heads, width)
        _attend(own, state.keys[layer, who[r]], state.values[layer, who[r]], (state.cos[i], state.sin[i]), i, normed[r])
    _multiply(normed, weights.out[layer], added, count)
    for r in range(count):
        for c in range(channels):
            x[r, c] += added[r, c]
    _normalise(x, weights.norms[layer, 1], eps, normed)
    hidden = weights.down.shape[2]
    inside, gated = np.empty((count, 2 * hidden), np.float32), np.empty((count, hidden), np.float32)
    _multiply(normed, weights.into[layer], inside, count)
    for r in range(count):
        for c in range(hidden):
            gate = inside[r, c]
            gated[r, c] = gate / (np.float32(1.0) + np.exp(-gate)) * inside[r, hidden + c]
    _multiply(gated, weights.down[layer], added, count)
    for r in range(count):
        for c in range(channels):
            x[r, c] += added[r, c]


@_compiled
def _enter(weights: Any, state: Any, who: Any, where: Any) -> Any:
    """E[x_{i-1}] + inputs_i of these texts at these positions: [n, C]."""
    x = np.empty((len(who), state.inputs.shape[2]), np.float32)
    for r in range(len(who)):
        text, i = who[r], where[r]
        x[r] = state.inputs[text, i]
        if i > 0:
            token = state.x[text, i - 1]
            for c in range(x.shape[1]):
                x[r, c] += weights.table[token, c]
    return x


@_compiled
def _leave(x: Any, weights: Any, state: Any, eps: float, who: Any, where: Any) -> Any:
    """The logits of the block's last rows: [n, V]."""
    count, channels = x.shape
    g, read = np.empty_like(x), np.empty_like(x)
    _normalise(x, weights.norm, eps, g)
    if len(weights.combine):
        _multiply(g, weights.combine, read, count)
    else:
        read[:] = g
    if len(state.base):
        for r in range(count):
            for c in range(channels):
                read[r, c] += state.base[who[r], where[r], c]
    logits = np.empty((count, len(weights.bias)), np.float32)
    _multiply(read, weights.head, logits, count)
    for r in range(count):
        for v in range(logits.shape[1]):
            logits[r, v] += weights.bias[v]
    return logits


@_compiled
def read(weights: Any, state: Any, eps: float, who: Any, where: Any) -> Any:
    """Go through the blocks with these texts at these positions: the logits of those that are free there, [m, V]."""
    x = _enter(weights, state, who, where)
    for layer in range(len(weights.qkv)):
        _block(x, weights, state, layer, eps, who, where)
    free = np.empty(len(who), np.bool_)
    for r in range(len(who)):
        free[r] = state.free[who[r], where[r]]
    return _leave(x[free], weights, state, eps, who[free], where[free])


@_compiled
def _pick(logits: Any, u: float, temperature: float) -> int:
    """The token v with F(v-1) <= u < F(v), its sums in float64; -1: there is nothing to draw from. Logits are lost."""
    top = -np.inf
    for v in range(len(logits)):
        if not logits[v] <= top:  # NaN is the top, too
            top = logits[v]
    total, last = 0.0, -1
    for v in range(len(logits)):
        logits[v] = np.exp((logits[v] - np.float32(top)) / np.float32(temperature))
        total += np.float64(logits[v])
        if logits[v] > 0:
            last = v
    if not math.isfinite(total):
        return -1
    target, reached = u * total, 0.0
    for v in range(last + 1):
        reached += np.float64(logits[v])
        if reached > target:
            return v
    return last


@_compiled
def pick_rows(logits: Any, u: Any, temperature: float) -> Any:
    """A token per row, -1 where there is nothing to draw from."""
    tokens = np.empty(len(logits), np.int64)
    for row in range(len(logits)):
        tokens[row] = _pick(logits[row], u[row], temperature)
    return tokens


@_compiled
def run(weights: Any, state: Any, eps: float, temperature: float) -> bool:
    """Draw all texts from their starts to their ends, in place; False: somewhere there is nothing to draw from."""
    steps = max(0, (state.ends - state.starts).max())
    for step in range(steps):
        who = np.nonzero(state.starts + step < state.ends)[0]
        where = state.starts[who] + step
        logits = read(weights, state, eps, who, where)
        row = 0
        for text, i in zip(who, where):  # noqa: B905  # numba's zip knows no strict
            if not state.free[text, i]:
                continue
            for v in range(logits.shape[1]):
                logits[row, v] += state.banned[text, v]
            token = _pick(logits[row], state.u[text, i], temperature)
            if token < 0:
                return False
            state.x[text, i] = token
            row += 1
    return True
