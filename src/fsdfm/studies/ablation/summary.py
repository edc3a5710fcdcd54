"""From cells to verdicts: variants are compared seed by seed, over budgets, with 95 % intervals (Student's t).

d_s = mean over budgets of log(perplexity of better / perplexity of worse) with seed s, or the difference of accuracies
or entropies, turned so that a negative d is the paper's direction:

    reproduced   the interval of d over seeds lies below 0
    refuted      it lies above 0
    undecided    it holds 0

A perplexity may be lower because the text is better or because it is poorer. The base at lower temperatures shows what
a loss of entropy alone gains: its frontier f(H), log-perplexity by entropy (`fsdfm.measure.frontier`), of a budget. Its
shape is the mean over seeds, for three temperatures of one seed give slopes that are mostly noise; its level is the
seed's own. What a variant is worth at equal entropy is log perplexity - f(entropy). Where the winner's entropy is
surely lower and this does not confirm the win, the verdict says so: only a drop in entropy if less than half of d is
left, else undecided at equal entropy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdfm.measure.frontier import Frontier, mean_frontier
from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.measure.statistics import Interval, student_mean
from fsdfm.studies.ablation.factors import CONTROL, Claim, Factor, Variant

__all__ = ["METRICS", "AblationScores", "ComparedMetric", "Verdict", "decide", "verdicts"]

PERPLEXITY, ENTROPY, SECONDS = "token_perplexity", "entropy_bits", "seconds"
CLAIMED_UP_TO = 8  # the largest budget of the paper's claims about few steps
_ONCE = 0  # stands for the budget of a number that has none


@dataclass(frozen=True)
class ComparedMetric:
    """How two numbers of one kind are compared: as a ratio or a difference, and which of them is better."""

    name: str
    label: str
    ratio: bool
    lower_is_better: bool
    decimals: int = 2

    def distance(self, better: float, worse: float) -> float:
        """Below 0 where `better` is better."""
        d = math.log(better / worse) if self.ratio else better - worse
        return d if self.lower_is_better else -d

    def mean(self, values: Sequence[float]) -> Interval:
        """The mean over seeds and its interval; of ratios the geometric one."""
        if not self.ratio:
            return student_mean(values)
        return student_mean([math.log(value) for value in values]).map(math.exp)


METRICS = {
    metric.name: metric
    for metric in (
        ComparedMetric(PERPLEXITY, "ppl.", ratio=True, lower_is_better=True),
        ComparedMetric("continuation_token_perplexity", "cont. ppl.", ratio=True, lower_is_better=True),
        ComparedMetric(ENTROPY, "ent.", ratio=False, lower_is_better=False),
        ComparedMetric("accuracy", "acc.", ratio=False, lower_is_better=False, decimals=3),
        ComparedMetric("distinct_2", "distinct-2", ratio=False, lower_is_better=False, decimals=3),
        ComparedMetric("jumps_per_token", "jumps", ratio=False, lower_is_better=False),
        ComparedMetric(SECONDS, "time", ratio=True, lower_is_better=True, decimals=3),
    )
}


@dataclass
class AblationScores:
    """The numbers of an ablation: by variant, seed, metric and budget; beside them flags and real text."""

    steps: tuple[int, ...]
    values: dict[tuple[str, int, str, int], float] = field(default_factory=dict)
    flags: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # (variant, budget) -> collapse, noise
    real: Mapping[str, Measured] = field(default_factory=dict)
    judge: Mapping[str, object] = field(default_factory=dict)
    frontiers: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    cells: dict[tuple[str, int], Evaluation] = field(default_factory=dict)
    plain_seconds: dict[int, Sequence[float]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """The seeds that any variant has."""
        return sorted({seed for _, seed, _, _ in self.values})

    def add(self, label: str, seed: int, cell: Evaluation) -> None:
        """Take up a result file."""
        self.cells[label, seed] = cell
        self.real, self.judge = self.real or cell.real, self.judge or cell.judge
        for row in cell.plain:
            for name, measured in row.metrics.items():
                self.values[label, seed, name, row.steps] = measured.value
            self.flags.setdefault((label, row.steps), set()).update(flag.partition(":")[0] for flag in row.flags)
        if label == CONTROL.label:
            for row in (*cell.plain, *cell.frontier):
                self._add_to_frontier(seed, row)

    def _add_to_frontier(self, seed: int, row: Row) -> None:
        if PERPLEXITY in row.metrics:
            point = (row.metrics[ENTROPY].value, math.log(row.metrics[PERPLEXITY].value))
            self.frontiers.setdefault((seed, row.steps), []).append(point)

    def add_times(self, label: str, seed: int, seconds: Sequence[float]) -> None:
        """Take up seconds by round: the median ratio to the first variant's step of the same round."""
        plain = self.plain_seconds.setdefault(seed, seconds)
        ratios = [mine / theirs for mine, theirs in zip(seconds, plain, strict=True)]
        self.values[label, seed, SECONDS, _ONCE] = statistics.median(ratios)

    def of(self, label: str, metric: str, budget: int) -> list[float]:
        """One number per seed."""
        found = (self.values.get((label, seed, metric, budget)) for seed in self.seeds)
        return [value for value in found if value is not None]

    def budgets(self, metric: str) -> tuple[int, ...]:
        """The budgets that the paper's claims are about, or none where a metric has none."""
        few = tuple(steps for steps in self.steps if steps <= CLAIMED_UP_TO)
        return (_ONCE,) if metric == SECONDS else few or self.steps

    # --- comparisons --------------------------------------------------------------------------------------------------

    def distance(self, claim: Claim, budgets: Sequence[int]) -> Interval:
        """d over seeds: below 0 is the claim's direction."""
        metric = METRICS[claim.metric]
        return student_mean(
            [self._mean_distance(metric, claim, seed, budgets=budgets) for seed in self._shared(claim, budgets)]
        )

    def _mean_distance(self, metric: ComparedMetric, claim: Claim, seed: int, *, budgets: Sequence[int]) -> float:
        return statistics.fmean(
            metric.distance(
                self.values[claim.better, seed, claim.metric, b], self.values[claim.worse, seed, claim.metric, b]
            )
            for b in budgets
        )

    def _shared(self, claim: Claim, budgets: Sequence[int]) -> list[int]:
        return [
            seed
            for seed in self.seeds
            if all((who, seed, claim.metric, b) in self.values for who in (claim.better, claim.worse) for b in budgets)
        ]

    def at_equal_entropy(self, claim: Claim, budgets: Sequence[int]) -> Interval | None:
        """d with what cooling the base gains taken off on both sides; None where that was not measured."""
        if claim.metric != PERPLEXITY:
            return None
        found = []
        for seed in self._shared(claim, budgets):
            parts = []
            for b in budgets:
                excess = [self.excess(who, seed, b) for who in (claim.better, claim.worse)]
                if excess[0] is None or excess[1] is None:
                    return None
                parts.append(excess[0] - excess[1])
            found.append(statistics.fmean(parts))
        return student_mean(found) if found else None

    def excess(self, label: str, seed: int, budget: int) -> float | None:
        """log perplexity - f(entropy): below 0 is better than the base cooled to the same entropy."""
        frontier, points = self._frontier(budget), self.frontiers.get((seed, budget))
        perplexity, entropy = (self.values.get((label, seed, name, budget)) for name in (PERPLEXITY, ENTROPY))
        if frontier is None or not points or perplexity is None or entropy is None:
            return None
        level = statistics.fmean(y - frontier.extended(x) for x, y in points)
        return math.log(perplexity) - frontier.extended(entropy) - level

    def _frontier(self, budget: int) -> Frontier | None:
        """What cooling the base does, over all seeds; None where entropy does not change."""
        sweeps = [points for (_, steps), points in self.frontiers.items() if steps == budget]
        try:
            return mean_frontier(sweeps)
        except ValueError:
            return None


# --- verdicts ---------------------------------------------------------------------------------------------------------

Result = Literal["reproduced", "refuted", "undecided"]


def decide(e: Interval) -> Result:
    """What the interval of d says; without an interval nothing."""
    if e.high < 0:
        return "reproduced"
    return "refuted" if e.low > 0 else "undecided"


@dataclass(frozen=True)
class Verdict:
    """A claim, what was measured, and what follows.

    distance     d over the claim's budgets
    by_budget    d of each budget
    equal        d at equal entropy; None: not measured, or not a matter of perplexity
    entropy      entropy of better - entropy of worse, in bits; None: not measured
    """

    claim: Claim
    distance: Interval
    by_budget: Mapping[int, Interval]
    equal: Interval | None = None
    entropy: Interval | None = None

    @property
    def result(self) -> Result:
        """Reproduced, refuted or undecided."""
        return decide(self.distance)

    @property
    def poorer(self) -> bool:
        """Whether the side that wins has surely the lower entropy, and not surely the lower perplexity at equal one."""
        if self.result == "undecided" or self.equal is None or self.entropy is None:
            return False
        return decide(self.entropy) == self.result and decide(self.equal) != self.result

    @property
    def only_entropy(self) -> bool:
        """Whether less than half of what a poorer side wins is left at equal entropy."""
        return self.poorer and self.equal is not None and self.equal.value / self.distance.value < 1 / 2

    @property
    def words(self) -> str:
        """The result, and what is left of it at equal entropy."""
        if self.only_entropy:
            return f"{self.result}, but only as a drop in entropy"
        return f"{self.result}, but undecided at equal entropy" if self.poorer else self.result


def verdicts(factor: Factor, scores: AblationScores, variants: Sequence[Variant]) -> list[Verdict]:
    """What the numbers say of every claim whose variants ran."""
    ran = {variant.label for variant in variants}
    return [_verdict(claim, scores) for claim in factor.claims if claim.better in ran and claim.worse in ran]


def _verdict(claim: Claim, scores: AblationScores) -> Verdict:
    budgets = scores.budgets(claim.metric)
    entropy = None
    if claim.metric == PERPLEXITY:
        turned = Claim("", claim.worse, claim.better, metric=ENTROPY)  # its distance: better's entropy - worse's
        entropy = scores.distance(turned, budgets)
    return Verdict(
        claim,
        scores.distance(claim, budgets),
        {b: scores.distance(claim, [b]) for b in budgets},
        scores.at_equal_entropy(claim, budgets),
        entropy,
    )
