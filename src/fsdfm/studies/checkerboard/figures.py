"""The pictures of the checkerboard: what was measured, drawn without global state (no pyplot).

matplotlib and pillow are optional and imported where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdfm.noise import Noise, Purpose
from fsdfm.studies.checkerboard.board import Board
from fsdfm.studies.checkerboard.cells import (
    BUDGETS,
    SCHEDULES,
    SHOWN_RULES,
    SOURCES,
    CheckerboardNumbers,
    SamplingCase,
    States,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure
    from PIL.Image import Image

__all__ = ["draw_few_steps", "draw_jumps", "draw_trajectories", "film", "scatter"]

DPI = 130
POINTS = 3000  # samples a panel shows; more would only fill it
SHOWN_TIMES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
INK, FAINT, SQUARE, STRIP = "#2a2f36", "#8b929b", "#e9eef5", "#f3f1ec"
ALLOWED, FORBIDDEN, MASKED = "#2c5a94", "#d0532f", "#a39a88"
RULE_COLOURS = {"exact": "#3b4a8f", "single": "#1f8a70", "instant": "#c77f0a", "systematic": "#8c4a86"}
RULE_NAMES = {
    "exact": "Exact\n(closed form)",
    "single": "Single\n(cumulative scalar)",
    "instant": "Instant\n(instantaneous)",
    "systematic": "Systematic\n(variance-reduced)",
}


def draw_trajectories(numbers: CheckerboardNumbers, states: States) -> Figure:
    """The paper's figure: rows of frames for both sources, under the exact posterior and the trained network."""
    rows = [(source, denoiser) for source in SOURCES for denoiser in ("exact", "network")]
    figure, panels = _panels(len(rows), len(SHOWN_TIMES), size=(12.2, 8.6))
    figure.subplots_adjust(left=0.125, right=0.985, top=0.845, bottom=0.055, wspace=0.08, hspace=0.2)
    _title(
        figure,
        f"From noise to data in {numbers.frames} frames of the instantaneous rule, κ = t",
        "Each dot is a sample: blue on an allowed square, orange on a forbidden one, grey with a token still masked "
        "(drawn in the margin).",
    )
    for row, (source, denoiser) in zip(panels, rows, strict=True):
        frames = states[SamplingCase(denoiser, source, "instant", numbers.frames)]
        for axes, t in zip(row, SHOWN_TIMES, strict=True):
            x_t = frames[round(t * numbers.frames)]
            scatter(axes, numbers.board, x_t, margin=source == "mask")
            _say(axes, _state_in_words(x_t, numbers.board))
        name = "exact posterior" if denoiser == "exact" else "trained network"
        _row_label(row[0], f"{source} source\n{name}")
    for axes, t in zip(panels[0], SHOWN_TIMES, strict=True):
        axes.text(0.5, 1.17, f"t = {t:g}", transform=axes.transAxes, ha="center", fontsize=11, color=INK)
    _label_tokens(panels[-1][0])
    return figure


def draw_few_steps(numbers: CheckerboardNumbers, states: States) -> Figure:
    """The last state after 1, 2, 4 and 8 steps under the four rules, uniform source on the left, mask on the right."""
    figure, panels = _panels(len(SHOWN_RULES), 2 * len(BUDGETS), size=(13.4, 7.9), gap_after=len(BUDGETS))
    figure.subplots_adjust(left=0.125, right=0.99, top=0.8, bottom=0.055, wspace=0.1, hspace=0.2)
    _title(
        figure,
        "Few steps with the exact posterior: what each jump rule makes of 1, 2, 4 and 8 steps",
        "Above each panel: the share of samples on allowed squares. In 1 step both tokens are drawn independently, "
        "so half of them fit.",
    )
    columns = [(source, steps) for source in SOURCES for steps in BUDGETS]
    for row, rule in zip(panels, SHOWN_RULES, strict=True):
        for axes, (source, steps) in zip(row, columns, strict=True):
            setting = SamplingCase("exact", source, rule, steps)
            scatter(axes, numbers.board, states[setting][-1], margin=False)
            _say(axes, f"{numbers.outcomes[setting].on_allowed:.1%}")
        _row_label(row[0], RULE_NAMES[rule], RULE_COLOURS[rule])
    for axes, (source, steps) in zip(panels[0], columns, strict=True):
        plural = "step" if steps == 1 else "steps"
        axes.text(0.5, 1.19, f"{steps} {plural}", transform=axes.transAxes, ha="center", fontsize=10, color=INK)
        if steps == BUDGETS[0]:
            axes.text(0, 1.42, f"{source} source", transform=axes.transAxes, fontsize=11, color=INK, weight="bold")
    _label_tokens(panels[-1][0])
    return figure


def draw_jumps(numbers: CheckerboardNumbers) -> Figure:
    """Share of tokens jumping in each step, instantaneous against cumulative, and the positions never reached."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.6, 6.8), dpi=DPI, facecolor="white")
    grid = figure.subplots(len(SCHEDULES), 5)
    figure.subplots_adjust(left=0.045, right=0.985, top=0.8, bottom=0.08, wspace=0.32, hspace=0.42)
    _title(
        figure,
        "When tokens jump: the instantaneous against the cumulative scalar (exact posterior)",
        "At κ = t nothing stalls early: the instantaneous rule jumps a little too rarely in every step and leaves the "
        "rest to the last redraw. At κ = t² its first step moves nothing.",
    )
    columns = [(source, steps) for steps in (numbers.frames, BUDGETS[-1]) for source in SOURCES]
    for row, kappa in zip(grid, SCHEDULES, strict=True):
        for axes, (source, steps) in zip(row[:-1], columns, strict=True):
            _plot_jumps(axes, numbers, source, steps=steps, kappa=kappa)
        _plot_never_reached(row[-1], numbers, kappa)
    lines, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="upper left", bbox_to_anchor=(0.01, 0.9), ncols=3, frameon=False, fontsize=9.5)
    return figure


def film(numbers: CheckerboardNumbers, states: States, source: str) -> list[Image]:
    """The frames of a trajectory under the exact posterior, in a fixed palette so that a GIF stores only changes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from PIL import Image

    trajectory = states[SamplingCase("exact", source, "instant", numbers.frames)]
    figure = Figure(figsize=(3.7, 4.3), dpi=DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.05, 0.06, 0.9, 0.775))
    dots = scatter(axes, numbers.board, trajectory[0], margin=source == "mask", dot=3.4)
    time = figure.text(0.05, 0.945, "", fontsize=12, color=INK)
    words = figure.text(0.05, 0.885, "", fontsize=9.5, color=FAINT)
    bar = figure.add_artist(Rectangle((0.05, 0.022), 0.0, 0.014, facecolor=INK, linewidth=0))
    images: list[Image.Image] = []
    for index, x_t in enumerate(trajectory):
        for collection, places in zip(dots, _places(numbers.board, x_t, margin=source == "mask"), strict=True):
            collection.set_offsets(places.numpy())
        time.set_text(f"{source} source, t = {index / numbers.frames:.2f}")
        words.set_text(_state_in_words(x_t, numbers.board))
        bar.set(width=0.9 * index / numbers.frames)
        canvas.draw()  # type: ignore[no-untyped-call]
        pixels = bytes(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        image = Image.frombytes("RGBA", canvas.get_width_height(), pixels).convert("RGB")
        images.append(image.quantize(palette=_palette(), dither=Image.Dither.NONE))
    return images


def _palette() -> Image:
    """Shades of the few colours used, from each background to each ink: one palette for every frame."""
    from PIL import Image

    def rgb(colour: str) -> list[int]:
        return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]

    entries: list[int] = []
    for ground in ("#ffffff", SQUARE, STRIP):
        for ink in (INK, FAINT, ALLOWED, FORBIDDEN, MASKED):
            for share in (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0):
                entries += [round(a + share * (b - a)) for a, b in zip(rgb(ground), rgb(ink), strict=True)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(entries)
    return palette


def scatter(axes: Axes, board: Board, x: Tensor, *, margin: bool, dot: float = 1.5) -> list[PathCollection]:
    """Samples [B, 2] as dots on the board; with a margin, masked coordinates are spread over a strip outside it.

    Returns the dots: with a token masked, on allowed squares, on forbidden ones.
    """
    from matplotlib.colors import ListedColormap

    strip = _strip(board, margin)
    side = board.size // board.square
    squares = [[(i + j) % 2 for i in range(side)] for j in range(side)]
    extent = (0, board.size, 0, board.size)
    axes.imshow(squares, extent=extent, origin="lower", cmap=ListedColormap([SQUARE, "#ffffff"]), vmin=0, vmax=1)
    if margin:
        axes.axvspan(-strip, 0, color=STRIP, linewidth=0, zorder=0)
        axes.axhspan(-strip, 0, color=STRIP, linewidth=0, zorder=0)
        axes.plot([0, 0, board.size], [board.size, 0, 0], color=FAINT, linewidth=0.6)
    dots = [
        axes.scatter(places[:, 0].numpy(), places[:, 1].numpy(), s=dot, color=colour, linewidths=0)
        for places, colour in zip(_places(board, x, margin=margin), (MASKED, ALLOWED, FORBIDDEN), strict=True)
    ]
    axes.set(xlim=(-strip, board.size), ylim=(-strip, board.size), xticks=[], yticks=[])
    _thin_frame(axes)
    return dots


def _strip(board: Board, margin: bool) -> float:
    return 0.16 * board.size if margin else 0.0


def _places(board: Board, x: Tensor, *, margin: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Where the dots go: incomplete samples, those on allowed squares, those on forbidden ones, each [n, 2]."""
    shown = x[:POINTS]
    masked = shown.ge(board.size)
    spread = Noise(0, range(len(shown))).uniform(Purpose.SOURCE, 2)
    place = torch.where(masked, -_strip(board, margin) * (0.12 + 0.76 * spread), shown + 0.5)
    incomplete, allowed = masked.any(-1), board.allowed(shown)
    return place[incomplete], place[allowed], place[~allowed & ~incomplete]


def _plot_jumps(axes: Axes, numbers: CheckerboardNumbers, source: str, *, steps: int, kappa: str) -> None:
    times = torch.arange(steps + 1, dtype=torch.float64) / steps
    flow = SCHEDULES[kappa].kappa(times).diff() * _jumps_of_the_flow(source, numbers.board)
    middle = ((times[1:] + times[:-1]) / 2).tolist()
    few = steps <= BUDGETS[-1]
    axes.plot(
        middle, (100 * flow).tolist(), color=FAINT, linewidth=1.1, linestyle=(0, (2, 1.5)), label="the flow itself"
    )
    for rule, name in (("single", "cumulative (Single)"), ("instant", "instantaneous (Instant)")):
        shares = [
            100 * share for share in numbers.outcomes[SamplingCase("exact", source, rule, steps, kappa)].jumps_per_step
        ]
        axes.plot(
            middle,
            shares,
            color=RULE_COLOURS[rule],
            linewidth=1.2,
            label=name,
            marker="o" if few else "",
            markersize=3.6,
        )
    _style_curves(
        axes,
        title=f"{source} source, {steps} steps, {_formula(kappa)}",
        x_label="t",
        y_label="% of tokens jumping a step",
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])


def _plot_never_reached(axes: Axes, numbers: CheckerboardNumbers, kappa: str) -> None:
    found = [entry for entry in numbers.never_reached if entry.kappa == kappa]
    top = 1.2 * max(entry.measured for entry in found)
    for place, entry in enumerate(found):
        axes.bar(place, 100 * entry.measured, width=0.62, color=RULE_COLOURS["instant"], alpha=0.85, linewidth=0)
        axes.plot([place - 0.4, place + 0.4], [100 * entry.predicted] * 2, color=INK, linewidth=1.2)
        height = 100 * (max(entry.measured, entry.predicted) + 0.03 * top)
        axes.text(place, height, f"{entry.measured:.1%}", ha="center", fontsize=8, color=INK)
    _style_curves(
        axes,
        title=f"never reached (literal), {_formula(kappa)}",
        x_label="steps",
        y_label="% of positions (line: predicted)",
    )
    axes.set_xticks(range(len(found)), [str(entry.steps) for entry in found])
    axes.set_ylim(0, max(100 * top, 1.0))


def _jumps_of_the_flow(source: str, board: Board) -> float:
    """Mean jumps per token in continuous time: the integral of g(t) P(x_1 != x_t) = kappa'_t P(x_1 != x_0)."""
    return 1 - 1 / board.size if source == "uniform" else 1.0


def _state_in_words(x_t: Tensor, board: Board) -> str:
    masked = x_t.ge(board.size).to(torch.float64).mean()
    if masked > 0:
        return f"{float(masked):.0%} of tokens masked"
    return f"{float(board.allowed(x_t).to(torch.float64).mean()):.1%} on allowed"


def _panels(
    rows: int, columns: int, *, size: tuple[float, float], gap_after: int = 0
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a table of panels; `gap_after` leaves a gap after that many columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, facecolor="white")
    widths = [1.0] * columns
    if gap_after:
        widths.insert(gap_after, 0.18)
    grid = figure.add_gridspec(rows, len(widths), width_ratios=widths)
    kept = [column for column in range(len(widths)) if not gap_after or column != gap_after]
    return figure, [[figure.add_subplot(grid[row, column]) for column in kept] for row in range(rows)]


def _title(figure: Figure, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.018, 1 - 0.32 / height, title, fontsize=14, color=INK, weight="bold", va="center")
    figure.text(0.018, 1 - 0.6 / height, subtitle, fontsize=10, color=FAINT, va="center")


def _say(axes: Axes, words: str) -> None:
    axes.set_title(words, fontsize=8.5, color=INK, pad=3)


def _row_label(axes: Axes, words: str, colour: str = INK) -> None:
    axes.text(-0.2, 0.5, words, transform=axes.transAxes, ha="right", va="center", fontsize=9, color=colour)


def _label_tokens(axes: Axes) -> None:
    axes.set_xlabel("first token", fontsize=8.5, color=FAINT, labelpad=4)
    axes.set_ylabel("second token", fontsize=8.5, color=FAINT, labelpad=2)


def _thin_frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set(linewidth=0.6, color=FAINT)


def _style_curves(axes: Axes, *, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=8.5, color=INK)
    axes.set_ylabel(y_label, fontsize=8.5, color=INK)
    axes.tick_params(labelsize=8, colors=INK, width=0.6, length=2.5)
    axes.grid(axis="y", color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    _thin_frame(axes)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _formula(kappa: str) -> str:
    return "κ = " + kappa.replace("^2", "²")
