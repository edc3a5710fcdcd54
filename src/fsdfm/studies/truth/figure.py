"""The picture: total variation against steps, a row of panels a world, a column a question."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fsdfm.measure.statistics import student_mean
from fsdfm.studies.truth.laws import BUDGETS
from fsdfm.studies.truth.summary import TruthNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_truth"]

INK, FAINT = "#2a2f36", "#c3c8ce"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a3fa0")
_MARKERS = "osD^vPX"
_COLUMNS: dict[str, tuple[str, ...]] = {
    "Teachers": ("rk2", "rk4", "classical-rk4", "heun", "midpoint", "chained"),
    "Averages and hops": (
        *("rk2/probabilities", "rk4/probabilities", "heun/probabilities", "chained/logits"),
        *("rk2/single-hops", "rk2/instant-hops", "paper"),
    ),
    "Weight policies, under RK-2": ("rk2", "rk2/TB-10", "rk2/PU", "rk2/G", "rk2/AG", "rk2/TB-20-mirrored"),
    "Reflow": ("path-only", "reflow-1", "reflow-2", "reflow-3", "reflow-1+rk2", "reflow-2+rk2", "reflow-3+rk2"),
    "Reflow, quantile coupling": ("reflow-1", "quantile-1", "quantile-2", "quantile-1+rk2", "quantile-2+rk2"),
    "Controls: parent at the entropy of": (
        *("dfm/entropy-of-rk2", "dfm/entropy-of-rk4", "dfm/entropy-of-chained"),
        *("dfm/entropy-of-reflow-2", "dfm/entropy-of-reflow-2+rk2"),
        *("dfm/entropy-of-quantile-1", "dfm/entropy-of-quantile-2+rk2"),
    ),
}
_LABELS = {
    "dfm": "DFM (parent)",
    "rk2": "RK-2",
    "rk4": "RK-4",
    "classical-rk4": "classical RK-4",
    "heun": "Heun",
    "midpoint": "midpoint",
    "chained": "chained half-steps",
    "path-only": "path loss only",
    "paper": "the paper's RK-4",
}


def draw_truth(results: TruthNumbers) -> Figure:
    """TV against steps on logarithmic axes, bars are 95 % intervals over seeds; the parent is grey in every panel."""
    from matplotlib.figure import Figure

    present = {name for world in results.worlds for name in results.methods(world)}
    columns = {
        title: shown for title, names in _COLUMNS.items() if len(shown := [n for n in names if n in present]) > 1
    }
    rows, num_seeds = len(results.worlds), len(results.seeds)
    figure = Figure(figsize=(0.8 + 4.0 * max(1, len(columns)), 1.0 + 3.4 * rows), layout="constrained")
    figure.suptitle(
        "Few-step truth: distance of the generated law to the data's, computed exactly, by number of steps. "
        f"Bars: 95 % intervals over {num_seeds} seed{'s' if num_seeds > 1 else ''}.",
        x=0.01,
        ha="left",
        color=INK,
        fontsize=11,
    )
    panels = figure.subplots(rows, max(1, len(columns)), squeeze=False, sharex=True, sharey="row")
    for row, world in zip(panels, results.worlds, strict=True):
        for panel, (title, names) in zip(row, columns.items(), strict=False):
            _panel(panel, results, world, names=names)
            if world == results.worlds[0]:
                panel.set_title(title, fontsize=10.5, color=INK, loc="left", fontweight="bold")
            if world == results.worlds[-1]:
                panel.set_xlabel("steps", color=INK)
        row[0].set_ylabel(f"{world}\ntotal variation", color=INK)
    return figure


def _panel(panel: Axes, results: TruthNumbers, world: str, *, names: list[str]) -> None:
    have = results.methods(world)
    _line(panel, results, world, method="dfm", colour=FAINT, marker="", place=0.0)
    for n, name in enumerate(names):
        if name in have:
            place = (n - (len(names) - 1) / 2) * 0.025
            _line(panel, results, world, method=name, colour=_COLOURS[n], marker=_MARKERS[n], place=place)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(BUDGETS, [str(s) for s in BUDGETS])
    ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlim(0.85, 9.4)
    every = [v for m in have for s in BUDGETS for v in results.values(world, m, "tv", steps=s)]
    panel.set_ylim(min(every) / 1.25, min(1.0, max(every) * 1.2))
    panel.grid(True, color="#e6e8eb", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.tick_params(colors=INK, labelsize=8.5)
    panel.legend(fontsize=7.5, frameon=False, loc="lower left", handlelength=1.8, labelspacing=0.25)


def _line(
    panel: Axes, results: TruthNumbers, world: str, *, method: str, colour: str, marker: str, place: float
) -> None:
    points = [student_mean(results.values(world, method, "tv", steps=s)) for s in BUDGETS]
    x = [s * 2**place for s in BUDGETS]
    bars = [0.0 if math.isnan(p.high) else min(p.high - p.value, 0.98 * p.value) for p in points]
    y, label = [p.value for p in points], _LABELS.get(method, method.rpartition("entropy-of-")[2])
    panel.vlines(
        x,
        [p - b for p, b in zip(y, bars, strict=True)],
        [p + b for p, b in zip(y, bars, strict=True)],
        color=colour,
        alpha=0.35,
        linewidth=2.2,
        zorder=1,
    )
    thick = method == "dfm"
    panel.plot(
        x,
        y,
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=4 if thick else 1.6,
        zorder=1 + (not thick),
        label=label,
    )
