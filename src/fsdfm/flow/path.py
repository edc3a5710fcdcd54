"""The probability path between source and data, its coupling, and the velocity that follows it.

p_t(x^i | x_0, x_1) = (1 - kappa_t) delta_{x_0}(x^i) + kappa_t delta_{x_1}(x^i)          section 3
u_t^i(a, z)         = g(t) (p_{1|t}(a | z) - delta_z(a))                                   section 3
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fsdfm.flow.schedule import PolynomialSchedule, Schedule, Time
from fsdfm.flow.source import Source
from fsdfm.noise import Noise, Purpose

__all__ = ["Coupling", "IndependentCoupling", "MixturePath", "velocity"]


class Coupling(Protocol):
    """The joint law pi(x_0, x_1), as a draw of x_0 given x_1."""

    def sample(self, source: Source, x_1: Tensor, noise: Noise) -> Tensor:
        """x_0 ~ pi(. | x_1): int64 [B, L]."""
        ...


@dataclass(frozen=True)
class IndependentCoupling:
    """pi(x_0, x_1) = p_0(x_0) p_1(x_1): noise that knows nothing of the data (the default)."""

    def sample(self, source: Source, x_1: Tensor, noise: Noise) -> Tensor:
        """x_0 ~ p_0, whatever x_1 is."""
        return source.sample(noise, x_1.shape[1])


@dataclass(frozen=True)
class MixturePath:
    """How noise becomes data: a source, a schedule and the coupling of the two ends."""

    source: Source
    schedule: Schedule = field(default_factory=PolynomialSchedule)
    coupling: Coupling = field(default_factory=IndependentCoupling)

    def sample_x_0(self, x_1: Tensor, noise: Noise) -> Tensor:
        """x_0 ~ pi(. | x_1): int64 [B, L]."""
        return self.coupling.sample(self.source, x_1, noise)

    def sample(
        self, x_0: Tensor, x_1: Tensor, t: Time, *, noise: Noise, step: int = 0, turns: Tensor | None = None
    ) -> Tensor:
        """x_t ~ p_t(. | x_0, x_1): each position shows x_1 with probability kappa_t, else x_0.

        turns   kappa at which each position turns from x_0 to x_1, uniform on [0, 1): float64 [B, L]; independent ones
                unless said
        """
        if x_0.shape != x_1.shape:
            raise ValueError(f"x_0 has shape {tuple(x_0.shape)} and x_1 {tuple(x_1.shape)}; they must agree")
        require_rows(noise, len(x_1))
        kappa = self.schedule.kappa(t).to(noise.samples.device).reshape(-1, 1)
        turns = noise.uniform(Purpose.PATH, x_1.shape[1], step) if turns is None else turns
        shows_data = turns < kappa
        return torch.where(shows_data.to(x_1.device), x_1, x_0)

    def renoise(self, x_t: Tensor, t: Time, t_back: Time, *, noise: Noise, step: int = 0, origin: Time = 0.0) -> Tensor:
        """Go back in time exactly: x_s ~ p_s for s = t_back <= t, if x_t ~ p_t and the coupling is independent.

        Each position returns to the source with probability 1 - kappa_s / kappa_t, for then
        (kappa_s/kappa_t) [kappa_t delta_{x_1} + (1-kappa_t) p_0] + (1 - kappa_s/kappa_t) p_0
        = kappa_s delta_{x_1} + (1-kappa_s) p_0. Under the mask source this is remasking.

        origin   the time t_0 <= s at which these positions were noise alone, which is later than 0 where others are
                 given; they show x_1 with probability (kappa_t - kappa_{t_0}) / (1 - kappa_{t_0}), and so stay with
                 (kappa_s - kappa_{t_0}) / (kappa_t - kappa_{t_0})
        """
        if not isinstance(self.coupling, IndependentCoupling):
            raise ValueError("renoising needs the independent coupling: noise that is new knows nothing of x_1")
        require_rows(noise, len(x_t))
        first = self.schedule.kappa(origin)
        now, back = self.schedule.kappa(t) - first, self.schedule.kappa(t_back) - first
        if not bool((back <= now).all()):
            raise ValueError(f"t_back={t_back} lies after t={t}; renoising goes back in time")
        if bool((back < 0).any()):
            raise ValueError(f"t_back={t_back} lies before {origin}, when there was nothing but noise; go back to it")
        kept = torch.where(now > 0, back / now.clamp(min=1e-300), 1.0).to(noise.samples.device).reshape(-1, 1)
        returns = noise.uniform(Purpose.RENOISE, x_t.shape[1], step) >= kept
        x_0 = self.source.sample(noise, x_t.shape[1], step=step + 1)
        return torch.where(returns.to(x_t.device), x_0.to(x_t.device), x_t)


def require_rows(noise: Noise, rows: int) -> None:
    """Raise unless the noise has one sample per row: one row for many would make them move in step."""
    if len(noise) != rows:
        raise ValueError(f"noise has {len(noise)} samples for {rows} rows; give one sample index per row")


def velocity(probs: Tensor, x_t: Tensor, scalar: Tensor | float) -> Tensor:
    """The factorised velocity u_t^i(a, z) = g(t) (p_{1|t}(a | z) - delta_z(a)), dense: [B, L, V].

    For small vocabularies and proofs; the sampler never builds it. `scalar` is g(t), or the mean scalar, of shape
    [] or [B].
    """
    direction = probs.clone()
    direction.scatter_add_(-1, x_t[..., None], torch.full_like(probs[..., :1], -1.0))
    return torch.as_tensor(scalar, device=probs.device).reshape(-1, 1, 1).to(probs.dtype) * direction
