"""Texts of unknown damage: which tokens are likely wrong, and where a draft stands in time.

**Which tokens are wrong.** What stands at a place is judged by the law of that place given all others,
q_i(v) = P(X_1^i = v | X_t^j, j != i), and not by the posterior, which has seen the token itself. Given X_1^i, X_t^i
knows nothing of the other places, so by Bayes' rule the two differ by one factor, for every joint law and source p_0:

    p / (1 - p) = q / (1 - q) * (1 + kappa / ((1 - kappa) p_0(x))),        p = p_{1|t}(x | X_t),  x = X_t^i

One call of the network gives all q_i(x^i), at any t in (0, 1): kappa only says how far the other places are believed.

If q is the law of the text, then among V tokens

    P(q_i(X^i) < a / V) = sum_v q_i(v) [q_i(v) < a / V] < a

whatever q is: calling the tokens below a / V wrong is a false alarm at most once in 1 / a. A text of another kind than
the model knows is unlikely all over. Its likeliest tokens show it: where the UPPER quantile of logit q, which damage of
less than that share hardly moves, stands at m < 0 (in text of its own kind a model expects there what is shown), the
limit is taken SLOPE * m lower. A quantile of n tokens is uncertain, the more the fewer they are, and so is what a
network says beside so little; a short text is given SHORT / n more:

    x^i is damaged       if   logit q_i(x^i) < log(a / V) + SLOPE * min(m, 0) - SHORT / n

a = FALSE_ALARMS is a bound for a true q and a measured number for a network (docs/guides/generate.md).

**What a text does twice, it means.** Words that a network never saw spelt so (the beginning of a story in the middle of
a text, a name) are unlikely wherever they stand, and they come back. Noise does not: let u stand beside x^i. If x^i is
a uniform draw, it is one of the at most c tokens that stand on that side of u at its c other places with probability

    P(the pair (u, x^i) is in the text a second time) <= c / V.

So a pair that recurs, where c / V <= RECURRING, is the text's own; of the damage that is found at most that share is
missed for it on each side.

**Where a draft stands in time.** Let X_t be x_1 seen at time t through an independent source, and p = p_{1|t}(. | X_t)
its posterior. Posteriors average to the probability of what they are about; so what p gives to the very token that is
shown averages to

    E[p(X_t^i)] = P(X_1^i = X_t^i) = kappa_t + (1 - kappa_t) P(X_0^i = X_1^i) = kappa_t + (1 - kappa_t) / V

for a uniform source. A source that shows a real token only with probability s, each of the V alike, gives, for the
positions that show one,

    A(t) = (kappa_t + (1 - kappa_t) s / V) / (kappa_t + (1 - kappa_t) s).

A model that is told too early a time is surprised by how well the text hangs together: the mean of p(x^i) over the text
lies above A. Told too late a time it meets more nonsense than it should: the mean lies below A. The time of the text is
where the two agree. (They agree at t = 1 as well, where everything shown is believed: the search ends where one token
is wrong.)
"""

from __future__ import annotations

import math
from collections.abc import Generator

import torch
from torch import Tensor

from fsdfm.flow import MixturePath

__all__ = [
    "FALSE_ALARMS",
    "HALVINGS",
    "consistent_time",
    "expected_agreement",
    "find_damage",
    "find_recurring",
    "leave_one_out",
]

FALSE_ALARMS = 0.005  # share of right tokens that are called wrong in text of a kind that the model knows: at most
JUDGED_AT = 0.85  # the kappa at which a text is judged
UPPER, SLOPE, SHORT = 0.7, 4.0, 16.0
RECURRING = 0.02  # share of damage that may be taken for the text's own for each neighbour: at most
HALVINGS = 7  # kappa to 1/128


def leave_one_out(path: MixturePath, log_odds: Tensor, x_t: Tensor, *, kappa: float) -> Tensor:
    """logit q_i(x^i): the log-odds of every shown token given all others, of its posterior log-odds [B, L]."""
    _require_real_noise(path)
    p_0 = path.source.probabilities().to(log_odds.dtype)[x_t]
    return log_odds - torch.log1p(kappa / ((1 - kappa) * p_0))


def find_damage(scores: Tensor, free: Tensor, vocab_size: int) -> Tensor:
    """Which free tokens are likely wrong, of the logit q [B, L] of all: bool [B, L]."""
    upper = torch.where(free, scores, torch.nan).nanquantile(UPPER, dim=-1)
    limit = math.log(FALSE_ALARMS / vocab_size) + SLOPE * upper.clamp(max=0) - SHORT / free.sum(-1)
    return free & (scores < limit[:, None])


def find_recurring(tokens: Tensor, vocab_size: int) -> Tensor:
    """Which tokens stand beside a neighbour as they do elsewhere in their text, too often for chance: bool [B, L]."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    most = RECURRING * vocab_size
    for text, own in zip(tokens, found, strict=True):
        left, right = text[:-1], text[1:]
        recurs = _counts(left * vocab_size + right) > 1
        own[1:] |= recurs & (_counts(left) - 1 <= most)
        own[:-1] |= recurs & (_counts(right) - 1 <= most)
    return found


def _counts(values: Tensor) -> Tensor:
    """How often each value is among all of them."""
    ordered = values.sort().values
    return torch.searchsorted(ordered, values, right=True) - torch.searchsorted(ordered, values)


def expected_agreement(path: MixturePath, t: Tensor) -> Tensor:
    """A(t), what the mean of p_{1|t}(x_t^i) is in expectation over positions that show a real token: like t."""
    p_0 = path.source.probabilities()
    mask = path.source.mask_token
    real = 1.0 if mask is None else 1.0 - float(p_0[mask])
    num_real = len(p_0) - (mask is not None)
    kappa = path.schedule.kappa(t)
    noise = (1 - kappa) * real
    return (kappa + noise / num_real) / (kappa + noise)


def consistent_time(path: MixturePath, num_tokens: Tensor) -> Generator[Tensor, Tensor, Tensor]:
    """The time t at which a text agrees with itself, agreement(t) = A(t): float64 [B], one per text.

    A generator that yields times [B], receives the mean of p_{1|t}(x^i) over each text there [B] (one network call) and
    returns t, found by bisection of kappa over [0, 1 - 1/num_tokens]. A text that agrees better than A at the end of
    that range is clean as far as the model can tell, and gets its last time; one that agrees worse everywhere gets 0.
    It takes HALVINGS + 1 calls.
    """
    _require_real_noise(path)
    low = torch.zeros(len(num_tokens), dtype=torch.float64)
    high = 1 - 1 / num_tokens.to(torch.float64)
    kappa = high
    for _ in range(HALVINGS + 1):
        t = path.schedule.kappa_inverse(kappa)
        later = (yield t) >= expected_agreement(path, t)
        low = torch.where(later, kappa, low)
        high = torch.where(later, high, kappa)
        kappa = (low + high) / 2
    return path.schedule.kappa_inverse(kappa)


def _require_real_noise(path: MixturePath) -> None:
    mask = path.source.mask_token
    if mask is not None and float(path.source.probabilities()[mask]) == 1:
        raise ValueError("this model's noise is the mask, so it takes every word for right; say which are damaged")
