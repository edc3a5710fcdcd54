"""The joint head of a linear-chain CRF: low-rank transitions between neighbours (`fsdfm.flow.crf`).

Dynamic transitions have gates, from the features of both neighbours, the time and the step size,

    g_i = A SiLU(P f_i + Q f_{i+1} + phi(1000 t) + phi'(log2 h)),      s_i(a, b) = sum_k (1 + g_ik) left_ak right_bk,

A = 0 at the start: a child with gates says what its parent says, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.flow import Chain, ChainCRF, SplitNetwork, crf_posterior
from fsdfm.flow.posterior import without_token
from fsdfm.model.joint import JointConfig, JointHead, register_joint_head
from fsdfm.model.layers import TIME_SCALE, Sinusoid, StackConfig, draw_normal, linear

__all__ = ["CRFConfig", "TransitionGates", "TransitionTables"]


@dataclass(frozen=True, kw_only=True)
class CRFConfig(JointConfig):
    """A CRF whose transitions s(a, b) = <left_a, right_b> have this rank, and gates of this inner width; 0: none."""

    kind = "crf"
    rank: int = 64
    gate_width: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("gate_width", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}; allowed are whole numbers >= {least}")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; static transitions as an earlier fsdfm wrote them."""
        values = super().to_dict()
        return values if self.gate_width else {key: value for key, value in values.items() if key != "gate_width"}


class TransitionGates(nn.Module):
    """g_i of features, times and step sizes; 0 at the start."""

    def __init__(self, width: int, config: CRFConfig):
        super().__init__()
        self.before = linear(width, config.gate_width, bias=False)  # P
        self.after = linear(width, config.gate_width, bias=False)  # Q
        self.time, self.step = Sinusoid(config.gate_width), Sinusoid(config.gate_width, bias=False)
        self.out = linear(config.gate_width, config.rank, bias=True)  # A

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """N(0, 1/fan_in) for P, Q, phi and phi'; A = 0."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                draw_normal(module.weight, module.in_features**-0.5, generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.zeros_(self.out.weight)

    def forward(self, features: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """[B, L, C], [B], [B] -> [B, L-1, rank]; without gradients on a CPU text by text, for a product rounds by its
        number of rows."""
        if features.device.type != "cpu" or torch.is_grad_enabled() or len(features) < 2:
            told = (self.time(t * TIME_SCALE) + self.step(torch.log2(h)))[:, None]
            found: Tensor = self.out(F.silu(self.before(features[:, :-1]) + self.after(features[:, 1:]) + told))
            return found
        every = zip(*(torch.split(each, 1) for each in (features, t, h)), strict=True)
        return torch.cat([self(*each) for each in every])


class TransitionTables(JointHead):
    """How well a token goes before another: s(a, b) = <left_a, right_b>, 0 at the start."""

    def __init__(self, stack: StackConfig, config: CRFConfig):
        super().__init__()
        self.left = nn.Parameter(torch.empty(stack.vocab_size, config.rank))
        self.right = nn.Parameter(torch.empty(stack.vocab_size, config.rank))
        self.gates = TransitionGates(stack.width, config) if config.gate_width else None

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the left table, N(0, 1/rank); the right one is zero."""
        draw_normal(self.left, self.left.shape[1] ** -0.5, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.right)
        if self.gates is not None:
            self.gates.initialise(seed + 1)

    def posterior(
        self, network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
    ) -> ChainCRF:
        """The chain whose fields are the network's logits."""
        return crf_posterior(network, (self.left, self.right), x_t, t=t, h=h, rows=rows, gates=self.gates)

    def log_prob(
        self,
        network: SplitNetwork,
        features: Tensor,
        x_1: Tensor,
        *,
        t: Tensor,
        h: Tensor,
        held: Tensor,
        real: Tensor,
        forbidden: int | None = None,
    ) -> Tensor:
        """By forward-backward: [B]."""
        logits = network.logits_at(features.flatten(0, 1)).float().view(*x_1.shape, -1)
        if forbidden is not None:
            logits = without_token(logits, forbidden)
        gates = None if self.gates is None else self.gates(features, t, h)
        chain = Chain.of(logits, (self.left, self.right), held=held, joined=real, gates=gates)
        return chain.log_prob(x_1, scored=real)


register_joint_head(CRFConfig, TransitionTables)
