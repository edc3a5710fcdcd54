"""Pictures of the study: boards solved by calls, and which step wrote which cell. Needs the extra `plots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdfm.studies.sudoku.model import BoardAnswer
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


def draw_board_steps(answer: BoardAnswer) -> Any:
    """A board: givens in black, other digits coloured by the step that wrote them last."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    n, last = answer.box**2, max(1, int(answer.written.max()))
    figure = Figure(figsize=(0.5 * n + 1, 0.5 * n + 1), layout="constrained")
    panel = figure.subplots()
    colours = colormaps["viridis"]
    for cell, digit in enumerate(answer.board.tolist()):
        row, column = divmod(cell, n)
        given, step = answer.givens[cell] > 0, int(answer.written[cell])
        colour = "black" if given else colours(0.85 * step / last)
        weight = "bold" if given else "normal"
        panel.text(
            column + 0.5, row + 0.5, str(digit), ha="center", va="center", color=colour, fontsize=13, weight=weight
        )
        if not given:
            panel.text(column + 0.95, row + 0.95, str(step), ha="right", va="bottom", color="dimgrey", fontsize=6)
    for line in range(n + 1):
        wide = 1.6 if line % answer.box == 0 else 0.4
        panel.axhline(line, color="black", linewidth=wide)
        panel.axvline(line, color="black", linewidth=wide)
    verdict = "every row, column and box is right" if answer.is_right else "not a solution"
    panel.set(
        xlim=(0, n),
        ylim=(n, 0),
        aspect="equal",
        title=f"bold: given; small: the step,\n1 to {last}, that wrote it; 0: noise stayed\n{verdict}",
    )
    panel.title.set_fontsize(8)
    panel.axis("off")
    return figure
