"""Dream's decoder (arXiv 2508.15487): masks are revealed at times 1 = t_0 > ... > t_S = eps, at random or by a score.

The network is shifted like an autoregressive one (`next_token`). Call i reads the logits at the masked positions,
tempers and filters them to p, proposes a token x ~ p (the likeliest at T = 0), and reveals with w_i = 1 - t_{i+1} / t_i

    origin          each masked position with probability w_i
    maskgit_plus    the k = floor(m w_i) best of m masked positions by p(x)
    topk_margin     by p_(1) - p_(2), the two likeliest tokens
    entropy         by sum_v p_v ln(p_v + 1e-10)

the last call all that are left. With `alg_temp` > 0 the k positions are drawn without replacement with weights
softmax(score / alg_temp). `origin` under the mask source is our `ExactJump` with kappa = 1 - t.

Times are float32, as published: floor(m w_i) depends on their rounding. The published code takes m as the mean over the
batch, so rows with unequal numbers of masks lose known tokens or keep masks; here every row has its own m, and
`batch_mean` shows the other. Top-p at T = 0 makes exact ties (a token above p alone has confidence 1); they go to the
left here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter, draw
from fsdfm.flow.posterior import Posterior
from fsdfm.flow.rule import RULES, Plan, SamplerState, StepRule
from fsdfm.noise import Purpose
from fsdfm.peers.order import best_positions, gumbel_scores, masked_positions, put_tokens

__all__ = ["DreamRule", "filter_logits", "reveal_count", "reveal_share", "scores"]

Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]


@dataclass(frozen=True)
class DreamRule(StepRule):
    """The decoder's step, its options under the published names where there is one.

    alg          how positions are chosen
    eps          the last time
    temperature  T of the proposals and of the scores; 0: the likeliest token. The sampler's own filter, if it has one,
                 stands before T, top_p and top_k
    top_p        drop a token when the mass before it exceeds this
    top_k        then drop logits below the k-th largest
    alg_temp     temperature of the order; None or 0: the best
    batch_mean   with the published fault: one m for all rows
    """

    goes_back = False

    alg: Algorithm = "origin"
    eps: float = 1e-3
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    batch_mean: bool = False

    def __post_init__(self) -> None:
        if self.alg not in get_args(Algorithm):
            raise ValueError(f"alg is {self.alg!r}; allowed are {', '.join(map(repr, get_args(Algorithm)))}")
        if not 0 < self.eps < 1:
            raise ValueError(f"eps is {self.eps}; allowed are 0 < eps < 1")
        if not 0 <= self.temperature < float("inf") or not 0 <= (self.alg_temp or 0) < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, alg_temp {self.alg_temp}; allowed are numbers >= 0")
        if (self.top_p is not None and not 0 < self.top_p <= 1) or (self.top_k is not None and self.top_k < 1):
            raise ValueError(f"top_p is {self.top_p}, top_k {self.top_k}; allowed are 0 < top_p <= 1, top_k >= 1")

    def plan(self, state: SamplerState) -> Plan:
        """All masks; under `origin` those whose coin says so, which needs no posterior."""
        wanted = masked_positions(state, "dream")
        if self.alg == "origin":
            wanted &= self._coins(state) < reveal_share(self.eps, state.index, state.steps)
        return Plan(wanted.flatten().nonzero()[:, 0])

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """What was planned is revealed, or the best of it."""
        own_filter = self if state.filter is None else self._filtered(state.filter)
        shape, device = state.x_t.shape, state.x_t.device
        u = state.noise.uniform(Purpose.DESTINATION, shape[1], state.index).to(device).flatten()[plan.rows]
        tokens = torch.zeros(len(plan.rows), dtype=torch.int64, device=device)
        sure = torch.zeros(len(plan.rows), dtype=torch.float64, device=device)
        for part, tile, own in posterior.marginals(plan.rows):
            logits = (tile if own is None else tile[own]).float()
            mask = torch.tensor(state.path.source.mask_token, device=device)
            filtered = filter_logits(logits.index_fill(-1, mask, -torch.inf), own_filter)
            tokens[part] = filtered.argmax(-1) if own_filter.temperature == 0 else draw(filtered, u[part]).tokens
            sure[part] = scores(filtered, tokens[part], self.alg).double()
        candidates = torch.zeros(shape, dtype=torch.bool, device=device).flatten().index_fill_(0, plan.rows, True)
        placed = torch.zeros(candidates.shape, dtype=torch.float64, device=device).index_copy_(0, plan.rows, sure)
        return self._revealed(state, plan, tokens, scores=placed.view(shape), candidates=candidates.view(shape))

    def _revealed(
        self, state: SamplerState, plan: Plan, tokens: Tensor, *, scores: Tensor, candidates: Tensor
    ) -> Tensor:
        if self.alg == "origin":
            return put_tokens(state.x_t, candidates, plan.rows, tokens=tokens)
        if self.alg_temp:
            scores = gumbel_scores(scores, self._coins(state), self.alg_temp)
        masks = candidates.sum(-1)
        known = masks.float().mean().expand(len(masks)) if self.batch_mean else masks
        counts = reveal_count(known, self.eps, state.index, steps=state.steps)
        x_next = put_tokens(state.x_t, best_positions(scores, candidates, counts), plan.rows, tokens=tokens)
        if not self.batch_mean:
            return x_next
        too_many = best_positions(torch.zeros_like(scores), ~candidates, (counts - masks).clamp(min=0))
        mask = state.path.source.mask_token
        assert mask is not None
        return torch.where(too_many, mask, x_next)  # a row with fewer masks than the mean loses known tokens

    def _coins(self, state: SamplerState) -> Tensor:
        return state.noise.uniform(Purpose.COIN, state.x_t.shape[1], state.index).to(state.x_t.device)

    def _filtered(self, filter: Filter) -> DreamRule:
        return replace(self, temperature=filter.temperature, top_p=filter.top_p, top_k=filter.top_k)


RULES["dream"] = DreamRule(temperature=1.0)
RULES["dream-entropy"] = DreamRule("entropy", temperature=0.2, top_p=0.95)  # what its authors recommend


def reveal_share(eps: float, call: int, steps: int) -> Tensor:
    """w_i = 1 - t_{i+1} / t_i in float32, 1 in the last call: []."""
    times = torch.linspace(1, eps, steps + 1, dtype=torch.float32)
    return 1 - times[call + 1] / times[call] if call < steps - 1 else torch.tensor(1.0)


def reveal_count(masked: Tensor, eps: float, call: int, *, steps: int) -> Tensor:
    """k = floor(m w_i) of m masked positions, in float32 as published: [B] -> int64 [B]."""
    return (masked.to(torch.float32) * reveal_share(eps, call, steps).to(masked.device)).to(torch.int64)


def filter_logits(logits: Tensor, rule: DreamRule) -> Tensor:
    """l / T, without the tokens that top-p and top-k drop (-inf): [N, V] -> [N, V]."""
    if rule.temperature > 0:
        logits = logits / rule.temperature
    if rule.top_p is not None and rule.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = torch.softmax(ordered, -1).cumsum(-1)
        dropped = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), -1) > rule.top_p
        logits = logits.masked_fill(torch.empty_like(dropped).scatter_(-1, order, dropped), -torch.inf)
    if rule.top_k is not None and rule.top_k < logits.shape[-1]:
        least = logits.topk(rule.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def scores(filtered: Tensor, tokens: Tensor, alg: Algorithm) -> Tensor:
    """How sure the network is of a position: filtered logits [N, V] and the proposed tokens [N] -> [N]."""
    probs = torch.softmax(filtered.float(), -1)
    if alg == "topk_margin":
        best = probs.topk(2, -1).values
        return best[:, 0] - best[:, 1]
    if alg == "entropy":
        return (probs * torch.log(probs + 1e-10)).sum(-1)
    return probs.gather(-1, tokens[:, None])[:, 0]
