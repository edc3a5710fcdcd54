"""The sampler against forty plain lines: Python floats, one position at a time, the same random numbers.

Both are asked within one run, so that no number of one machine is written down. The reference knows nothing of thinning,
tiles, tables of sums or batches.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdfm.flow import Filter, Grid, MaskSource, MixturePath, UniformSource, sample
from fsdfm.flow.rule import RULES
from fsdfm.noise import Noise, Purpose

V, L = 7, 6
NARROWINGS = [(1.0, None, None), (0.6, None, None), (0.7, 4, None), (1.4, None, 0.8), (0.5, 5, 0.7)]


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
    return [kept.get(v, 0.0) / sum(kept.values()) for v in range(len(cold))]


def reference(logits, path, x_0, *, steps, rule, noise, frozen, narrowing) -> list[list[int]]:
    """Every position of every step by the definition: stay with probability s, else an inverse CDF of the others."""
    x = [row[:] for row in x_0.tolist()]
    for n in range(steps):
        t, end = n / steps, (n + 1) / steps
        g = (
            math.inf
            if end == 1
            else math.log((1 - float(path.schedule.kappa(t))) / (1 - float(path.schedule.kappa(end))))
        )
        coins = noise.uniform(Purpose.COIN, L, n).tolist()
        places = noise.uniform(Purpose.DESTINATION, L, n).tolist()
        answers = logits(torch.tensor(x), t).tolist()
        for b, row in enumerate(x):
            for i, now in enumerate(row):
                if frozen[b][i] or (path.source.mask_token is not None and now != path.source.mask_token):
                    continue
                row_logits = [-math.inf if v == path.source.mask_token else z for v, z in enumerate(answers[b][i])]
                p = narrow(row_logits, *narrowing)
                q = 1 - p[now]
                leave = q if end == 1 else (1 - math.exp(-g)) * q if rule == "exact" else 1 - math.exp(-g * q)
                if coins[b][i] < leave:
                    others = [0.0 if v == now else mass for v, mass in enumerate(p)]
                    target, at = places[b][i] * sum(others), 0.0
                    row[i] = next(v for v, mass in enumerate(others) if (at := at + mass) > target)
    return x


def table(seed: int):
    """A posterior that depends on the whole state and on t."""
    weights = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def logits(x_t: Tensor, t: float | Tensor) -> Tensor:
        time = torch.as_tensor(t, dtype=torch.float64).reshape(-1, 1, 1)
        return 2 * weights[x_t] + weights[x_t.roll(1, 1)] * (1 + time)

    return logits


@pytest.mark.parametrize("rule", ["exact", "single"])
@pytest.mark.parametrize(
    "narrowing", [(1.0, None, None), (0.6, None, None), (0.7, 4, None), (1.4, None, 0.8), (0.5, 5, 0.7)]
)
@pytest.mark.parametrize("source", [UniformSource(V), MaskSource(V)])
def test_texts_are_those_of_the_definition(rule, narrowing, source) -> None:
    path, noise, steps = MixturePath(source), Noise(11, range(40)), 3
    x_0 = source.sample(noise, L)
    frozen = torch.zeros_like(x_0, dtype=torch.bool)
    frozen[:, 2] = True
    temperature, top_k, top_p = narrowing
    logits = table(3)
    found = sample(
        lambda x_t, t, h: logits(x_t, t).float(),
        path,
        x_0,
        grid=Grid.uniform(steps),
        rule=RULES[rule],
        noise=noise,
        frozen=frozen,
        filter=Filter(temperature, top_k, top_p),
    )
    expected = reference(
        lambda x, t: logits(x, t),
        path,
        x_0,
        steps=steps,
        rule=rule,
        noise=noise,
        frozen=frozen.tolist(),
        narrowing=narrowing,
    )
    wrong = sum(a != b for a, b in zip(found.tolist(), expected, strict=True))
    assert wrong <= 1  # float32 may fall on the other side of an end once in a long while
