"""SEDD (Lou, Meng, Ermon 2023, arXiv 2310.16834): score entropy; the network says ratios p_t(y)/p_t(x_t).

Two graphs. `Absorb`: tokens become the mask (the last token); `Uniform`: tokens are redrawn from all N. The log-score
of the own token is 0. With r the true ratio given x_1, the loss per position is sigma' times

    absorb, at masks only:   sum_{y != mask} s_y - r ln s_{x_1} + r (ln r - 1),       r = 1/(e^sigma - 1)
    uniform, everywhere:     (1/N) sum_{y != x_t} [s_y - r_y ln s_y + r_y (ln r_y - 1)]

Samplers: Euler and analytic (Tweedie) steps, and a last analytic step to sigma = 0: S steps are S + 1 calls. Under the
log-linear schedule Euler and analytic are the same step. Neither normalises: where the scores are too large, weights
are negative and the law is what is left after cutting them (`clipped`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from fsdfm.flow.reading import from_uniform_scores, uniform_scores
from fsdfm.flow.schedule import Time
from fsdfm.peers.noising import Geometric, LogLinear, Noising, column
from fsdfm.peers.transition import clipped

__all__ = ["Absorb", "Graph", "Rule", "Uniform", "log_score"]


def log_score(head: Tensor, x_t: Tensor, sigma: Tensor, *, scaled: bool) -> Tensor:
    """Log-scores from the network's last Linear: [B, L, V], 0 at the own token.

    scaled   with `scale_by_sigma` (the absorbing models): head - ln(e^sigma - 1) - ln(V - 1)
    """
    if scaled:
        head = head - (torch.log(torch.expm1(column(sigma))) + math.log(head.shape[-1] - 1))[..., None].to(head)
    return head.scatter(-1, x_t[..., None], 0.0)


class Graph(Protocol):
    """How tokens are destroyed, and what follows for scores."""

    def score_entropy(self, log_scores: Tensor, x_1: Tensor, x_t: Tensor, *, sigma: Tensor) -> Tensor:
        """The loss per position, not yet times sigma': [B, L]."""
        ...

    def euler(self, scores: Tensor, x_t: Tensor, change: Tensor) -> Tensor:
        """The weights of an Euler step in which sigma falls by about `change`: [B, L, V]."""
        ...

    def analytic(self, scores: Tensor, x_t: Tensor, change: Tensor) -> Tensor:
        """The weights of a Tweedie step in which sigma falls by `change`: [B, L, V]."""
        ...

    def scores(self, probs: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """The scores that belong to a posterior p(x_1 | x_t): [B, L, V], 1 at the own token."""
        ...

    def posterior(self, scores: Tensor, x_t: Tensor, sigma: Tensor, /) -> Tensor:
        """The posterior that belongs to scores, the inverse of `scores`: [B, L, V]."""
        ...


def _shown(x_t: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(x_t, like.shape[-1]).to(like)


def _column(value: Tensor) -> Tensor:
    return column(value)[..., None]


@dataclass(frozen=True)
class Absorb:
    """Tokens become the mask, the last of V, and stay it."""

    def score_entropy(self, log_scores: Tensor, x_1: Tensor, x_t: Tensor, *, sigma: Tensor) -> Tensor:
        """Zero where a token is shown."""
        ratio = 1 / torch.expm1(column(sigma))
        log_scores = log_scores.to(torch.float64)
        total = log_scores[..., :-1].exp().sum(-1)
        at_data = log_scores.gather(-1, x_1[..., None])[..., 0]
        loss = total - ratio * at_data + ratio * (torch.log(ratio) - 1)
        return torch.where(x_t == log_scores.shape[-1] - 1, loss, 0.0)

    def euler(self, scores: Tensor, x_t: Tensor, change: Tensor) -> Tensor:
        """From the mask to y with change * s_y; a shown token stays."""
        moves = _column(change) * scores
        return self._from_mask(moves, x_t)

    def analytic(self, scores: Tensor, x_t: Tensor, change: Tensor) -> Tensor:
        """From the mask to y with (e^change - 1) s_y; a shown token stays."""
        return self._from_mask(torch.expm1(_column(change)) * scores, x_t)

    def _from_mask(self, moves: Tensor, x_t: Tensor) -> Tensor:
        mask = moves.shape[-1] - 1
        tokens = moves[..., :-1]
        weights = torch.cat([tokens, 1 - tokens.sum(-1, keepdim=True)], -1)
        return torch.where((x_t == mask)[..., None], weights, _shown(x_t, weights))

    def scores(self, probs: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """p(y) / (e^sigma - 1) at a mask; from a shown token nothing is asked, 0 stands there."""
        scores = probs / torch.expm1(_column(sigma))
        masked = (x_t == probs.shape[-1] - 1)[..., None]
        return torch.where(masked, scores, 0.0).scatter(-1, x_t[..., None], 1.0)

    def posterior(self, scores: Tensor, x_t: Tensor, _: Tensor, /) -> Tensor:
        """Scores at a mask normalised over the tokens: the scale cancels; a shown token is certain."""
        tokens = scores.clone()
        tokens[..., -1] = 0
        masked = (x_t == scores.shape[-1] - 1)[..., None]
        return torch.where(masked, tokens / tokens.sum(-1, keepdim=True), _shown(x_t, scores))


@dataclass(frozen=True)
class Uniform:
    """Tokens are redrawn from all N, themselves included."""

    def _own_ratio(self, sigma: Tensor, vocab: int) -> Tensor:
        """rho = p(y)/p(x) where x is the data's token: (e^sigma - 1)/(e^sigma - 1 + N)."""
        grown = torch.expm1(column(sigma))
        return grown / (grown + vocab)

    def score_entropy(self, log_scores: Tensor, x_1: Tensor, x_t: Tensor, *, sigma: Tensor) -> Tensor:
        """Everywhere, the mean over the N tokens."""
        log_scores, vocab = log_scores.to(torch.float64), log_scores.shape[-1]
        rho = self._own_ratio(sigma, vocab)
        log_rho = torch.log(rho)
        total = log_scores.exp().sum(-1) - 1  # without the own token, whose log-score is 0
        at_data = log_scores.gather(-1, x_1[..., None])[..., 0]
        same = x_t == x_1
        sum_log = log_scores.sum(-1)
        matched = torch.where(same, rho * sum_log, sum_log - at_data + at_data / rho)
        constant = torch.where(same, (vocab - 1) * rho * (log_rho - 1), (-log_rho - 1) / rho - (vocab - 2))
        return (total - matched + constant) / vocab

    def euler(self, scores: Tensor, x_t: Tensor, change: Tensor) -> Tensor:
        """To y with change * s_y / N, else it stays."""
        moves = (_column(change) * scores / scores.shape[-1]).scatter(-1, x_t[..., None], 0.0)
        return moves.scatter(-1, x_t[..., None], 1 - moves.sum(-1, keepdim=True))

    def analytic(self, scores: Tensor, x_t: Tensor, change: Tensor) -> Tensor:
        """(e^d s_y + (1 - e^d)/N sum_z s_z) (e^-d [y = x] + (1 - e^-d)/N) for d = change."""
        vocab, d = scores.shape[-1], _column(change)
        staggered = torch.exp(d) * scores - torch.expm1(d) / vocab * scores.sum(-1, keepdim=True)
        forward = torch.exp(-d) * _shown(x_t, scores) - torch.expm1(-d) / vocab
        return staggered * forward

    def scores(self, probs: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
        """s_y = 1 + p(y)(1/rho - 1) - p(x_t)(1 - rho)."""
        return uniform_scores(probs, x_t, torch.exp(-column(sigma)))

    def posterior(self, scores: Tensor, x_t: Tensor, sigma: Tensor, /) -> Tensor:
        """Solved for p; negative ones are cut."""
        return from_uniform_scores(torch.log(scores), x_t, torch.exp(-column(sigma))).exp()


@dataclass(frozen=True)
class Rule:
    """SEDD's sampler on raw outputs of its network.

    step     "analytic" (their scripts, 1,024 steps) or "euler" (their training runs, 128 steps)
    scaled   whether the head's outputs are scaled by sigma (`log_score`); the absorbing models' are
    """

    graph: Graph = field(default_factory=Absorb)
    noising: Noising = field(default_factory=LogLinear)
    step: Literal["analytic", "euler"] = "analytic"
    scaled: bool = True

    @property
    def keeps_shown(self) -> bool:
        """Whether a shown token always stays: the absorbing graph's do."""
        return isinstance(self.graph, Absorb)

    @classmethod
    def uniform(cls, step: Literal["analytic", "euler"] = "analytic") -> Rule:
        """The uniform graph with its geometric schedule."""
        return cls(Uniform(), Geometric(), step, scaled=False)

    def scores(self, logits: Tensor, x_t: Tensor, t: Time) -> Tensor:
        """exp of the log-scores: float64 [B, L, V]."""
        return log_score(logits.to(torch.float64), x_t, self.noising.sigma(t), scaled=self.scaled).exp()

    def weights(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """What a step draws from, as it is: it sums to 1, and entries may be negative."""
        scores = self.scores(logits, x_t, t)
        if self.step == "euler":
            width = torch.as_tensor(t_next, dtype=torch.float64) - torch.as_tensor(t, dtype=torch.float64)
            return self.graph.euler(scores, x_t, width * self.noising.rate(t))
        return self.graph.analytic(scores, x_t, self.noising.sigma(t) - self.noising.sigma(t_next))

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): the weights, clipped."""
        return clipped(self.weights(logits, x_t, t=t, t_next=t_next))

    def last_weights(self, logits: Tensor, x_t: Tensor, t: Time) -> Tensor:
        """The last call: an analytic step from t to sigma = 0; the mask's weight is cut to 0."""
        weights = self.graph.analytic(self.scores(logits, x_t, t), x_t, self.noising.sigma(t))
        if isinstance(self.graph, Absorb):
            weights = weights.clone()
            weights[..., -1] = 0
        return weights

    def last_law(self, logits: Tensor, x_t: Tensor, t: Time) -> Tensor:
        """The law of the last call."""
        return clipped(self.last_weights(logits, x_t, t))
