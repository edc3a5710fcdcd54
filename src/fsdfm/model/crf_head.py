"""The joint head of a linear-chain CRF: low-rank transitions between neighbours (`fsdfm.flow.crf`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdfm.flow import Chain, ChainCRF, SplitNetwork, crf_posterior
from fsdfm.flow.posterior import without_token
from fsdfm.model.joint import JointConfig, JointHead, register_joint_head
from fsdfm.model.layers import StackConfig, draw_normal

__all__ = ["CRFConfig", "TransitionTables"]


@dataclass(frozen=True, kw_only=True)
class CRFConfig(JointConfig):
    """A CRF whose transitions s(a, b) = <left_a, right_b> have this rank."""

    kind = "crf"
    rank: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; allowed are whole numbers >= 1")


class TransitionTables(JointHead):
    """How well a token goes before another: s(a, b) = <left_a, right_b>, 0 at the start."""

    def __init__(self, stack: StackConfig, config: CRFConfig):
        super().__init__()
        self.left = nn.Parameter(torch.empty(stack.vocab_size, config.rank))
        self.right = nn.Parameter(torch.empty(stack.vocab_size, config.rank))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the left table, N(0, 1/rank); the right one is zero."""
        draw_normal(self.left, self.left.shape[1] ** -0.5, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.right)

    def posterior(
        self, network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
    ) -> ChainCRF:
        """The chain whose fields are the network's logits."""
        return crf_posterior(network, (self.left, self.right), x_t, t=t, h=h, rows=rows)

    def log_prob(
        self,
        network: SplitNetwork,
        features: Tensor,
        x_1: Tensor,
        *,
        held: Tensor,
        real: Tensor,
        forbidden: int | None = None,
        **_: Tensor,
    ) -> Tensor:
        """By forward-backward: [B]."""
        logits = network.logits_at(features.flatten(0, 1)).float().view(*x_1.shape, -1)
        if forbidden is not None:
            logits = without_token(logits, forbidden)
        return Chain.of(logits, (self.left, self.right), held=held, joined=real).log_prob(x_1, scored=real)


register_joint_head(CRFConfig, TransitionTables)
