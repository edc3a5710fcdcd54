"""The denoiser: logits of p_{1|t}(. | x_t) from x_t, t and h by a diffusion transformer (appendix C.1)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.flow import Posterior, SplitNetwork
from fsdfm.flow.posterior import independent_posterior
from fsdfm.flow.reading import reading_hook
from fsdfm.model.context import Beside, CanvasPattern, Context
from fsdfm.model.crf_head import CRFConfig
from fsdfm.model.joint import JointConfig, JointHead, JointStackConfig, make_joint_head
from fsdfm.model.layers import (
    AdaptiveBlock,
    Modulation,
    Norm,
    Rotary,
    RotaryScaling,
    Sinusoid,
    draw_normal,
    embedding,
    initialise,
    linear,
    rotary_phases,
)
from fsdfm.model.network import Network

__all__ = ["PRESETS", "Conditioning", "DiT", "FusedConditioning", "ModelConfig", "SharedConditioning", "Sinusoid"]

ConditioningName = Literal["time", "step", "fused"]
ClockName = Literal["time", "none", "sigma", "hybrid", "geometric"]
ReadingName = Literal["posterior", "leave-one-out", "uniform-scores"]

SIGMA_FLOORS = {"sigma": 1e-3, "hybrid": 5e-3}  # kappa at t = 0 as such networks were trained to believe it
SMALLEST_SIGMA, LARGEST_SIGMA = 1e-4, 20.0  # the ends of sigma on the clock `geometric`: SEDD's with the uniform graph


@dataclass(frozen=True, kw_only=True)
class ModelConfig(JointStackConfig):
    """The architecture of a `DiT`; the defaults are the paper's 170M model."""

    vocab_size: int = 50257
    width: int = 768
    num_blocks: int = 12
    num_heads: int = 12
    cond_width: int = 128
    conditioning: ConditioningName = "time"  # "step": aware of h too; "fused": so are the released few-step weights
    clock: ClockName = "time"  # what the network is told of t: t itself, nothing, or sigma = -ln kappa (`_told`)
    blend: float = 0.0  # of the mask, the last token, every input has the share 1 - e^(-blend sigma): gamma-HDLM's
    says: ReadingName = "posterior"  # what its outputs are: logits of p_{1|t}, or what `fsdfm.flow.reading` makes it of
    next_token: bool = False  # the output for position i comes from i-1, as in a converted autoregressive model
    canvas: int | None = None  # tokens that are written at a time, after clean context (`fsdfm.model.context`)
    window: int | None = None  # of that context so many tokens are seen, a multiple of the canvas; None: all
    rotary_factor: float = 1.0  # texts so many times longer than in training (`RotaryScaling`)
    rotary_scaling: Literal["linear", "ntk"] = "ntk"  # how

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("cond_width")
        names = get_args(ConditioningName)
        if self.conditioning not in names:
            raise ValueError(f"conditioning is {self.conditioning!r}; allowed are {', '.join(map(repr, names))}")
        for name, allowed in (("clock", get_args(ClockName)), ("says", get_args(ReadingName))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(map(repr, allowed))}")
        if not 0 <= self.blend <= 1 or (self.blend and self.clock not in SIGMA_FLOORS):
            raise ValueError(
                f"blend is {self.blend} with clock {self.clock!r}; allowed are 0 <= blend <= 1, above 0 only with the "
                f"clocks {' and '.join(SIGMA_FLOORS)}"
            )
        if self.says != "posterior" and self.posterior is not None:
            raise ValueError(f"says is {self.says!r}, but a joint head needs logits of the posterior; leave one out")
        if not isinstance(self.next_token, bool):
            raise ValueError(f"next_token is {self.next_token!r}; allowed are true and false")
        self._check_canvas()
        self.scaling  # noqa: B018 (checks it)

    def _check_canvas(self) -> None:
        for name in ("canvas", "window"):
            if getattr(self, name) is not None:
                self._check_count(name)
        if self.window is not None and (self.canvas is None or self.window % self.canvas):
            raise ValueError(f"window is {self.window}; allowed are multiples of the canvas, {self.canvas}")

    @property
    def scaling(self) -> RotaryScaling | None:
        """How rotary angles are changed; None: not at all."""
        scaling = RotaryScaling(kind=self.rotary_scaling, factor=self.rotary_factor)
        return None if self.rotary_factor == 1 else scaling

    @property
    def is_step_aware(self) -> bool:
        """Whether the network knows its step size h."""
        return self.conditioning != "time"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """A named size, with fields changed: `ModelConfig.preset("170m", vocab_size=8192)`."""
        if name not in PRESETS:
            raise ValueError(f"preset is {name!r}; allowed are {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name].to_dict(), **changes})


PRESETS = {
    "tiny": ModelConfig(vocab_size=8192, width=256, num_blocks=6, num_heads=4, cond_width=64),
    "stories": ModelConfig(vocab_size=3636, width=288, num_blocks=6, num_heads=6, mlp_width=768, style="llama"),
    "170m": ModelConfig(),
    "1300m": ModelConfig(width=2048, num_blocks=21, num_heads=32, cond_width=256),
    "1700m": ModelConfig(width=2048, num_blocks=28, num_heads=32, cond_width=256),
}


class Conditioning(nn.Module, ABC):
    """How time and step size reach the network: one vector c for every block and one for the head."""

    @abstractmethod
    def forward(self, t: Tensor, h: Tensor | None) -> list[Tensor]:
        """Times [B] and step sizes [B] -> num_blocks + 1 conditions, each [B, cond_width]."""

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the weights, N(0, 1/fan_in), so that c has order one from the start."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                draw_normal(module.weight, module.in_features**-0.5, generator)


class SharedConditioning(Conditioning):
    """One c for all blocks: c = SiLU(W_t phi(t)), and with step size c = SiLU(W_t phi(t) + W_h phi(log2 h)).

    h enters by its logarithm, so that 2^-10 and 2^-9 are as far apart as 1/2 and 1. W_h is zero at the start: a
    step-aware child computes its parent's logits, bit for bit, for every h.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_conditions = config.num_blocks + 1
        self.time = Sinusoid(config.cond_width)
        self.step = Sinusoid(config.cond_width, bias=False) if config.conditioning == "step" else None

    def forward(self, t: Tensor, h: Tensor | None) -> list[Tensor]:
        """The same c [B, cond_width] for every block; h, 0 < h <= 1, is needed only where the model is step-aware."""
        c = self.time(t)
        if self.step is not None:
            c = c + self.step(torch.log2(_known(h)))
        return [F.silu(c)] * self.num_conditions

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """As ever, and W_h = 0."""
        super().initialise(seed)
        if self.step is not None:
            self.step.out.weight.zero_()


class FusedConditioning(Conditioning):
    """The released few-step weights' way: c = SiLU(W [W_t phi(t); W_h phi(h)]), and c_b = SiLU(W_b c) for block b.

    h enters raw, the fused c is twice as wide, and every block and the head narrow it by a Linear of their own.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.cond_width
        self.time, self.step = Sinusoid(width), Sinusoid(width)
        self.fuser = linear(2 * width, 2 * width, bias=True)
        self.narrow = nn.ModuleList(linear(2 * width, width, bias=True) for _ in range(config.num_blocks + 1))

    def forward(self, t: Tensor, h: Tensor | None) -> list[Tensor]:
        """A c_b [B, cond_width] for every block and one for the head."""
        c = F.silu(self.fuser(torch.cat((self.time(t), self.step(_known(h))), dim=-1)))
        return [F.silu(narrow(c)) for narrow in self.narrow]


def _known(h: Tensor | None) -> Tensor:
    if h is None:
        raise ValueError("h is None, but this model is step-aware; give the step sizes, 0 < h <= 1, one per row")
    return h


class Reading(JointHead):
    """The head of a network whose outputs are no logits of p_{1|t}: it makes them so, position by position."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def initialise(self, seed: int) -> None:
        """It has no weights."""

    def posterior(
        self, network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
    ) -> Posterior:
        """The network's outputs, read."""
        said = independent_posterior(network, x_t, t, h=h, rows=rows)
        return said.changed(reading_hook(self.name), x_t, t=t, t_next=t + h)

    def log_prob(self, *_: Any, **__: Any) -> Tensor:
        """Asked for by objectives that train logits of p_{1|t}, which this network has not."""
        raise ValueError(
            f"this network says {self.name}, not p_1|t; train it with the objective that it was trained with"
        )


def _joint_head(config: ModelConfig) -> JointHead | None:
    """What stands between the logits and the posterior, if anything."""
    if config.says != "posterior":
        return Reading(config.says)
    return None if config.posterior is None else make_joint_head(config, config.posterior)


def _told(clock: ClockName, t: Tensor) -> Tensor:
    """What the network is told at time t, which is kappa: t, 0, or sigma.

    sigma       -ln(epsilon + (1 - epsilon) t), epsilon = 1e-3
    hybrid      the same with epsilon = 5e-3: gamma-HDLM's
    geometric   -ln t between 1e-4 and 20
    """
    if clock == "time":
        return t
    if clock == "geometric":
        return -torch.log(t.clamp(min=math.exp(-LARGEST_SIGMA), max=math.exp(-SMALLEST_SIGMA)))
    if clock == "none":
        return torch.zeros_like(t)
    floor = SIGMA_FLOORS[clock]
    return -torch.log(floor + (1 - floor) * t)


class DiT(Network):
    """A bidirectional transformer with rotary attention and adaptive LayerNorm: logits [B, L, V] of p_{1|t}.

        model = DiT(ModelConfig.preset("170m"))
        logits = model(x_t, t, h)  # x_t int64 [B, L]; t, h float [B]

    The same in two parts, for callers that need the vocabulary only at some positions:

        features = model.features_at(x_t, t, h, rows=rows)  # rows b * L + i in order -> [N, C]
        logits = model.logits_at(features)  # [N, V]

    With a `joint` head the positions depend on each other (`fsdfm.flow.ChainCRF`), and the logits are the fields u.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0):
        super().__init__()
        self.config: ModelConfig = config
        self.precision = "float32"  # of its matrix products, unless somebody recasts them
        self.embedding = embedding(config.vocab_size, config.width)
        fused = config.conditioning == "fused"
        self.conditioning: Conditioning = FusedConditioning(config) if fused else SharedConditioning(config)
        self.blocks = nn.ModuleList(AdaptiveBlock(config, config.cond_width) for _ in range(config.num_blocks))
        self.norm = Norm(config)
        self.modulation = Modulation(config.cond_width, config.width, parts=2)
        self.head = linear(config.width, config.vocab_size, bias=config.style == "paper")
        self.joint = _joint_head(config)
        self._phases: tuple[tuple[int, int, torch.device], Rotary] | None = None  # of the last length
        initialise(self, config.num_blocks, seed)
        self.conditioning.initialise(seed + 1)
        nn.init.zeros_(self.head.weight)
        if self.joint is not None:
            self.joint.initialise(seed + 2)

    def trunk(
        self,
        x_t: Tensor,
        t: Tensor,
        h: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        embedded: Tensor | None = None,
        context: Context | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Everything but the last Linear: features [B, L, C], normed and modulated; with rows, those there: [N, C].

        embedded   [B, L, C] in place of the tokens' embeddings, such as the mean of several
        context    the clean text before x_t, as `read` or `read_all` give it
        keys       which positions are seen at all, bool [B, L]: padding is not; None: all

        A next-token model is shifted here: position i receives the features of i-1. Position 0 has no predecessor and
        keeps its own, which mean nothing: the token there is given (BOS) and its caller holds it frozen. After a
        context it has one.
        """
        if context is not None and context.before is not None:
            return self._led(x_t, t, h, rows=rows, context=context)
        length = x_t.shape[1]
        if rows is not None and self.config.next_token:
            rows = torch.where(rows % length > 0, rows - 1, rows)
        rotary = self._rotary(length, x_t.device, 0 if context is None else context.start)
        x = self._embedded(x_t, t) if embedded is None else embedded
        beside = None if context is None else context.seen()
        features = self._through(x, t, h, rotary=rotary, rows=rows, beside=beside, keys=keys)
        if rows is None and self.config.next_token:
            features = torch.cat((features[:, :1], features[:, :-1]), dim=1)
        return features

    def _led(self, x_t: Tensor, t: Tensor, h: Tensor | None, *, rows: Tensor | None, context: Context) -> Tensor:
        """`trunk` of a next-token model after a context: the token before every canvas speaks of its first."""
        assert context.before is not None
        (batch, length), count = x_t.shape, context.before.shape[1]
        size = length // count
        tokens, positions = context.lead(x_t)
        cos, sin = self._rotary(length + 1, x_t.device, context.start - 1)
        if rows is not None:
            rows = rows + rows // size  # one token more before every canvas, and then the one before
        rotary, beside = (cos[positions], sin[positions]), context.seen()
        features = self._through(self._embedded(tokens, t), t, h, rotary=rotary, rows=rows, beside=beside)
        return features if rows is not None else features.view(batch, count, size + 1, -1)[:, :, :-1].flatten(1, 2)

    def _embedded(self, tokens: Tensor, t: Tensor) -> Tensor:
        """E[x], or with a blend e^(-blend sigma) E[x] + (1 - e^(-blend sigma)) E[mask]: [B, m, C]."""
        x: Tensor = self.embedding(tokens)
        if not self.config.blend:
            return x
        kept = torch.exp(-self.config.blend * _told(self.config.clock, t)).to(x)[:, None, None]
        mask: Tensor = self.embedding.weight[-1]
        return kept * x + (1 - kept) * mask

    def _through(
        self,
        x: Tensor,
        t: Tensor,
        h: Tensor | None,
        *,
        rotary: Rotary,
        rows: Tensor | None = None,
        beside: Sequence[Beside] | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Blocks and the last norm: [B, L, C] -> [B, L, C], or with rows [N, C]."""
        conditions = self.conditioning(_told(self.config.clock, t), h)
        seen: Sequence[Beside | None] = [None] * len(self.blocks) if beside is None else beside
        for block, c, own in zip(self.blocks[:-1], conditions[:-2], seen[:-1], strict=True):
            x = block(x, c, rotary, beside=own, keys=keys)
        length = x.shape[1]
        x = self.blocks[-1](x, conditions[-2], rotary, rows=rows, beside=seen[-1], keys=keys)
        shift, scale = self.modulation(conditions[-1])
        if rows is not None:
            shift, scale = shift[rows // length, 0], scale[rows // length, 0]
        return self.norm(x, shift, scale)  # type: ignore[no-any-return]

    def features_beside(
        self, tokens: Tensor, t: Tensor, h: Tensor | None, *, positions: Tensor, length: int, beside: Sequence[Beside]
    ) -> Tensor:
        """Features of tokens [B, m] at some positions [m] of a text of `length`, which see `beside`, too: [B, m, C].

        Nothing is shifted: a next-token model's features at i are about the token at i+1.
        """
        cos, sin = self._rotary(length, tokens.device)
        rotary = (cos[positions], sin[positions])
        return self._through(self._embedded(tokens, t), t, h, rotary=rotary, beside=beside)

    def read(self, tokens: Tensor, context: Context | None = None) -> Context:
        """The context that one more canvas of clean text [B, C] makes of a context; at most `window` tokens of it."""
        context = Context.empty(len(self.blocks)) if context is None else context
        last = tokens[:, -1:] if self.config.next_token else None
        return context.extended(self._pass(tokens, context, None), most=self.config.window, before=last)

    def read_all(self, x_1: Tensor) -> Context:
        """The context for all canvases of rows [B, L] at once: training."""
        size = self._canvas()
        passed = self._pass(x_1, Context.empty(len(self.blocks)), CanvasPattern(size, self.config.window))
        whole = Context.empty(len(self.blocks)).extended(passed)
        led = self.config.next_token
        before = torch.cat([x_1[:, :1], x_1[:, size - 1 : -1 : size]], 1) if led else None
        return Context(whole.layers, 0, CanvasPattern(size, self.config.window, noised=True, led=led), before)

    def _canvas(self) -> int:
        if self.config.canvas is None:
            raise ValueError('this model has no canvas; train one with objective.kind = "canvas"')
        return self.config.canvas

    def _pass(self, tokens: Tensor, context: Context, pattern: CanvasPattern | None) -> tuple[Beside, ...]:
        """Clean tokens [B, n] after a context: what they leave in every layer. Their condition is t = h = 1."""
        one = torch.ones(len(tokens), device=tokens.device)
        conditions = self.conditioning(_told(self.config.clock, one), one)
        rotary = self._rotary(tokens.shape[1], tokens.device, context.start)
        x, beside = self.embedding(tokens), context.beside(pattern)
        for block, c, seen in zip(self.blocks, conditions[:-1], beside, strict=True):
            x = block(x, c, rotary, beside=seen)
        return beside

    def features_at(
        self, x_t: Tensor, t: Tensor, h: Tensor | None = None, *, rows: Tensor, context: Context | None = None
    ) -> Tensor:
        """`trunk` at the positions b * L + i of `rows`, in order: [N, C].

        Elsewhere the last block computes keys and values only: no other position needs more. A GPU computes all and
        picks, for it would wait longer for ragged shapes than it saves.
        """
        if x_t.device.type != "cpu":
            return self.trunk(x_t, t, h, context=context).flatten(0, 1)[rows]
        return self.trunk(x_t, t, h, rows=rows, context=context)

    def _rotary(self, length: int, device: torch.device, start: int = 0) -> Rotary:
        """The rotary phases of positions start .. start+length-1, kept until others are asked for."""
        width, scaling = self.config.head_width, self.config.scaling
        if torch.compiler.is_compiling():
            return rotary_phases(length, width, start=start, device=device, scaling=scaling)
        kept = self._phases  # read once: another thread may ask for another length meanwhile
        if kept is None or kept[0] != (length, start, device):
            with torch.inference_mode(False):  # else training could not use what sampling has left here
                phases = rotary_phases(length, width, start=start, device=device, scaling=scaling)
                kept = ((length, start, device), phases)
            self._phases = kept
        return kept[1]

    @property
    def vocabulary(self) -> nn.Module:
        """Whose product with features the logits are, and nothing else."""
        return self.head  # type: ignore[no-any-return]

    def logits_at(self, features: Tensor) -> Tensor:
        """The head at chosen rows of the flattened features: [N, C] -> [N, V]."""
        return self.head(features)  # type: ignore[no-any-return]

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor | None = None) -> Tensor:
        """Logits of p_{1|t}(. | x_t) at every position: [B, L, V]."""
        return self.head(self.trunk(x_t, t, h))  # type: ignore[no-any-return]

    def step_aware(self, *, seed: int = 0) -> DiT:
        """A step-aware child with this model's weights: its logits equal the parent's, bit for bit, for every h."""
        if self.config.is_step_aware:
            raise ValueError("this model is step-aware already; train it as it is")
        return self._grown("conditioning.step.", seed, conditioning="step")

    def with_transitions(self, left: Tensor, right: Tensor) -> DiT:
        """A child with this model's weights, and the transitions of a CRF between neighbours: tables [V, rank]."""
        if self.config.transition_rank:
            raise ValueError(
                f"this model has transitions of rank {self.config.transition_rank} already; train it as it is"
            )
        child = self.with_posterior(CRFConfig(rank=left.shape[1]))
        assert child.joint is not None
        child.joint.load_state_dict({"left": left, "right": right})
        return child

    def with_gates(self, width: int, *, seed: int = 0) -> DiT:
        """A child of a model with transitions whose transitions are dynamic, with gates of this inner width."""
        found = self.config.posterior
        if not isinstance(found, CRFConfig) or found.gate_width:
            raise ValueError(f"gates are for transitions that have none yet; this model's posterior is {found}")
        return self._grown("joint.gates.", seed, posterior=replace(found, gate_width=width))

    def with_posterior(self, config: JointConfig, *, seed: int = 0) -> DiT:
        """A child with this model's weights and a joint head, which says nothing yet."""
        if self.config.posterior is not None:
            raise ValueError(f"this model has the posterior {self.config.posterior} already; train it as it is")
        return self._grown("joint.", seed, posterior=config)

    def with_larger_posterior(self, config: JointConfig, *, seed: int = 0, **start: Any) -> DiT:
        """A child with a larger joint head of the same kind, which says what this one's says; see its `grow_from`."""
        if self.joint is None:
            raise ValueError("this model has no joint head that could grow; use with_posterior")
        child = self._grown("joint.", seed, posterior=config)
        assert child.joint is not None
        child.joint.grow_from(self.joint, **start)
        return child

    @torch.no_grad()
    def with_mask(self) -> DiT:
        """A child with one token more, the mask: embedded as the mean of all tokens, its output 0."""
        child = DiT(replace(self.config, vocab_size=self.config.vocab_size + 1, posterior=None))
        state = {name: value for name, value in self.state_dict().items() if not name.startswith("joint.")}
        table = state["embedding.weight"]
        state["embedding.weight"] = torch.cat([table, table.mean(0, keepdim=True)])
        for name in ("head.weight", "head.bias"):
            if name in state:
                state[name] = torch.cat([state[name], torch.zeros_like(state[name][:1])])
        child.load_state_dict(state)
        return child.to(table).train(self.training)

    def _grown(self, part: str, seed: int, **changes: Any) -> DiT:
        """A network with a part more, which is drawn from the seed, and this one's weights elsewhere."""
        child = DiT(replace(self.config, **changes), seed=seed)
        own = {name: value for name, value in child.state_dict().items() if name.startswith(part)}
        kept = {name: value for name, value in self.state_dict().items() if not name.startswith(part)}
        child.load_state_dict({**kept, **own})
        return child.to(self.embedding.weight).train(self.training)
