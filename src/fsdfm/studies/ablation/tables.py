"""The tables: the paper's table with our numbers, its own beside it, and the verdicts; Markdown, JSON and PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.measure.statistics import Interval
from fsdfm.show.quality import Comparison
from fsdfm.show.quality.figures import draw_change
from fsdfm.studies.ablation.factors import Factor, Variant
from fsdfm.studies.ablation.setting import AblationSetting
from fsdfm.studies.ablation.summary import METRICS, PERPLEXITY, SECONDS, AblationScores, ComparedMetric, Verdict
from fsdfm.studies.report import StudyReport, interval_json, markdown_table

__all__ = ["AblationTables", "ablation_report"]

_ORIGINS = {"stated": "the paper says", "implied": "implied by the paper's choice", "reading": "our reading"}
_MAIN = {"quality": (PERPLEXITY, "entropy_bits"), "given": ("accuracy", "continuation_token_perplexity")}
_BESIDE = {"quality": ("accuracy", "distinct_2", "jumps_per_token"), "given": ()}
_MARK = "⚑"


@dataclass(frozen=True)
class AblationTables:
    """Everything that a report says."""

    factor: Factor
    variants: Sequence[Variant]
    scores: AblationScores
    verdicts: Sequence[Verdict]
    setting: AblationSetting
    seeds: int

    def markdown(self, *, figure: bool = False) -> str:
        """The whole report."""
        factor = self.factor
        parts = [f"# {factor.title}", f"The paper: {factor.where}. {self._heading()}"]
        if factor.kind == "time":
            parts.append(markdown_table(self._times()))
        else:
            parts.append(markdown_table(self._table(_MAIN[factor.kind])))
            if beside := _BESIDE[factor.kind]:
                parts.append(markdown_table(self._table(beside)))
            parts += [sentence for sentence in (self._flags(), self._excess()) if sentence]
        if factor.note:
            parts.append(factor.note)
        if figure:
            parts.append(f"![{factor.title}](figure.png)")
        parts += ["## The paper's own numbers", self._paper(), "## Verdict"]
        parts.append("\n".join(f"- {sentence(verdict, factor)}" for verdict in self.verdicts))
        return "\n\n".join(parts) + "\n"

    def _heading(self) -> str:
        setting = self.setting
        trained = f"Fine-tuned for {setting.train_steps} steps from one base with {self.seeds} seeds"
        if self.factor.kind == "time":
            return (
                f"Training steps of {setting.length}-token rows, {setting.rounds} interleaved rounds with each of "
                f"{self.seeds} seeds; in brackets 95 % intervals over seeds (Student's t)."
            )
        return (
            f"{trained}; {setting.num} samples of {setting.length} tokens per budget and seed, perplexity per token "
            f"under {setting.judge}; in brackets 95 % intervals over seeds (Student's t); columns are network calls."
        )

    def _table(self, names: Sequence[str]) -> list[list[str]]:
        metrics = [METRICS[name] for name in names if self._has(name)]
        head = [self.factor.column, *(f"{steps}: {m.label}" for steps in self.setting.steps for m in metrics)]
        rows = [head]
        for variant in self.variants:
            label = f"*{variant.label}*" if variant.control else variant.label
            rows.append([label, *(self._number(variant, m, s) for s in self.setting.steps for m in metrics)])
        if any(m.name in self.scores.real for m in metrics):
            real = [_measured(m, self.scores.real.get(m.name)) for m in metrics]
            rows.append(["*real text*", *(real * len(self.setting.steps))])
        return rows

    def _has(self, name: str) -> bool:
        return any(key[2] == name for key in self.scores.values)

    def _number(self, variant: Variant, metric: ComparedMetric, steps: int) -> str:
        values = self.scores.of(variant.label, metric.name, steps)
        if not values:
            return "-"
        flagged = metric.name.endswith("perplexity") and self.scores.flags.get((variant.label, steps))
        return _interval(metric, metric.mean(values)) + (_MARK if flagged else "")

    def _times(self) -> list[list[str]]:
        metric = METRICS[SECONDS]
        rows = [[self.factor.column, "time of a plain step"]]
        for variant in self.variants:
            rows.append([variant.label, _interval(metric, metric.mean(self.scores.of(variant.label, SECONDS, 0)))])
        return rows

    def _flags(self) -> str:
        """Why perplexities are flagged, in one paragraph."""
        if self.factor.kind != "quality":
            return ""
        found: dict[str, list[str]] = {}
        for (label, steps), kinds in self.scores.flags.items():
            for kind in sorted(kinds):
                found.setdefault(f"{label}: {kind}", []).append(str(steps))
        if not found:
            return "No perplexity is flagged: entropy and distinct-n stay in the band of real text everywhere."
        said = "; ".join(f"{what} at {', '.join(steps)}" for what, steps in found.items())
        return f"{_MARK} entropy or distinct-n left the band of real text with some seed: {said}."

    def _excess(self) -> str:
        """What variants are worth beside the base cooled to their entropy."""
        said = []
        for variant in self.variants:
            shown = []
            for steps in self.setting.steps:
                found = [self.scores.excess(variant.label, seed, steps) for seed in self.scores.seeds]
                known = [math.exp(value) for value in found if value is not None]
                if known and not (variant.training is None and variant.setup.frontier):
                    shown.append(f"{METRICS[PERPLEXITY].mean(known).value:.2f}")
            if shown:
                said.append(f"{variant.label} {' / '.join(shown)}")
        if not said:
            return ""
        return (
            "Perplexity over that of the base cooled to the same entropy, by budget (below 1: more than cooling "
            f"gains): {'; '.join(said)}."
        )

    def _paper(self) -> str:
        """As printed: another model, length and judge, so that only directions compare."""
        factor = self.factor
        parts = []
        if factor.paper:
            budgets = list(next(iter(factor.paper.values())))
            rows = [[factor.column, *(f"{steps:,}: {what}" for steps in budgets for what in ("ppl.", "ent."))]]
            for label, row in factor.paper.items():
                rows.append([label, *(f"{number:,.2f}" for steps in budgets for number in row[steps])])
            parts.append(markdown_table(rows))
        if factor.quote:
            parts.append(f"In its text: {factor.quote}.")
        if not parts:
            parts.append("The paper prints no numbers for this.")
        measure = "" if factor.kind == "time" else ", perplexity under gpt2-large as a mean over sequences"
        parts.append(f"0.17 B parameters, 1,024 tokens{measure}: levels do not compare with ours, directions do.")
        return "\n\n".join(parts)


# --- words ------------------------------------------------------------------------------------------------------------


def sentence(verdict: Verdict, factor: Factor) -> str:
    """A claim, its verdict, and the numbers that it follows from."""
    claim, metric = verdict.claim, METRICS[verdict.claim.metric]
    said = [f"**{verdict.words}**: {claim.text} ({_ORIGINS[claim.origin]})"]
    what = f"`{claim.better}` {'over' if metric.ratio else 'minus'} `{claim.worse}`"
    numbers = f"{metric.label} {what}: {_change(metric, verdict.distance)}"
    if len(verdict.by_budget) > 1:
        each = ", ".join(f"{_change(metric, e)} at {steps}" for steps, e in verdict.by_budget.items())
        numbers += f" ({each})"
    said.append(numbers)
    if (ratio := paper_ratio(factor, verdict)) is not None:
        said.append(f"the paper's: {ratio:.2f}")
    if verdict.entropy is not None:
        said.append(f"entropy {verdict.entropy.value:+.2f} ± {_half(verdict.entropy)} bits")
    if verdict.equal is not None:
        said.append(f"at equal entropy {_change(METRICS[PERPLEXITY], verdict.equal)}")
    return "; ".join(said) + "."


def paper_ratio(factor: Factor, verdict: Verdict) -> float | None:
    """better / worse in the paper, a geometric mean over the budgets of the claim that its table has."""
    claim = verdict.claim
    if claim.ratio is not None:
        return claim.ratio
    ours, theirs = factor.paper.get(claim.better), factor.paper.get(claim.worse)
    if claim.metric != PERPLEXITY or ours is None or theirs is None:
        return None
    logs = [math.log(ours[b][0] / theirs[b][0]) for b in verdict.by_budget if b in ours and b in theirs]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _change(metric: ComparedMetric, distance: Interval) -> str:
    """A distance as a reader wants it: the ratio or the difference itself, with its interval."""
    if not metric.lower_is_better:
        distance = Interval(-distance.value, -distance.high, -distance.low)
    return _interval(metric, distance.map(_exp) if metric.ratio else distance)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _interval(metric: ComparedMetric, e: Interval) -> str:
    decimals = metric.decimals if abs(e.value) < 100 else 0
    if math.isnan(e.low):
        return f"{e.value:,.{decimals}f}"
    return f"{e.value:,.{decimals}f} [{e.low:,.{decimals}f}, {_wide(e.high, decimals)}]"


def _wide(value: float, decimals: int) -> str:
    return f"{value:.1e}" if value >= 1e6 else f"{value:,.{decimals}f}"


def _half(e: Interval) -> str:
    return "?" if math.isnan(e.high) else f"{e.high - e.value:.2f}"


def _measured(metric: ComparedMetric, measured: Measured | None) -> str:
    return "-" if measured is None else _interval(metric, Interval(measured.value, measured.low, measured.high))


# --- files ------------------------------------------------------------------------------------------------------------


def ablation_report(tables: AblationTables) -> StudyReport:
    """ablation.md, ablation.json and, where the paper has a figure, figure.png."""
    pictures = {} if tables.factor.figure is None else {"figure.png": partial(_draw, tables)}
    return StudyReport("ablation", tables.markdown(figure=bool(pictures)), _record(tables), pictures)


def _record(tables: AblationTables) -> dict[str, Any]:
    values = [
        {"variant": label, "seed": seed, "metric": metric, "steps": steps or None, "value": value}
        for (label, seed, metric, steps), value in tables.scores.values.items()
    ]
    found = [
        {
            "claim": verdict.claim.text,
            **{"better": verdict.claim.better, "worse": verdict.claim.worse, "metric": verdict.claim.metric},
            **{"origin": verdict.claim.origin, "result": verdict.result, "only_entropy": verdict.only_entropy},
            "distance": interval_json(verdict.distance),
            "by_budget": {str(steps): interval_json(e) for steps, e in verdict.by_budget.items()},
            "at_equal_entropy": None if verdict.equal is None else interval_json(verdict.equal),
            "entropy_bits": None if verdict.entropy is None else interval_json(verdict.entropy),
        }
        for verdict in tables.verdicts
    ]
    paper = {label: {str(s): list(n) for s, n in row.items()} for label, row in tables.factor.paper.items()}
    facts = {"factor": tables.factor.name, "seeds": tables.seeds}
    return {**facts, "verdicts": found, "paper": paper, "values": values}


def _draw(tables: AblationTables, file: Path) -> None:
    """The paper's figure 3: the two variants with ribbons over seeds, and what changes."""
    assert tables.factor.figure is not None
    evaluations = tuple(_over_seeds(tables.scores, label) for label in tables.factor.figure)
    drawn = draw_change(Comparison(tables.factor.figure, evaluations), tables.factor.figure[1])
    if drawn is not None:
        drawn.savefig(file, format="png", dpi=150)


def _over_seeds(scores: AblationScores, label: str) -> Evaluation:
    """The cells of a variant as one evaluation: means over seeds and their intervals."""
    first = scores.cells[label, scores.seeds[0]]
    rows = []
    for row in first.plain:
        metrics = {}
        for name in _MAIN["quality"]:
            if values := scores.of(label, name, row.steps):
                metrics[name] = _plain(METRICS[name].mean(values))
        flags = tuple(sorted(scores.flags.get((label, row.steps), ())))
        rows.append(Row(steps=row.steps, calls=row.calls, metrics=metrics, flags=flags))
    return replace(first, model={**first.model, "name": label}, rows=tuple(rows), frontier=())


def _plain(interval: Interval) -> Measured:
    return Measured(interval.value, interval.low, interval.high)
