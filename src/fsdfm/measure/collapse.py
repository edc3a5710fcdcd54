"""The collapse guard: no perplexity stands alone, and one bought with diversity is flagged.

real = {"entropy_bits": bootstrap_mean(...), "distinct_2": jackknife(...)}  # held-out text, as many and as long
for flag in leave_band({"entropy_bits": 4.1, "distinct_2": 0.31}, real):
    print(flag)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from fsdfm.measure.statistics import Interval

__all__ = ["TOLERANCE", "Flag", "Tolerance", "leave_band"]


@dataclass(frozen=True)
class Tolerance:
    """How far beyond the interval of real text a number may lie: `absolute` in its unit, `relative` as a share."""

    absolute: float = 0.0
    relative: float = 0.0

    def band(self, real: Interval) -> tuple[float, float]:
        """The interval of real text, widened on both sides."""
        margin = self.absolute + self.relative * abs(real.value)
        return min(real.low, real.value) - margin, max(real.high, real.value) + margin


TOLERANCE: Mapping[str, Tolerance] = MappingProxyType(
    {
        "entropy_bits": Tolerance(absolute=0.15),
        "distinct_1": Tolerance(relative=0.10),
        "distinct_2": Tolerance(relative=0.10),
        "distinct_4": Tolerance(relative=0.10),
    }
)
"""The metrics that the guard watches; too low is collapse, too high is noise."""


@dataclass(frozen=True)
class Flag:
    """A metric that has left the band of real text."""

    metric: str
    value: float
    band: tuple[float, float]

    @property
    def side(self) -> Literal["below", "above"]:
        """Below the band is collapse, above it is noise."""
        return "below" if not self.value > self.band[1] else "above"

    def __str__(self) -> str:
        what, (low, high) = "collapse" if self.side == "below" else "noise", self.band
        return f"{what}: {self.metric} {self.value:.3g} is {self.side} real text's {low:.3g} .. {high:.3g}"


def leave_band(
    measured: Mapping[str, float],
    real: Mapping[str, Interval],
    *,
    tolerance: Mapping[str, Tolerance] = TOLERANCE,
) -> tuple[Flag, ...]:
    """The watched metrics of a set of samples that lie outside the band of real held-out text.

        band = [low - margin, high + margin],  margin = absolute + relative * value

    `real` must come from as many texts of the same length: entropy and distinct-n move with both.
    """
    missing = sorted(name for name in tolerance if name in measured and name not in real)
    if missing:
        raise ValueError(f"real text lacks {', '.join(missing)}; measure it there in the same way, or leave it out")
    bands = {name: allowed.band(real[name]) for name, allowed in tolerance.items() if name in measured}
    return tuple(
        Flag(name, measured[name], band)
        for name, band in bands.items()
        if not band[0] <= measured[name] <= band[1]  # a number that is none is outside
    )
