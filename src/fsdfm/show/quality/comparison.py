"""Models set beside each other: their result files read, named, and checked to be comparable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdfm.measure.controls import blind_metrics
from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation
from fsdfm.show.quality.marks import Marks

__all__ = ["REAL", "Change", "Comparison", "Real", "change", "change_of_rows", "judge_number", "real_metrics"]

REAL = "real data"


@dataclass(frozen=True)
class Real:
    """Held-out text: what it is called and its metrics."""

    label: str
    metrics: Mapping[str, Measured]


@dataclass(frozen=True)
class Comparison:
    """Evaluations, each with the name it bears in tables and figures; the first is the baseline."""

    labels: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    alone: bool = False  # without the autoregressive models beside them

    def __post_init__(self) -> None:
        judges = {str(e.judge.get("name")) for e in self.evaluations}
        if len(judges) > 1:
            raise ValueError(
                f"the files have different judges ({', '.join(sorted(judges))}), whose perplexities do not compare; "
                "report them apart, or evaluate again with one --judge"
            )

    @classmethod
    def read(cls, files: Sequence[Path], names: Sequence[str] = ()) -> Comparison:
        """Read result files; `names` stand in the place of the models' own."""
        if not files:
            raise ValueError("no result file is given; give at least one that `fsdfm evaluate` wrote")
        if names and len(names) != len(files):
            raise ValueError(f"{len(names)} names are given for {len(files)} files; give one --name a file, in order")
        evaluations = tuple(load_evaluation(file) for file in files)
        wanted = [name.strip() for name in names] or [evaluation.name for evaluation in evaluations]
        return cls(_unique(wanted, [file.stem for file in files]), evaluations)

    @property
    def pairs(self) -> list[tuple[str, Evaluation]]:
        """Every label with its evaluation."""
        return list(zip(self.labels, self.evaluations, strict=True))

    @property
    def swept_alternatives(self) -> dict[str, Evaluation]:
        """The autoregressive models that any file swept over temperature, by name."""
        if self.alone:
            return {}
        return {name: found for e in self.evaluations for name, found in e.swept_alternatives.items()}

    @property
    def budgets(self) -> list[int]:
        """The numbers of steps that any model was measured at."""
        return sorted({row.steps for evaluation in self.evaluations for row in evaluation.plain})

    @property
    def reals(self) -> list[Real]:
        """Held-out text as the files measured it: one, unless the files disagree."""
        groups: list[tuple[Mapping[str, Measured], list[str]]] = []
        for label, evaluation in self.pairs:
            metrics = real_metrics(evaluation)
            same = next((labels for other, labels in groups if _equal(other, metrics)), None)
            if same is None:
                groups.append((metrics, [label]))
            else:
                same.append(label)
        filled = [group for group in groups if group[0]] or groups[:1]
        if len(filled) == 1:
            return [Real(REAL, filled[0][0])]
        return [Real(f"{REAL} ({', '.join(labels)})", metrics) for metrics, labels in filled]

    def real_of(self, label: str) -> Real:
        """Held-out text as the file of this model measured it."""
        return Real(REAL, real_metrics(self.evaluations[self.labels.index(label)]))

    @cached_property
    def marks(self) -> Marks:
        """The metrics that a negative control fools beside any of these models."""
        return Marks.of(self.pairs)

    def marks_of(self, label: str) -> Marks:
        """The metrics that a negative control fools beside one model."""
        own = self.evaluations[self.labels.index(label)]
        if own.controls:
            return Marks.of([(label, own)])
        lent = next((e for e in self.evaluations if e.controls), None)
        if lent is None:
            return Marks({}, measured=False)
        return Marks({mark.metric: mark for mark in blind_metrics(own, lent=lent)})

    @property
    def warnings(self) -> list[str]:
        """What differs between the files that should not, where numbers are compared."""
        asked: dict[str, Callable[[Evaluation], Any]] = {
            "held-out text": lambda e: e.data.get("held_out_sha256") or e.data.get("held_out"),
            "length": lambda e: e.sampler.get("length"),
            "number of samples": lambda e: e.facts.get("num_samples"),
            "judge's precision": lambda e: e.judge.get("dtype"),
            "temperature": lambda e: e.sampler.get("temperature"),
            "final temperature": lambda e: e.sampler.get("final_temperature"),
            "top-k": lambda e: e.sampler.get("top_k"),
            "top-p": lambda e: e.sampler.get("top_p"),
            "renoise": lambda e: e.sampler.get("renoise"),
            "device": lambda e: e.facts.get("device"),
            "threads": lambda e: e.facts.get("threads"),
        }
        found = []
        for what, ask in asked.items():
            values = {label: ask(evaluation) for label, evaluation in self.pairs}
            if len(set(map(repr, values.values()))) > 1:
                shown = ", ".join(f"{label}: {_short(value)}" for label, value in values.items())
                found.append(f"The files differ in {what} ({shown}).")
        return found

    def metric_names(self) -> set[str]:
        """Every metric that any row or any held-out text has."""
        names = {name for e in self.evaluations for row in (*e.rows, *e.frontier) for name in row.metrics}
        return names.union(*(real_metrics(e) for e in self.evaluations))


def real_metrics(evaluation: Evaluation) -> dict[str, Measured]:
    """The metrics of held-out text; a perplexity that stands only with the judge is taken from there."""
    metrics = dict(evaluation.real)
    judged = evaluation.judge.get("real")
    if isinstance(judged, Mapping):
        for name in ("token_perplexity", "perplexity"):
            value = judge_number(judged.get(name))
            if name not in metrics and value is not None:
                metrics[name] = value
    return metrics


def judge_number(value: Any) -> Measured | None:
    """A number of the judge's scale, which may stand with or without an interval."""
    if isinstance(value, Mapping) and "value" in value:
        return Measured.from_json(value)
    return Measured(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- changes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """How a metric changes from one model to another; NaN where it cannot be said.

    relative   of perplexities, b/a - 1 (a share); of everything else the difference b - a
    flags      why it is not to be believed alone: those of both rows, for perplexities
    """

    measured: Measured
    relative: bool
    flags: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.measured.low > 0 or self.measured.high < 0


def change(a: Measured | None, b: Measured | None, *, relative: bool, flags: tuple[str, ...] = ()) -> Change | None:
    """The change from a to b with the interval that follows from theirs, taken as independent.

    With d = b - a the ends are d - sqrt((b - b_low)^2 + (a_high - a)^2) and d + sqrt((b_high - b)^2 + (a - a_low)^2)
    (Zou and Donner 2008), which is the usual interval where both are symmetric; ratios are taken in logarithms.
    """
    if a is None or b is None:
        return None
    if relative:
        a, b = _log(a), _log(b)
    d = b.value - a.value if math.isfinite(a.value) and math.isfinite(b.value) else math.nan
    low = d - math.hypot(b.value - b.low, a.high - a.value)
    high = d + math.hypot(b.high - b.value, a.value - a.low)
    if not (math.isfinite(low) and math.isfinite(high)):
        low = high = math.nan
    if relative:  # NaN stays NaN: min keeps its first argument
        d, low, high = (math.expm1(min(end, 700.0)) for end in (d, low, high))
    return Change(Measured(d, low, high), relative, flags)


def change_of_rows(a: Row, b: Row, name: str, *, relative: bool) -> Change | None:
    """The change of one metric between two rows."""
    flags = tuple(dict.fromkeys((*a.flags, *b.flags))) if relative else ()
    return change(a.metrics.get(name), b.metrics.get(name), relative=relative, flags=flags)


def _log(m: Measured) -> Measured:
    value, low, high = (math.log(end) if end > 0 else math.nan for end in (m.value, m.low, m.high))
    return Measured(value, low, high)


def _unique(names: Sequence[str], stems: Sequence[str]) -> tuple[str, ...]:
    """Names made different: by their file's where two are the same, and by a number where that is too."""
    double = {name for name, count in Counter(names).items() if count > 1}
    longer = [f"{name} ({stem})" if name in double else name for name, stem in zip(names, stems, strict=True)]
    seen: Counter[str] = Counter()
    unique = []
    for name in longer:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return tuple(unique)


def _equal(a: Mapping[str, Measured], b: Mapping[str, Measured]) -> bool:
    return repr(sorted(a.items())) == repr(sorted(b.items()))  # NaN equals NaN in its repr


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12] + "…"
