"""The timeline as a picture: a grid of monospaced cells, drawn by matplotlib without global state (no pyplot)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from fsdfm.show.plots import require_plots
from fsdfm.show.timeline.colours import Theme
from fsdfm.show.timeline.layout import Segment, lay_legend, lay_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    from fsdfm.show.timeline.record import Timeline

__all__ = ["draw", "save_png"]

COLUMNS = 88
FONT_SIZE, ROW, CHIP, MARGIN = 10.0, 17.0, 14.0, 18.0  # points
DPI = 150
MAX_PIXELS = 60_000  # a canvas may have 2^16 a side; a text of a thousand lines gets fewer dots an inch
FAMILIES = (
    "DejaVu Sans Mono",
    "DejaVu Sans",
    *("Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei"),
    *("Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Sans", "Noto Emoji", "Segoe UI Symbol", "Segoe UI Emoji", "Symbola"),
)


def save_png(timeline: Timeline, path: str | os.PathLike[str], theme: Theme) -> None:
    """Draw a timeline into a PNG file."""
    require_plots()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box, which says it
        figure = draw(timeline, theme)
        try:
            figure.savefig(path, format="png", dpi=figure.dpi)
        except OSError as error:
            raise ValueError(f"cannot write {os.fspath(path)}: {error.strerror}; choose another file") from error


def draw(timeline: Timeline, theme: Theme, columns: int = COLUMNS) -> Figure:
    """The legend above the wrapped text, as large as they need; data coordinates are points from the top left."""
    from matplotlib.figure import Figure

    legend, text = lay_legend(timeline.legend, columns), lay_tokens(timeline.tokens, columns)
    first = legend[-1].row + 2
    rows = first + (text[-1].row if text else 0) + 1
    height = rows * ROW + 2 * MARGIN
    dpi = min(DPI, MAX_PIXELS * 72 / height)
    cell = _cell_width(dpi)
    width = (columns + 1) * cell + 2 * MARGIN
    figure = Figure(figsize=(width / 72, height / 72), dpi=dpi, facecolor=theme.page)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    _paint(axes, legend, theme, cell=cell, top=MARGIN)
    _paint(axes, text, theme, cell=cell, top=MARGIN + first * ROW)
    return figure


def _cell_width(dpi: float) -> float:
    """The advance of the font in points, as it is drawn: hinting rounds it to whole pixels."""
    return _width("0" * 100, dpi) / 100


@lru_cache(maxsize=4096)
def _width(words: str, dpi: float) -> float:
    from matplotlib.backends.backend_agg import RendererAgg

    renderer: Any = RendererAgg
    width, _, _ = renderer(1, 1, dpi).get_text_width_height_descent(words, _font(), False)
    return float(width) * 72 / dpi


@lru_cache(maxsize=256)
def _font(size: float = FONT_SIZE) -> FontProperties:
    from matplotlib.font_manager import FontProperties, fontManager

    installed = {font.name for font in fontManager.ttflist}
    return FontProperties(family=[name for name in FAMILIES if name in installed], size=size)


def _paint(axes: Axes, segments: Sequence[Segment], theme: Theme, *, cell: float, top: float) -> None:
    font = _font()
    for segment in segments:
        x, y = MARGIN + segment.column * cell, top + segment.row * ROW
        _paint_chip(axes, segment, theme, corner=(x, y + (ROW - CHIP) / 2), width=segment.cells * cell)
        colour = theme.faint if segment.look is None or segment.look.kept else theme.ink
        for column, words in _runs(segment.clusters):
            room = cell_len(words) * cell
            centre, baseline = x + column * cell + room / 2, y + ROW / 2 + 0.36 * FONT_SIZE
            fitted = font if _is_latin(words) else _fitting(words, room, axes.figure.dpi)
            axes.text(  # parsed as mathematics, "$" would not be a dollar
                centre, baseline, words, fontproperties=fitted, color=colour, ha="center", parse_math=False
            )


def _fitting(words: str, room: float, dpi: float) -> FontProperties:
    """The font, smaller if another family stepped in for it with a glyph wider than its cells."""
    return _font(FONT_SIZE * min(1.0, room / max(_width(words, dpi), 1e-9)))


def _paint_chip(axes: Axes, segment: Segment, theme: Theme, *, corner: tuple[float, float], width: float) -> None:
    from matplotlib.patches import Rectangle

    look, gap = segment.look, 0.4  # points between neighbours, so that one sees where a token ends
    if look is not None and look.bin:
        hue = theme.hues[look.bin.hue]
        axes.add_patch(Rectangle((corner[0] + gap / 2, corner[1]), width - gap, CHIP, color=hue, linewidth=0))
    if look is not None and look.marked:
        inside = (corner[0] + gap / 2 + 0.6, corner[1] + 0.6)
        size = (width - gap - 1.2, CHIP - 1.2)
        axes.add_patch(Rectangle(inside, *size, fill=False, edgecolor=theme.mark, linewidth=1.0))


def _runs(clusters: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Strings drawn at once, with their columns: Latin text keeps the grid by itself, anything else cell by cell."""
    column = 0
    for latin, group in groupby(clusters, _is_latin):
        parts = list(group)
        for words in ["".join(parts)] if latin else parts:
            if words.strip():
                yield column, words
            column += cell_len(words)


def _is_latin(words: str) -> bool:
    return all(character < "\u0250" for character in words)
