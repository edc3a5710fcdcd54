"""Rules that look at the posterior before they decide how far to go: budgets that adapt.

    certain    position-aware turns: as many positions take their first turn as the grid says, the most certain first
    bounded    entropy-bounded acceptance: the most certain take their turn as long as their entropies, the largest left
               out, sum to at most `bound` nats; at least the grid's share, so that the grid is the slowest pace
    stop       any rule until its text is stable and confident, then the last step at once

A position's *first turn* is when it is first redrawn; until then it shows noise. The time that the network is told is
kappa^-1(share of the positions that had it). Positions that had theirs are candidates again with the probability w of
the exact rule, and the last step redraws all, as everywhere.

A coin that looks at p changes the law: under the exact posterior these rules no longer draw from the law of the random
order. Drawing the positions of a set A at once instead of one after the other costs at most sum_A H_i - max_A H_i nats
of dependence, which is what `bounded` bounds per step; choosing by certainty costs more where certainty depends on the
tokens drawn (`docs/adaptive.md` has the total variations of small worlds).

These rules ask for the posterior of every position that may change, at every call: the head is not spared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdfm.flow.categorical import draw
from fsdfm.flow.posterior import Posterior, without_token
from fsdfm.flow.rule import RULES, Plan, SamplerState, StepRule
from fsdfm.noise import Purpose

__all__ = ["CertainTurns", "StableStop"]


@dataclass(frozen=True)
class _Seen:
    """What a posterior says of some rows: a draw, the entropy in nats and the likeliest token of each."""

    tokens: Tensor
    entropy: Tensor
    likeliest: Tensor


@dataclass(frozen=True)
class CertainTurns(StepRule):
    """Certain positions take their first turn before uncertain ones.

    bound     nats per step: as many more than the grid says as sum H - max H allows; None: as many as the grid says
    returns   whether positions that had their first turn are candidates again
    """

    goes_back = False

    bound: float | None = None
    returns: bool = True

    def __post_init__(self) -> None:
        if self.bound is not None and not 0 <= self.bound < math.inf:
            raise ValueError(f"bound is {self.bound}; allowed are nats >= 0, or None")

    def plan(self, state: SamplerState) -> Plan:
        """Every position that may change, of texts that are not finished."""
        return Plan(_open(state).flatten().nonzero()[:, 0])

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """The chosen positions take what was drawn for them; the time follows their number."""
        seen, asked = _look(state, plan, posterior), _open(state)
        entropy = torch.full(asked.shape, math.inf, dtype=torch.float64, device=asked.device)
        entropy.view(-1)[plan.rows] = seen.entropy
        pace = _Pace.of(state)
        waiting = asked & ~pace.turned
        first = waiting if state.index == state.steps - 1 else self.choose(state, entropy, waiting)
        turned = pace.turned | first
        kappa = pace.kappa(turned)
        ends = (kappa >= 1).to(asked.device)[:, None]
        again = asked & turned & (self._coins(state) < _redraw(state, kappa)[:, None]) if self.returns else first
        state.memory["turned"], state.memory["t"] = turned, state.path.schedule.kappa_inverse(kappa)
        state.memory["finished"] = kappa >= 1
        text = state.x_t.flatten().index_copy(0, plan.rows, seen.tokens).view_as(state.x_t)
        return torch.where(first | again | (asked & ends), text, state.x_t)

    def choose(self, state: SamplerState, entropy: Tensor, waiting: Tensor) -> Tensor:
        """Who takes the first turn now, of those who wait: bool [B, L].

        At least as many as kappa(t_next) says; with a bound, as many more of the most certain as sum H - max H allows.
        """
        held = torch.where(waiting, entropy, math.inf)
        order = held.argsort(dim=-1, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order).to(order))
        chosen = rank < _Pace.of(state).due(state).to(rank.device)[:, None]
        if self.bound is not None:
            ordered = held.gather(-1, order)
            within = (ordered.cumsum(-1) - ordered <= self.bound) & torch.isfinite(ordered)
            chosen = chosen | within.gather(-1, rank)
        return chosen & waiting

    def _coins(self, state: SamplerState) -> Tensor:
        return state.noise.uniform(Purpose.COIN, state.x_t.shape[1], state.index).to(state.x_t.device)


@dataclass(frozen=True)
class _Pace:
    """How far texts have come: who had a first turn [B, L], of how many [B], from which kappa on [B]."""

    turned: Tensor
    total: Tensor
    start: Tensor

    @classmethod
    def of(cls, state: SamplerState) -> _Pace:
        memory = state.memory
        if "turned" not in memory:
            memory["turned"] = torch.zeros_like(state.x_t, dtype=torch.bool)
            memory["total"] = state.movable().sum(-1).cpu()
            memory["start"] = state.path.schedule.kappa(state.t).cpu()
        return cls(memory["turned"], memory["total"], memory["start"])

    def kappa(self, turned: Tensor) -> Tensor:
        """kappa at which so many have had theirs: start + (1 - start) share, float64 [B]."""
        share = turned.sum(-1).cpu().to(torch.float64) / self.total.clamp(min=1)
        share = torch.where(self.total > 0, share, 1.0)
        return torch.where(share >= 1, 1.0, self.start + (1 - self.start) * share)

    def due(self, state: SamplerState) -> Tensor:
        """How many must take their turn in this step to be on the grid's pace: int64 [B]."""
        aim = (state.path.schedule.kappa(state.t_next).cpu() - self.start) / (1 - self.start).clamp(min=1e-12)
        wanted = torch.ceil(aim * self.total - 1e-9).to(torch.int64)
        return (wanted - self.turned.sum(-1).cpu()).clamp(min=0)


def _open(state: SamplerState) -> Tensor:
    """Positions that may change, of texts that are not finished: bool [B, L]."""
    finished = state.memory.get("finished")
    movable = state.movable()
    return movable if finished is None else movable & ~finished.to(movable.device)[:, None]


def _redraw(state: SamplerState, kappa: Tensor) -> Tensor:
    """w = (kappa' - kappa) / (1 - kappa), 1 for texts at their end: [B]."""
    before = state.path.schedule.kappa(state.t).cpu()
    return torch.where(before < 1, (kappa - before) / (1 - before).clamp(min=1e-12), 1.0).to(state.x_t.device)


@dataclass(frozen=True)
class StableStop(StepRule):
    """A rule until a text is stable and confident: then it takes its last step, a redraw from p, at once.

    Stable: the likeliest token of every position that may change is what it was `patience` calls ago and since.
    Confident: the mean entropy of these positions is at most `entropy` nats.
    """

    goes_back = False

    rule: StepRule = field(default_factory=lambda: RULES["spaced"])
    entropy: float = 0.3
    patience: int = 1

    def __post_init__(self) -> None:
        if not self.entropy >= 0 or self.patience < 0:
            raise ValueError(
                f"entropy is {self.entropy} and patience {self.patience}; allowed are numbers >= 0, and calls >= 0"
            )

    def plan(self, state: SamplerState) -> Plan:
        """Every position of texts on their way."""
        return Plan(_open(state).flatten().nonzero()[:, 0])

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """The rule's step, or the last one."""
        seen, asked = _look(state, plan, posterior), _open(state)
        ends = self._ends(state, plan, seen)
        inner = self.rule.plan(state)
        x_next = self.rule.apply(state, Plan(inner.rows[asked.flatten()[inner.rows]], inner.coins), posterior)
        last = state.x_t.flatten().index_copy(0, plan.rows, seen.tokens).view_as(state.x_t)
        before = state.memory.get("finished", torch.zeros_like(ends))
        state.memory["finished"] = before | ends
        return torch.where(ends.to(asked.device)[:, None], last, x_next)

    def _ends(self, state: SamplerState, plan: Plan, seen: _Seen) -> Tensor:
        """Texts that are stable and confident: bool [B]."""
        batch, length = state.x_t.shape
        sample = (plan.rows // length).cpu()
        count = torch.bincount(sample, minlength=batch)
        mean = torch.bincount(sample, seen.entropy.cpu(), minlength=batch) / count.clamp(min=1)
        likeliest = state.x_t.flatten().index_copy(0, plan.rows, seen.likeliest).view_as(state.x_t)
        before = state.memory.get("likeliest")
        same = torch.zeros(batch, dtype=torch.int64)
        if before is not None:
            same = torch.where((before == likeliest).all(-1).cpu(), state.memory["same"] + 1, 0)
        state.memory["likeliest"], state.memory["same"] = likeliest, same
        return (same >= self.patience) & (mean <= self.entropy)


def _look(state: SamplerState, plan: Plan, posterior: Posterior) -> _Seen:
    """The posterior at the rows of a plan, read once; where positions are joint, tokens are drawn together."""
    rows, device = plan.rows, state.x_t.device
    u = state.noise.uniform(Purpose.DESTINATION, state.x_t.shape[1], state.index)
    tokens, likeliest = torch.empty_like(rows), torch.empty_like(rows)
    entropy = torch.empty(len(rows), dtype=torch.float64, device=device)
    own_u, forbidden = u.flatten()[rows.to(u.device)], state.path.source.mask_token
    for part, tile, own in posterior.marginals(rows):
        logits = (tile if own is None else tile[own]).float().clone()
        logits = logits if forbidden is None else without_token(logits, forbidden)
        logits = logits if state.filter is None else state.filter(logits)
        log_p = torch.log_softmax(logits, -1)
        entropy[part] = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1).double()
        likeliest[part] = logits.argmax(-1)
        if not posterior.joint:
            tokens[part] = draw(logits, own_u[part]).tokens
    if posterior.joint and len(rows):
        samples = torch.unique_consecutive(rows // state.x_t.shape[1])
        texts = state.x_t.clone()
        texts[samples] = posterior.draw(samples, u[samples.to(u.device)], filter=state.filter)
        tokens = texts.flatten()[rows]
    return _Seen(tokens, entropy, likeliest)


RULES["certain"] = CertainTurns()
RULES["bounded"] = CertainTurns(bound=4.0)
RULES["stop"] = StableStop()
