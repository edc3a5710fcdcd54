"""The report: tables, files for other programs and figures of some result files, in one folder."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdfm.files import replace_file, write_text
from fsdfm.measure.results import Evaluation
from fsdfm.show.plots import require_plots
from fsdfm.show.quality.claims import claims_table
from fsdfm.show.quality.comparison import Comparison, judge_number
from fsdfm.show.quality.figures import (
    draw_change,
    draw_frontier,
    draw_latency,
    draw_panels,
    draw_quality,
)
from fsdfm.show.quality.marks import BLIND, UNKNOWN
from fsdfm.show.quality.metrics import in_order, metric_named
from fsdfm.show.quality.tables import (
    COMPARED,
    across_budgets_table,
    changes_csv,
    changes_table,
    controls_table,
    equal_entropy_table,
    few_steps_table,
    matched_table,
    metric_table,
    model_tables,
    plain_markdown,
    results_csv,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["facts_in_words", "judge_in_words", "report_markdown", "write_comparison", "write_report"]

DPI = 200
_SAMPLER = ("jump", "grid", "temperature", "final_temperature", "top_k", "top_p", "renoise", "length")
ALT = {
    "quality": "Perplexity and entropy against calls of the network",
    "panels": "Accuracy, diversity and MAUVE against calls of the network",
    "frontier": "Perplexity against entropy",
    "latency": "Perplexity against seconds per sample",
}


def write_report(files: Sequence[Path], out: Path, *, names: Sequence[str] = ()) -> list[Path]:
    """Write report.md, results.csv, changes.csv and the figures that the files have numbers for.

    The first file is the baseline of the others. Returns what was written, the report first.
    """
    return write_comparison(Comparison.read(files, names), out)


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """The same of evaluations that are there already."""
    require_plots()
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = draw_all(comparison)
        texts = {"report.md": report_markdown(comparison, list(figures)), "results.csv": results_csv(comparison)}
        if len(comparison.labels) > 1:
            texts["changes.csv"] = changes_csv(comparison)
        for name, text in texts.items():
            write_text(out / name, text)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a name in letters the font lacks is drawn as boxes
            for name, figure in figures.items():
                replace_file(out / f"{name}.png", partial(figure.savefig, format="png", dpi=DPI))
    except OSError as error:
        raise ValueError(f"cannot write into {out}: {error.strerror}; choose a folder you may write to") from error
    return [out / name for name in (*texts, *(f"{name}.png" for name in figures))]


def draw_all(comparison: Comparison) -> dict[str, Figure]:
    """Every figure that there are numbers for, by the name of its file."""
    drawn = {
        "quality": draw_quality(comparison),
        "panels": draw_panels(comparison),
        **{
            change_name(label, number): draw_change(comparison, label)
            for number, label in enumerate(comparison.labels[1:], start=2)
        },
        "frontier": draw_frontier(comparison),
        "latency": draw_latency(comparison),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def change_name(label: str, number: int) -> str:
    """The name of the figure of a model against the baseline."""
    slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    return f"change-{number}-{slug}"[:60].rstrip("-")


def report_markdown(comparison: Comparison, figures: Sequence[str] = ()) -> str:
    """The whole report as Markdown; `figures` are the names of the pictures that stand beside it."""

    def pictures(start: str) -> list[str]:
        return [f"![{ALT.get(name, 'Changes by budget')}]({name}.png)\n" for name in figures if name.startswith(start)]

    several = len(comparison.labels) > 1
    parts = ["# Quality by number of steps\n", _heading(comparison), few_steps_table(comparison).to_markdown()]
    if (claims := claims_table(comparison)) is not None:
        parts.append(claims.to_markdown())
    parts += [*pictures("quality"), *pictures("panels")]
    if several:
        parts.append(f"## Against {plain_markdown(comparison.labels[0])}\n")
        for number, label in enumerate(comparison.labels[1:], start=2):
            parts += [changes_table(comparison, label).to_markdown(), *pictures(change_name(label, number))]
        present = comparison.metric_names()
        metrics = [metric_named(name) for name in COMPARED if name in present]
        parts += ["## Metric by metric\n", *(metric_table(comparison, metric).to_markdown() for metric in metrics)]
    if (matched := matched_table(comparison)) is not None:
        parts.append(matched.to_markdown())
    if (across := across_budgets_table(comparison)) is not None:
        parts.append(across.to_markdown())
    equal = equal_entropy_table(comparison)
    if equal is not None or pictures("frontier") or pictures("latency"):
        parts += ["## Frontier and latency\n", *pictures("frontier")]
        parts += [] if equal is None else [equal.to_markdown()]
        parts += pictures("latency")
    parts.append("## Model by model\n")
    for label, evaluation in comparison.pairs:
        tables = model_tables(label, evaluation, comparison.real_of(label), marks=comparison.marks_of(label))
        parts += [table.to_markdown() for table in tables]
        if (controls := controls_table(label, evaluation, comparison.real_of(label))) is not None:
            parts.append(controls.to_markdown())
        parts.append(plain_markdown(facts_in_words(evaluation)) + "\n")
    return "\n".join(parts)


def _heading(comparison: Comparison) -> str:
    lines = [
        "Numbers in brackets are 95 % intervals. "
        "⚑ marks a perplexity that must not be read alone: its text left the band of real text, why stands under the "
        "table. Text that repeats itself is easy to predict. "
        f"{_about_marks(comparison)}",
        "",
        plain_markdown(judge_in_words(comparison.evaluations[0].judge)),
    ]
    care = [f"- {plain_markdown(warning)}" for warning in comparison.warnings]
    if care:
        lines += ["", "**Compare with care:**", "", *care]
    return "\n".join(lines) + "\n"


def _about_marks(comparison: Comparison) -> str:
    """What the mark of blindness says in this report."""
    marks = comparison.marks
    if not marks.measured:
        return f"{UNKNOWN}; measure them (`--controls`) before a number is believed."
    named = ", ".join(metric.label for metric in in_order(marks.found))
    said = f"here {named}" if named else "here none"
    why = "because it ranks text without sense above real text or above a row"
    return f"{BLIND} marks a metric that is blind, {why}: {said}."


def judge_in_words(judge: Mapping[str, Any]) -> str:
    """Who scored the text, and what it gives to real and to shuffled text."""
    perplexity = metric_named("token_perplexity")
    scale = []
    for what, words in (("real", "real held-out text"), ("shuffled", "the same with its words shuffled")):
        known = judge.get(what)
        if isinstance(known, Mapping) and (number := judge_number(known.get("token_perplexity"))):
            scale.append(f"{words} {perplexity.write(number)}")
    said = f"; its scale (perplexity per token): {', '.join(scale)}" if scale else ""
    dtype = f" ({judge['dtype']})" if judge.get("dtype") else ""
    return f"Judge: {judge.get('name', 'none')}{dtype}{said}."


def facts_in_words(evaluation: Evaluation) -> str:
    """What a reader needs to measure the same again, in one paragraph."""
    known: dict[str, Any] = {
        "parameters": _count(evaluation.model.get("num_parameters")),
        "checkpoint": str(evaluation.model.get("checkpoint_sha256") or "")[:12],
        **{name: evaluation.sampler.get(name) for name in _SAMPLER},
        "held-out text": evaluation.data.get("held_out"),
        **{name: evaluation.facts.get(name) for name in ("num_samples", "seed", "dtype", "device", "threads")},
        "commit": str(evaluation.facts.get("commit") or "")[:12],
        "started": evaluation.facts.get("started"),
    }
    said = [f"{name.replace('_', ' ')} {value}" for name, value in known.items() if value not in (None, "")]
    if evaluation.bound is not None:
        said.append(f"likelihood bound {metric_named('bound').write(evaluation.bound)}")
    return f"Measured: {', '.join(said)}." if said else "The file says nothing of how it was measured."


def _count(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else ""
