"""The sampler as a textbook writes it: every quantity of the paper's equations, dense, in its turn.

It is what `fsdfm bench generate` measures ours against: a network call for all logits [B, L, V], a softmax over all of
them, the velocity of every token of every position, and a float64 `torch.multinomial` of every position's destination,
needed or not. Randomness comes from torch's own generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdfm.flow import LogitsFunction, PolynomialSchedule, Schedule, velocity

__all__ = ["textbook_sample"]


@torch.no_grad()
def textbook_sample(
    denoiser: LogitsFunction, x_0: Tensor, steps: int, *, schedule: Schedule | None = None, seed: int = 0
) -> Tensor:
    """x_1, int64 [B, L], in equal steps by the paper's rule (appendix B.1).

        u(a) = gbar_{t,h} (p_{1|t}(a) - [a = x_t])       the velocity with the cumulative scalar
        lambda = sum of u(a) over a != x_t               the intensity
        J ~ Bernoulli(1 - exp(-h lambda));  x_{t+h} ~ u(.) / lambda over a != x_t where J, else x_t

    At t+h = 1, where gbar is infinite, x_1 ~ p_{1|t}.
    """
    schedule = schedule or PolynomialSchedule()
    generator = torch.Generator(x_0.device).manual_seed(seed)
    x_t, h = x_0, 1 / steps
    for step in range(steps):
        t = torch.full((len(x_0),), step / steps, dtype=torch.float64)
        probs = torch.softmax(denoiser(x_t, t, torch.full_like(t, h)), -1)
        if step == steps - 1:
            return _draw(probs, generator)
        scalar = float(schedule.mean_scalar(t[0], t[0] + h))
        rates = velocity(probs, x_t, scalar).scatter(-1, x_t[..., None], 0.0)
        intensity = rates.sum(-1)
        jumps = torch.rand(x_t.shape, generator=generator) < -torch.expm1(-h * intensity)
        x_t = torch.where(jumps, _draw(rates / intensity[..., None], generator), x_t)
    return x_t


def _draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    flat = probs.flatten(0, 1).to(torch.float64)
    return torch.multinomial(flat, 1, generator=generator)[:, 0].view(probs.shape[:2])
