"""The figures: quality against calls, a model against another, panels, the frontier, latency.

Each `draw_...` returns None where the files have no numbers for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.show.quality.comparison import Comparison, change_of_rows
from fsdfm.show.quality.metrics import Metric, metric_named
from fsdfm.show.quality.style import (
    FAINT,
    INK,
    REAL_INK,
    Look,
    add_legend,
    draw_real_line,
    draw_series,
    look,
    new_figure,
    series_of,
    set_calls_axis,
    set_log_axis,
    set_title,
    words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_change", "draw_frontier", "draw_latency", "draw_panels", "draw_quality"]

_LINE, _LETTER = 9.0, 4.6  # height of a small line and width of its letters, in points
PANELS = ("accuracy", "entropy_bits", "distinct_2", "mauve")


def draw_quality(comparison: Comparison) -> Figure | None:
    """The paper's figure 1: perplexity against calls on logarithmic axes, and beside it the entropy it came with."""
    metrics = [m for m in (_perplexity(comparison), metric_named("entropy_bits")) if m and _is_drawn(comparison, m)]
    if not metrics:
        return None
    figure = new_figure(3.6)
    for axes, metric in zip(_panels(figure, 1, len(metrics)), metrics, strict=True):
        _against_calls(axes, comparison, metric)
    _legend(figure, comparison, metrics)
    return figure


def draw_panels(comparison: Comparison) -> Figure | None:
    """Accuracy, entropy, distinct-2 and MAUVE against calls, those that were measured."""
    metrics = [metric for name in PANELS if _is_drawn(comparison, metric := metric_named(name))]
    if not metrics:
        return None
    rows = math.ceil(len(metrics) / 2)
    figure = new_figure(0.2 + 2.9 * rows)
    panels = _panels(figure, rows, min(2, len(metrics)))
    for axes, metric in zip(panels, metrics, strict=False):
        _against_calls(axes, comparison, metric)
    for axes in panels[len(metrics) :]:
        axes.remove()
    _legend(figure, comparison, metrics)
    return figure


def _against_calls(axes: Axes, comparison: Comparison, metric: Metric, *, numbers: Sequence[int] | None = None) -> None:
    """One metric of the models (of these numbers; None: of all) against calls, with ribbons and real data."""
    calls: list[float] = []
    for n, evaluation in enumerate(comparison.evaluations):
        if numbers is not None and n not in numbers:
            continue
        rows = evaluation.plain
        x = [float(row.num_calls) for row in rows]
        series = series_of(rows, metric.name, x, positive=metric.is_perplexity)
        if not series.is_empty:
            draw_series(axes, series, look(n))
            calls += x
    for real in comparison.reals:
        draw_real_line(axes, real.metrics.get(metric.name), band=not metric.is_perplexity)
    if metric.is_perplexity:
        set_log_axis(axes, "y")
    set_calls_axis(axes, calls)
    set_title(axes, _panel_title(comparison, metric))


def _panel_title(comparison: Comparison, metric: Metric) -> str:
    label = metric.label[0].upper() + comparison.marks.label(metric)[1:]
    judge = comparison.evaluations[0].judge.get("name")
    return f"{label} under {judge}" if metric.is_perplexity and judge else label


# --- one model against another ----------------------------------------------------------------------------------------


def draw_change(comparison: Comparison, other: str) -> Figure | None:
    """The paper's figure 3: the baseline and another model with ribbons and connectors, and below what changes."""
    number = comparison.labels.index(other)
    base, evaluation = comparison.evaluations[0], comparison.evaluations[number]
    pairs = [(a, b) for a in base.plain if (b := evaluation.row(a.steps)) is not None]
    candidates = (metric_named("entropy_bits"), _perplexity(comparison))
    metrics = [m for m in candidates if m and any(_has(a, m) and _has(b, m) for a, b in pairs)]
    if not metrics:
        return None
    figure = new_figure(5.4)
    grid = figure.subplots(2, len(metrics), squeeze=False, height_ratios=(1.5, 1), sharex="col")
    for top, bottom, metric in zip(grid[0], grid[1], metrics, strict=True):
        _against_calls(top, comparison, metric, numbers=(0, number))
        _connect(top, pairs, metric)
        _deltas(bottom, pairs, metric, style=look(number))
        set_calls_axis(bottom, [float(row.num_calls) for row in (*base.plain, *evaluation.plain)])
        top.set_xlim(bottom.get_xlim())
        top.set_xlabel("")
        what = "Change of perplexity, %" if metric.is_perplexity else f"Change of {metric.label}"
        named = f"{what} ({other} against {comparison.labels[0]})"
        set_title(bottom, named if len(named) <= 48 * 2 // len(metrics) else what)
    _legend(figure, comparison, metrics, numbers=(0, number))
    return figure


def _connect(axes: Axes, pairs: Sequence[tuple[Row, Row]], metric: Metric) -> None:
    """A thin upright line between the two models at every budget."""
    for a, b in pairs:
        if _has(a, metric) and _has(b, metric) and a.num_calls == b.num_calls:
            ends = sorted((a.metrics[metric.name].value, b.metrics[metric.name].value))
            axes.plot([a.num_calls] * 2, ends, color=FAINT, linewidth=0.8, linestyle=":", zorder=2)


def _deltas(axes: Axes, pairs: Sequence[tuple[Row, Row]], metric: Metric, *, style: Look) -> None:
    """What changes at every budget, with its interval; where a row is flagged the point is hollow."""
    axes.axhline(0, color=INK, linewidth=0.8, zorder=1)
    changes = [(b, change_of_rows(a, b, metric.name, relative=metric.is_perplexity)) for a, b in pairs]
    scale = 100 if metric.is_perplexity else 1
    rows = [
        Row(
            steps=b.steps,
            calls=b.calls,
            flags=c.flags,
            metrics={metric.name: Measured(scale * c.measured.value, scale * c.measured.low, scale * c.measured.high)},
        )
        for b, c in changes
        if c is not None
    ]
    draw_series(axes, series_of(rows, metric.name, [float(r.num_calls) for r in rows], positive=False), style)


# --- frontier and latency ---------------------------------------------------------------------------------------------


def draw_frontier(comparison: Comparison) -> Figure | None:
    """Perplexity against entropy, a line per model and budget from cold to hot; real data is a point in its band."""
    metric = _perplexity(comparison)
    every = [*comparison.evaluations, *comparison.swept_alternatives.values()]
    if metric is None or not any(_sweeps(e, metric) for e in every):
        return None
    figure = new_figure(4.4)
    (axes,) = _panels(figure, 1, 1)
    ends: list[tuple[float, float, str, str]] = []
    shown = [*comparison.pairs, *comparison.swept_alternatives.items()]
    for n, (label, evaluation) in enumerate(shown):
        sweeps = _sweeps(evaluation, metric)
        for rank, (steps, rows) in enumerate(sweeps.items()):
            x = [row.metrics["entropy_bits"].value for row in rows]
            series = series_of(rows, metric.name, x, positive=True)
            style = Look(
                _lighter(look(n).colour, 0.55 * (1 - (rank + 1) / len(sweeps))), look(n).marker, look(n).dashes
            )
            draw_series(axes, series, style)
            says = f"{steps} step{'s' if steps > 1 else ''}" if n < len(comparison.evaluations) else label
            ends.append((series.x[-1], series.y[-1], says, look(n).colour))
    for n, real in enumerate(comparison.reals):
        _real_point(
            axes, real.metrics.get("entropy_bits"), real.metrics.get(metric.name), says="real data" if n == 0 else ""
        )
    set_log_axis(axes, "y")
    axes.margins(x=0.1)
    _say_apart(axes, ends)
    axes.set_xlabel("entropy of a sample, bits (right: more diverse)")
    axes.set_ylabel(comparison.marks.label(metric))
    set_title(axes, "Perplexity against entropy as the temperature rises")
    swept = [n for n, (_, evaluation) in enumerate(shown) if _sweeps(evaluation, metric)]
    flagged = any(row.flags for n in swept for row in shown[n][1].frontier)
    add_legend(figure, {n: shown[n][0] for n in swept}, real=False, flagged=flagged)
    return figure


def _sweeps(evaluation: Evaluation, metric: Metric) -> dict[int, list[Row]]:
    """The rows of every budget that was measured at several temperatures, cold ones first."""
    budgets: dict[int, list[Row]] = {}
    swept = {(row.steps, row.temperature): row for row in evaluation.frontier}
    own = {(row.steps, row.temperature): row for row in evaluation.plain if row.steps in {steps for steps, _ in swept}}
    for row in [row for _, row in sorted({**swept, **own}.items())]:
        if _has(row, metric) and _has(row, metric_named("entropy_bits")):
            budgets.setdefault(row.steps, []).append(row)
    return budgets


def _real_point(axes: Axes, entropy: Measured | None, perplexity: Measured | None, *, says: str) -> None:
    """Real data as a star with its intervals, in the band of entropies that count as real."""
    if entropy is None or not math.isfinite(entropy.value):
        return
    low, high = entropy.band
    if math.isfinite(low) and math.isfinite(high):
        axes.axvspan(low, high, color=REAL_INK, alpha=0.1, linewidth=0, zorder=0)
    if perplexity is None or not math.isfinite(perplexity.value) or perplexity.value <= 0:
        axes.axvline(entropy.value, color=REAL_INK, linestyle=(0, (4, 2)), linewidth=1.2)
        return
    if entropy.has_interval:
        axes.hlines(perplexity.value, entropy.low, entropy.high, color=REAL_INK, linewidth=1.4)
    if perplexity.has_interval and perplexity.low > 0:
        axes.vlines(entropy.value, perplexity.low, perplexity.high, color=REAL_INK, linewidth=1.4)
    axes.plot([entropy.value], [perplexity.value], marker="*", markersize=13, color=REAL_INK, linestyle="", zorder=6)
    place = (entropy.value, perplexity.value)
    axes.annotate(says, place, (7, -12), textcoords="offset points", fontsize=8.5, color=REAL_INK)


def draw_latency(comparison: Comparison) -> Figure | None:
    """Perplexity against seconds per sample on logarithmic axes; every point says its steps."""
    metric = _perplexity(comparison)
    timed = [[row for row in e.plain if _time(row) > 0] for e in comparison.evaluations]
    if metric is None or not any(_has(row, metric) for rows in timed for row in rows):
        return None
    figure = new_figure(4.0)
    (axes,) = _panels(figure, 1, 1)
    texts: list[tuple[float, float, str, str]] = []
    beside = ""
    for n, rows in enumerate(timed):
        series = series_of(rows, metric.name, [_time(row) for row in rows], positive=True)
        draw_series(axes, series, look(n), ribbon=False)
        texts += [(x, y, str(row.steps), look(n).colour) for row, x, y in zip(rows, series.x, series.y, strict=True)]
    written = {str(r.facts.get("name")): r for e in comparison.evaluations for r in e.alternatives}
    crosses = sorted(
        (_time(r), r.metrics[metric.name].value, n) for n, r in written.items() if _has(r, metric) and _time(r)
    )
    for n, (x, y, name) in enumerate(crosses):
        axes.plot(x, y, marker="P", markersize=8, color=REAL_INK, linestyle="", zorder=6)
        beside = " (crosses: autoregressive models)"
        if n == 0 and len(crosses) > 1:  # to its left, where the next one's name is not
            label = axes.annotate(
                words(name), (x, y), (-7, 0), textcoords="offset points", fontsize=7.5, color=REAL_INK
            )
            label.set(horizontalalignment="right", verticalalignment="center", zorder=7)
        else:
            texts.append((x, y, name, REAL_INK))
    for real in comparison.reals:
        draw_real_line(axes, real.metrics.get(metric.name))
    for which in ("x", "y"):
        set_log_axis(axes, which)
    _say_apart(axes, _without_crowds(texts))
    axes.set_xlabel(f"seconds per sample{beside}")
    axes.set_ylabel(comparison.marks.label(metric))
    set_title(axes, f"{_panel_title(comparison, metric)} against time; numbers are steps")
    _legend(figure, comparison, [metric])
    return figure


# --- parts ------------------------------------------------------------------------------------------------------------


def _perplexity(comparison: Comparison) -> Metric | None:
    """The perplexity that decides: a token's, or where it was not measured the mean of sequences."""
    names = {name for e in comparison.evaluations for row in (*e.rows, *e.frontier) for name in row.metrics}
    return next((metric_named(name) for name in ("token_perplexity", "perplexity") if name in names), None)


def _is_drawn(comparison: Comparison, metric: Metric) -> bool:
    return any(_has(row, metric) for evaluation in comparison.evaluations for row in evaluation.plain)


def _has(row: Row, metric: Metric) -> bool:
    measured = row.metrics.get(metric.name)
    if measured is None or not math.isfinite(measured.value):
        return False
    return measured.value > 0 or not metric.is_perplexity


def _time(row: Row) -> float:
    seconds = row.seconds_per_sample
    return seconds if seconds is not None and math.isfinite(seconds) else 0.0


def _panels(figure: Figure, rows: int, columns: int) -> list[Axes]:
    return [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]


def _legend(
    figure: Figure, comparison: Comparison, metrics: Sequence[Metric], *, numbers: Sequence[int] | None = None
) -> None:
    chosen = range(len(comparison.labels)) if numbers is None else numbers
    rows = [row for n in chosen for e in [comparison.evaluations[n]] for row in (*e.plain, *e.frontier)]
    add_legend(
        figure,
        {n: comparison.labels[n] for n in chosen},
        real=any(m.name in real.metrics for real in comparison.reals for m in metrics),
        flagged=any(row.flags and _has(row, m) for row in rows for m in metrics if m.is_perplexity),
    )


def _without_crowds(texts: Sequence[tuple[float, float, str, str]]) -> list[tuple[float, float, str, str]]:
    """Of points that lie close together and say the same, only the highest says it."""
    kept: list[tuple[float, float, str, str]] = []
    for x, y, text, colour in sorted(texts, key=lambda entry: -entry[1]):
        if not any(t == text and b < 1.35 * y and max(a, x) < 1.15 * min(a, x) for a, b, t, _ in kept):
            kept.append((x, y, text, colour))
    return kept


def _say_apart(axes: Axes, texts: Sequence[tuple[float, float, str, str]]) -> None:
    """Texts (x, y, text, colour) beside their points: pushed up until they are free."""
    figure = axes.get_figure(root=True)
    points = 72 / figure.dpi if figure else 1.0  # in a pixel
    taken: list[tuple[float, float, str]] = []
    for x, y, text, colour in sorted(texts, key=lambda entry: entry[:2]):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        across, up = (float(pixels) * points for pixels in axes.transData.transform((x, y)))
        near = [u for a, u, t in taken if abs(a - across) < _LETTER * max(len(t), len(text))]
        shift = 0.0
        while any(abs(u - up - shift) < _LINE for u in near):
            shift += 1.0
        taken.append((across, up + shift, text))
        axes.annotate(
            words(text), (x, y), (5, 4 + shift), textcoords="offset points", fontsize=7.5, color=colour, zorder=7
        )


def _lighter(colour: str, share: float) -> str:
    """The colour mixed with this share of white."""
    parts = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)
