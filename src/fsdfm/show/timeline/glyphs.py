"""Any piece of text made visible and harmless: no raw control character leaves this file, and no piece is invisible."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len

__all__ = ["NEWLINE", "clusters", "visible"]

NEWLINE = "↵"
_SHOWN = {"\n": NEWLINE + "\n", "\t": "⇥ "}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, formats, surrogates, unassigned, line separators
_JOINERS = "\u200c\u200d"  # formats that words and emoji are written with


def visible(piece: str) -> str:
    r"""A piece as it is displayed: a newline as "↵" and a line break, a tab as "⇥", a control as its escape (\x1b).

    A piece that would take no room is shown by a sign: "∅" if empty, a dotted circle under a lone combining mark.
    """
    text = "".join(map(_show, piece))
    if cell_len(text) > 0:
        return text
    if all(unicodedata.category(character).startswith("M") for character in text):
        return f"◌{text}" if text else "∅"
    return _escape(text)


def clusters(text: str) -> Iterator[str]:
    """The characters of a displayed text, each with the marks and joined characters that share its cell."""
    cluster = ""
    for character in text:
        joined = cluster.endswith("\u200d") or (character != "\n" and cell_len(character) == 0)
        if cluster and not (joined and cluster != "\n"):
            yield cluster
            cluster = ""
        cluster += character
    if cluster:
        yield cluster


def _show(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
    return _escape(character) if hidden else character


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")
