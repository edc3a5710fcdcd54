"""BrierLM (arXiv 2510.27688): a proper score of continuations that needs samples only, no likelihood.

For a context with the true continuation y and two independent samples x, x' of the model, the Brier score of the law
of the first n tokens has an unbiased estimate without that law:

    Brier-n = E[1{x = y} + 1{x' = y} - 1{x = x'}]  =  2 p(y) - sum_v p(v)^2

It is largest where the model's law is the data's. BrierLM = 100 (Brier-1 Brier-2 Brier-3 Brier-4)^(1/4), no factor
below 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdfm.measure.statistics import Interval
from fsdfm.noise import Noise, Purpose

__all__ = ["ORDERS", "brier_lm", "brier_n", "brier_terms"]

Floats = npt.NDArray[np.float64]
ORDERS = (1, 2, 3, 4)
_RESAMPLES = 2000


def brier_terms(samples: npt.NDArray[np.integer], truth: npt.NDArray[np.integer], n: int) -> Floats:
    """The estimate for each context, over all pairs of its samples: samples [C, S, L], truth [C, L] -> [C].

    2/S sum_s 1{x_s = y} - 1/(S (S-1)) sum_{s != r} 1{x_s = x_r}, on the first n tokens.
    """
    if samples.ndim != 3 or truth.ndim != 2 or samples.shape[::2] != truth.shape or samples.shape[1] < 2:
        raise ValueError(
            f"samples have the shape {samples.shape} and truth {truth.shape}; give [contexts, samples >= 2, tokens] "
            "and [contexts, tokens]"
        )
    if not 1 <= n <= truth.shape[1]:
        raise ValueError(f"n is {n}; allowed are 1 to {truth.shape[1]}, the tokens of a continuation")
    x, y, count = samples[:, :, :n], truth[:, None, :n], samples.shape[1]
    right = (x == y).all(-1).mean(1)
    same = (x[:, :, None] == x[:, None]).all(-1).sum((1, 2)) - count
    terms: Floats = 2 * right - same / (count * (count - 1))
    return terms


def brier_n(samples: npt.NDArray[np.integer], truth: npt.NDArray[np.integer], n: int) -> float:
    """The mean of `brier_terms` over contexts."""
    return float(brier_terms(samples, truth, n).mean())


def brier_lm(
    samples: npt.NDArray[np.integer],
    truth: npt.NDArray[np.integer],
    *,
    orders: Sequence[int] = ORDERS,
    seed: int = 0,
) -> Interval:
    """BrierLM, 0 .. 100, with its bootstrap interval over contexts."""
    terms = np.stack([brier_terms(samples, truth, n) for n in orders])
    chosen = Noise(seed, range(_RESAMPLES)).integers(Purpose.BOOTSTRAP, terms.shape[1], terms.shape[1]).numpy()
    draws = _combine(np.stack([terms[:, row].mean(1) for row in chosen]))
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    return Interval(float(_combine(terms.mean(1)[None])[0]), low, high)


def _combine(means: Floats) -> Floats:
    """100 times the geometric mean of the orders' scores: [R, orders] -> [R]."""
    score: Floats = 100 * np.prod(np.maximum(means, 0.0), axis=1) ** (1 / means.shape[1])
    return score
