"""The report: truth.json, truth.md and truth.png from the cells of a run."""

from __future__ import annotations

import math
from pathlib import Path as FilePath
from typing import Any

import torch

from fsdfm.files import replace_file, write_json, write_text
from fsdfm.studies.truth.figure import draw_truth
from fsdfm.studies.truth.laws import BUDGETS
from fsdfm.studies.truth.study import Setting
from fsdfm.studies.truth.summary import Estimate, Results, estimate, verdicts

__all__ = ["write_report"]


def write_report(folder: FilePath, results: Results, *, setting: Setting, stamp: dict[str, Any]) -> list[str]:
    """Write the three files and return the verdicts."""
    found = verdicts(results)
    numbers = {"stamp": stamp, "verdicts": found, "rows": results.as_json(), "cells": list(results.cells.values())}
    write_json(folder / "truth.json", numbers)
    text = "\n".join([*_heading(results, setting), *_tables(results), *_convergence(results), *_verdict(found)])
    write_text(folder / "truth.md", text)
    figure = draw_truth(results)
    replace_file(folder / "truth.png", lambda file: figure.savefig(file, format="png", dpi=150))
    return found


def _heading(results: Results, setting: Setting) -> list[str]:
    seeds = len(results.seeds)
    return [
        "# Few-step truth",
        "",
        "Total variation to the truth / entropy of the generated law in bits, every law computed, never sampled. "
        f"Mean over {seeds} seed{'s' if seeds > 1 else ''} ± half of the 95 % interval (Student's t). "
        f"Parents trained for {setting.parent_steps} steps, every child for {setting.child_steps} more, batches of "
        f"{setting.batch_size}; torch {torch.__version__}. Sampler: the exact jump rule. "
        "CTC: conditional total correlation of the first step under the coupling trained on, in bits. "
        "Cross-entropy: of the 4-step law under the truth, in bits a sequence ('perplexity'; lower than the truth's "
        "entropy means collapse).",
        "",
    ]


def _tables(results: Results) -> list[str]:
    lines: list[str] = []
    for world in results.worlds:
        truth = results.noted(world, "exact", "truth_entropy")[0]
        lines += [f"## {world}: entropy of the truth {truth:.2f} bits", ""]
        lines += [
            "| method | 1 step | 2 | 4 | 8 | CTC | cross-entropy |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_row(results, world, method) for method in results.methods(world)]
        lines.append("")
    return lines


def _row(results: Results, world: str, method: str) -> str:
    cells = []
    for steps in BUDGETS:
        tv = estimate(results.values(world, method, "tv", steps=steps))
        entropy = estimate(results.values(world, method, "entropy", steps=steps))
        cells.append(f"{_with_interval(tv)} / {entropy.mean:.2f}")
    correlations = results.noted(world, method, "conditional_total_correlation")
    ctc = f"{estimate(correlations).mean:.2f}" if correlations else ""
    cross = estimate(results.values(world, method, "cross_entropy", steps=4)).mean
    return f"| {method} | {' | '.join(cells)} | {ctc} | {cross:.2f} |"


def _with_interval(e: Estimate) -> str:
    return f"{e.mean:.3f}" if math.isnan(e.half_width) else f"{e.mean:.3f} ± {e.half_width:.3f}"


def _convergence(results: Results) -> list[str]:
    """How much training left undone: the parent against the exact posterior, and the last quarter of each child."""
    lines = ["## How far training converged", ""]
    for world in results.worlds:
        gaps = results.noted(world, "dfm", "tv_to_exact_posterior")
        shown = ", ".join(f"{estimate([gap[str(s)] for gap in gaps]).mean:.3f}" for s in BUDGETS)
        lines.append(f"- {world}: the parent's law is {shown} from the exact posterior's at 1, 2, 4, 8 steps.")
        floor = results.noted(world, "dfm", "tv_of_pairs")
        if floor:
            lines.append(f"  With the many steps of reflow's pairs it is {estimate(floor).mean:.3f} from the truth.")
        moved = [text for method in results.methods(world) if (text := _last_quarter(results, world, method))]
        if moved:
            lines.append(f"  Still moving in the last quarter (4-step TV, by more than 5 %): {', '.join(moved)}.")
    return [*lines, ""]


def _last_quarter(results: Results, world: str, method: str) -> str:
    curves = [list(curve.values()) for curve in results.noted(world, method, "tv_at_4_steps_while_training")]
    changes = [math.log(curve[-1] / curve[-2]) for curve in curves if len(curve) > 1]
    if not changes or abs(sum(changes) / len(changes)) < math.log(1.05):
        return ""
    return f"{method} {100 * math.expm1(sum(changes) / len(changes)):+.0f} %"


def _verdict(found: list[str]) -> list[str]:
    intro = (
        "Ratios are geometric means over budgets, worlds and seeds with 95 % intervals over (world, seed) pairs; below "
        "1 is better. With few seeds the intervals are wide, and that is what they should say."
    )
    return ["## Verdict", "", intro, "", *[f"- {line}" for line in found], ""]
