"""The picture of `fsdfm bench generate`: who takes how long for a text, and how the cost grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdfm.show.plots import require_plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_generate", "require_picture"]

INK, OURS, OTHERS = "#222222", "#3f51b5", "#b0b4bd"
_LABELS = {
    "ours": "fsdfm",
    "bf16": "fsdfm, bfloat16",
    "int8": "fsdfm, int8",
    "gpt2": "GPT-2, cached",
    "textbook": "textbook",
}


def require_picture(file: Path | None) -> None:
    """Raise before the work where a picture is wanted and matplotlib is missing, or the file is no picture."""
    if file is None:
        return
    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"the picture is {file}; allowed are names that end in .png, .svg or .pdf")
    require_plots()


def draw_generate(result: Mapping[str, Any]) -> Figure:
    """Bars of seconds per text where systems were compared, and lines over batch and length where those were swept."""
    from matplotlib.figure import Figure

    sweeps = {name: rows for name, rows in result["sweeps"].items() if rows}
    panels = [
        name for name in ("seconds", "lengths", "batch") if name in sweeps or (name == "seconds" and result[name])
    ]
    steps = result["setting"]["steps"]
    figure = Figure(figsize=(4.2 * max(1, len(panels)), 3.4), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axis, name in zip(axes, panels, strict=False):
        if name == "seconds":
            _bars(axis, result)
        elif name == "lengths":
            _line(axis, sweeps[name], x="length", y="seconds", label=f"a text in {steps} steps, seconds")
        else:
            _line(axis, sweeps[name], x="batch", y="tokens_per_second", label="tokens per second")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK)
    return figure


def _bars(axis: Axes, result: Mapping[str, Any]) -> None:
    shown = {label: result["seconds"][name] for name, label in _LABELS.items() if name in result["seconds"]}
    names = list(shown)[::-1]
    colours = [OURS if name.startswith("fsdfm") else OTHERS for name in names]
    axis.bar_label(axis.barh(names, [shown[name] for name in names], color=colours), fmt="%.1f", padding=3)
    axis.margins(x=0.15)
    setting = result["setting"]
    axis.set_xlabel(f"seconds for {setting['length']} tokens ({setting['preset']}, {setting['steps']} steps)")


def _line(axis: Axes, rows: Sequence[Mapping[str, float]], *, x: str, y: str, label: str) -> None:
    points = [(row[x], row[y]) for row in rows]
    axis.plot(*zip(*points, strict=True), "o-", color=OURS)
    axis.set(xscale="log", yscale="log" if y == "seconds" else "linear", xlabel=x, ylabel=label)
    beside, side = ((-5, 5), "right") if y == "seconds" else ((0, 6), "center")  # off a line that rises
    for point in points:
        axis.annotate(f"{point[1]:.3g}", point, beside, textcoords="offset points", ha=side, color=INK)
    axis.margins(0.2, 0.15)
    if y == "seconds":  # what a cost in proportion to the length would be
        (first, cost), (last, _) = points[0], points[-1]
        axis.plot((first, last), (cost, cost * last / first), "--", color=OTHERS, zorder=0, label="in proportion")
        axis.legend(frameon=False, loc="upper left")
    else:
        axis.set_ylim(0, 1.2 * max(value for _, value in points))
    axis.set_xticks([value for value, _ in points], [f"{value:g}" for value, _ in points])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
