"""The timeline in a terminal.

A terminal does not tell its background, so a hue always brings its own ink: dark text on a light chip reads on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType
from rich.style import Style
from rich.text import Text

from fsdfm.show.timeline.colours import LIGHT
from fsdfm.show.timeline.glyphs import visible
from fsdfm.show.timeline.tokens import LEGEND_TITLE, Key, Token

if TYPE_CHECKING:
    from fsdfm.show.timeline.record import Timeline

__all__ = ["TimelineText", "text_of"]

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸"


class TimelineText:
    """A rich renderable: the legend, an empty line, the text; without colours, numbers and brackets stand for them."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        entry = _chip_entry if _has_colours(console) else _numbered_entry
        yield Text(LEGEND_TITLE)
        yield Columns([entry(key) for key in self.timeline.legend], padding=(0, 3))
        yield Text()
        yield text_of(self.timeline.tokens, console)


def text_of(tokens: Sequence[Token], console: Console) -> Text:
    """The tokens as the console can show them."""
    return _chips(tokens) if _has_colours(console) else _numbered(tokens)


def _has_colours(console: Console) -> bool:
    """Sixteen colours are none: the terminal chooses what they look like, and eight hues would fall together."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def _style(look: Token | Key) -> Style:
    chip = Style(color=LIGHT.ink, bgcolor=LIGHT.hues[look.bin.hue]) if look.bin else Style()
    return chip + Style(underline=look.marked or None, bold=look.marked or None, italic=look.kept or None)


def _chips(tokens: Sequence[Token]) -> Text:
    text = Text(overflow="fold")
    for token in tokens:
        text.append(visible(token.piece), _style(token))
    return text


def _chip_entry(key: Key) -> Text:
    return Text.assemble((f" {key.label} " if key.bin or key.marked else key.label, _style(key)), f" {key.count}")


def _numbered(tokens: Sequence[Token]) -> Text:
    """Every run of tokens of one bin followed by the bin's number, corrupted tokens in brackets."""
    text = Text(overflow="fold")
    for (bin, marked, given), run in groupby(tokens, lambda token: (token.bin, token.marked, token.given)):
        shown = "".join(visible(token.piece) for token in run)
        words = shown.removesuffix("\n")  # the number stands at the end of its line, not before the next one
        number = SUPERSCRIPTS[bin.number] if bin else "" if given else SUPERSCRIPTS[0]
        text.append(f"⟦{words}⟧{number}" if marked else f"{words}{number}")
        text.append(shown[len(words) :])
    return text


def _numbered_entry(key: Key) -> Text:
    if key.bin:
        return Text(f"{SUPERSCRIPTS[key.bin.number]} step {key.bin.label}: {key.count}")
    label = f"⟦{key.label}⟧" if key.marked else f"{SUPERSCRIPTS[0]} {key.label}" if key.kept else key.label
    return Text(f"{label}: {key.count}")
