"""How the peers destroy text: the noise schedules of MDLM, Duo, SEDD, SDTT and HDLM, in our time.

Their time runs from data (0) to noise (1), ours from noise to data: t_theirs = 1 - t. kappa_t is the probability that a
position still shows its own token, sigma = -ln kappa the total noise (what some of the networks are told), and

    rate(t) = d sigma / d t_theirs = -d sigma / dt = kappa'_t / kappa_t

None of them begins at kappa = 0: a peer's x_0 is drawn as pure noise, but the network believes kappa_0 = epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fsdfm.flow.schedule import Time

__all__ = ["Geometric", "LogLinear", "Noising", "column"]


def column(t: Time) -> Tensor:
    """Times as float64 that broadcast against [B, L]: one for all, one per row [B], or one per position [B, L]."""
    time = torch.as_tensor(t, dtype=torch.float64)
    return time[:, None] if time.ndim == 1 else time


class Noising(Protocol):
    """A noise schedule: kappa, its complement, sigma and the rate of sigma, all float64."""

    def kappa(self, t: Time) -> Tensor:
        """kappa_t: the probability that a position shows its x_1 token, untouched."""
        ...

    def lost(self, t: Time) -> Tensor:
        """1 - kappa_t, with its digits."""
        ...

    def sigma(self, t: Time) -> Tensor:
        """The total noise -ln kappa_t."""
        ...

    def rate(self, t: Time) -> Tensor:
        """The rate of sigma towards the noise."""
        ...


@dataclass(frozen=True)
class LogLinear:
    """kappa_t = epsilon + (1 - epsilon) t: every masked model here, and Duo; epsilon = 1e-3 (gamma-HDLM: 5e-3)."""

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon is {self.epsilon}; allowed are 0 <= epsilon < 1, the published ones are 1e-3")

    def kappa(self, t: Time) -> Tensor:
        """epsilon + (1 - epsilon) t."""
        return self.epsilon + (1 - self.epsilon) * torch.as_tensor(t, dtype=torch.float64)

    def lost(self, t: Time) -> Tensor:
        """(1 - epsilon)(1 - t)."""
        return (1 - self.epsilon) * (1 - torch.as_tensor(t, dtype=torch.float64))

    def sigma(self, t: Time) -> Tensor:
        """-ln kappa_t."""
        return -torch.log1p(-self.lost(t))

    def rate(self, t: Time) -> Tensor:
        """(1 - epsilon) / kappa_t."""
        return (1 - self.epsilon) / self.kappa(t)


@dataclass(frozen=True)
class Geometric:
    """sigma_t = smallest^t largest^(1-t): SEDD with the uniform graph."""

    smallest: float = 1e-4
    largest: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.smallest < self.largest < math.inf:
            raise ValueError(
                f"sigma runs from {self.largest} to {self.smallest}; allowed are 0 < smallest < largest, finite"
            )

    def kappa(self, t: Time) -> Tensor:
        """exp(-sigma_t)."""
        return torch.exp(-self.sigma(t))

    def lost(self, t: Time) -> Tensor:
        """1 - exp(-sigma_t)."""
        return -torch.expm1(-self.sigma(t))

    def sigma(self, t: Time) -> Tensor:
        """Geometric between the two ends."""
        time = torch.as_tensor(t, dtype=torch.float64)
        return self.smallest**time * self.largest ** (1 - time)

    def rate(self, t: Time) -> Tensor:
        """sigma_t ln(largest / smallest)."""
        return self.sigma(t) * math.log(self.largest / self.smallest)
