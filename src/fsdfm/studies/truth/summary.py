"""Summary: cells of several seeds become means with 95 % intervals, and pairs of methods become verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdfm.measure.statistics import Interval, student_mean
from fsdfm.studies.folder import CellValue
from fsdfm.studies.report import interval_json
from fsdfm.studies.truth.laws import BUDGETS
from fsdfm.studies.truth.methods import TEMPERED

__all__ = ["QUESTIONS", "Answer", "TruthNumbers", "TruthQuestion", "verdicts"]

COLLAPSE_BITS = 0.5


class TruthNumbers:
    """All cells of the study, by world, method and seed."""

    def __init__(self, cells: Iterable[CellValue]):
        self.cells: dict[tuple[str, str, int], CellValue] = {(c["world"], c["method"], c["seed"]): c for c in cells}
        self.worlds = list(dict.fromkeys(world for world, _, _ in self.cells))
        self.seeds = sorted({seed for _, _, seed in self.cells})

    def methods(self, world: str) -> list[str]:
        """The methods that ran in a world, in the order of the study."""
        return list(dict.fromkeys(method for w, method, _ in self.cells if w == world))

    def rules(self, world: str, method: str) -> list[str]:
        """The jump rules that a method was judged under."""
        return list(next(c["rules"] for (w, m, _), c in self.cells.items() if (w, m) == (world, method)))

    def noted(self, world: str, method: str, note: str) -> list[Any]:
        """What the cells of a method note beside their scores, one per seed that has it."""
        found = (self.cells.get((world, method, seed), {}).get(note) for seed in self.seeds)
        return [value for value in found if value is not None]

    def values(self, world: str, method: str, quantity: str, *, steps: int, rule: str = "exact") -> list[float]:
        """One number per seed; of cells that an earlier fsdfm computed, only those that know the quantity."""
        found = (self.cells.get((world, method, seed)) for seed in self.seeds)
        scores = [cell["rules"][rule][str(steps)] for cell in found if cell is not None]
        return [float(score[quantity]) for score in scores if quantity in score]

    def log_ratio(self, world: str, seed: int, method: str, *, baseline: str, rules: tuple[str, str]) -> float | None:
        """The mean over budgets of log(TV of method / TV of baseline) in one world with one seed; None: missing."""
        ours, theirs = self.cells.get((world, method, seed)), self.cells.get((world, baseline, seed))
        if ours is None or theirs is None:
            return None
        first, second = ours["rules"][rules[0]], theirs["rules"][rules[1]]
        return statistics.fmean(math.log(first[str(s)]["tv"] / second[str(s)]["tv"]) for s in BUDGETS)

    def pairs(self, worlds: Sequence[str], methods: Sequence[str]) -> list[tuple[str, int]]:
        """The (world, seed) pairs in which all of these methods ran."""
        every = [(world, seed) for world in worlds for seed in self.seeds]
        return [(world, seed) for world, seed in every if all((world, m, seed) in self.cells for m in methods)]

    def ratio(
        self,
        pairs: Sequence[tuple[str, int]],
        method: str,
        *,
        baseline: str = "dfm",
        rules: tuple[str, str] = ("exact", "exact"),
    ) -> Interval | None:
        """TV of a method over TV of a baseline, a geometric mean over budgets, worlds and seeds, with its interval."""
        logs = [self.log_ratio(world, seed, method, baseline=baseline, rules=rules) for world, seed in pairs]
        known = [value for value in logs if value is not None]
        if not known:
            return None
        return student_mean(known).map(math.exp)

    def as_json(self) -> list[dict[str, object]]:
        """Means and intervals of every quantity, a row a (world, method, rule, steps)."""
        rows: list[dict[str, object]] = []
        for world in self.worlds:
            for method in self.methods(world):
                for rule in self.rules(world, method):
                    for steps in BUDGETS:
                        row: dict[str, object] = {"world": world, "method": method, "rule": rule, "steps": steps}
                        for quantity in ("tv", "transition", "valid", "entropy", "cross_entropy"):
                            values = self.values(world, method, quantity, steps=steps, rule=rule)
                            row[quantity] = interval_json(student_mean(values)) if values else None
                        rows.append(row)
        return rows


@dataclass(frozen=True)
class TruthQuestion:
    """A choice to settle: the candidates, the first being the one the others are compared with."""

    title: str
    candidates: tuple[str, ...]


QUESTIONS = (
    TruthQuestion("Teacher", ("rk4", "rk2", "classical-rk4", "heun", "midpoint", "chained")),
    TruthQuestion("Average, RK-2", ("rk2", "rk2/probabilities")),
    TruthQuestion("Average, RK-4", ("rk4", "rk4/probabilities")),
    TruthQuestion("Average, classical RK-4", ("classical-rk4", "classical-rk4/probabilities")),
    TruthQuestion("Average, Heun", ("heun", "heun/probabilities")),
    TruthQuestion("Average, chained", ("chained", "chained/logits")),
    TruthQuestion("Weight policy, under RK-2", ("rk2", "rk2/TB-10", "rk2/PU", "rk2/G", "rk2/AG", "rk2/TB-20-mirrored")),
    TruthQuestion("Jump rule of the teacher's hops, under RK-2", ("rk2", "rk2/single-hops", "rk2/instant-hops")),
    TruthQuestion("Reflow", ("path-only", "reflow-1", "reflow-2", "reflow-3")),
    TruthQuestion(
        "Reflow, then few-step training",
        ("rk2", "reflow-1+rk2", "reflow-2+rk2", "reflow-2+chained", "reflow-2+rk4", "reflow-3+rk2", "path-only/x3"),
    ),
    TruthQuestion("Pairs of free or quantile-coupled draws, one round", ("reflow-1", "quantile-1")),
    TruthQuestion("Pairs of free or quantile-coupled draws, two rounds", ("reflow-2", "quantile-2")),
    TruthQuestion(
        "Free or quantile-coupled, then few-step training", ("reflow-2+rk2", "quantile-1+rk2", "quantile-2+rk2")
    ),
    TruthQuestion("Posterior, exact rule", ("path-only", "crf", "causal", "causal-prefixes")),
    TruthQuestion(
        "Posterior, sweep", tuple(f"{name}/sweep" for name in ("path-only", "crf", "causal", "causal-prefixes"))
    ),
    TruthQuestion("Everything against its controls", ("path-only", "rk2", "rk4", "paper", "reflow-2", "reflow-2+rk2")),
)


@dataclass(frozen=True)
class Answer:
    """The best candidate of a question that did not collapse, the next one, and how surely they differ."""

    question: TruthQuestion
    best: str
    second: str
    paired: Interval  # of the best to the second
    ranking: str

    @property
    def clear(self) -> bool:
        """Whether the interval of the paired ratio stays below 1."""
        return self.paired.high < 1

    def __str__(self) -> str:
        against = f"{'better than' if self.clear else 'not separable from'} `{self.second}`"
        return (
            f"**{self.question.title}**: `{self.best}`, {against} (paired ratio {self.paired:.2f}). "
            f"TV over DFM's: {self.ranking}."
        )


def verdicts(results: TruthNumbers) -> list[str]:
    """What the numbers say, a sentence or two a question, for the uniform source and then for the mask source."""
    uniform = [world for world in results.worlds if not world.endswith("-mask")]
    masked = [world for world in results.worlds if world.endswith("-mask")]
    lines = []
    if uniform:
        collapsed = _collapsed(results, uniform)
        answers = [a for question in QUESTIONS if (a := _answer(results, uniform, question, collapsed=set(collapsed)))]
        lines += [_headline(answers), *map(str, answers), _sampler_rule(results, uniform)]
        lines += [_collapse(collapsed), _temperature(results, uniform)]
    if masked:
        lines.append(_mask(results, masked))
    lines += [_families(results), _validity(results)]
    return [line for line in lines if line]


def _answer(
    results: TruthNumbers, worlds: Sequence[str], question: TruthQuestion, *, collapsed: set[str]
) -> Answer | None:
    ran = [name for name in question.candidates if any(name in results.methods(world) for world in worlds)]
    pairs = results.pairs(worlds, ["dfm", *ran])  # the same for all, so that no candidate has the easier worlds
    known = {name: ratio for name in ran if (ratio := results.ratio(pairs, name))}
    if len(known) < 2:
        return None
    ranked = sorted(known, key=lambda name: (name in collapsed, known[name].value))
    best, second = ranked[:2]
    paired = results.ratio(pairs, best, baseline=second)
    assert paired is not None
    shown = [f"`{name}` {known[name]:.2f}{' (collapsed)' if name in collapsed else ''}" for name in ranked]
    return Answer(question, best, second, paired, ", ".join(shown))


def _headline(answers: Sequence[Answer]) -> str:
    """Which choices deserve text, and which of them the numbers leave open."""
    settled = [f"{a.question.title.lower()}: `{a.best}`" for a in answers if a.clear]
    left = [f"{a.question.title.lower()}: `{a.best}` or `{a.second}`" for a in answers if not a.clear]
    parts = [f"settled, {'; '.join(settled)}"] if settled else []
    parts += [f"left open, {'; '.join(left)}"] if left else []
    return f"**What deserves text** ({'. '.join(parts)})." if parts else ""


def _sampler_rule(results: TruthNumbers, worlds: Sequence[str]) -> str:
    parts = []
    for method in ("dfm", "rk2", "reflow-2+rk2"):
        ratios = {
            rule: results.ratio(results.pairs(worlds, [method]), method, baseline=method, rules=(rule, "exact"))
            for rule in ("single", "instant")
        }
        shown = [f"{rule} {ratio:.2f}" for rule, ratio in ratios.items() if ratio is not None]
        if shown:
            parts.append(f"`{method}`: {', '.join(shown)}")
    return f"**Jump rule of the sampler** (TV over the exact rule's): {'; '.join(parts)}." if parts else ""


def _collapsed(results: TruthNumbers, worlds: Sequence[str]) -> dict[str, str]:
    """Methods whose law lost more than half a bit of the truth's entropy, and where."""
    lost: dict[str, list[str]] = {}
    for world in worlds:
        truth = float(results.noted(world, "exact", "truth_entropy")[0])
        for method in results.methods(world):
            if method.startswith(("dfm/", "exact/")):
                continue
            entropies = {s: student_mean(results.values(world, method, "entropy", steps=s)).value for s in BUDGETS}
            low = [f"{entropies[s]:.2f} at {s}" for s in BUDGETS if entropies[s] < truth - COLLAPSE_BITS]
            if low:
                lost.setdefault(method, []).append(f"{world} ({truth:.2f} bits): {', '.join(low)}")
    return {method: "; ".join(places) for method, places in lost.items()}


def _collapse(collapsed: dict[str, str]) -> str:
    if not collapsed:
        return f"**Collapse**: no method fell more than {COLLAPSE_BITS} bit below the truth's entropy."
    listed = ". ".join(f"`{method}` {where}" for method, where in collapsed.items())
    return f"**Collapse** (entropy more than {COLLAPSE_BITS} bit below the truth's): {listed}."


def _temperature(results: TruthNumbers, worlds: Sequence[str]) -> str:
    """Whether a method does more than sharpen: its TV over that of the untrained parent at the same entropy."""
    found = {m: results.ratio(results.pairs(worlds, ["dfm"]), m, baseline=f"dfm/entropy-of-{m}") for m in TEMPERED}
    listed = ", ".join(f"`{method}` {ratio:.2f}" for method, ratio in found.items() if ratio is not None)
    return f"**Against the parent at the temperature of equal entropy**: {listed}." if listed else ""


def _families(results: TruthNumbers) -> str:
    """What a family of posteriors can reach at best: total variation at 1 and 8 steps, with nothing to train."""
    parts = []
    for world in results.worlds:
        names = [name for name in results.methods(world) if name.startswith("exact")]
        shown = [
            f"`{name}` " + " and ".join(f"{results.values(world, name, 'tv', steps=s)[0]:.3f}" for s in (1, 8))
            for name in names
        ]
        parts.append(f"{world}: {', '.join(shown)}")
    return f"**Posteriors and rules, all exact** (TV at 1 and 8 steps): {'; '.join(parts)}." if parts else ""


def _validity(results: TruthNumbers) -> str:
    """Where sequences are right or wrong (the truth gives some no probability): how many of those drawn are right."""
    parts = []
    for world in results.worlds:
        names = [name for name in results.methods(world) if not name.startswith("dfm/")]
        known = [name for name in names if results.values(world, name, "valid", steps=1)]
        shares = {
            name: [student_mean(results.values(world, name, "valid", steps=s)).value for s in (1, 8)] for name in known
        }
        if any(first < 1 - 1e-6 for first, _ in shares.values()):
            shown = (f"`{name}` {first:.0%} and {last:.0%}" for name, (first, last) in shares.items())
            parts.append(f"{world}: {', '.join(shown)}")
    return f"**Right or wrong** (share of valid sequences at 1 and 8 steps): {'; '.join(parts)}." if parts else ""


def _mask(results: TruthNumbers, worlds: Sequence[str]) -> str:
    pairs = results.pairs(worlds, ["path-only"])
    names = [m for m in results.methods(worlds[0]) if m != "dfm" and not m.startswith(("exact", "dfm/"))]
    ratios = {name: ratio for name in names if (ratio := results.ratio(pairs, name, baseline="path-only"))}
    gains = [name for name, ratio in ratios.items() if ratio.high < 1]
    found = f"gains: {', '.join(f'`{name}`' for name in gains)}" if gains else "no few-step training gains separably"
    listed = ", ".join(f"`{name}` {ratio:.2f}" for name, ratio in ratios.items() if name != "path-only")
    return f"**Mask source**: {found}. TV over that of the same time on the path loss: {listed}."
