"""Filling a network that is still on the meta device, part by part, in the precision that it will have.

A matrix is read, used or rounded, and let go before the next, so the peak is what the network will occupy (`num_bytes`)
and one of its matrices in float32. For LLaDA-8B that is 32.1 GB in float32, 16.0 in bfloat16 and 8.5 in int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fsdfm.model.bfloat16 import Bfloat16Linear
from fsdfm.model.int8 import Int8Linear
from fsdfm.model.layers import Attention, Mlp
from fsdfm.model.stack import Transformer, TransformerConfig

__all__ = ["Precision", "fill_network", "num_bytes"]

Precision = Literal["float32", "bfloat16", "int8"]


@torch.no_grad()
def fill_network(model: Transformer, tensors: Mapping[str, Tensor], precision: Precision = "float32") -> None:
    """Give a network on the meta device its weights, read from `tensors` one by one.

    float32    to use or to train
    bfloat16   Linears of blocks and head and the embedding, as published; norms, residual stream, attention float32
    int8       those Linears in 8 bits, the embedding in bfloat16; on a CPU

    The last two are for use only.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; allowed are {', '.join(get_args(Precision))}")
    small = precision != "float32"
    for name in [name for name, _ in model.named_modules()]:  # a list of modules would keep those that are replaced
        module = model.get_submodule(name)
        _fill(module, name, tensors, dtype=torch.bfloat16 if small and module is model.embedding else torch.float32)
        if small and isinstance(module, Attention | Mlp):
            for child, part in list(module.named_children()):
                setattr(module, child, _recast(part, precision))
    if small:
        model.untie()
        model.add_module("head", _recast(model.head, precision))
        model.precision = precision
        model.requires_grad_(False)


def _fill(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Give a module its own weights, and those of the Linears that an attention or MLP consists of."""
    parts = [(prefix, module)]
    if isinstance(module, Attention | Mlp):
        parts += [(f"{prefix}.{name}", child) for name, child in module.named_children()]
    for place, part in parts:
        for name, empty in list(part.named_parameters(recurse=False)):
            if empty.is_meta:
                value = tensors[f"{place}.{name}"].to(dtype).contiguous()
                if not bool(torch.isfinite(value).all()):
                    raise ValueError(
                        f"the weights {place}.{name} hold NaN or infinity; the file is spoilt: get it again"
                    )
                setattr(part, name, nn.Parameter(value))


def _recast(linear: nn.Module, precision: Precision) -> nn.Module:
    assert isinstance(linear, nn.Linear)
    return Bfloat16Linear(linear) if precision == "bfloat16" else Int8Linear(linear)


def num_bytes(config: TransformerConfig, precision: Precision = "float32") -> int:
    """Bytes of a model built so: 4 per number; embedding and Linears of blocks and head 2, in int8 those Linears 1."""
    with torch.device("meta"):
        model = Transformer(config)
    small = {
        id(part) for module in model.modules() if isinstance(module, Attention | Mlp) for part in module.children()
    }
    if not config.tied:
        small |= {id(model.head)}
    size = 0
    for module in model.modules():
        count = sum(value.numel() for value in module.parameters(recurse=False))
        width = 1 if precision == "int8" and module is not model.embedding else 2
        size += count * (width if precision != "float32" and (id(module) in small or module is model.embedding) else 4)
    return size + (config.vocab_size * config.width if config.tied and precision == "int8" else 0)
