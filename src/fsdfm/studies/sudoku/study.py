"""The study: every method trained with several seeds, every rule and budget scored on the same puzzles.

    run_sudoku("out", setting=BoardSetting.quick())     # 4 x 4 boards, minutes
    run_sudoku("out")                                   # 9 x 9

A board is solved where every cell is right; there is nothing in between to be fooled by. The share of right cells
stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdfm.flow import MixturePath
from fsdfm.measure.statistics import Interval, student_mean
from fsdfm.noise import Noise
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.report import StudyReport, interval_json, markdown_table, save_figure
from fsdfm.studies.runner import Cell, Study, StudyResults, require_seeds, run_study
from fsdfm.studies.sudoku.board import DIFFICULTIES, Difficulty, Puzzle, write_board
from fsdfm.studies.sudoku.figure import draw_board_steps, draw_solved
from fsdfm.studies.sudoku.methods import METHODS, BoardMethod, BoardSetting, adaptive_rules_of, rules_of, train_method
from fsdfm.studies.sudoku.model import BoardModel, load_board_model, save_board_model
from fsdfm.studies.sudoku.network import BoardNetwork, make_source
from fsdfm.studies.sudoku.solving import fill_boards, fill_counting, make_puzzles, score_boards

__all__ = ["SudokuNumbers", "run_sudoku"]

_PUZZLE_SEED = 2**20  # of the puzzles: no training board has it
_SHOWN_STEPS = 8  # of the picture
_COMPARED = {  # (method, rule) -> what it is compared with
    ("mask", "exact"): ("dfm", "exact"),
    ("mask", "confident"): ("mask", "exact"),
    ("dfm", "spaced"): ("dfm", "exact"),
    ("paper", "exact"): ("path-only", "exact"),
    ("rk2", "exact"): ("path-only", "exact"),
    ("crf", "exact"): ("path-only", "exact"),
    ("causal", "exact"): ("path-only", "exact"),
    ("mask+crf", "confident"): ("mask", "confident"),
}
_ADAPTS = {"bound 0.1": "certain", "bound 0.5": "certain", "stop 0.1": "exact"}  # rule -> its order, not adapting


def _compute(cell: Cell, folder: StudyFolder, *, setting: BoardSetting) -> Mapping[str, Any]:
    """Train one method with one seed and score it."""
    method: BoardMethod = cell.spec
    parent = load_board_model(_place(folder, f"{method.start}.{cell.seed}")) if method.start else None
    weights = None if parent is None else parent.network.state_dict()
    network = train_method(method, setting, seed=cell.seed, parent=weights)
    save_board_model(_place(folder, cell.name), BoardModel(network, method, setting))
    puzzles = make_puzzles(setting.box, setting.puzzles, seed=_PUZZLE_SEED)
    scores = {
        f"{rule}/{steps}/{difficulty}": score
        for rule in rules_of(method)
        for steps in setting.budgets
        for difficulty, score in _score(network, method, puzzles, rule=rule, steps=steps, seed=cell.seed).items()
    }
    adaptive = {
        f"{rule}/{steps}/{difficulty}": score
        for rule in adaptive_rules_of(method)
        for steps in setting.budgets
        for difficulty, score in _score_adaptive(
            network, method, puzzles, rule=rule, steps=steps, seed=cell.seed
        ).items()
    }
    return {"scores": scores, "adaptive": adaptive, "parameters": sum(p.numel() for p in network.parameters())}


def _place(folder: StudyFolder, name: str) -> Path:
    """Where the network of a cell is kept for users."""
    return folder.path / "models" / name


def _laid_out(
    network: BoardNetwork, method: BoardMethod, puzzles: Mapping[Difficulty, Sequence[Puzzle]]
) -> tuple[MixturePath, list[Puzzle], Tensor]:
    """The method's path, the boards of all difficulties one after the other, and their givens."""
    path = MixturePath(make_source(method.source, round(network.num_digits**0.5)))
    boards = [puzzle for found in puzzles.values() for puzzle in found]
    return path, boards, torch.from_numpy(np.array([puzzle.givens for puzzle in boards]))


def _score(
    network: BoardNetwork,
    method: BoardMethod,
    puzzles: Mapping[Difficulty, Sequence[Puzzle]],
    *,
    rule: str,
    steps: int,
    seed: int,
) -> dict[Difficulty, dict[str, float]]:
    """The share of boards solved and of empty cells right, by difficulty; all are filled in together."""
    path, boards, givens = _laid_out(network, method, puzzles)
    noise = Noise(seed, range(len(boards)))
    filled = fill_boards(network, path, givens, steps=steps, rule=rules_of(method)[rule], noise=noise)
    sizes = [len(found) for found in puzzles.values()]
    parts = [torch.split(part, sizes) for part in score_boards(filled, boards)]
    return {
        difficulty: {"solved": float(solved.double().mean()), "cells": float(right.sum() / empty.sum())}
        for difficulty, solved, right, empty in zip(puzzles, *parts, strict=True)
    }


def _score_adaptive(
    network: BoardNetwork,
    method: BoardMethod,
    puzzles: Mapping[Difficulty, Sequence[Puzzle]],
    *,
    rule: str,
    steps: int,
    seed: int,
) -> dict[Difficulty, dict[str, float]]:
    """The share of boards solved and the mean calls that they took, at most `steps`, by difficulty."""
    path, boards, givens = _laid_out(network, method, puzzles)
    noise = Noise(seed, range(len(boards)))
    filled, calls = fill_counting(network, path, givens, steps=steps, rule=adaptive_rules_of(method)[rule], noise=noise)
    sizes = [len(found) for found in puzzles.values()]
    parts = [torch.split(part.double(), sizes) for part in (score_boards(filled, boards)[0], calls)]
    return {
        difficulty: {"solved": float(solved.mean()), "calls": float(took.mean())}
        for difficulty, solved, took in zip(puzzles, *parts, strict=True)
    }


class SudokuNumbers:
    """What the study says: (method, rule, steps, difficulty, "solved" or "cells") -> mean over seeds, with interval."""

    def __init__(self, results: StudyResults, setting: BoardSetting, methods: Sequence[BoardMethod]):
        self.setting, self.methods, self.results = setting, methods, results
        first = results.of(methods[0].name)[0]["scores"]
        present = {key.split("/")[2] for key in first}
        self.difficulties = [name for name in DIFFICULTIES if name in present]

    def at(self, method: str, rule: str, steps: int, *, difficulty: str, what: str = "solved") -> Interval:
        """One number."""
        key = f"{rule}/{steps}/{difficulty}"
        return student_mean([float(cell["scores"][key][what]) for cell in self.results.of(method)])

    def table(self, difficulty: str) -> str:
        """Boards solved / cells right, by calls."""
        rows: list[list[str]] = [["method, rule", *(str(steps) for steps in self.setting.budgets)]]
        for method in self.methods:
            for rule in rules_of(method):
                cells = [
                    self._written(method.name, rule, steps, difficulty=difficulty) for steps in self.setting.budgets
                ]
                rows.append([f"{method.name}, {rule}", *cells])
        return markdown_table(rows)

    def adaptive_methods(self) -> list[BoardMethod]:
        """Those that were filled in by rules that decide how many calls a board gets; cells of before lack some."""

        def has_all(method: BoardMethod, cell: Mapping[str, Any]) -> bool:
            rules = {key.partition("/")[0] for key in cell.get("adaptive", {})}
            return bool(rules) and rules >= set(adaptive_rules_of(method))

        return [each for each in self.methods if all(has_all(each, cell) for cell in self.results.of(each.name))]

    def adaptive_table(self) -> str:
        """Boards solved and mean calls by difficulty, beside a fixed number of calls."""
        rows: list[list[str]] = [["method, rule", "calls at most", *self.difficulties, "mean calls", "points gained"]]
        for method in self.adaptive_methods():
            for rule in [name for name in rules_of(method) if name != "spaced"]:
                for steps in self.setting.budgets:
                    fixed = [self.at(method.name, rule, steps, difficulty=name) for name in self.difficulties]
                    cells = [f"{_per_cent(solved)} % in {steps}" for solved in fixed]
                    rows.append([f"{method.name}, {rule}", str(steps), *cells, str(steps), ""])
            for rule in adaptive_rules_of(method):
                for steps in self.setting.budgets[1:]:
                    cells = []
                    for name in self.difficulties:
                        solved, calls = (
                            self.adaptive_at(method.name, rule, steps, difficulty=name, what=what)
                            for what in ("solved", "calls")
                        )
                        cells.append(f"{_per_cent(solved)} % in {calls.value:.1f}")
                    row = [
                        f"{method.name}, {rule}",
                        str(steps),
                        *cells,
                        f"{self.mean_calls(method.name, rule, steps):.1f}",
                    ]
                    rows.append([*row, self._adapting(method.name, rule, steps)])
        return markdown_table(rows)

    def mean_calls(self, method: str, rule: str, steps: int) -> float:
        """Of a board, over difficulties and seeds."""
        found = [
            self.adaptive_at(method, rule, steps, difficulty=name, what="calls").value for name in self.difficulties
        ]
        return float(np.mean(found))

    def gain_of_adapting(self, method: str, rule: str, steps: int) -> tuple[int, Interval] | None:
        """(calls, boards solved more than by the same order with so many calls for every board), paired by seed.

        These are the fewest calls of the study's budgets that are no fewer than the rule's mean. None for a rule with a
        fixed number itself.
        """
        if (fixed := _ADAPTS.get(rule)) is None:
            return None
        mean = self.mean_calls(method, rule, steps)
        calls = next(budget for budget in self.setting.budgets if budget >= mean - 1e-9)
        kind = "adaptive" if fixed == "certain" else "scores"
        return calls, student_mean(
            [
                float(
                    np.mean(
                        [
                            cell["adaptive"][f"{rule}/{steps}/{name}"]["solved"]
                            - cell[kind][f"{fixed}/{calls}/{name}"]["solved"]
                            for name in self.difficulties
                        ]
                    )
                )
                for cell in self.results.of(method)
            ]
        )

    def _adapting(self, method: str, rule: str, steps: int) -> str:
        if (found := self.gain_of_adapting(method, rule, steps)) is None:
            return ""
        return f"{found[1].map(lambda share: 100 * share):+.1f} over {_ADAPTS[rule]} in {found[0]}"

    def adaptive_at(self, method: str, rule: str, steps: int, *, difficulty: str, what: str = "solved") -> Interval:
        """The share solved, or the mean `calls`, of a rule that makes at most `steps` of them."""
        key = f"{rule}/{steps}/{difficulty}"
        return student_mean([float(cell["adaptive"][key][what]) for cell in self.results.of(method)])

    def gain(self, method: str, rule: str, *, over: tuple[str, str], what: str = "solved") -> Interval:
        """What is solved (or right) more than by another (method, rule): a mean over budgets and difficulties, by seed.

        Seeds are paired.
        """
        ours, theirs = self.results.of(method), self.results.of(over[0])
        keys = [f"{steps}/{name}" for steps in self.setting.budgets for name in self.difficulties]
        return student_mean(
            [
                float(np.mean([a["scores"][f"{rule}/{k}"][what] - b["scores"][f"{over[1]}/{k}"][what] for k in keys]))
                for a, b in zip(ours, theirs, strict=True)
            ]
        )

    def verdicts(self) -> list[str]:
        """What each choice gains over what it is to be compared with, in points of boards solved and of cells right."""
        names = {method.name for method in self.methods}
        asked = [(pair, over) for pair, over in _COMPARED.items() if {pair[0], over[0]} <= names]
        lines = []
        for (method, rule), over in asked:
            boards, cells = (self._points(method, rule, over=over, what=what) for what in ("solved", "cells"))
            lines.append(f"`{method}, {rule}` against `{', '.join(over)}`: {boards}; cells {cells}")
        return lines

    def _points(self, method: str, rule: str, *, over: tuple[str, str], what: str) -> str:
        found = self.gain(method, rule, over=over, what=what).map(lambda share: 100 * share)
        clear = "better" if found.low > 0 else "worse" if found.high < 0 else "not separable"
        return f"{found:+.1f} points, {clear}"

    def _written(self, method: str, rule: str, steps: int, *, difficulty: str) -> str:
        solved, cells = (self.at(method, rule, steps, difficulty=difficulty, what=w) for w in ("solved", "cells"))
        return f"{_per_cent(solved)} / {100 * cells.value:.0f}"

    def record(self) -> dict[str, Any]:
        """Every number, for the JSON file."""
        return {
            f"{method.name}/{rule}/{steps}/{difficulty}/{what}": interval_json(
                self.at(method.name, rule, steps, difficulty=difficulty, what=what)
            )
            for method in self.methods
            for rule in rules_of(method)
            for steps in self.setting.budgets
            for difficulty in self.difficulties
            for what in ("solved", "cells")
        } | {
            f"{method.name}/{rule}/{steps}/{difficulty}/{what}": interval_json(
                self.adaptive_at(method.name, rule, steps, difficulty=difficulty, what=what)
            )
            for method in self.adaptive_methods()
            for rule in adaptive_rules_of(method)
            for steps in self.setting.budgets
            for difficulty in self.difficulties
            for what in ("solved", "calls")
        }


def _per_cent(share: Interval) -> str:
    """A share in per cent, its interval cut at none and all."""
    low, high = (100 * min(1.0, max(0.0, end)) for end in (share.low, share.high))
    spread = f" [{low:.0f}, {high:.0f}]" if np.isfinite(share.low) else ""
    return f"{100 * share.value:.0f}{spread}"


def _report(results: StudyResults, *, setting: BoardSetting, methods: Sequence[BoardMethod]) -> StudyReport:
    numbers = SudokuNumbers(results, setting, methods)
    n = setting.box**2
    lines = [
        f"# Sudoku {n} x {n}: boards that are right or wrong",
        "",
        f"Boards solved / empty cells right, in per cent, by network calls; {setting.puzzles} puzzles of each "
        "difficulty with one solution, generated; brackets are 95 % intervals over seeds (Student's t). Easy puzzles "
        "are solved by cells with one digit left, medium ones also by digits with one place left, hard ones only by "
        "trying.",
        "",
        *(f"- **{method.name}**: {method.what}" for method in methods),
        "",
    ]
    for difficulty in numbers.difficulties:
        lines += [f"## {difficulty.capitalize()}", "", numbers.table(difficulty), ""]
    lines += [
        "## What is gained",
        "",
        "Points of boards solved and of empty cells right, a mean over budgets and difficulties, paired by seed:",
        "",
    ]
    lines += [f"- {line}" for line in numbers.verdicts()] + [""]
    if numbers.adaptive_methods():
        lines += [
            "## Calls by difficulty",
            "",
            "Rules that decide how many calls a board gets (`fsdfm.flow.adaptive`; nats of entropy), beside rules with "
            "a fixed number: boards solved, and the mean calls that they took. Points gained: boards of all "
            "difficulties solved more than by the same order with a fixed number of calls (the fewest of the table "
            "that are no fewer than the mean of the rule), paired by seed.",
            "",
            numbers.adaptive_table(),
            "",
        ]
    pictures = {
        "sudoku.png": save_figure(partial(draw_solved, numbers)),
        "board.png": save_figure(partial(_draw_example, results, setting, methods[0])),
    }
    return StudyReport("sudoku", "\n".join(lines), {"numbers": numbers.record()}, pictures)


def _draw_example(results: StudyResults, setting: BoardSetting, method: BoardMethod) -> Any:
    """Which step wrote which cell, on one puzzle."""
    puzzles = make_puzzles(setting.box, 1, seed=_PUZZLE_SEED)
    puzzle = next(iter(puzzles.values()))[0]
    model = load_board_model(_place(results.folder, f"{method.name}.{results.cells[0].seed}"))
    return draw_board_steps(model.solve(write_board(puzzle.givens, setting.box), steps=_SHOWN_STEPS))


def run_sudoku(
    out: str | Path,
    *,
    seeds: int = 3,
    methods: Sequence[str] = (),
    setting: BoardSetting | None = None,
    workers: int | None = None,
) -> SudokuNumbers:
    """Train and score every method; the same call resumes. Writes sudoku.md, sudoku.json, sudoku.png and board.png.

    setting   the size of everything; 9 x 9 unless said
    methods   names of those to run, and what they start from; all unless said
    """
    require_seeds(seeds)
    size = setting or BoardSetting()
    chosen = _chosen(methods)
    cells = [
        Cell(method.name, seed, method, needs=(f"{method.start}.{seed}",) if method.start else ())
        for seed in range(seeds)
        for method in chosen
    ]
    study = Study(
        "sudoku",
        cells,
        partial(_compute, setting=size),
        partial(_report, setting=size, methods=chosen),
        setting={**asdict(size), "budgets": list(size.budgets)},
    )
    return SudokuNumbers(run_study(study, out, workers=workers), size, chosen)


def _chosen(names: Sequence[str]) -> list[BoardMethod]:
    known = {method.name: method for method in METHODS}
    if unknown := next((name for name in names if name not in known), None):
        raise ValueError(f"there is no method {unknown!r}; allowed are {', '.join(known)}")
    wanted = {*names, *(known[name].start for name in names)} if names else set(known)
    return [method for method in METHODS if method.name in wanted]
