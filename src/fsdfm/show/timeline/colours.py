"""Eight ordered hues for two themes, from a token's first step to its last.

Both ramps move away from the page, so late edits stand out; their lightness is monotone, so they keep their order for
every reader and in grey; text on every hue has a contrast of at least 4.5:1. The tests compute all of this, for normal
vision and for simulated protanopia, deuteranopia and tritanopia.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DARK", "LIGHT", "NUM_HUES", "Theme"]

NUM_HUES = 8


@dataclass(frozen=True)
class Theme:
    """What is drawn with: page, text, secondary text, the box of a corrupted token, and the hues, early to late."""

    page: str
    ink: str
    faint: str
    mark: str
    hues: tuple[str, ...]


LIGHT = Theme(
    page="#ffffff",
    ink="#16181d",
    faint="#5c636e",
    mark="#b3001b",
    hues=("#ffeeaf", "#caed80", "#a7e0b2", "#01ddc5", "#7cc0e8", "#a2a1fd", "#aa96b8", "#d8708c"),
)
DARK = Theme(
    page="#14161a",
    ink="#f4f5f7",
    faint="#a3abb6",
    mark="#ffb454",
    hues=("#423216", "#384100", "#314b31", "#005658", "#435576", "#415aa0", "#6158bc", "#866097"),
)
