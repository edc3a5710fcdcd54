"""The loop over positions of `causal_loop`, compiled by numba where that is installed: `pip install 'fsdfm[fast]'`.

A position of a lone text reads a few megabytes of weights, in a fraction of a millisecond; a hundred calls of torch
between them take longer than that. Here the loop is one function. It computes in float32 as torch does and draws by
float64 sums; products add over their inputs in order, four at a time, every text by itself, so no other changes it.
Its last digits are not torch's, so one text in some dozens is another one than without numba.

Weights that float16 holds exactly, as those of a model that was exported with `--half`, are kept and read so: half the
bytes, the same bits in what comes out.

What is compiled is kept on disk beside this file or, where that is not writable, in the user's cache; NUMBA_CACHE_DIR
names another place.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fsdfm.model.layers import Block, rotary_phases

if TYPE_CHECKING:
    from fsdfm.model.causal_loop import CausalParts, CausalTexts

__all__ = ["can_compile", "draw_texts"]

_COLUMNS = 64  # outputs that are summed at a time: four registers of AVX-512
_INPUTS = 4

Array = np.ndarray[Any, Any]


class _Weights(NamedTuple):
    """The weights of all layers, packed: [layers, blocks of outputs, inputs, _COLUMNS], float32 or bits of halves."""

    qkv: Array
    out: Array
    into: Array
    down: Array
    norms: Array  # [layers, 2, C]
    norm: Array  # [C]
    combine: Array  # [blocks, C, _COLUMNS]; none: [0, C, _COLUMNS]
    head: Array
    bias: Array  # [V]
    table: Array  # [V, C]


class _State(NamedTuple):
    """What the texts are told and what they have seen."""

    x: Array  # int64 [n, L]
    free: Array
    inputs: Array
    base: Array
    starts: Array
    ends: Array
    u: Array
    banned: Array  # [n, V]
    keys: Array  # [layers, n, H, D, L]
    values: Array  # [layers, n, H, L, D]
    cos: Array  # [L, D]
    sin: Array


@functools.cache
def _kernels() -> Any:
    """The compiled functions; None without numba."""
    if importlib.util.find_spec("numba") is None:
        return None
    from fsdfm.model import kernels

    return kernels


def can_compile(parts: CausalParts) -> bool:
    """Whether numba is installed and these are blocks of Llama's style with plain float32 products."""
    gated = all(isinstance(block, Block) and block.mlp.gated for block in parts.blocks)
    if _kernels() is None or not gated:
        return False
    products = [*_products(parts), parts.vocabulary, *([] if parts.combine is None else [parts.combine])]
    return all(_is_plain(each) for each in products)


def _is_plain(module: object) -> bool:
    if not isinstance(module, nn.Linear | nn.Embedding):
        return False
    return module.weight.dtype == torch.float32 and module.weight.shape[1] % _INPUTS == 0


def _products(parts: CausalParts) -> list[nn.Module]:
    blocks = [block for block in parts.blocks if isinstance(block, Block)]
    return [each for b in blocks for each in (b.attention.qkv, b.attention.out, b.mlp.into, b.mlp.out)]


def draw_texts(parts: CausalParts, texts: CausalTexts) -> Tensor:
    """`causal_loop.draw_texts`."""
    kernels, weights, state = _kernels(), _packed(parts), _state(parts, texts)
    eps, chosen = parts.norm.eps, texts.filter
    cut = chosen is not None and (chosen.top_k is not None or chosen.top_p is not None)
    temperature = 1.0 if chosen is None or cut else max(chosen.temperature, float(np.finfo(np.float32).tiny))
    if texts.banned is not None and not cut:
        _require(bool(kernels.run(weights, state, eps, temperature)))
        return texts.x
    for step in range(max(0, int((state.ends - state.starts).max()))):
        who = np.nonzero(state.starts + step < state.ends)[0]
        where = state.starts[who] + step
        logits = torch.from_numpy(kernels.read(weights, state, eps, who, where))
        asked = state.free[who, where]
        own, at = who[asked], where[asked]
        if not len(own):
            continue
        if texts.banned is not None:
            logits += texts.banned[own]
        elif texts.shaped is not None:
            logits = texts.shaped(logits, torch.from_numpy(own), torch.from_numpy(at))
        if cut and chosen is not None:
            logits = chosen(logits)
        drawn = kernels.pick_rows(logits.contiguous().numpy(), state.u[own, at], temperature)
        _require(bool((drawn >= 0).all()))
        state.x[own, at] = drawn
    return texts.x


def _require(found: bool) -> None:
    if not found:
        raise ValueError("a row of logits holds NaN or +inf, or -inf for every token: there is nothing to draw from")


_KEPT: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], _Weights]] = WeakKeyDictionary()


def _packed(parts: CausalParts) -> _Weights:
    """The weights as the kernels read them, packed once; again when one has changed."""
    combine = [] if parts.combine is None else [parts.combine]
    modules = [*_products(parts), *combine, parts.vocabulary, parts.norm, *_norms(parts)]
    bias = getattr(parts.vocabulary, "bias", None)
    tensors = [parts.table, *map(_weight, modules), *([] if bias is None else [bias])]
    stamp = tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))
    kept = _KEPT.get(parts.blocks)
    if kept is None or kept[0] != stamp:
        kept = stamp, _pack_all(parts)
        _KEPT[parts.blocks] = kept
    return kept[1]


def _norms(parts: CausalParts) -> list[nn.Module]:
    return [norm for b in parts.blocks if isinstance(b, Block) for norm in (b.norm_attention, b.norm_mlp)]


def _pack_all(parts: CausalParts) -> _Weights:
    head, width, norms = parts.vocabulary, parts.norm.weight.shape[0], [_weight(module) for module in _norms(parts)]
    assert isinstance(head, nn.Linear | nn.Embedding)
    combine = [] if parts.combine is None else [parts.combine]
    halves = _reads_halves() and all(_are_halves(_weight(each)) for each in (*_products(parts), *combine, head))
    products = [_pack(module, halves=halves) for module in _products(parts)]
    bias = getattr(head, "bias", None)
    return _Weights(
        qkv=np.stack(products[0::4]),
        out=np.stack(products[1::4]),
        into=np.stack(products[2::4]),
        down=np.stack(products[3::4]),
        norms=torch.stack(norms).view(-1, 2, width).float().numpy().copy(),
        norm=parts.norm.weight.detach().float().numpy().copy(),
        combine=_pack(combine[0], halves=halves) if combine else np.empty((0, width, _COLUMNS), products[0].dtype),
        head=_pack(head, halves=halves),
        bias=np.zeros(len(head.weight), np.float32) if bias is None else bias.detach().float().numpy().copy(),
        table=np.ascontiguousarray(parts.table.detach().float().numpy()),
    )


def _weight(module: Any) -> Tensor:
    found: Tensor = module.weight
    return found.detach()


@functools.cache
def _reads_halves() -> bool:
    """Whether the processor has an instruction that widens halves; without one every weight would be a call."""
    from llvmlite.binding import get_host_cpu_features

    return platform.machine().lower() in ("arm64", "aarch64") or bool(get_host_cpu_features().get("f16c"))


def _are_halves(weight: Tensor) -> bool:
    """Whether float16 holds all of a weight exactly."""
    return torch.equal(weight.half().float(), weight)


def _pack(module: nn.Module, *, halves: bool) -> Array:
    """W [N, K] as [blocks of N, K, _COLUMNS], filled up with zeros."""
    weight = _weight(module).numpy()
    outputs, inputs = weight.shape
    whole = np.zeros((-(-outputs // _COLUMNS) * _COLUMNS, inputs), np.float16 if halves else np.float32)
    whole[:outputs] = weight
    packed = np.ascontiguousarray(whole.reshape(-1, _COLUMNS, inputs).transpose(0, 2, 1))
    return packed.view(np.uint16) if halves else packed


def _state(parts: CausalParts, texts: CausalTexts) -> _State:
    count, length = texts.x.shape
    block = parts.blocks[0]
    assert isinstance(block, Block)
    heads, width = block.attention.num_heads, block.attention.head_width
    cos, sin = rotary_phases(length, width)
    keys = np.zeros((len(parts.blocks), count, heads, width, length), np.float32)
    values = np.zeros((len(parts.blocks), count, heads, length, width), np.float32)
    for text, caches in enumerate(texts.caches):
        for layer, cache in enumerate(caches):
            if cache.length:
                keys[layer, text, :, :, : cache.length] = cache.keys[0, :, : cache.length].transpose(1, 2).numpy()
                values[layer, text, :, : cache.length] = cache.values[0, :, : cache.length].numpy()
    vocab_size = parts.table.shape[0]
    banned = torch.zeros(count, vocab_size) if texts.banned is None else texts.banned
    base = torch.empty(0, length, texts.inputs.shape[2]) if texts.base is None else texts.base
    return _State(
        x=_array(texts.x),
        free=_array(texts.free),
        inputs=_array(texts.inputs),
        base=_array(base),
        starts=np.array(texts.starts, np.int64),
        ends=np.array(texts.ends, np.int64),
        u=_array(texts.u),
        banned=_array(banned),
        keys=keys,
        values=values,
        cos=_array(cos[:, 0]),
        sin=_array(sin[:, 0]),
    )


def _array(tensor: Tensor) -> Array:
    """Contiguous, on the same memory where it is so already."""
    found: Array = tensor.detach().contiguous().numpy()
    return found
