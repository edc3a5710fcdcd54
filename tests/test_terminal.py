import io

import pytest
from rich.console import Console

from fsdfm.terminal import draws_bars, printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, naïve\tand\nwhole 🙂", "plain, naïve\tand\nwhole 🙂"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),  # OSC: the terminal's title
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),  # CSI in one character
        ("a\rb\x08c\x7f", "a\\rb\\x08c\\x7f"),
        ("abc\u202egpj", "abc\\u202egpj"),  # shown backwards
    ],
)
def test_no_control_character_is_obeyed(text, shown):
    assert printable(text) == shown


def test_what_is_said_is_neither_markup_nor_folded():
    out = io.StringIO()
    say(Console(file=out, width=20, force_terminal=True), "x[/b] [red]not red[/red] \x1b[31m and a long line")
    assert out.getvalue() == "x[/b] [red]not red[/red] \\x1b[31m and a long line\n"


def test_bars_move_on_terminals_and_in_notebooks_with_widgets(monkeypatch):
    plain = Console(file=io.StringIO())
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    assert not draws_bars(plain)
    assert draws_bars(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setattr("fsdfm.terminal.find_spec", lambda name: None)
    assert not draws_bars(notebook)
    monkeypatch.setattr("fsdfm.terminal.find_spec", lambda name: name)
    assert draws_bars(notebook)
