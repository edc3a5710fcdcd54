"""The samplers in forty plain lines each, one position at a time: they know nothing of thinning, tiles or batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fsdfm.flow import MixturePath
from fsdfm.noise import Noise, Purpose

Narrowing = tuple[float, int | None, float | None]
"""temperature, top_k, top_p"""


def narrow(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """Probabilities: temperature, then the k likeliest, then the likeliest up to a mass of p."""
    cold = [x / temperature for x in logits]
    order = sorted(range(len(cold)), key=lambda v: (-cold[v], v))[:top_k]
    weights = {v: math.exp(cold[v] - cold[order[0]]) for v in order}
    total, kept, before = sum(weights.values()), {}, 0.0
    for v in order:
        if top_p is None or v == order[0] or before < top_p:
            kept[v] = weights[v]
        before += weights[v] / total
    mass = sum(kept.values())
    return [kept.get(v, 0.0) / mass for v in range(len(cold))]


def plain_sample(
    logits: Callable[[Tensor, float], Tensor],
    path: MixturePath,
    x_0: Tensor,
    *,
    steps: int,
    rule: str,
    noise: Noise,
    frozen: Tensor,
    narrowing: Narrowing = (1.0, None, None),
) -> list[list[int]]:
    """Every position of every step by the definition: stay with probability s, else an inverse CDF of the others."""
    x, length = x_0.tolist(), x_0.shape[1]
    for n in range(steps):
        t, end = n / steps, (n + 1) / steps
        left = [1 - float(path.schedule.kappa(time)) for time in (t, end)]
        g = math.inf if end == 1 else math.log(left[0] / left[1])
        coins = noise.uniform(Purpose.COIN, length, n).tolist()
        places = noise.uniform(Purpose.DESTINATION, length, n).tolist()
        answers = logits(torch.tensor(x), t).tolist()
        for b, row in enumerate(x):
            for i, now in enumerate(row):
                if frozen[b, i] or (path.source.mask_token is not None and now != path.source.mask_token):
                    continue
                answer = [-math.inf if v == path.source.mask_token else z for v, z in enumerate(answers[b][i])]
                p = narrow(answer, *narrowing)
                q = 1 - p[now]
                leave = q if end == 1 else (1 - math.exp(-g)) * q if rule == "exact" else 1 - math.exp(-g * q)
                if coins[b][i] < leave:
                    row[i] = inverse([0.0 if v == now else mass for v, mass in enumerate(p)], places[b][i])
    return x


def inverse(weights: list[float], u: float) -> int:
    """F^-1(u) of the law that is proportional to the weights."""
    target, at = u * sum(weights), 0.0
    return next(v for v, mass in enumerate(weights) if (at := at + mass) > target)


Conditional = Callable[[list[int]], list[float]]
"""The logits of the next token of a text, given those before it."""


def plain_joint_sample(
    law: Callable[[list[int], float], Conditional],
    path: MixturePath,
    x_0: list[int],
    *,
    steps: int,
    rule: str,
    noise: Noise,
    frozen: list[bool],
    narrowing: Narrowing = (1.0, None, None),
) -> list[int]:
    """One text under a posterior that is drawn left to right, by the definition.

    In a step from t to t' a whole text is drawn, x_i = F^-1(u_i | x_<i), what is frozen standing fast. Position i takes
    its token if it is a candidate: `exact` where its coin is below w = 1 - (1 - kappa') / (1 - kappa); `spaced` in the
    step in which kappa passes frac(U + i/phi), and after it like `exact`.
    """
    x, length = list(x_0), len(x_0)
    phase, golden = float(noise.uniform(Purpose.PHASE, 1)), (math.sqrt(5) - 1) / 2
    for n in range(steps):
        kappa, then = (float(path.schedule.kappa(time)) for time in (n / steps, (n + 1) / steps))
        w = 1 - (1 - then) / (1 - kappa)
        coins = noise.uniform(Purpose.COIN, length, n)[0].tolist()
        places = noise.uniform(Purpose.DESTINATION, length, n)[0].tolist()
        conditional, text = law(x, n / steps), list[int]()
        for i, held in enumerate(frozen):
            text.append(x[i] if held else inverse(narrow(conditional(text), *narrowing), places[i]))
        for i, held in enumerate(frozen):
            turn = (phase + i * golden) % 1
            chosen = coins[i] < w if rule == "exact" or turn < kappa else turn < then
            x[i] = text[i] if chosen and not held else x[i]
    return x
