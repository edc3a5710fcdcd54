"""Matching: the temperature at which samples have a given entropy.

Entropy rises with the temperature, so two samplers are compared at equal entropy by cooling one of them. The search
asks for the entropy of some samples at a temperature; where the same noise is used each time, it is a steady function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COLDEST", "HOTTEST", "Match", "find_temperature"]

COLDEST, HOTTEST = 0.1, 4.0
_STRIDE = 1.25  # of the first steps away from the start
_INSIDE = 0.1  # share of a bracket that interpolation may not come nearer to its ends
_MOST = 24  # askings


@dataclass(frozen=True)
class Match:
    """The temperature found, the entropy there, and whether that is within the tolerance."""

    temperature: float
    entropy_bits: float
    reached: bool


def find_temperature(
    entropy: Callable[[float], float], target: float, *, start: float = 1.0, tolerance: float = 0.02
) -> Match:
    """The temperature in COLDEST .. HOTTEST with |entropy(temperature) - target| <= tolerance.

    From `start` outwards until the target lies between two temperatures, then between those: by interpolation in the
    logarithm of the temperature, kept off the ends of the bracket, so that it shrinks like a bisection at worst. Where
    the target is out of reach the nearest temperature is given, `reached` false.
    """
    asked: dict[float, float] = {}

    def ask(temperature: float) -> float:
        temperature = float(f"{min(max(temperature, COLDEST), HOTTEST):.4g}")  # as it will be written down
        if temperature not in asked:
            asked[temperature] = entropy(temperature)
        return temperature

    here = ask(start)
    while len(asked) < _MOST and abs(asked[here] - target) > tolerance:
        below = [t for t in asked if asked[t] < target]
        above = [t for t in asked if asked[t] >= target]
        if below and above:
            step = _between(max(below), min(above), asked, target)
        else:
            step = here / _STRIDE if above else here * _STRIDE
        before = len(asked)
        here = ask(step)
        if len(asked) == before:  # an end of the range, or a bracket too narrow to be told apart
            break
    nearest = min(asked, key=lambda t: (abs(asked[t] - target), t))
    return Match(nearest, asked[nearest], abs(asked[nearest] - target) <= tolerance)


def _between(cold: float, hot: float, asked: dict[float, float], target: float) -> float:
    """A temperature between two whose entropies enclose the target."""
    share = (target - asked[cold]) / (asked[hot] - asked[cold])
    share = min(max(share, _INSIDE), 1 - _INSIDE)
    return math.exp(math.log(cold) + share * (math.log(hot) - math.log(cold)))
