"""The rule `sweep`: positions settle from left to right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdfm.flow.categorical import draw
from fsdfm.flow.path import require_rows
from fsdfm.flow.posterior import Posterior
from fsdfm.flow.rule import RULES, Plan, SamplerState, StepRule, check_width, redrawn_together
from fsdfm.noise import Purpose

__all__ = ["Sweep"]


@dataclass(frozen=True)
class Sweep(StepRule):
    """Positions settle from left to right: every step draws the next ones, together, and what follows stays noise.

    Of the n free positions at the start, at t_0, those with the numbers b(t) .. b(t_next) - 1 turn, counted from 0 and
    from the left, b(t) = round(n (kappa_t - kappa_{t_0}) / (1 - kappa_{t_0})): each position has a schedule of its own,
    a jump from 0 to 1. With the exact joint posterior the text has the law of the data for *any* number of steps,

        p(x^{<b}) p(x^{b .. b'} | x^{<b}) p(x^{>b'} | x^{<=b'}) = p(x),

    for what is not settled is noise that knows nothing of it. The network is told the share that is settled. Blocks of
    tokens that follow each other, each denoised at once: semi-autoregressive models (arXiv 1808.08583, 2210.17432) and
    block diffusion (2503.09573); here a block is a step, and as wide as the grid has it.
    """

    goes_back = False

    def plan(self, state: SamplerState) -> Plan:
        """The positions whose turn it is."""
        require_rows(state.noise, len(state.x_t))
        rank, begin, end = self._turns(state)
        return Plan(((rank >= begin) & (rank < end)).flatten().nonzero()[:, 0])

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """Draw them; what was settled before is held."""
        rank, begin, _ = self._turns(state)
        state.memory.setdefault("start", state.t)
        state.memory.setdefault("rank", rank)
        held = torch.where(rank >= begin, -1, state.x_t)
        posterior = posterior.given(held, forbidden=state.path.source.mask_token)
        u = state.noise.uniform(Purpose.DESTINATION, state.x_t.shape[1], state.index)
        if posterior.joint:
            return redrawn_together(state, plan, posterior, u=u)
        return _redrawn_alone(state, plan, posterior, u=u.flatten()[plan.rows.to(u.device)])

    def _turns(self, state: SamplerState) -> tuple[Tensor, Tensor, Tensor]:
        """Free positions numbered, -1 elsewhere, [B, L]; the first that turns, and the first that waits, [B, 1]."""
        free = state.movable()
        rank = state.memory.get("rank", torch.where(free, free.cumsum(1) - 1, -1))
        before = state.path.schedule.kappa(state.memory.get("start", state.t))
        count = (rank.amax(1) + 1).cpu()
        shares = [(state.path.schedule.kappa(t) - before) / (1 - before) for t in (state.t, state.t_next)]
        begin, end = (torch.round(share * count).to(rank.device)[:, None] for share in shares)
        return rank, begin, end


def _redrawn_alone(state: SamplerState, plan: Plan, posterior: Posterior, *, u: Tensor) -> Tensor:
    """Every position of the plan takes a draw of its own, from uniforms u [N]."""
    source, x_next = state.path.source, state.x_t.flatten().clone()
    for part, tile, own in posterior.marginals(plan.rows):
        check_width(tile, source)
        drawn = draw(tile, u[part], rows=own, forbidden=source.mask_token, filter=state.filter)
        x_next[plan.rows[part]] = drawn.tokens
    return x_next.view_as(state.x_t)


RULES["sweep"] = Sweep()
