"""The sampler in forty plain lines, one position at a time: it knows nothing of thinning, tiles or batches."""

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
                    others = [0.0 if v == now else mass for v, mass in enumerate(p)]
                    target, at = places[b][i] * sum(others), 0.0
                    row[i] = next(v for v, mass in enumerate(others) if (at := at + mass) > target)
    return x
