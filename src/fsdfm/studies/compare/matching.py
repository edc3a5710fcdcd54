"""Our rows against a peer's at equal calls: at equal entropy, and at equal diversity.

A win needs both: the ratio of perplexities at the entropy where both sweeps meet, nearest to real text, and the same at
distinct-2, each with an interval that leaves out 1 on the same side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fsdfm.measure.frontier import AtEntropy, Frontier, common_entropies, compare_frontiers, frontier_of
from fsdfm.measure.results import Evaluation, Measured

__all__ = ["PeerMatch", "Verdict", "compare_at", "sweep"]

Verdict = Literal["win", "loss", "undecided", "apart"]


@dataclass(frozen=True)
class PeerMatch:
    """What one model is worth against another at so many calls: perplexity ratios, below 1 is better.

    entropy, distinct   None: the two sweeps do not meet, so nothing can be said at equal entropy or diversity
    inside              whether the places compared at lie inside of real text's band
    """

    calls: int
    entropy: AtEntropy | None
    distinct: AtEntropy | None
    inside: bool

    @property
    def verdict(self) -> Verdict:
        """Decided only where both say the same."""
        if self.entropy is None or self.distinct is None:
            return "apart"
        ratios = (self.entropy.ratio, self.distinct.ratio)
        if all(ratio.high < 1 for ratio in ratios):
            return "win"
        return "loss" if all(ratio.low > 1 for ratio in ratios) else "undecided"

    def to_json(self) -> dict[str, Any]:
        """The mapping of a report."""
        found = {name: getattr(self, name) for name in ("entropy", "distinct")}
        parts = {name: None if at is None else at.to_json() for name, at in found.items()}
        return {"calls": self.calls, **parts, "inside": self.inside, "verdict": self.verdict}


def compare_at(peer: Evaluation, ours: Evaluation, calls: int) -> PeerMatch:
    """Ours against a peer at so many calls."""
    entropy, near_entropy = _compare(peer, ours, calls, by="entropy_bits")
    distinct, near_distinct = _compare(peer, ours, calls, by="distinct_2")
    return PeerMatch(calls, entropy, distinct, near_entropy and near_distinct)


def sweep(evaluation: Evaluation, calls: int, by: str) -> Frontier | None:
    """The sweep over temperatures of a budget; None where there are not two points."""
    rows = [row for row in (*evaluation.plain, *evaluation.frontier) if row.steps == calls]
    try:
        return frontier_of(rows, by)
    except ValueError:
        return None


def _compare(peer: Evaluation, ours: Evaluation, calls: int, *, by: str) -> tuple[AtEntropy | None, bool]:
    """The ratio where both sweeps come nearest to real text, and whether that is real text's own band."""
    baseline, other = sweep(peer, calls, by), sweep(ours, calls, by)
    if baseline is None or other is None or not (ends := common_entropies(baseline, other, num=2)):
        return None, False
    real = ours.real.get(by, Measured((ends[0] + ends[1]) / 2))
    place = min(max(real.value, ends[0]), ends[1])
    found = compare_frontiers(baseline, other, entropies=[place])
    low, high = real.band
    return (found[0] if found else None), bool(low <= place <= high)
