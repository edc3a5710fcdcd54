"""The timeline: its bins by arithmetic, its colours by colour science, and every medium against hostile text."""

import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import RendererAgg
from PIL import Image
from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.console import Console

from fsdfm.show.timeline import LiveText, Timeline, page, timeline_html_fragment
from fsdfm.show.timeline import live as live_module
from fsdfm.show.timeline import png as png_module
from fsdfm.show.timeline.colours import DARK, LIGHT
from fsdfm.show.timeline.glyphs import clusters, visible
from fsdfm.show.timeline.layout import lay_legend, lay_tokens
from fsdfm.show.timeline.png import COLUMNS, MARGIN, draw
from fsdfm.show.timeline.tokens import bins

NASTY = [
    *("<b>&amp;\"'", "[bold]x[/]", "[/nope]", ":smile:", "\n", "\n\n", "\t", "\x1b[31m", "\x00", "\r\n", "\x7f"),
    *("\u202eabc", "\u200b", "", "\ufffd", "\ud800", "你好世界", "日本", "👍🏽", "👩\u200d👧", "e\u0301", "\u0301"),
    *(" ", "   ", "$x^2$ \\frac", "</style><script>alert(1)</script>", "a" * 200, "\ufeff", "\u2028", "\u200d"),
]
SIMULATED = {  # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def story(num_tokens: int, steps: int) -> Timeline:
    words = ["Once", " upon", " a", " time", ",", " there", " was", " a", " little", " girl", ".", "\n"]
    pieces = [words[index % len(words)] for index in range(num_tokens)]
    return Timeline(pieces, [index * 7 % (steps + 1) for index in range(num_tokens)], steps)


def nasty(**flags) -> Timeline:
    return Timeline(NASTY, [index % 9 for index in range(len(NASTY))], 8, **flags)


# ------------------------------------------------------------------------------------------------------ the record


@pytest.mark.parametrize("steps", [*range(1, 40), 100, 1000, 1024])
def test_bins_partition_the_steps_evenly_and_span_the_ramp(steps):
    every = bins(steps)
    assert len(every) == min(steps, 8)
    assert [step for each in every for step in range(each.first, each.last + 1)] == list(range(1, steps + 1))
    sizes = [each.last - each.first + 1 for each in every]
    assert max(sizes) - min(sizes) <= 1
    hues = [each.hue for each in every]
    assert hues == sorted(set(hues))
    assert hues[0] == 0
    assert hues[-1] == (7 if steps > 1 else 0)
    tokens = Timeline(["x"] * steps, range(1, steps + 1), steps).tokens
    assert all(token.bin.first <= token.step <= token.bin.last for token in tokens)


def test_the_legend_shows_ranges_and_counts_every_token():
    timeline = Timeline(
        list("abcdef"), [0, 0, 1, 128, 129, 1024], 1024, marked=[0, 0, 0, 0, 1, 1], given=[1, 0, 0, 0, 0, 0]
    )
    entries = {key.label: key.count for key in timeline.legend}
    assert entries["1-128"] == 2
    assert entries["129-256"] == entries["897-1024"] == 1
    assert entries["513-640"] == 0
    assert (entries["never changed"], entries["given"], entries["corrupted"]) == (1, 1, 2)
    assert [key.label for key in Timeline(["a"], [1], 3).legend] == ["1", "2", "3"]


def test_tensors_and_arrays_are_taken_as_they_come():
    timeline = Timeline(["a", "b"], torch.tensor([1, 0]), 2, marked=np.array([True, False]))
    assert timeline.last_changed == (1, 0)
    assert timeline.marked == (True, False)
    assert timeline.given == (False, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], [1], 0), "steps is 0; a timeline needs at least 1"),
        ((["a"], [1, 2], 2), "last_changed has 2 entries for 1 pieces"),
        ((["a"], [1], 2, [True, False]), "marked has 2 entries for 1 pieces"),
        ((["a"], [1], 2, (), [True, False]), "given has 2 entries for 1 pieces"),
        ((["a", "b"], [1, 3], 2), r"last_changed\[1\] is 3; it must be 0 \(never\) or a step of 1..2"),
        ((["a"], [-1], 2), r"last_changed\[0\] is -1"),
        ((["a"], [1.5], 2), "contains 1.5; steps are whole"),
        (([7], [1], 2), "piece 0 is 7; pieces are strings"),
        ((["a"], [1], 2, (), [True]), "token 0 is given, yet changed at step 1"),
    ],
)
def test_an_impossible_timeline_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Timeline(*arguments)


# ----------------------------------------------------------------------------------------------------- the colours


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted(TO_XYZ[1] @ linear(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    scaled = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_all_text_has_a_contrast_of_at_least_4_5(theme):
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for hue in theme.hues:
        assert contrast(theme.ink, hue) >= 4.5
    for colour in (theme.ink, theme.faint, theme.mark):
        assert contrast(colour, theme.page) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("vision", SIMULATED)
def test_the_hues_are_ordered_and_apart_for_every_reader(theme, vision):
    colours = np.array([lab(np.array(SIMULATED[vision]) @ linear(hue)) for hue in theme.hues])
    away_from_page = np.abs(colours[:, 0] - lab(linear(theme.page))[0])
    assert (np.diff(away_from_page) > 1).all()  # also in grey
    apart = np.linalg.norm(colours[:, None] - colours[None], axis=-1)[np.triu_indices(8, 1)]
    assert apart.min() > (20 if vision == "normal" else 10)  # CIE 1976; 2.3 is just noticeable


def test_a_terminal_of_256_colours_still_tells_them_apart():
    def seen(colour):
        return Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).get_truecolor().hex

    shown = [seen(hue) for hue in LIGHT.hues]
    assert len(set(shown)) == 8
    assert min(contrast(seen(LIGHT.ink), hue) for hue in shown) >= 4.5


# ------------------------------------------------------------------------------------------------------ the glyphs


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec=None), max_size=6))
def test_any_piece_is_visible_and_harmless(piece):
    shown = visible(piece)
    assert cell_len(shown) > 0
    assert all(
        character == "\n" or character.isprintable() or character.isspace() or character in "\u200c\u200d"
        for character in shown
    )
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode("utf-8")
    assert "".join(clusters(shown)) == shown


def test_invisible_pieces_have_a_sign():
    assert visible("\n") == "↵\n"
    assert visible("a\tb") == "a⇥ b"
    assert visible("") == "∅"
    assert visible("\u0301") == "◌\u0301"
    assert visible("\x1b[0m") == "\\x1b[0m"
    assert visible("\u200d") == "\\u200d"
    assert visible("👩\u200d👧") == "👩\u200d👧"
    assert list(clusters("ae\u0301\n你")) == ["a", "e\u0301", "\n", "你"]
    assert list(clusters("")) == []


# ---------------------------------------------------------------------------------------------------- the terminal


def printed(timeline: Timeline, **options) -> str:
    console = Console(
        **{"file": io.StringIO(), "width": 80, "force_terminal": True, "color_system": "truecolor", **options}
    )
    console.print(timeline.to_rich())
    return console.file.getvalue()


def test_the_terminal_shows_each_token_on_its_hue():
    output = printed(Timeline([" one", " two", " three"], [1, 8, 0], 8, marked=[0, 1, 0], given=[0, 0, 1]))

    def background(index):
        return "48;2;" + ";".join(str(int(LIGHT.hues[index][at : at + 2], 16)) for at in (1, 3, 5))

    assert re.search(rf"\x1b\[38;2;[\d;]*{background(0)}m one", output)
    assert re.search(rf"\x1b\[1;4;38;2;[\d;]*{background(7)}m two", output)  # bold and underlined: it was corrupted
    assert re.search(r"\x1b\[0m three", output)
    assert "corrupted" in output
    assert "given" in output


@pytest.mark.parametrize("options", [{"color_system": None}, {"no_color": True}, {"color_system": "standard"}])
def test_without_colours_numbers_and_brackets_stand_for_them(options):
    timeline = Timeline(
        [" a", " b", " c", "\n", " d", " e"],
        [1, 1, 900, 900, 0, 0],
        1024,
        marked=[0, 1, 0, 0, 0, 0],
        given=[0, 0, 0, 0, 0, 1],
    )
    output = re.sub(r"\x1b\[[\d;]*m", "", printed(timeline, **options))
    assert " a¹⟦ b⟧¹ c↵⁸\n d⁰ e" in output
    assert "⁸ step 897-1024: 2" in output
    assert "⁰ never changed: 1" in output


def test_hostile_text_reaches_the_terminal_as_text():
    output = printed(nasty(), color_system=None, width=1000)
    assert "[bold]x[/]" in output
    assert ":smile:" in output
    assert "\\x1b[31m" in output
    assert "\\ud800" in output
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", output)


# ------------------------------------------------------------------------------------------------ live, in the terminal


def frames(console: Console, **options) -> str:
    with LiveText(console, 2, **options) as live:
        live.show(["x", "y"], [False, False], 0)
        live.show(["a", "y"], [True, False], 1)
        live.show(["a", "b\x1b"], [False, True], 2)
    return console.file.getvalue()


def test_live_text_resolves_in_place(monkeypatch):
    monkeypatch.setattr(live_module, "FRAMES_PER_SECOND", float("inf"))
    output = frames(
        Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60, _environ={"TERM": "xterm"})
    )
    assert [f"step {step} of 2" in output for step in range(3)] == [True] * 3
    assert "x" + "y⁰" in output
    assert "a¹y⁰" in output
    assert "a¹b\\x1b²" in output
    assert output.count("\x1b[1A") >= 2  # the cursor goes back up


def test_live_text_skips_states_nobody_could_see_but_never_the_last():
    output = frames(
        Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60, _environ={"TERM": "xterm"})
    )
    assert "step 2 of 2" in output


def test_live_text_holds_a_state_as_long_as_asked(monkeypatch):
    waits = []
    monkeypatch.setattr(live_module.time, "sleep", waits.append)
    output = frames(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}), min_seconds=9.0)
    assert len(waits) == 2
    assert all(8 < wait <= 9 for wait in waits)
    assert "step 1 of 2" in output


def test_live_text_prints_the_states_where_there_is_no_terminal():
    assert frames(Console(file=io.StringIO())) == (
        "[step 0 of 2, 0 of 2 tokens changed]\nxy\n\n"
        "[step 1 of 2, 1 of 2 tokens changed]\nay\n\n"
        "[step 2 of 2, 1 of 2 tokens changed]\nab\\x1b\n\n"
    )


def test_live_text_prints_at_most_one_state_a_bin():
    console = Console(file=io.StringIO())
    with LiveText(console, 1024) as live:
        for step in range(1025):
            live.show(["[red]a\n"], [True], step)
    output = console.file.getvalue()
    assert re.findall(r"step (\d+)", output) == [str(step) for step in range(0, 1025, 128)]
    assert "[red]a\n" in output


def test_live_text_lets_a_text_grow_and_shrink():
    console = Console(file=io.StringIO())
    with LiveText(console, 1) as live:
        live.show(["a"], [True], 1)
        live.show(["a", "b", "c"], [False, True, False], 1)
        live.show(["a"], [False], 1)
    assert "abc" in console.file.getvalue()


def test_live_text_refuses_bad_states():
    with pytest.raises(ValueError, match="steps is 0"):
        LiveText(Console(file=io.StringIO()), 0)
    live = LiveText(Console(file=io.StringIO()), 2)
    with pytest.raises(ValueError, match="step is 3"):
        live.show(["a"], [True], 3)
    with pytest.raises(ValueError, match="changed has 2 entries for 1 pieces"):
        live.show(["a"], [True, False], 1)


# -------------------------------------------------------------------------------------------------------------- HTML


class Reader(HTMLParser):
    """What a browser makes of a page: balanced elements, and the text and attributes of every token."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.tags, self.tokens = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("meta", "input"):
            return
        if tag == "span" and self.open[-1] == "p":
            self.tokens.append([dict(attributes), ""])
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "p" in self.open:
            self.tokens[-1][1] += data


def test_html_returns_hostile_text_and_says_every_step():
    timeline = nasty(marked=[index == 1 for index in range(len(NASTY))])
    html = timeline.to_html(title="<A & B>\x00")
    html.encode("utf-8")
    reader = Reader(html)
    assert [text for _, text in reader.tokens] == [visible(piece) for piece in NASTY]
    assert reader.tokens[1][0]["title"] == "last changed at step 1 of 8; was corrupted"
    assert reader.tokens[1][0]["class"] == "k0 marked"
    assert reader.tokens[0][0] == {"class": "kept", "title": "never changed"}
    assert "<title>&lt;A &amp; B&gt;\\x00</title>" in html
    assert "\x1b" not in html


def test_html_is_self_contained_with_both_themes():
    html = story(50, 8).to_html()
    tags = {tag for tag, _ in Reader(html).tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe"})
    assert not re.search(r"https?:|url\(|@import|src=", html)
    assert "prefers-color-scheme:dark" in html
    for hue in (*LIGHT.hues, *DARK.hues):
        assert hue in html


def test_html_numbers_the_end_of_every_run():
    reader = Reader(Timeline(list("abcd"), [1, 1, 9, 0], 16).to_html())
    assert [attributes.get("data-bin") for attributes, _ in reader.tokens] == [None, "1", "5", None]
    assert '<i class="newline">↵</i></span>\n<span' in Timeline(["a\n", "b"], [1, 2], 2).to_html()
    assert Reader(Timeline([], [], 1).to_html()).tokens == []


def test_spaces_that_a_browser_would_swallow_are_kept():
    html = timeline_html_fragment(Timeline([" a", " ", " b", "\n", " c  d"], [1] * 5, 1))
    assert re.findall(r"(\w?)<span class=\"space\">( +)</span>", html) == [("", " ")] * 4


def test_several_timelines_share_a_page_and_its_style():
    parts = [story(5, 4), timeline_html_fragment(story(7, 8), caption="<second>"), "<p>between</p>"]
    html = page(parts, title="Two")
    assert html.count("<figure") == 2
    assert html.count("<style>") == 1
    assert "&lt;second&gt;" in html
    assert "<p>between</p>" in html


# --------------------------------------------------------------------------------------------------------------- PNG


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*NASTY, " the", "x", "word", " "]), max_size=40), st.integers(8, 30))
def test_the_layout_loses_nothing_and_overlaps_nothing(pieces, columns):
    tokens = Timeline(pieces, [1] * len(pieces), 1).tokens
    segments = lay_tokens(tokens, columns)
    taken = [(s.row, column) for s in segments for column in range(s.column, s.column + s.cells)]
    assert len(taken) == len(set(taken))
    assert all(column <= columns for _, column in taken)
    assert {id(segment.look) for segment in segments} == {id(token) for token in tokens}
    drawn = "".join("".join(segment.clusters) for segment in segments)
    assert drawn.replace(" ", "") == re.sub("[ \n]", "", "".join(map(visible, pieces)))


def test_the_layout_breaks_between_words_and_hides_the_space_there():
    tokens = Timeline([" the", " ca", "t", " sat"], [1] * 4, 1).tokens
    assert [(s.row, s.column, "".join(s.clusters)) for s in lay_tokens(tokens, 7)] == [
        (0, 0, " the"),
        (1, 0, "ca"),
        (1, 2, "t"),
        (1, 3, " sat"),
    ]


def test_the_legend_stays_within_its_columns():
    for steps in (1, 8, 1024):
        assert max(s.column + s.cells for s in lay_legend(story(1024, steps).legend, COLUMNS)) <= COLUMNS


@pytest.mark.parametrize(("num_tokens", "steps"), [(0, 1), (256, 8), (1024, 1024)])
def test_no_text_leaves_the_picture_or_its_chip(num_tokens, steps):
    figure = draw(story(num_tokens, steps), LIGHT)
    (axes,) = figure.axes
    renderer = RendererAgg(1, 1, figure.dpi)
    inner = axes.transData.transform([(MARGIN, axes.get_ylim()[0]), (axes.get_xlim()[1] - MARGIN, 0)])
    for words in axes.texts:
        box = words.get_window_extent(renderer)
        assert inner[0, 0] - 1 <= box.x0
        assert box.x1 <= inner[1, 0] + 1
        assert inner[0, 1] <= box.y0
        assert box.y1 <= inner[1, 1]
    longest = max(axes.texts, key=lambda words: len(words.get_text()))
    left = longest.get_window_extent(renderer).x0
    cell = axes.transData.transform((1, 0))[0] * (axes.get_xlim()[1] - 2 * MARGIN) / (COLUMNS + 1)
    assert longest.get_window_extent(renderer).width == pytest.approx(len(longest.get_text()) * cell, abs=2)
    assert left == pytest.approx(inner[0, 0], abs=2)


def colours_of(file) -> set[str]:
    with Image.open(file) as picture:
        return {"#{:02x}{:02x}{:02x}".format(*colour[:3]) for _, colour in picture.getcolors(1 << 24)}


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_the_picture_has_the_colours_of_its_theme(tmp_path, dark, theme):
    file = tmp_path / "timeline.png"
    story(60, 8).save_png(file, dark=dark)
    assert {theme.page, *theme.hues} <= colours_of(file)
    assert theme.mark not in colours_of(file)
    Timeline([" corrupted"], [1], 1, marked=[True]).save_png(file, dark=dark)
    assert theme.mark in colours_of(file)


def test_hostile_text_can_be_drawn(tmp_path):
    nasty().save_png(tmp_path / "nasty.png")  # warnings are errors here
    assert (tmp_path / "nasty.png").stat().st_size > 0


def test_a_very_tall_picture_gets_fewer_dots(monkeypatch):
    monkeypatch.setattr(png_module, "MAX_PIXELS", 1000)
    figure = draw(Timeline(["\n"] * 100, [1] * 100, 1), LIGHT)
    assert figure.get_figheight() * figure.dpi == pytest.approx(1000)


def test_a_picture_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(ValueError, match="cannot write .*No such file or directory; choose another file"):
        story(3, 1).save_png(tmp_path / "missing" / "timeline.png")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'fsdfm"):
        story(3, 1).save_png(tmp_path / "timeline.png")
