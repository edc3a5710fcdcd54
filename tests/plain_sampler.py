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
    """Every position of every step by the definition: stay with probability s, else an inverse CDF of the others.

    exact, single, instant: the coin decides; spaced: a coin from the turn on at which kappa passes frac(U + i/phi), as
    in `exact`; sweep: the free positions from left to right, each drawn once, as many as kappa says.
    """
    x, length, mask = x_0.tolist(), x_0.shape[1], path.source.mask_token
    phases, golden = noise.uniform(Purpose.PHASE, 1)[:, 0].tolist(), (math.sqrt(5) - 1) / 2
    free = [[i for i in range(length) if not frozen[b, i] and mask in (None, row[i])] for b, row in enumerate(x)]
    for n in range(steps):
        t, end = n / steps, (n + 1) / steps
        kappa, then = (float(path.schedule.kappa(time)) for time in (t, end))
        w = (then - kappa) / (1 - kappa)
        redraws = (
            (end - t) * float(path.schedule.kappa_dot(t)) / (1 - kappa)
            if rule == "instant"
            else -math.log1p(-w)
            if w < 1
            else math.inf
        )
        coins = noise.uniform(Purpose.COIN, length, n).tolist()
        places = noise.uniform(Purpose.DESTINATION, length, n).tolist()
        answers = logits(torch.tensor(x), t).tolist()
        for b, row in enumerate(x):
            swept = range(round(kappa * len(free[b])), round(then * len(free[b])))
            for rank, i in enumerate(free[b]):
                now = row[i]
                if mask is not None and now != mask:
                    continue
                p = narrow([-math.inf if v == mask else z for v, z in enumerate(answers[b][i])], *narrowing)
                if rule == "sweep":
                    row[i] = inverse(p, places[b][i]) if rank in swept else now
                    continue
                q, coin, turn = 1 - p[now], coins[b][i], (phases[b] + i * golden) % 1
                if rule == "spaced":
                    coin = coin if turn < kappa else w * coin if turn < then else 1.0
                leave = q if end == 1 else w * q if rule in ("exact", "spaced") else 1 - math.exp(-redraws * q)
                if coin < leave:
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
