"""Schedules: kappa_t, the share of a sequence that already is data, and what follows from it.

A schedule is a differentiable increasing map of [0, 1] onto itself. Everything a sampler or a loss needs of it
follows from kappa, its derivative and its inverse:

    scalar             g(t)       = kappa'_t / (1 - kappa_t)                  the paper's eq. for g in section 3
    survival           exp(-G)    = (1 - kappa_{t+h}) / (1 - kappa_t)
    cumulative scalar  G_{t,h}    = integral of g over [t, t+h] = -ln survival            section 4.2
    mean scalar        gbar_{t,h} = G_{t,h} / h                                           section 4.2
    redraw             w          = 1 - exp(-G) = (kappa_{t+h} - kappa_t) / (1 - kappa_t)

All of them take times as Python floats or tensors and return float64 tensors. At t+h = 1 the survival is 0 and
the cumulative scalar infinite, which is right: prefer `survival` and `redraw`, which are finite everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["CosineSchedule", "ExponentialSchedule", "PolynomialSchedule", "Schedule", "Time"]

Time = float | Tensor


def as_time(t: Time) -> Tensor:
    """A time, or a tensor of them, as float64; outside [0, 1] is an error."""
    time = torch.as_tensor(t, dtype=torch.float64)
    if not bool(((time >= 0) & (time <= 1)).all()):
        raise ValueError(f"time {_worst(time)} is outside [0, 1]; flows run from t=0 (noise) to t=1 (data)")
    return time


def as_interval(t: Time, t_next: Time) -> tuple[Tensor, Tensor]:
    """The two ends of a step as float64; they must satisfy 0 <= t <= t_next <= 1 and t < 1."""
    start, end = as_time(t), as_time(t_next)
    if not bool((start <= end).all()):
        row = int((start - end).argmax()) if (start - end).ndim else 0
        times = [float(torch.broadcast_to(x, (start - end).shape).flatten()[row]) for x in (start, end)]
        raise ValueError(f"a step goes from t={times[0]} to t_next={times[1]}; t_next must not be smaller than t")
    if not bool((start < 1).all()):
        raise ValueError("a step starts at t=1, where the flow has already ended; t must be below 1")
    return start, end


def _worst(time: Tensor) -> float:
    outside = torch.nan_to_num((time - 0.5).abs(), nan=math.inf)
    return float(time.flatten()[outside.flatten().argmax()])


class Schedule(ABC):
    """An increasing differentiable map kappa of [0, 1] onto [0, 1]; the rest is derived once, here."""

    @abstractmethod
    def _kappa(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _kappa_dot(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _kappa_inverse(self, kappa: Tensor) -> Tensor: ...

    def _complement(self, t: Tensor) -> Tensor:
        """1 - kappa_t; a schedule overrides it where the subtraction would lose digits or miss 0 at t = 1."""
        return 1 - self._kappa(t)

    def kappa(self, t: Time) -> Tensor:
        """kappa_t: the probability that a position shows its x_1 token at time t."""
        return self._kappa(as_time(t))

    def kappa_dot(self, t: Time) -> Tensor:
        """The derivative of kappa at t."""
        return self._kappa_dot(as_time(t))

    def kappa_inverse(self, kappa: Time) -> Tensor:
        """The time at which a share kappa of the positions shows data."""
        return self._kappa_inverse(as_time(kappa)).clamp(0, 1)

    def scalar(self, t: Time) -> Tensor:
        """g(t) = kappa'_t / (1 - kappa_t), the rate at which positions are redrawn; infinite at t = 1."""
        time = as_time(t)
        return self._kappa_dot(time) / self._complement(time)

    def survival(self, t: Time, t_next: Time) -> Tensor:
        """exp(-G_{t,h}) = (1 - kappa_{t+h}) / (1 - kappa_t): P(no redraw in the step); 0 at t_next = 1."""
        start, end = as_interval(t, t_next)
        return self._complement(end) / self._complement(start)

    def redraw(self, t: Time, t_next: Time) -> Tensor:
        """w = 1 - exp(-G_{t,h}) = (kappa_{t+h} - kappa_t) / (1 - kappa_t): the probability of at least one redraw."""
        start, end = as_interval(t, t_next)
        gained = self._kappa(end) - self._kappa(start)  # keeps its digits near t = 0
        lost = self._complement(start) - self._complement(end)  # and this one near t = 1
        share = torch.where(self._kappa(start) < 0.5, gained, lost) / self._complement(start)
        survival = self.survival(start, end)
        return torch.where(survival > 0.5, share, 1 - survival)  # exactly 1 at t_next = 1

    def cumulative_scalar(self, t: Time, t_next: Time) -> Tensor:
        """G_{t,h} = ln((1 - kappa_t) / (1 - kappa_{t+h})): additive over steps, infinite at t_next = 1."""
        w = self.redraw(t, t_next)
        return torch.where(w < 0.5, -torch.log1p(-w.clamp(max=0.5)), -torch.log(self.survival(t, t_next)))

    def mean_scalar(self, t: Time, t_next: Time) -> Tensor:
        """gbar_{t,h} = G_{t,h} / h, the mean of g over the step; g(t) in the limit h = 0."""
        start, end = as_interval(t, t_next)
        h = end - start
        mean = self.cumulative_scalar(start, end) / torch.where(h > 0, h, 1.0)
        return torch.where(h > 0, mean, self.scalar(start))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{v:g}' for v in vars(self).values())})"


class PolynomialSchedule(Schedule):
    """kappa_t = t^n with n >= 1; n = 1 is the paper's linear schedule, larger n spend more time near the noise."""

    def __init__(self, exponent: float = 1.0):
        if not 1 <= exponent < math.inf:
            raise ValueError(f"exponent is {exponent}; allowed are finite numbers >= 1 (below 1, g(0) is infinite)")
        self.exponent = float(exponent)

    def _kappa(self, t: Tensor) -> Tensor:
        return t**self.exponent

    def _kappa_dot(self, t: Tensor) -> Tensor:
        return self.exponent * t ** (self.exponent - 1)

    def _kappa_inverse(self, kappa: Tensor) -> Tensor:
        return kappa ** (1 / self.exponent)


class CosineSchedule(Schedule):
    """kappa_t = 1 - cos(pi t / 2): convex, with g(0) = 0 and kappa' = pi/2 at the end."""

    def _kappa(self, t: Tensor) -> Tensor:
        # 2 sin^2(pi t / 4) keeps the digits near 0, 1 - sin(pi (1-t) / 2) is exactly 1 at t = 1.
        return torch.where(t < 0.5, 2 * torch.sin(math.pi * t / 4) ** 2, 1 - self._complement(t))

    def _complement(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi * (1 - t) / 2)

    def _kappa_dot(self, t: Tensor) -> Tensor:
        return math.pi / 2 * torch.sin(math.pi * t / 2)

    def _kappa_inverse(self, kappa: Tensor) -> Tensor:
        return 4 / math.pi * torch.asin(torch.sqrt(kappa / 2))


class ExponentialSchedule(Schedule):
    """kappa_t = (e^{rt} - 1) / (e^r - 1): convex for rate r > 0, concave for r < 0, linear as r -> 0.

    Its scalar is r / (e^{r(1-t)} - 1): unlike t^n with n > 1 the flow does not stall at t = 0.
    """

    def __init__(self, rate: float = 2.0):
        if not 0 < abs(rate) <= 20:
            raise ValueError(f"rate is {rate}; allowed are 0 < |rate| <= 20 (rate 0 is PolynomialSchedule(1))")
        self.rate = float(rate)

    def _kappa(self, t: Tensor) -> Tensor:
        return torch.expm1(self.rate * t) / math.expm1(self.rate)

    def _complement(self, t: Tensor) -> Tensor:
        return torch.expm1(-self.rate * (1 - t)) / math.expm1(-self.rate)

    def _kappa_dot(self, t: Tensor) -> Tensor:
        return self.rate * torch.exp(self.rate * t) / math.expm1(self.rate)

    def _kappa_inverse(self, kappa: Tensor) -> Tensor:
        return torch.log1p(kappa * math.expm1(self.rate)) / self.rate
