"""What a terminal or a notebook is told: words, never commands; no stranger's text can move its cursor."""

from __future__ import annotations

from importlib.util import find_spec

from rich.console import Console

__all__ = ["draws_bars", "printable", "say"]

_KEPT = "\n\t"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # C0, C1, directions
_SHOWN = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS if chr(code) not in _KEPT}


def printable(text: str) -> str:
    r"""The text with every control character but newline and tab written out: ESC is shown as \x1b."""
    return text.translate(_SHOWN)


def say(console: Console, text: str) -> None:
    """Print a sentence as it is: no markup is read in it, no control character obeyed, no line folded."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def draws_bars(console: Console) -> bool:
    """Whether a bar can move here: a terminal, or a notebook that has ipywidgets; anywhere else lines are printed."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
