"""The networks of the study: a small multilayer perceptron over the whole state, step-aware from a zero start.

`JointDenoiser` is one with a joint head of the library, as it ships, over its features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fsdfm.model import CausalHeadConfig, CRFConfig, JointHead
from fsdfm.model.joint import make_joint_head
from fsdfm.model.layers import StackConfig

__all__ = ["JointDenoiser", "TinyDenoiser"]

_SMALLEST = 2.0**-10
_CHANNELS = 24


class TinyDenoiser(nn.Module):
    """Logits of p_{1|t} from (x_t, t, h): embeddings of all positions, t, log2 h -> a residual MLP -> a linear head.

    The state is small, so that nothing but training separates the network from the true posterior. How far a token is
    evidence depends on t, so t scales the embeddings. A gated skip from each token to its own output lets the network
    say "what is shown is probably right", more firmly as t grows. The weights of h
    start at zero and are frozen until `step_aware_parameters` asks for them: the child starts as its parent, bit by
    bit, for every h, and a parent trained at one h says the same at every h.
    """

    def __init__(self, vocab_size: int, length: int, *, width: int = 128, blocks: int = 2, seed: int = 0):
        super().__init__()
        self.vocab_size, self.length = vocab_size, length
        channels, embedded = _CHANNELS, 16
        times, sizes = _time_features(torch.zeros(1)).shape[-1], _step_features(torch.ones(1)).shape[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab_size, embedded)
            self.trust = nn.Linear(times, embedded)
            self.enter = nn.Linear(length * embedded + times, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
                for _ in range(blocks)
            )
            self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, length * channels))
            self.shown = nn.Embedding(vocab_size, channels)
            self.gate = nn.Linear(times, channels)
            self.head = nn.Linear(channels, vocab_size)
        self.enter_h = nn.Linear(sizes, width, bias=False)
        self.gate_h = nn.Linear(sizes, channels, bias=False)
        for layer in (self.enter_h, self.gate_h):
            nn.init.zeros_(layer.weight)

    def plain_parameters(self) -> Iterable[nn.Parameter]:
        """Everything but the weights of h."""
        return (p for name, p in self.named_parameters() if not name.startswith(("enter_h", "gate_h")))

    def step_aware_parameters(self) -> Iterable[nn.Parameter]:
        """Everything."""
        return self.parameters()

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C], the head's input."""
        times, sizes = _time_features(t), _step_features(h)
        evidence = self.embedding(x_t) * (1 + self.trust(times))[:, None]
        x = self.enter(torch.cat([evidence.flatten(1), times], -1)) + self.enter_h(sizes)
        for block in self.blocks:
            x = x + block(x)
        gate = self.gate(times) + self.gate_h(sizes)
        features: Tensor = self.leave(x).view(len(x), self.length, -1) + gate[:, None] * self.shown(x_t)
        return features

    def logits_at(self, rows: Tensor) -> Tensor:
        """The head: [N, C] -> [N, V]."""
        logits: Tensor = self.head(rows)
        return logits

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Logits [B, L, V]."""
        return self.logits_at(self.trunk(x_t, t, h))


class JointDenoiser(nn.Module):
    """A `TinyDenoiser` whose positions are drawn together, by a head that says nothing at the start.

    kind   "crf": transitions of full rank between neighbours, alike at all times; "causal": two causal blocks

    The head reads tokens with the embedding of what is shown. Its weights of h, zero at the start, stand still like
    those of the trunk: the same posterior for every step size.
    """

    def __init__(self, plain: TinyDenoiser, kind: str, *, seed: int = 0):
        super().__init__()
        self.plain = plain
        vocab = plain.vocab_size
        stack = StackConfig(
            vocab_size=vocab, width=_CHANNELS, num_blocks=2, num_heads=2, mlp_width=64, style="llama", dropout=0.0
        )
        config = CRFConfig(rank=vocab) if kind == "crf" else CausalHeadConfig(num_blocks=2, cond_width=16)
        self.joint: JointHead = make_joint_head(stack, config)
        self.joint.initialise(seed)

    @property
    def head(self) -> nn.Module:
        """The last linear layer."""
        return self.plain.head

    @property
    def embedding(self) -> nn.Embedding:
        """What a causal head reads the tokens before with."""
        return self.plain.shown

    @property
    def length(self) -> int:
        """L."""
        return self.plain.length

    def plain_parameters(self) -> Iterable[nn.Parameter]:
        """Everything but the weights of h."""
        yield from self.plain.plain_parameters()
        yield from (p for name, p in self.joint.named_parameters() if not name.startswith("step"))

    def step_aware_parameters(self) -> Iterable[nn.Parameter]:
        """Everything."""
        return self.parameters()

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C]."""
        return self.plain.trunk(x_t, t, h)

    def logits_at(self, rows: Tensor) -> Tensor:
        """The head: [N, C] -> [N, V]."""
        return self.plain.logits_at(rows)


def _time_features(t: Tensor) -> Tensor:
    """t, the log-odds of a shown token being data (clipped at the smallest step), and a sinusoid: float32 [B, 10]."""
    odds = torch.log((t + _SMALLEST) / (1 - t + _SMALLEST)) / 4
    waves = [wave(math.pi * 2.0**k * t) for k in range(4) for wave in (torch.sin, torch.cos)]
    return torch.stack([t, odds, *waves], -1).float()


def _step_features(h: Tensor) -> Tensor:
    """log2 h on [0, 1] and a sinusoid of it: float32 [B, 8]; 1 and 1/2 are as far apart as 2^-9 and 2^-10."""
    level = 1 + torch.log2(h) / 10
    waves = [wave(math.pi * 2.0**k * level) for k in range(3) for wave in (torch.sin, torch.cos)]
    return torch.stack([torch.ones_like(level), level, *waves], -1).float()
