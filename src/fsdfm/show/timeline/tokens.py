"""A token as it is drawn: steps sorted into at most eight bins, a bin's hue, and the lines of a legend."""

from __future__ import annotations

from dataclasses import dataclass

from fsdfm.show.timeline.colours import NUM_HUES

__all__ = ["LEGEND_TITLE", "Bin", "Key", "Token", "bins"]

LEGEND_TITLE = "Tokens by the step of their last change, early to late, and how many"


@dataclass(frozen=True)
class Bin:
    """Consecutive steps first..last that share one hue; `number` counts the bins of a timeline from 1."""

    number: int
    first: int
    last: int
    hue: int

    @property
    def label(self) -> str:
        """The steps in words: "3" or "1-128"."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Token:
    """One token as it is drawn; `bin` is None where it never changed."""

    piece: str
    step: int
    bin: Bin | None
    marked: bool
    given: bool

    @property
    def kept(self) -> bool:
        """Whether it was free to change and never did."""
        return self.bin is None and not self.given


@dataclass(frozen=True)
class Key:
    """One line of the legend: a way of drawing, its name, and how many tokens are drawn that way."""

    label: str
    count: int
    bin: Bin | None = None
    marked: bool = False
    given: bool = False
    kept: bool = False


def bins(steps: int) -> tuple[Bin, ...]:
    """Steps 1..steps in min(steps, 8) bins of equal size up to rounding, their hues spread over the whole ramp."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; a timeline needs at least 1 step")
    count = min(steps, NUM_HUES)
    edges = [-(-number * steps // count) for number in range(count + 1)]
    hues = [round(number * (NUM_HUES - 1) / max(count - 1, 1)) for number in range(count)]
    return tuple(Bin(n + 1, edges[n] + 1, edges[n + 1], hues[n]) for n in range(count))
