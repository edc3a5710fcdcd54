"""Where a text with unknown damage stands in time.

Let X_t be x_1 seen at time t through an independent source, and p = p_{1|t}(. | X_t) its posterior. Posteriors average
to the probability of what they are about; so what p gives to the very token that is shown averages to

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

from collections.abc import Generator

import torch
from torch import Tensor

from fsdfm.flow import MixturePath

__all__ = ["HALVINGS", "consistent_time", "expected_agreement"]

HALVINGS = 7  # kappa to 1/128


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
    if path.source.mask_token is not None and float(path.source.probabilities()[path.source.mask_token]) == 1:
        raise ValueError("this model's noise is the mask, so it takes every word for right; say which are damaged")
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
