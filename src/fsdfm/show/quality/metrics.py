"""What each metric is called and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fsdfm.measure.results import Measured

__all__ = ["GAP", "METRICS", "Metric", "in_order", "metric_named", "write_number"]

GAP = "-"  # not measured


@dataclass(frozen=True)
class Metric:
    """A metric as a reader meets it.

    decimals   after the point; None: three significant digits
    main       whether it stands in a model's first table, or in the second
    """

    name: str
    label: str
    decimals: int | None = 3
    main: bool = False

    @property
    def is_perplexity(self) -> bool:
        """Whether the collapse guard's flags belong to it, and changes are ratios."""
        return self.name.endswith("perplexity")

    def write(self, measured: Measured | None) -> str:
        """The number and its interval, or a gap."""
        if measured is None:
            return GAP
        if math.isnan(measured.low) or math.isnan(measured.high):
            return self.write_value(measured)
        decimals = self._decimals(measured.value)
        low, high = (write_number(end, decimals) for end in (measured.low, measured.high))
        return f"{self.write_value(measured)} [{low}, {high}]"

    def write_value(self, measured: Measured | None) -> str:
        """The number alone, or a gap."""
        return GAP if measured is None else write_number(measured.value, self._decimals(measured.value))

    def _decimals(self, value: float) -> int:
        if self.decimals is not None:
            return self.decimals
        if not math.isfinite(value) or value == 0:
            return 2
        return min(6, max(0, 2 - math.floor(math.log10(abs(value)))))


def write_number(value: float, decimals: int) -> str:
    """A number with its thousands apart; infinity as a sign, what is no number as `nan`."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if abs(value) >= 1e7:
        return f"{value:.2e}"
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # adding zero: no -0.00


METRICS = (
    Metric("token_perplexity", "perplexity (token)", None, main=True),
    Metric("perplexity", "perplexity (sequence mean)", None, main=True),
    Metric("entropy_bits", "entropy, bits", 2, main=True),
    Metric("distinct_2", "distinct-2", main=True),
    Metric("repetition", "repetition", main=True),
    Metric("accuracy", "accuracy", main=True),
    Metric("mauve", "MAUVE", main=True),
    Metric("second_token_perplexity", "perplexity (token), second judge", None, main=True),
    Metric("energy_style_z", "style, z", 1, main=True),
    Metric("energy_ngram_z", "n-grams, z", 1, main=True),
    Metric("energy_meaning_z", "meaning, z", 1, main=True),
    Metric("energy_judge_z", "judge's states, z", 1, main=True),
    Metric("energy_trunk_z", "trunk, z", 1, main=True),
    Metric("mauve_z", "MAUVE, z", 1, main=True),
    Metric("brier_lm", "BrierLM", 2, main=True),
    Metric("mmd_style_z", "style (MMD), z", 1),
    Metric("mmd_ngram_z", "n-grams (MMD), z", 1),
    Metric("mmd_meaning_z", "meaning (MMD), z", 1),
    Metric("mmd_judge_z", "judge's states (MMD), z", 1),
    Metric("mmd_trunk_z", "trunk (MMD), z", 1),
    Metric("ngram_recall_bits", "n-gram recall, bits", 2),
    Metric("ngram_precision_bits", "n-gram precision, bits", 2),
    Metric("ngram_recall_z", "n-gram recall, z", 1),
    Metric("ngram_precision_z", "n-gram precision, z", 1),
    Metric("names_kept", "names stay"),
    Metric("sentences_end", "sentences end"),
    Metric("quotes_close", "quotes close"),
    Metric("second_perplexity", "perplexity (sequence mean), second judge", None),
    Metric("continuation_token_perplexity", "continuation: perplexity (token)", None),
    Metric("continuation_perplexity", "continuation: perplexity (sequence mean)", None),
    Metric("accuracy_argmax", "accuracy (arg-max)"),
    Metric("model_entropy_bits", "the model's entropy, bits", 2),
    Metric("distinct_1", "distinct-1"),
    Metric("distinct_4", "distinct-4"),
    Metric("self_bleu", "self-BLEU"),
    Metric("duplicates", "duplicates"),
    Metric("copied_8grams", "copied 8-grams"),
    Metric("longest_copy", "longest copy, tokens", 1),
    Metric("jumps_per_token", "jumps per token", 2),
)
_KNOWN = {metric.name: metric for metric in METRICS}


def metric_named(name: str) -> Metric:
    """The metric of a name; one that is not known is called by it."""
    return _KNOWN.get(name, Metric(name, name.replace("_", " "), None))


def in_order(names: Iterable[str]) -> list[Metric]:
    """The metrics of these names, known ones first."""
    wanted = set(names)
    known = [metric for metric in METRICS if metric.name in wanted]
    return [*known, *(metric_named(name) for name in sorted(wanted - _KNOWN.keys()))]
