"""The parts of a transformer: norms, rotary attention, MLPs and the two kinds of block.

Every matrix product is one `nn.Linear` (Q, K and V fused; gate and up of SwiGLU fused); attention is SDPA only. The
style names a family of blocks: `paper` is LayerNorm without bias and a GELU MLP with biases, `llama` is RMSNorm and
SwiGLU without biases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.files import did_you_mean
from fsdfm.model.context import Beside, attend

__all__ = [
    "AdaptiveBlock",
    "Attention",
    "Block",
    "Cache",
    "Mlp",
    "Modulation",
    "Norm",
    "Projection",
    "Rotary",
    "RotaryScaling",
    "Sinusoid",
    "StackConfig",
    "Style",
    "draw_normal",
    "embedding",
    "gelu_tanh",
    "initialise",
    "linear",
    "replace_linears",
    "rotary_phases",
    "rotate",
]

Style = Literal["paper", "llama"]
Rotary = tuple[Tensor, Tensor]
_Config = TypeVar("_Config", bound="StackConfig")

ROTARY_BASE = 10000.0
LARGEST_FACTOR = 2**16  # by which texts may be longer than those of training
INIT_STD = 0.02
SINUSOID_WIDTH = 256
SINUSOID_BASE = 10000.0
TIME_SCALE = 1000.0  # t in [0, 1] turns the waves as far as a thousand steps would
GELU_SCALE, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715
_GELU_ROWS = 64  # of a few thousand channels: they stay in the cache between the five passes over them


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The shape of a stack of blocks between an embedding and a head; what every model here has in common."""

    vocab_size: int
    width: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int | None = None  # None: as many as query heads
    mlp_width: int | None = None  # None: 4 * width
    style: Style = "paper"
    dropout: float = 0.1  # on the output of attention and MLP, before the residual sum
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_blocks", "num_heads", "num_kv_heads", "mlp_width"):
            self._check_count(name)
        if self.width % self.num_heads or self.head_width % 2:
            raise ValueError(
                f"width is {self.width} with num_heads {self.num_heads}; rotary attention needs an even width a head: "
                f"make width a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; allowed are the divisors of num_heads = {self.num_heads}"
            )
        if self.style not in get_args(Style):
            raise ValueError(f"style is {self.style!r}; allowed are {', '.join(map(repr, get_args(Style)))}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; allowed are 0 <= dropout < 1; the paper has 0.1")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps is {self.norm_eps}; allowed are 0 < norm_eps < 1; 1e-5 is usual")

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        optional = name in ("num_kv_heads", "mlp_width")
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; give a whole number >= 1{' or leave it out' if optional else ''}")

    @property
    def head_width(self) -> int:
        """Channels a head."""
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of K and V: fewer than those of Q under grouped-query attention."""
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_width(self) -> int:
        """Channels inside the MLP."""
        return self.mlp_width or 4 * self.width

    def to_dict(self) -> dict[str, Any]:
        """The config as plain JSON values; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
        """The config of a mapping; a key that is not a field is an error that names the nearest one."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"{key!r} is not a field of {cls.__name__}; {did_you_mean(key, known)}")
        try:
            return cls(**values)
        except TypeError as error:
            missing = "() missing " in str(error)  # a required field
            told = f"{str(error).split('() ')[-1]}; {'add it' if missing else 'give a value of the right type'}"
            raise ValueError(f"{cls.__name__}: {told}") from None


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Rotary angles for texts longer than those of training, by a factor f.

    linear   position / f: every angle is one that training has seen, neighbours are closer than they were
    ntk      base f^(D/(D-2)): the fastest channel turns as before, the slowest f times slower
    """

    kind: Literal["linear", "ntk"] = "ntk"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "ntk") or not _is_between(self.factor, 1, LARGEST_FACTOR):
            raise ValueError(
                f"rotary scaling is {self.kind!r} by {self.factor!r:.80}; allowed are 'linear' and 'ntk' by a factor "
                f"from 1 to {LARGEST_FACTOR}"
            )

    def of(self, head_width: int) -> tuple[float, float]:
        """What positions are divided by, and the base of the angles."""
        if self.kind == "linear":
            return self.factor, ROTARY_BASE
        return 1.0, ROTARY_BASE * self.factor ** (head_width / max(1, head_width - 2))


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high


class Projection(nn.Linear):
    """A Linear that can be asked for some of its outputs, or for their GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., out_features]."""
        return _product(x, self.weight, self.bias)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs start .. stop-1: [..., C] -> [..., stop - start]."""
        return _product(x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    def gelu(self, x: Tensor) -> Tensor:
        """`gelu_tanh` of the outputs."""
        if _multiplies_here(x, self.weight):
            return _product(x, self.weight, self.bias, activation="gelu", form="tanh")
        return gelu_tanh(self(x))  # a call of the module: hooks on it, such as a sharded model's, see it


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str = "none", form: str = "") -> Tensor:
    """x W^T + b.

    Without gradients, in float32, on a CPU where that is faster, oneDNN multiplies; an activation costs it no pass of
    its own.
    """
    if not _multiplies_here(x, weight):
        return F.linear(x, weight, bias)
    product: Any = torch.ops.mkldnn._linear_pointwise
    y: Tensor = product(x, weight, bias, activation, [], form)
    return y


def _multiplies_here(x: Tensor, weight: Tensor) -> bool:
    plain = not torch.is_grad_enabled() and _is_plain(x) and _is_plain(weight) and x.numel() > 0
    return plain and _onednn_is_faster()


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether oneDNN beats MKL, whom torch asks: on AMD's AVX-512 by a tenth to a quarter, with 50257 outputs by more.

    On another machine it took half as long again. What is told here never changes on one machine, for the two round
    differently.
    """
    features = torch.cpu.get_capabilities()
    amd = str(features.get("cpu_name", "")).startswith("AMD") and bool(features.get("avx512_f", False))
    return amd and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _is_plain(x: Tensor) -> bool:
    """Whether x is float32 on a CPU and nobody recasts or compiles what is done with it."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def linear(in_width: int, out_width: int, *, bias: bool) -> Projection:
    """A Linear whose weights are not drawn yet: `initialise` does that, from a seed."""
    sizes, device = (in_width, out_width), torch.get_default_device()
    module: Projection = nn.utils.skip_init(Projection, *sizes, bias=bias, device=device)  # type: ignore[no-untyped-call]
    return module


def embedding(vocab_size: int, width: int) -> nn.Embedding:
    """An Embedding whose weights are not drawn yet (`skip_init` would draw them on meta, and import a compiler to)."""
    return nn.Embedding(vocab_size, width, _weight=torch.empty(vocab_size, width))


class Norm(nn.Module):
    """LayerNorm without bias or RMSNorm, with the adaptive modulation folded in: norm(x) * (1 + scale) + shift."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.normalise = F.layer_norm if config.style == "paper" else F.rms_norm
        self.weight = nn.Parameter(torch.ones(config.width))
        self.eps = config.norm_eps

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Normalise the channels of x [..., C]; shift and scale are alike, [B, 1, C] for one per sample, or absent."""
        unit = self.normalise(x, self.weight.shape, eps=self.eps)
        if shift is None or scale is None:
            return unit * self.weight
        return torch.addcmul(shift, unit, self.weight * (1 + scale))


def rotary_phases(
    length: int,
    head_width: int,
    *,
    start: int = 0,
    device: torch.device | None = None,
    scaling: RotaryScaling | None = None,
) -> Rotary:
    """Cosines and signed sines of the rotary angles, once a forward pass: each float32 [length, 1, head_width].

    In the half-split form channel i of a head of width D turns with channel i + D/2, by position * 10000^(-2i/D).
    """
    stretch, base = (1.0, ROTARY_BASE) if scaling is None else scaling.of(head_width)
    channel = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    position = torch.arange(start, start + length, dtype=torch.float32, device=device)
    angle = (position / stretch)[:, None, None] * base ** (-channel / head_width)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the heads x [..., L, H, D] by their positions' angles: (a, b) -> (a cos - b sin, b cos + a sin)."""
    cos, signed_sin = rotary
    return torch.addcmul(x.roll(x.shape[-1] // 2, -1) * signed_sin, x, cos).to(x.dtype)


class Cache:
    """The keys and values of one attention layer for the tokens seen so far, in memory reserved once."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys = self.values = torch.empty(0)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values [B, H, n, D] and return all of them."""
        if not len(self.keys):
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Attention(nn.Module):
    """Multi-head attention with rotary positions; `causal` hides the future."""

    def __init__(self, config: StackConfig, *, causal: bool):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.kv_heads, config.head_width
        self.causal = causal
        outputs = (self.num_heads + 2 * self.num_kv_heads) * self.head_width
        self.qkv = linear(config.width, outputs, bias=False)
        self.out = linear(config.width, config.width, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        cache: Cache | None = None,
        *,
        keys: Tensor | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        """Softmax(q k^T / sqrt(D)) v, heads joined and projected: [B, L, C] -> [B, L, C].

        With a cache, x holds the tokens that follow the cached ones. Without one, and not causal, `keys` [B, L] are the
        positions that are seen; `beside` holds what else they see, and then all of it.
        """
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, self.num_heads + 2 * self.num_kv_heads, self.head_width)
        qk = rotate(heads[:, :, : -self.num_kv_heads], rotary).transpose(1, 2)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        v = heads[:, :, -self.num_kv_heads :].transpose(1, 2)
        seen, causal = _seen(keys), self.causal and length > 1
        if cache is not None:
            if causal and cache.length:  # the new tokens see all before them, and each other as far as they go
                ends = torch.ones(length, cache.length + length, dtype=torch.bool, device=x.device)
                seen, causal = ends.tril(cache.length), False
            k, v = cache.extend(k, v)
        if beside is not None:
            k, v = beside.join(k, v)
            y = attend(q, k, v, pattern=beside.pattern, grouped=self.grouped)
            return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of K and V."""
        return self.num_kv_heads != self.num_heads

    def at(
        self, x: Tensor, rotary: Rotary, rows: Tensor, *, keys: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """The attention of some positions to all of their sample: x [B, L, C], rows b * L + i in order -> [N, C].

        Keys and values are computed everywhere, queries and the projection of what they find only at the rows.
        """
        batch, length, _ = x.shape
        split, end = self.num_heads * self.head_width, self.qkv.out_features
        q = self.qkv.part(x.flatten(0, 1)[rows], 0, split).view(len(rows), self.num_heads, self.head_width)
        q = rotate(q, (rotary[0][rows % length], rotary[1][rows % length]))
        kv = self.qkv.part(x, split, end).view(batch, length, 2 * self.num_kv_heads, self.head_width)
        k, v = (
            rotate(kv[:, :, : self.num_kv_heads], rotary).transpose(1, 2),
            kv[:, :, self.num_kv_heads :].transpose(1, 2),
        )
        if beside is not None:
            k, v = beside.join(k, v)
        found, counts = [], torch.bincount(rows // length, minlength=batch).tolist()
        for sample, own in enumerate(torch.split(q, counts)):
            if len(own):
                one = slice(sample, sample + 1)
                heads = own.transpose(0, 1)[None]
                seen = None if keys is None else _seen(keys[one])
                y = F.scaled_dot_product_attention(heads, k[one], v[one], attn_mask=seen, enable_gqa=self.grouped)
                found.append(y[0].transpose(0, 1).flatten(1))
        return self.out(torch.cat([q.flatten(1)[:0], *found]))  # type: ignore[no-any-return]


def _seen(keys: Tensor | None) -> Tensor | None:
    """The positions [B, L] that every query of a sample sees, as attention takes them; None: all."""
    return None if keys is None else keys[:, None, None, :]


class Mlp(nn.Module):
    """The position-wise network of a block: GELU(x W_1 + b_1) W_2 + b_2, or SwiGLU (SiLU(x W_g) * x W_u) W_2."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.gated = config.style == "llama"
        hidden, bias = config.hidden_width, config.style == "paper"
        self.into = linear(config.width, 2 * hidden if self.gated else hidden, bias=bias)
        self.out = linear(hidden, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [B, L, C]."""
        if not self.gated:
            return self.out(self.into.gelu(x))  # type: ignore[no-any-return]
        gate, up = self.into(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)  # type: ignore[no-any-return]


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)); without gradients on a CPU it overwrites x.

    The two forms are the same function; torch's own takes twice as long on a CPU, for tanh costs more than a sigmoid.
    """
    if torch.is_grad_enabled() or not _is_plain(x) or not x.is_contiguous():
        return F.gelu(x, approximate="tanh")
    for part in torch.split(x.view(-1, x.shape[-1]), _GELU_ROWS):
        gate = part * part
        part.mul_(gate.mul_(GELU_SCALE * GELU_CUBIC).add_(GELU_SCALE).mul_(part).sigmoid_())
    return x


class Block(nn.Module):
    """A pre-norm block without conditioning: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: StackConfig, *, causal: bool):
        super().__init__()
        self.norm_attention, self.attention = Norm(config), Attention(config, causal=causal)
        self.norm_mlp, self.mlp = Norm(config), Mlp(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, rotary: Rotary, cache: Cache | None = None) -> Tensor:
        """[B, L, C] -> [B, L, C]."""
        x = x + F.dropout(self.attention(self.norm_attention(x), rotary, cache), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_mlp(x)), self.dropout, self.training)


class Sinusoid(nn.Module):
    """W phi(s) of a scalar s: phi(s) = SiLU(Linear([cos(w_i s); sin(w_i s)])), w_i = 10000^(-i/128)."""

    def __init__(self, cond_width: int, *, bias: bool = True):
        super().__init__()
        self.into = linear(SINUSOID_WIDTH, cond_width, bias=True)
        self.out = linear(cond_width, cond_width, bias=bias)

    def forward(self, s: Tensor) -> Tensor:
        """[B] -> [B, cond_width]."""
        half = SINUSOID_WIDTH // 2
        i = torch.arange(half, dtype=torch.float32, device=s.device)
        angle = s.to(torch.float32)[:, None] * torch.exp(-math.log(SINUSOID_BASE) / half * i)
        waves = torch.cat((angle.cos(), angle.sin()), dim=-1)
        return self.out(F.silu(self.into(waves.to(self.into.weight.dtype))))  # type: ignore[no-any-return]


class Modulation(nn.Module):
    """What the condition c says to a layer: `parts` vectors per row, affine in c and zero at the start."""

    def __init__(self, cond_width: int, width: int, parts: int):
        super().__init__()
        self.linear = linear(cond_width, parts * width, bias=True)
        self.parts = parts

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        """[B, cond_width] -> parts times [B, 1, width]."""
        return self.linear(c)[:, None].chunk(self.parts, dim=-1)  # type: ignore[no-any-return]


class AdaptiveBlock(nn.Module):
    """A block under adaptive LayerNorm: x + gate * f(norm(x) * (1 + scale) + shift), f = attention, then MLP.

    The modulation is zero at the start, so a fresh block is the identity; with open gates it is the plain `Block`.
    """

    def __init__(self, config: StackConfig, cond_width: int):
        super().__init__()
        self.norm_attention, self.attention = Norm(config), Attention(config, causal=False)
        self.norm_mlp, self.mlp = Norm(config), Mlp(config)
        self.modulation = Modulation(cond_width, config.width, parts=6)
        self.dropout = config.dropout

    @torch.no_grad()
    def open_gates(self) -> None:
        """Make gate = 1 where c says nothing: how the weights of a plain block, bit for bit the same, move in."""
        self.modulation.linear.bias.view(self.modulation.parts, -1)[2::3] = 1.0

    def forward(
        self,
        x: Tensor,
        c: Tensor,
        rotary: Rotary,
        *,
        rows: Tensor | None = None,
        keys: Tensor | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        """x [B, L, C] and c [B, cond_width] -> [B, L, C]; with rows b * L + i, in order, the output there: [N, C]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(c)
        y = self.norm_attention(x, shift_a, scale_a)
        if rows is None:
            y = self.attention(y, rotary, keys=keys, beside=beside)
        else:
            y, sample = self.attention.at(y, rotary, rows, keys=keys, beside=beside), rows // x.shape[1]
            x = x.flatten(0, 1)[rows]
            gate_a, shift_m, scale_m, gate_m = (part[sample, 0] for part in (gate_a, shift_m, scale_m, gate_m))
        x = torch.addcmul(x, gate_a, F.dropout(y, self.dropout, self.training))
        y = self.mlp(self.norm_mlp(x, shift_m, scale_m))
        return torch.addcmul(x, gate_m, F.dropout(y, self.dropout, self.training))


@torch.no_grad()
def initialise(model: nn.Module, num_blocks: int, seed: int) -> None:
    """Draw all weights from the seed: N(0, 0.02^2), residual outputs / sqrt(2 num_blocks), modulation and biases 0.

    The numbers are drawn on the CPU in the order of the modules, so a seed means the same weights on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Attention | Mlp):
            draw_normal(module.out.weight, INIT_STD / math.sqrt(2 * num_blocks), generator)
            draw_normal((module.qkv if isinstance(module, Attention) else module.into).weight, INIT_STD, generator)
        elif isinstance(module, nn.Embedding):
            draw_normal(module.weight, INIT_STD, generator)
        elif isinstance(module, Modulation):
            module.linear.weight.zero_()
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what `make` makes of it in the place of every Linear that attention and MLPs consist of."""
    for layer in [module for module in model.modules() if isinstance(module, Attention | Mlp)]:
        for name, child in list(layer.named_children()):
            assert isinstance(child, nn.Linear)
            setattr(layer, name, make(child))


def draw_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill a weight with N(0, std^2) from the generator; a meta tensor has nothing to fill."""
    if not weight.is_meta:
        weight.copy_(torch.empty(weight.shape, device="cpu").normal_(0.0, std, generator=generator))
