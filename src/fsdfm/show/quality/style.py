"""How the figures look: colours that everyone can tell apart, axes, ribbons, legends; no global state (no pyplot)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdfm.measure.results import Measured, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = [
    "FAINT",
    "INK",
    "REAL_INK",
    "Look",
    "Series",
    "add_legend",
    "draw_real_line",
    "draw_series",
    "look",
    "new_figure",
    "series_of",
    "set_calls_axis",
    "set_log_axis",
    "set_title",
    "words",
]

INK, FAINT, REAL_INK = "#2a2f36", "#8b929b", "#4d4d4d"
WIDTH = 8.4  # inches: 100 pixels an inch at a README's width
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a3fa0")  # after Okabe and Ito
_MARKERS = "osD^vPX"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # as matplotlib writes them


@dataclass(frozen=True)
class Look:
    """What tells a model from another: colour and marker, and the dashes once these are used up."""

    colour: str
    marker: str
    dashes: Any


def look(number: int) -> Look:
    """The look of the model of this number."""
    count = len(_COLOURS)
    return Look(_COLOURS[number % count], _MARKERS[number % count], _DASHES[number // count % len(_DASHES)])


@dataclass(frozen=True)
class Series:
    """One metric of some rows, ready to be drawn: NaN where there is nothing, so that a line breaks there."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    flagged: list[bool]

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be drawn."""
        return all(math.isnan(x) or math.isnan(y) for x, y in zip(self.x, self.y, strict=True))


def series_of(rows: Sequence[Row], name: str, x: Sequence[float], *, positive: bool) -> Series:
    """The metric of these rows over x; `positive`: for a logarithmic axis, where only positive numbers stand."""
    found = [row.metrics.get(name, Measured(math.nan)) for row in rows]
    flagged = [bool(row.flags) and name.endswith("perplexity") for row in rows]

    def clean(values: list[float]) -> list[float]:
        return [v if math.isfinite(v) and (v > 0 or not positive) else math.nan for v in values]

    return Series(
        clean_x(x),
        clean([m.value for m in found]),
        clean([m.low for m in found]),
        clean([m.high for m in found]),
        flagged,
    )


def clean_x(x: Sequence[float]) -> list[float]:
    """The places, NaN where one is not finite."""
    return [float(v) if math.isfinite(v) else math.nan for v in x]


# --- drawing ----------------------------------------------------------------------------------------------------------


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty white figure that fits a README."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def draw_series(axes: Axes, series: Series, style: Look, *, ribbon: bool = True) -> Line2D:
    """A line with its interval as a ribbon; flagged points are hollow. Returns the line."""
    (line,) = axes.plot(series.x, series.y, color=style.colour, linestyle=style.dashes, linewidth=1.7, zorder=3)
    if ribbon:
        axes.fill_between(series.x, series.low, series.high, color=style.colour, alpha=0.16, linewidth=0, zorder=1)
    axes.vlines(series.x, series.low, series.high, color=style.colour, alpha=0.45, linewidth=1.4, zorder=2)
    for hollow in (False, True):
        chosen = [n for n, flagged in enumerate(series.flagged) if flagged == hollow]
        axes.plot(
            [series.x[n] for n in chosen],
            [series.y[n] for n in chosen],
            linestyle="",
            marker=style.marker,
            markersize=5.5,
            markeredgewidth=1.4,
            color=style.colour,
            markerfacecolor="white" if hollow else style.colour,
            zorder=4,
        )
    return line


def draw_real_line(axes: Axes, measured: Measured | None, *, band: bool = False) -> None:
    """Real data as a dashed line over the whole width, with its interval, or the guard's band, behind it."""
    if measured is None or not math.isfinite(measured.value):
        return
    axes.axhline(measured.value, color=REAL_INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=2)
    low, high = measured.band if band else (measured.low, measured.high)
    if math.isfinite(low) and math.isfinite(high):
        axes.axhspan(low, high, color=REAL_INK, alpha=0.1, linewidth=0, zorder=0)


def add_legend(figure: Figure, labels: Mapping[int, str], *, real: bool, flagged: bool) -> None:
    """One legend above all panels: the models, real data, and what a hollow point means."""
    from matplotlib.lines import Line2D

    handles = []
    for n, label in labels.items():
        style = look(n)
        handles.append(
            Line2D(
                [],
                [],
                color=style.colour,
                marker=style.marker,
                linestyle=style.dashes,
                label=words(label),
                markersize=5.5,
            )
        )
    if real:
        handles.append(Line2D([], [], color=REAL_INK, linestyle=(0, (4, 2)), linewidth=1.2, label="real data"))
    if flagged:
        name = "hollow: flagged"
        hollow = Line2D([], [], color=FAINT, marker="o", linestyle="", markerfacecolor="white", label=name)
        hollow.set_markeredgewidth(1.4)
        handles.append(hollow)
    columns = _legend_columns(labels.values(), len(handles))
    figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(handles) / columns))
    handles = [handle for column in range(columns) for handle in handles[column::columns]]  # to be read row by row
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=2.2,
        columnspacing=1.6,
    )


def _legend_columns(labels: Iterable[str], entries: int) -> int:
    widest = max((len(words(label)) for label in labels), default=0)
    return max(1, min(entries, 4, 110 // (widest + 8)))


# --- axes -------------------------------------------------------------------------------------------------------------


def set_title(axes: Axes, title: str) -> None:
    """The name of a panel, and the quiet frame that all panels share."""
    axes.set_title(words(title), fontsize=9.5, color=INK, loc="left", fontweight="bold")
    axes.tick_params(labelsize=8, colors=INK, width=0.6, length=3)
    axes.grid(True, color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(linewidth=0.6, color=FAINT)
        spine.set_visible(side in ("left", "bottom"))
    axes.xaxis.label.set(color=INK, fontsize=8.5)
    axes.yaxis.label.set(color=INK, fontsize=8.5)


def set_calls_axis(axes: Axes, calls: Sequence[float]) -> None:
    """A logarithmic axis of network calls, ticks at 1, 2, 4 ... as far as they were measured."""
    first, last = min(calls, default=1), max(calls, default=1)
    ticks = [2**n for n in range(math.floor(math.log2(first)), math.ceil(math.log2(last)) + 1)]
    ticks = ticks[:: 1 + (len(ticks) - 1) // 11]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(first / 2**0.35, last * 2**0.35)
    axes.set_xlabel("calls of the network")


def set_log_axis(axes: Axes, which: str) -> None:
    """A logarithmic axis ("x" or "y") with plain numbers at 1, 2, 5, 10 ..., finer where it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    decades = math.log10(high / low) if 0 < low < high else 0.0
    subs = (1.0,) if decades > 4 else (1.0, 2.0, 5.0)
    axis.set_major_locator(MaxNLocator(5) if decades < 0.7 else LogLocator(base=10, subs=subs, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:g}"


def words(text: str, longest: int = 80) -> str:
    """A text from outside as matplotlib may draw it: no formula begins in it, and it is not hidden or endless."""
    text = " ".join(text.split()).replace("$", r"\$")
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return f" {text}" if text.startswith("_") else text
