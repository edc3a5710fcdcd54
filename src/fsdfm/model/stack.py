"""A plain transformer for the weights of others: LLaDA, Dream, Llama, Qwen, SmolLM2, GPT-2 by a change of names.

    x = x + attention(norm(x)),  x = x + mlp(norm(x))

with what these families differ in as fields of one config: rotary positions with a base and a scaling or learned ones,
biases, norms of queries and keys, grouped heads of any width, tied embeddings, and who sees whom. Attention gives the
key at position j, seen from i, the weight

    a_ij ~ m_ij exp(q_i k_j / sqrt(D)),   m_ij = 1 if block(j) <= block(i), else `future`

so future = 1 is full attention, future = 0 with blocks of one position the causal mask, with longer blocks the
block-causal one; in between lies the way from one to the other, the mean of a mask that shows each later position with
probability `future`.

Conditioning on t (and h) is optional and zero at the start: every gate is 1 + 0, every scale and shift 0, so the
logits are those of the weights without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.model.crf_head import CRFConfig
from fsdfm.model.dit import ModelConfig, SharedConditioning
from fsdfm.model.joint import JointStackConfig, make_joint_head
from fsdfm.model.layers import (
    LARGEST_FACTOR,
    Attention,
    Mlp,
    Modulation,
    Norm,
    Rotary,
    embedding,
    initialise,
    linear,
    rotate,
)
from fsdfm.model.network import Network

__all__ = ["Transformer", "TransformerConfig", "rotary_frequencies", "visibility"]

Positions = Literal["rotary", "learned"]
StackConditioning = Literal["none", "time", "step"]

_LARGEST_BASE = 1e15  # of rotary angles; the largest published is below 1e11


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(JointStackConfig):
    """The architecture of a `Transformer`; the defaults are Llama's, seen in both directions."""

    style: Literal["paper", "llama"] = "llama"  # "paper": LayerNorm and GELU, with its biases GPT-2
    dropout: float = 0.0
    head_channels: int | None = None  # None: width / num_heads
    max_length: int = 2048  # the longest text it was trained on; with learned positions the longest it can read
    block_length: int = 1  # positions that always see each other
    future: float = 1.0  # weight of later blocks in attention: 1 full, 0 hidden
    positions: Positions = "rotary"
    rotary_base: float = 10000.0
    rotary_factor: float = 1.0  # slow angles are divided by this
    rotary_bands: tuple[float, float, int] | None = None  # Llama 3's low and high turns over so many positions
    qkv_bias: bool = False
    out_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every head's query and key, as in Qwen3
    tied: bool = False  # the head is the embedding
    next_token: bool = False  # the output for position i comes from i-1, as in an autoregressive model
    conditioning: StackConditioning = "none"  # "none": t and h are taken and ignored
    cond_width: int = 128

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_blocks", "num_heads", "num_kv_heads", "mlp_width", "head_channels"):
            self._check_count(name)
        for name in ("max_length", "block_length", "cond_width"):
            self._check_count(name)
        if self.head_channels is None and self.width % self.num_heads:
            raise ValueError(
                f"width is {self.width} with num_heads {self.num_heads}; give head_channels, or make width a multiple"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"a head has {self.head_width} channels; rotary positions need an even number")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; allowed are the divisors of {self.num_heads}")
        for name, allowed in (("positions", Positions), ("conditioning", StackConditioning)):
            if getattr(self, name) not in get_args(allowed):
                words = ", ".join(map(repr, get_args(allowed)))
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {words}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        if self.style not in ("paper", "llama"):
            raise ValueError(f"style is {self.style!r}; allowed are 'paper', 'llama'")
        if not 0 <= self.dropout < 1 or not 0 <= self.future <= 1:
            raise ValueError(f"dropout is {self.dropout}, future {self.future}; allowed are 0 <= dropout < 1, 0 to 1")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps is {self.norm_eps}; allowed are 0 < norm_eps < 1; 1e-5 is usual")
        if not 1 < self.rotary_base <= _LARGEST_BASE or not 1 <= self.rotary_factor <= LARGEST_FACTOR:
            raise ValueError(
                f"rotary_base is {self.rotary_base!r:.80}, rotary_factor {self.rotary_factor!r:.80}; allowed are "
                f"1 < rotary_base <= {_LARGEST_BASE:g}, 1 <= rotary_factor <= {LARGEST_FACTOR}"
            )
        if self.rotary_bands is not None:
            object.__setattr__(self, "rotary_bands", _bands(self.rotary_bands))
        for name in ("qkv_bias", "out_bias", "norm_bias", "qk_norm", "tied", "next_token"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are true and false")

    def _check_count(self, name: str) -> None:
        if name != "head_channels" or self.head_channels is not None:
            super()._check_count(name)

    @property
    def head_width(self) -> int:
        """Channels per head."""
        return self.head_channels or self.width // self.num_heads

    @property
    def is_step_aware(self) -> bool:
        """Whether the network knows its step size h."""
        return self.conditioning == "step"


def _bands(value: Any) -> tuple[float, float, int]:
    """Llama 3's two limits and its old length; JSON has brought them as a list."""
    low, high, length = value if isinstance(value, list | tuple) and len(value) == 3 else (0, 0, 0)
    if not 0 < low < high or not isinstance(length, int) or length < 1:
        raise ValueError(f"rotary_bands is {value!r}; allowed are [low, high, length] with 0 < low < high, length >= 1")
    return float(low), float(high), length


def rotary_frequencies(config: TransformerConfig) -> Tensor:
    """The angle per position of every pair of channels: float32 [D/2], w_i = base^(-2i/D), slow ones scaled.

    With bands (low, high, n) a pair that turns r = n w / 2 pi times over the old length n keeps its angle where
    r >= high, has it divided by the factor where r <= low, and is mixed in between; without them all are divided.
    """
    channel = torch.arange(0, config.head_width, 2, dtype=torch.float32)
    angle = config.rotary_base ** (-channel / config.head_width)
    if config.rotary_bands is None:
        return angle / config.rotary_factor
    low, high, length = config.rotary_bands
    kept = ((length * angle / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return angle * (kept + (1 - kept) / config.rotary_factor)


def visibility(config: TransformerConfig, length: int) -> Tensor | None:
    """log m_ij, the weight with which i sees j: float32 [length, length]; None where everybody sees everybody."""
    if config.future == 1:
        return None
    block = torch.arange(length) // config.block_length
    later = block[None, :] > block[:, None]
    hidden = math.log(config.future) if config.future > 0 else -math.inf
    return torch.zeros(length, length).masked_fill_(later, hidden)


class _Place(NamedTuple):
    """Where the positions of a batch stand: their angles, if any, and whom each may see, [1 or B, 1, L, L]."""

    rotary: Rotary | None
    bias: Tensor | None


class _AffineNorm(Norm):
    """A norm with or without a bias, modulated: (norm(x) w + b) (1 + scale) + shift."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.norm_bias else None

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """[..., C] -> [..., C]."""
        y = self.normalise(x, self.weight.shape, eps=self.eps) * self.weight
        y = y if self.bias is None else y + self.bias
        return y if shift is None or scale is None else torch.addcmul(shift, y, 1 + scale)


class _SelfAttention(Attention):
    """Attention whose heads have a width of their own, with the biases and norms that the config asks for."""

    def __init__(self, config: TransformerConfig):
        nn.Module.__init__(self)
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.kv_heads, config.head_width
        self.causal, self.eps = False, config.norm_eps
        outputs = (self.num_heads + 2 * self.num_kv_heads) * self.head_width
        self.qkv = linear(config.width, outputs, bias=config.qkv_bias)
        self.out = linear(self.num_heads * self.head_width, config.width, bias=config.out_bias)
        self.norm_q = nn.Parameter(torch.ones(self.head_width)) if config.qk_norm else None
        self.norm_k = nn.Parameter(torch.ones(self.head_width)) if config.qk_norm else None

    def attend(self, x: Tensor, place: _Place, rows: Tensor | None = None) -> Tensor:
        """Softmax(q k^T / sqrt(D) + log m) v, projected: [B, L, C] -> [B, L, C]; with rows b * L + i, those: [N, C]."""
        batch, length, _ = x.shape
        split = self.num_heads * self.head_width
        if rows is None:
            heads = self.qkv(x).view(batch, length, -1, self.head_width)
            q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        else:
            kv = self.qkv.part(x, split, self.qkv.out_features).view(batch, length, -1, self.head_width)
            k, v = torch.split(kv, self.num_kv_heads, dim=2)
            q = self.qkv.part(x.flatten(0, 1)[rows], 0, split).view(len(rows), self.num_heads, self.head_width)
        k = self._turned(k, self.norm_k, place.rotary).transpose(1, 2)
        v = v.transpose(1, 2)
        if rows is not None:
            return self._at_rows(
                self._turned(q, self.norm_q, _phases_at(place.rotary, rows, length)), k, v, rows=rows, place=place
            )
        q = self._turned(q, self.norm_q, place.rotary).transpose(1, 2)
        y = self._weigh(q, k, v, bias=place.bias)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _turned(self, heads: Tensor, weight: Tensor | None, rotary: Rotary | None) -> Tensor:
        """Heads normed, if they are, and turned by their positions' angles."""
        if weight is not None:
            heads = F.rms_norm(heads, weight.shape, eps=self.eps) * weight
        return heads if rotary is None else rotate(heads, rotary)

    def _weigh(self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None) -> Tensor:
        mask = None if bias is None else bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, enable_gqa=self.grouped)

    def _at_rows(self, q: Tensor, k: Tensor, v: Tensor, *, rows: Tensor, place: _Place) -> Tensor:
        """The attention of some rows' queries [N, H, D] to all of their sample, sample after sample."""
        batch, length = k.shape[0], k.shape[2]
        counts = torch.bincount(rows // length, minlength=batch).tolist()
        found = [q.flatten(1)[:0]]
        for sample, (own, position) in enumerate(
            zip(torch.split(q, counts), torch.split(rows % length, counts), strict=True)
        ):
            if len(own):
                one = slice(sample, sample + 1)
                bias = (
                    None if place.bias is None else place.bias[one if len(place.bias) > 1 else slice(1)][:, :, position]
                )
                y = self._weigh(own.transpose(0, 1)[None], k[one], v[one], bias=bias)
                found.append(y[0].transpose(0, 1).flatten(1))
        return self.out(torch.cat(found))  # type: ignore[no-any-return]


def _phases_at(rotary: Rotary | None, rows: Tensor, length: int) -> Rotary | None:
    """The angles of rows b * L + i: of i where all samples have the same positions, else of their own."""
    if rotary is None:
        return None
    cos, sin = rotary
    index = rows % length if cos.ndim == 3 else rows
    flat = (cos, sin) if cos.ndim == 3 else (cos.flatten(0, 1), sin.flatten(0, 1))
    return flat[0][index], flat[1][index]


class _StackBlock(nn.Module):
    """x + (1 + gate) f(norm(x) (1 + scale) + shift), f = attention, then MLP; without a condition all three are 0."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm_attention, self.attention = _AffineNorm(config), _SelfAttention(config)
        self.norm_mlp, self.mlp = _AffineNorm(config), Mlp(config)
        conditioned = config.conditioning != "none"
        self.modulation = Modulation(config.cond_width, config.width, parts=6) if conditioned else None
        self.dropout = config.dropout

    def forward(self, x: Tensor, c: Tensor | None, place: _Place, *, rows: Tensor | None = None) -> Tensor:
        """[B, L, C] -> [B, L, C]; with rows b * L + i, in order, the output there: [N, C]."""
        parts: tuple[Tensor | None, ...] = (None,) * 6
        if self.modulation is not None and c is not None:
            parts = self.modulation(c)
        y = self.attention.attend(self.norm_attention(x, parts[0], parts[1]), place, rows)
        if rows is not None:
            sample = rows // x.shape[1]
            x = x.flatten(0, 1)[rows]
            parts = tuple(None if part is None else part[sample, 0] for part in parts)
        x = self._add(x, y, parts[2])
        return self._add(x, self.mlp(self.norm_mlp(x, parts[3], parts[4])), parts[5])

    def _add(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        y = F.dropout(y, self.dropout, self.training)
        return x + y if gate is None else torch.addcmul(x, 1 + gate, y)


class Transformer(Network):
    """A stack of pre-norm blocks: logits [B, L, V] of p_{1|t}(. | x_t), or of the next token under a causal mask.

        model = Transformer(TransformerConfig(vocab_size=50, width=32, num_blocks=2, num_heads=4))
        logits = model(x_t)  # t and h are needed where the config has a conditioning

    Like `DiT` it comes in two parts for callers that need the vocabulary only at some positions: `features_at` and
    `logits_at`.
    """

    def __init__(self, config: TransformerConfig, *, seed: int = 0):
        super().__init__()
        self.config: TransformerConfig = config
        self.precision = "float32"  # of its matrix products, unless somebody recasts them
        self.embedding = embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = embedding(config.max_length, config.width) if learned else None
        self.conditioning = _conditioning(config)
        self.blocks = nn.ModuleList(_StackBlock(config) for _ in range(config.num_blocks))
        self.norm = _AffineNorm(config)
        conditioned = config.conditioning != "none"
        self.modulation = Modulation(config.cond_width, config.width, parts=2) if conditioned else None
        if not config.tied:
            self._modules["head"] = linear(config.width, config.vocab_size, bias=False)
        self.joint = None if config.posterior is None else make_joint_head(config, config.posterior)
        self._places: tuple[tuple[int, torch.device, float], _Place] | None = None  # of the last length
        initialise(self, config.num_blocks, seed)
        if self.conditioning is not None:
            self.conditioning.initialise(seed + 1)
        if not config.tied:
            nn.init.zeros_(self.head.weight)
        if self.joint is not None:
            self.joint.initialise(seed + 2)

    @property
    def head(self) -> nn.Linear | nn.Embedding:
        """What gives the logits: a Linear, or the embedding itself where the two are tied."""
        return cast(nn.Linear, self._modules.get("head") or self.embedding)

    def see_future(self, weight: float) -> None:
        """Set the weight of later blocks in attention: 1 full, 0 hidden; training may go from one to the other."""
        self.config = replace(self.config, future=weight)

    def untie(self) -> None:
        """Give a tied model a head of its own, which shares the embedding's numbers until somebody changes them."""
        if self.config.tied:
            head = linear(1, 1, bias=False)
            head.in_features, head.out_features = self.config.width, self.config.vocab_size
            head.weight = nn.Parameter(self.embedding.weight.detach(), requires_grad=False)
            self._modules["head"] = head
            self.config = replace(self.config, tied=False)

    def step_aware(self, *, seed: int = 0) -> Transformer:
        """A step-aware child with this model's weights: its logits equal the parent's for every h."""
        if self.config.is_step_aware:
            raise ValueError("this model is step-aware already; train it as it is")
        return self._grown(seed, conditioning="step")

    def with_transitions(self, left: Tensor, right: Tensor) -> Transformer:
        """A child with this model's weights, and the transitions of a CRF between neighbours: tables [V, rank]."""
        if self.joint is not None:
            raise ValueError(
                f"this model has transitions of rank {self.config.transition_rank} already; train it as it is"
            )
        child = self._grown(0, posterior=CRFConfig(rank=left.shape[1]))
        assert child.joint is not None
        child.joint.load_state_dict({"left": left, "right": right})
        return child

    def _grown(self, seed: int, **changes: Any) -> Transformer:
        """A network with a part more, which is drawn from the seed, and this one's weights elsewhere."""
        child = Transformer(replace(self.config, **changes), seed=seed)
        child.load_state_dict({**child.state_dict(), **self.state_dict()})
        return child.to(self.norm.weight).train(self.training)

    def trunk(
        self,
        x_t: Tensor,
        t: Tensor | None = None,
        h: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Everything but the head: normed features [B, L, C]; with rows b * L + i, in order, those there: [N, C].

        keys        which positions are seen at all, bool [B, L]: padding is not; None: all
        positions   where the tokens stand, int64 [B, L]; None: 0 .. L-1

        A next-token model is shifted here: position i receives the features of i-1, and position 0 its own.
        """
        length = x_t.shape[1]
        conditions = self._conditions(t, h)
        if rows is not None and self.config.next_token:
            rows = torch.where(rows % length > 0, rows - 1, rows)
        place = self._place(x_t, keys, positions)
        x = self.embedding(x_t).to(self.norm.weight.dtype)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=x.device) if positions is None else positions)
        for block, c in zip(self.blocks[:-1], conditions, strict=False):
            x = block(x, c, place)
        x = self.blocks[-1](x, conditions[-2], place, rows=rows)
        features: Tensor = self.norm(x, *self._last(conditions[-1], rows, length))
        if rows is None and self.config.next_token:
            features = torch.cat((features[:, :1], features[:, :-1]), dim=1)
        return features

    def features_at(self, x_t: Tensor, t: Tensor | None = None, h: Tensor | None = None, *, rows: Tensor) -> Tensor:
        """`trunk` at the positions b * L + i of `rows`, in order: [N, C]; a GPU computes all and picks."""
        if x_t.device.type != "cpu":
            return self.trunk(x_t, t, h).flatten(0, 1)[rows]
        return self.trunk(x_t, t, h, rows=rows)

    @property
    def vocabulary(self) -> nn.Module:
        """Whose product with features the logits are, and nothing else."""
        return self.head

    def logits_at(self, features: Tensor) -> Tensor:
        """The head at chosen rows of the flattened features: [N, C] -> [N, V]."""
        if self.config.tied:
            return F.linear(features, self.embedding.weight.to(features.dtype))
        return self.head(features)  # type: ignore[no-any-return]

    def forward(self, x_t: Tensor, t: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """Logits at every position: [B, L, V]."""
        return self.logits_at(self.trunk(x_t, t, h))

    def _conditions(self, t: Tensor | None, h: Tensor | None) -> list[Tensor] | list[None]:
        if self.conditioning is None:
            return [None] * (self.config.num_blocks + 1)
        if t is None:
            raise ValueError("t is None, but this model is conditioned on it; give the times, 0 <= t <= 1, one per row")
        return self.conditioning(t, h)  # type: ignore[no-any-return]

    def _last(self, c: Tensor | None, rows: Tensor | None, length: int) -> tuple[Tensor, ...]:
        """Shift and scale of the last norm, per row where rows are asked for; nothing without a condition."""
        if self.modulation is None or c is None:
            return ()
        parts: tuple[Tensor, ...] = self.modulation(c)
        return parts if rows is None else tuple(part[rows // length, 0] for part in parts)

    def _place(self, x_t: Tensor, keys: Tensor | None, positions: Tensor | None) -> _Place:
        length, device, future = x_t.shape[1], x_t.device, self.config.future
        if self.positions is not None and length > self.config.max_length:
            raise ValueError(f"the text has {length} tokens; this model has {self.config.max_length} learned positions")
        key = (length, device, future)
        kept = self._places  # read once: another thread may ask for another length meanwhile
        if kept is None or kept[0] != key or torch.compiler.is_compiling():
            with torch.inference_mode(False):  # else training could not use what sampling has left here
                bias = visibility(self.config, length)
                standing = torch.arange(length, device=device)
                own = _Place(self._phases(standing), None if bias is None else bias.to(device)[None, None])
            kept = key, own
            if not torch.compiler.is_compiling():
                self._places = kept
        place = kept[1]
        if positions is not None:
            place = place._replace(rotary=self._phases(positions))
        if keys is not None:
            hidden = torch.zeros(keys.shape, device=device).masked_fill_(~keys, -math.inf)[:, None, None, :]
            place = place._replace(bias=hidden.expand(-1, 1, length, -1) if place.bias is None else hidden + place.bias)
        return place

    def _phases(self, positions: Tensor) -> Rotary | None:
        """Cosines and signed sines of positions [...]: float32 [..., 1, D] each."""
        if self.config.positions != "rotary":
            return None
        angle = positions.to(torch.float32)[..., None, None] * rotary_frequencies(self.config).to(positions.device)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _conditioning(config: TransformerConfig) -> SharedConditioning | None:
    """How t and h reach the blocks, as in `DiT`."""
    if config.conditioning == "none":
        return None
    shape = ModelConfig(num_blocks=config.num_blocks, cond_width=config.cond_width, conditioning=config.conditioning)
    return SharedConditioning(shape)
