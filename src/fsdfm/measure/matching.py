"""Matching: the temperature at which samples have a given entropy.

Entropy rises with the temperature, so two samplers are compared at equal entropy by cooling one of them. The search
asks for the entropy of some samples at a temperature; where the same noise is used each time, it is a steady function.
This is the one search for a temperature of equal entropy; two whole curves are compared in `frontier`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["COLDEST", "HOTTEST", "Match", "find_temperature"]

COLDEST, HOTTEST = 0.1, 4.0
_STRIDE = 1.25  # of the first steps away from the start
_INSIDE = 0.1  # share of a bracket that interpolation may not come nearer to its ends
_MOST = 48  # askings


@dataclass(frozen=True)
class Match:
    """The temperature found, the entropy there, and whether that is within the tolerance."""

    temperature: float
    entropy_bits: float
    reached: bool


def find_temperature(
    entropy: Callable[[float], float],
    target: float,
    *,
    start: float = 1.0,
    tolerance: float = 0.02,
    ends: tuple[float, float] = (COLDEST, HOTTEST),
) -> Match:
    """The temperature between the ends with |entropy(temperature) - target| <= tolerance.

    From `start` outwards, colder where there is too much entropy, until the target lies between two neighbouring
    temperatures; then between those, by interpolation in the logarithm of the temperature, kept off the ends of the
    bracket, so that it shrinks like a bisection at worst. Entropy usually rises with the temperature; where that leads
    to an end of the range, the other side is looked at, too. Where the target is out of reach the nearest temperature
    is given, `reached` false.
    """
    asked: dict[float, float] = {}

    def ask(temperature: float) -> float:
        temperature = float(f"{min(max(temperature, ends[0]), ends[1]):.4g}")  # as it will be written down
        if temperature not in asked:
            asked[temperature] = entropy(temperature)
        return temperature

    here = ask(start)
    while len(asked) < _MOST and abs(asked[here] - target) > tolerance:
        bracket = _bracket(asked, target, start)
        before = len(asked)
        here = ask(_between(*bracket, asked, target=target) if bracket else _outwards(asked, target, start, ends=ends))
        if len(asked) == before:  # the whole range was looked at, or a bracket is too narrow to be told apart
            break
    nearest = min(asked, key=lambda t: (abs(asked[t] - target), t))
    return Match(nearest, asked[nearest], abs(asked[nearest] - target) <= tolerance)


def _bracket(asked: dict[float, float], target: float, start: float) -> tuple[float, float] | None:
    """Neighbouring temperatures whose entropies enclose the target, nearest to the start."""
    pairs = [(a, b) for a, b in pairwise(sorted(asked)) if (asked[a] - target) * (asked[b] - target) <= 0]
    return min(pairs, key=lambda pair: abs(math.log(pair[0] * pair[1] / start**2)), default=None)


def _outwards(asked: dict[float, float], target: float, start: float, *, ends: tuple[float, float]) -> float:
    """The next temperature beyond those that were asked: on the side where entropy should be nearer, then the other."""
    cold, hot = min(asked), max(asked)
    colder = asked[start if start in asked else cold] > target
    if colder:
        return cold / _STRIDE if cold > ends[0] else hot * _STRIDE
    return hot * _STRIDE if hot < ends[1] else cold / _STRIDE


def _between(cold: float, hot: float, asked: dict[float, float], *, target: float) -> float:
    """A temperature between two whose entropies enclose the target."""
    gap = asked[hot] - asked[cold]
    share = (target - asked[cold]) / gap if gap else 0.5
    share = min(max(share, _INSIDE), 1 - _INSIDE)
    return math.exp(math.log(cold) + share * (math.log(hot) - math.log(cold)))
