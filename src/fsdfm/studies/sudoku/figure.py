"""Pictures of the study: boards solved by calls, and which step wrote which cell. Needs the extra `plots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fsdfm.studies.sudoku.study import SudokuNumbers

__all__ = ["draw_board_steps", "draw_solved"]

_STYLES = {"exact": "-", "spaced": "--", "confident": ":"}


def draw_solved(numbers: SudokuNumbers) -> Any:
    """The share of boards solved against network calls, a panel for each difficulty, intervals over seeds."""
    from matplotlib.figure import Figure

    from fsdfm.studies.sudoku.methods import rules_of

    budgets = numbers.setting.budgets
    figure = Figure(figsize=(4 * len(numbers.difficulties), 3.6), layout="constrained")
    panels = figure.subplots(1, len(numbers.difficulties), sharey=True, squeeze=False)[0]
    for panel, difficulty in zip(panels, numbers.difficulties, strict=True):
        for number, method in enumerate(numbers.methods):
            for rule in rules_of(method):
                found = [numbers.at(method.name, rule, steps, difficulty=difficulty) for steps in budgets]
                values = [100 * each.value for each in found]
                panel.plot(budgets, values, _STYLES.get(rule, "-."), color=f"C{number}", label=f"{method.name}, {rule}")
                low, high = ([100 * getattr(each, end) for each in found] for end in ("low", "high"))
                panel.fill_between(budgets, low, high, color=f"C{number}", alpha=0.1, linewidth=0)
        panel.set(title=difficulty, xlabel="network calls", xscale="log", ylim=(0, 100))
        panel.set_xticks(budgets, [str(steps) for steps in budgets])
        panel.minorticks_off()
    panels[0].set_ylabel("boards solved, %")
    panels[-1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_board_steps(givens: npt.NDArray[np.int64], filled: npt.NDArray[Any], written: npt.NDArray[Any]) -> Any:
    """A board: givens in black, other digits coloured by the step that wrote them last."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    n = round(len(givens) ** 0.5)
    box, last = round(n**0.5), max(1, int(written.max()))
    figure = Figure(figsize=(0.5 * n + 1, 0.5 * n + 1), layout="constrained")
    panel = figure.subplots()
    colours = colormaps["viridis"]
    for cell, digit in enumerate(filled.tolist()):
        row, column = divmod(cell, n)
        given, step = givens[cell] > 0, int(written[cell])
        shown = int(givens[cell]) if given else digit
        colour = "black" if given else colours(0.85 * step / last)
        panel.text(column + 0.5, row + 0.45, str(shown), ha="center", va="center", color=colour, fontsize=13)
        if not given:
            panel.text(column + 0.95, row + 0.95, str(step), ha="right", va="bottom", color="grey", fontsize=5)
    for line in range(n + 1):
        wide = 1.6 if line % box == 0 else 0.4
        panel.axhline(line, color="black", linewidth=wide)
        panel.axvline(line, color="black", linewidth=wide)
    panel.set(
        xlim=(0, n),
        ylim=(n, 0),
        aspect="equal",
        title=f"black: given; small: the step, 1 to {last}, that changed it last; 0: none did",
    )
    panel.title.set_fontsize(7)
    panel.axis("off")
    return figure
