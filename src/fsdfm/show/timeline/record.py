"""What a timeline records: pieces of text and the step at which each last changed; how it is drawn is elsewhere."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fsdfm.show.timeline.colours import DARK, LIGHT
from fsdfm.show.timeline.html import notebook_html, page
from fsdfm.show.timeline.png import save_png
from fsdfm.show.timeline.terminal import TimelineText
from fsdfm.show.timeline.tokens import Key, Token, bins

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Timeline"]


class Recorded(Protocol):
    """A text that knows how it came about, as `fsdfm.generate.Generation` does."""

    @property
    def pieces(self) -> Sequence[str]: ...
    @property
    def last_changed(self) -> Sequence[int]: ...
    @property
    def steps(self) -> int: ...
    @property
    def marked(self) -> Sequence[bool]: ...
    @property
    def given(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Timeline:
    """The final text of a generation and when each token came to be what it is (appendix D.4).

        Timeline([" the", " cat"], [1, 3], steps=8).to_html()

    pieces        the text of each token; anything may be in it
    last_changed  for each token the step 1..steps of its last change, or 0 if it never changed
    marked        the tokens that were corrupted before a repair
    given         the tokens that were frozen: prompt, suffix, everything a request fixed
    """

    pieces: Sequence[str]
    last_changed: Sequence[int]
    steps: int
    marked: Sequence[bool] = ()
    given: Sequence[bool] = ()

    def __post_init__(self) -> None:
        bins(self.steps)
        pieces = tuple(self.pieces)
        for name, convert in (("last_changed", _whole), ("marked", bool), ("given", bool)):
            values = tuple(map(convert, getattr(self, name)))  # also from a tensor or an array
            if name != "last_changed" and not values:
                values = (False,) * len(pieces)
            if len(values) != len(pieces):
                raise ValueError(f"{name} has {len(values)} entries for {len(pieces)} pieces; give one a piece")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "pieces", pieces)
        for index, (piece, step, given) in enumerate(zip(pieces, self.last_changed, self.given, strict=True)):
            _check_token(index, piece, step, given=given, steps=self.steps)

    @classmethod
    def of(cls, text: Recorded) -> Timeline:
        """The timeline of a generated text."""
        return cls(text.pieces, text.last_changed, text.steps, marked=text.marked, given=text.given)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens in order, each with its bin."""
        every = bins(self.steps)
        columns = zip(self.pieces, self.last_changed, self.marked, self.given, strict=True)
        return tuple(
            Token(piece, step, every[(step - 1) * len(every) // self.steps] if step else None, marked, given)
            for piece, step, marked, given in columns
        )

    @property
    def legend(self) -> tuple[Key, ...]:
        """Every bin with its count, then what else occurs: tokens never changed, given, corrupted."""
        tokens = self.tokens
        changed = [Key(bin.label, sum(token.bin == bin for token in tokens), bin) for bin in bins(self.steps)]
        others = [
            Key("never changed", sum(token.kept for token in tokens), kept=True),
            Key("given", sum(self.given), given=True),
            Key("corrupted", sum(self.marked), marked=True),
        ]
        return (*changed, *(key for key in others if key.count))

    def to_rich(self) -> RenderableType:
        """For the terminal: a rich renderable with its legend; where there is no colour, small numbers tell the bin."""
        return TimelineText(self)

    def to_html(self, title: str = "Timeline") -> str:
        """One self-contained page, light or dark as the reader's system is."""
        return page([self], title=title)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return notebook_html(self)

    def save_png(self, path: str | os.PathLike[str], *, dark: bool = False) -> None:
        """Write a picture of the wrapped text and its legend; needs `pip install 'fsdfm[plots]'`."""
        save_png(self, path, DARK if dark else LIGHT)


def _whole(value: int) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"last_changed contains {value!r}; steps are whole numbers") from error


def _check_token(index: int, piece: str, step: int, *, given: bool, steps: int) -> None:
    if not isinstance(piece, str):
        raise ValueError(f"piece {index} is {piece!r}; pieces are strings: decode the token ids first")
    if not 0 <= step <= steps:
        raise ValueError(f"last_changed[{index}] is {step}; it must be 0 (never) or a step of 1..{steps}")
    if given and step:
        raise ValueError(f"token {index} is given, yet changed at step {step}; a given token has last_changed 0")
