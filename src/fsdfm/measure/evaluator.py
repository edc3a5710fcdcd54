"""The evaluator: tables over step budgets, with real data beside them.

    evaluation = evaluate(checkpoint, Data(real=rows), judge, Options(steps=(1, 8), sampling=SamplingPlan(length=256)))
    evaluation.row(8).metrics["token_perplexity"]

It changes nothing: the model's weights and mode and every random state are afterwards what they were before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fsdfm.checkpoint import Checkpoint
from fsdfm.generate import LanguageModel
from fsdfm.measure.alternative import Alternative
from fsdfm.measure.archive import Archive, first_difference
from fsdfm.measure.brier import ORDERS, brier_lm
from fsdfm.measure.collapse import TOLERANCE
from fsdfm.measure.controls import Material, blind_metrics, sample_controls, sentence_ends
from fsdfm.measure.evidence import FEWEST_REAL, Evidence, TextFeatures
from fsdfm.measure.judges import Judge
from fsdfm.measure.kept import ScoreStore
from fsdfm.measure.matching import find_temperature
from fsdfm.measure.mauve import Features
from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.measure.rows import TokenRows
from fsdfm.measure.sampling import Drawn, SamplingPlan, TaskSampler
from fsdfm.measure.source import AGAIN, FreshSamples, SampleSource, SavedSamples
from fsdfm.measure.statistics import Interval, bootstrap_mean
from fsdfm.measure.suite import METRICS, MetricSuite, OnProgress
from fsdfm.runtime import ALONE, Processes, Runtime, RuntimeConfig

__all__ = [
    "BUDGETS",
    "Data",
    "EvaluationJob",
    "MatchTarget",
    "Options",
    "blind_metrics",
    "evaluate",
    "evaluate_samples",
    "possible_metrics",
]

BUDGETS = tuple(2**k for k in range(11))  # 1, 2, 4 ... 1024, the paper's
_NEEDS = {  # what a metric cannot be measured without
    "perplexity": ("judge", "real"),
    "continuation": ("judge", "real"),
    "brier": ("real",),
    "accuracy": ("real",),
    "bound": ("real",),
    "copying": ("training",),
    "mauve": ("features", "real"),
    "distances": ("real",),
}
_MISSING = {
    "judge": "a judge: --judge",
    "real": "real text, which gives numbers their scale and the collapse guard its band: --held-out",
    "training": "the training text: --training",
    "features": "features of texts: --mauve",
}
_OF_ROWS = frozenset({"trajectory", "accuracy", "brier", "bound"})  # metrics that say nothing of real text or controls
_PAIR = ("continuation", AGAIN)  # independent texts behind one prompt
# What must be the same for an evaluation to be gone on with.
_SAME = (
    "model.checkpoint_sha256",
    "sampler",
    "seed",
    "num_samples",
    "metrics",
    "data",
    "dtype",
    "device",
)


@dataclass(frozen=True)
class Data:
    """What samples are measured against.

    real       held-out rows, int32 [M, L]: the first `num` are the real row, a second `num` MAUVE's check on itself
    training   the tokens of the training text; of several processes only the first needs it
    features   text to vectors, for MAUVE
    distances  text to vectors, by name, for distances
    facts      what a result file says of them: held_out, held_out_sha256, training
    store      where scores of real text and of controls are kept for the next evaluation; None: nowhere
    second     another judge, best of another family: what both say alike is no taste of one
    alternatives   autoregressive models to measure beside the model
    beside     an evaluation whose real text, controls and autoregressive models are taken over
    """

    real: TokenRows | None = None
    training: npt.NDArray[Any] | None = None
    features: Features | None = None
    distances: Mapping[str, TextFeatures] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    store: ScoreStore | None = None
    second: Judge | None = None
    alternatives: tuple[Alternative, ...] = ()
    beside: Evaluation | None = None


@dataclass(frozen=True)
class MatchTarget:
    """An entropy to be matched by temperature: what it is called, and in bits; None: that of the real rows."""

    to: str | float
    entropy_bits: float | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    steps       budgets; none: what stands beside a model alone, real text, controls and autoregressive models
    num         samples per budget
    metrics     of METRICS; None: all that judge and data allow
    matched     entropies to match, for every budget
    frontier    temperatures to sweep, for every budget
    frontier_num   samples of a row of the frontier, at most
    alternative_frontier   temperatures to sweep, for every autoregressive model
    controls    whether negative controls are measured, too
    pilot       samples that the search for a temperature looks at
    tolerance   bits within which an entropy counts as matched
    """

    sampling: SamplingPlan
    steps: tuple[int, ...] = BUDGETS
    num: int = 256
    metrics: Collection[str] | None = None
    matched: tuple[MatchTarget, ...] = ()
    frontier: tuple[float, ...] = ()
    frontier_num: int = 64
    alternative_frontier: tuple[float, ...] = ()
    controls: bool = True
    pilot: int = 32
    tolerance: float = 0.03
    batch_size: int = 16

    @property
    def seed(self) -> int:
        """Of the samples and of what is drawn of them."""
        return self.sampling.config.seed

    def __post_init__(self) -> None:
        if self.num < 2:
            raise ValueError(f"num is {self.num}; allowed are 2 samples and more: one has no interval")
        if any(steps < 1 for steps in self.steps) or len(set(self.steps)) < len(self.steps):
            raise ValueError(f"steps are {self.steps}; give each budget once, whole numbers from 1 on")
        for temperature in (*self.frontier, *self.alternative_frontier):
            self.sampling.at(1, temperature)
        if unknown := sorted(set(self.metrics or ()) - set(METRICS)):
            raise ValueError(f"metrics holds {unknown[0]!r}; allowed are {', '.join(METRICS)}")

    def num_at(self, place: str) -> int:
        """Samples of a row of the `rows` or of the `frontier`."""
        return min(self.num, self.frontier_num) if place == "frontier" else self.num

    def jobs(self) -> list[EvaluationJob]:
        """Plain rows, matched rows, frontier, few steps first."""
        base, steps = self.sampling.temperature, sorted(self.steps)
        return [
            *(EvaluationJob(s, base(s)) for s in steps),
            *(EvaluationJob(s, base(s), target=target) for target in self.matched for s in steps),
            *(EvaluationJob(s, t, place="frontier") for t in self.frontier for s in steps),
        ]


@dataclass(frozen=True)
class EvaluationJob:
    """One row to be measured: at a temperature, or at that which matches a target."""

    steps: int
    temperature: float
    place: str = "rows"
    target: MatchTarget | None = None
    matched: Mapping[str, Any] | None = None

    @property
    def key(self) -> Any:
        """The key of its row."""
        to = self.matched if self.target is None else {"to": self.target.to}
        return Row(steps=self.steps, temperature=self.temperature, matched=to).key

    @property
    def name(self) -> str:
        """What progress calls it."""
        if self.target is not None:
            return f"steps {self.steps}, entropy of {self.target.to}"
        return f"steps {self.steps}" + (f", temperature {self.temperature:g}" if self.place == "frontier" else "")


OnRow = Callable[[Evaluation], None]


def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    judge: Judge | None,
    *,
    options: Options,
    about: Mapping[str, Any] | None = None,
    runtime: Runtime | None = None,
    archive: Archive | None = None,
    earlier: Evaluation | None = None,
    on_row: OnRow = lambda _: None,
    on_progress: OnProgress = lambda *_: None,
) -> Evaluation:
    """Measure a model at every budget.

    about         what a result file says of the model and the machine: `model`, `commit`, ...
    runtime       where to compute; all of its processes call this, with the same model, judge, real rows and options,
                  share the work, and get every number
    archive       where samples are kept, and taken from where they are there already; only the first process has one
    earlier       what a result file holds: its rows are kept and not measured again
    on_row        receives the evaluation after every row
    on_progress   hears of progress
    """
    runtime = runtime or Runtime(RuntimeConfig(device="cpu"))
    processes = runtime.processes
    metrics = processes.on_rank0(lambda: _checked_metrics(options.metrics, data, judge))
    with unchanged(checkpoint.model):
        lm = LanguageModel(checkpoint, runtime=runtime)
        real = None if data.real is None else data.real[: options.num]
        source = FreshSamples(TaskSampler(lm, options.batch_size), options.sampling, real, archive, on_progress)
        if options.steps:
            source.warm_up()
        if archive is not None and data.real is not None:
            archive.add_real(data.real[: 2 * options.num], source.reader.text)
        facts = {
            **(about or {"model": {"name": "model"}}),
            "sampler": options.sampling.to_json() if options.steps else {"length": options.sampling.length},
            "data": {**data.facts, "n_real": 0 if real is None else len(real)},
            **{"seed": options.seed, "num_samples": options.num, "metrics": sorted(metrics)},
            "dtype": "bfloat16" if runtime.bfloat16 else checkpoint.model.precision,
            "device": runtime.device.type,
            "threads": torch.get_num_threads(),
            "processes": processes.count,
        }
        evaluator = _Evaluator(
            source,
            data,
            judge,
            options=options,
            metrics=metrics,
            facts=facts,
            processes=processes,
            on_row=on_row,
            on_progress=on_progress,
        )
        return evaluator.run(options.jobs(), earlier)


def evaluate_samples(
    archive: Archive,
    data: Data,
    judge: Judge | None,
    *,
    options: Options,
    about: Mapping[str, Any] | None = None,
    processes: Processes = ALONE,
    earlier: Evaluation | None = None,
    on_row: OnRow = lambda _: None,
    on_progress: OnProgress = lambda *_: None,
) -> Evaluation:
    """Measure samples that are there already: the rows that a sample file says are complete, nothing drawn anew."""
    source = SavedSamples(archive)
    data = replace(data, real=source.real, facts={**archive.header["data"], **data.facts})
    wanted = options.metrics
    if wanted is None:
        wanted = [metric for metric in possible_metrics(data, judge) if source.holds(metric)]
    metrics = processes.on_rank0(lambda: _checked_metrics(wanted, data, judge))
    jobs = processes.on_rank0(lambda: _complete_jobs(archive, options))
    kept = ("model", "commit", "versions", "dtype", "device", "threads")
    facts = {
        **{name: archive.header[name] for name in kept if name in archive.header},
        **(about or {}),
        "sampler": archive.header["sampler"],
        "data": {**data.facts, "n_real": 0 if source.real is None else len(source.real[: options.num])},
        **{"seed": options.seed, "num_samples": options.num, "metrics": sorted(metrics)},
    }
    return _Evaluator(
        source,
        data,
        judge,
        options=options,
        metrics=metrics,
        facts=facts,
        processes=processes,
        on_row=on_row,
        on_progress=on_progress,
    ).run(jobs, earlier)


def _complete_jobs(archive: Archive, options: Options) -> list[EvaluationJob]:
    jobs = [
        EvaluationJob(row["steps"], row["temperature"], row["place"], matched=row["matched"])
        for row in archive.records("row")
        if row["steps"] in options.steps and row["num"] >= options.num_at(row["place"])
    ]
    if not jobs:
        raise ValueError(f"{archive.file} holds no complete row of these budgets and {options.num} samples")
    return jobs


def possible_metrics(data: Data, judge: Judge | None) -> tuple[str, ...]:
    """The metrics that there is everything for."""
    there = {"judge": judge, "real": data.real, "training": data.training, "features": data.features}
    return tuple(m for m in METRICS if all(there[need] is not None for need in _NEEDS.get(m, ())))


def _checked_metrics(wanted: Collection[str] | None, data: Data, judge: Judge | None) -> frozenset[str]:
    possible = possible_metrics(data, judge)
    if judge is not None and data.real is None:
        raise ValueError(f"the judge {judge.name} needs {_MISSING['real']}")
    for metric in METRICS if wanted is None else sorted(wanted):
        if wanted is not None and metric not in possible:
            there = {"judge": judge, "real": data.real, "training": data.training, "features": data.features}
            missing = next(need for need in _NEEDS[metric] if there[need] is None)
            raise ValueError(f"the metric {metric!r} needs {_MISSING[missing]}")
    return frozenset(possible if wanted is None else wanted)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards modes and random states are what they were."""
    modes = {module: module.training for module in model.modules()}
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class _Evaluator:
    """One evaluation on its way."""

    def __init__(
        self,
        source: SampleSource,
        data: Data,
        judge: Judge | None,
        *,
        options: Options,
        metrics: frozenset[str],
        facts: Mapping[str, Any],
        processes: Processes,
        on_row: OnRow,
        on_progress: OnProgress,
    ):
        self.source, self.options, self.metrics, self.on_row, self.on_progress = (
            source,
            options,
            metrics,
            on_row,
            on_progress,
        )
        self.processes = processes
        self.spare = None if data.real is None else data.real[options.num : 2 * options.num]
        self.real = None if data.real is None else data.real[: options.num]
        self.training, self.alternatives, self.beside = data.training, data.alternatives, data.beside
        self.assess = MetricSuite(
            source.reader,
            metrics,
            judge,
            self.real,
            data.training,
            data.features,
            options.seed,
            on_progress,
            processes,
            self._evidence(data),
            data.store,
            data.second,
            self.spare,
        )
        self.judge, self.facts = judge, dict(facts)
        self.began = time.perf_counter()

    def run(self, jobs: Sequence[EvaluationJob], earlier: Evaluation | None) -> Evaluation:
        """Real text first, then every row that is not there yet."""
        evaluation = self._begin() if earlier is None else self.processes.on_rank0(lambda: self._resume(earlier))
        self.seconds_before = float(evaluation.facts.get("seconds", 0.0))
        if earlier is None:
            evaluation = self._kept(evaluation)
        known = {row.facts.get("name") for row in evaluation.alternatives}
        for alternative in (each for each in self.alternatives if each.name not in known):
            written = self._alternative(alternative, evaluation.real)
            evaluation = self._kept(replace(evaluation, alternatives=(*evaluation.alternatives, written)))
        for alternative in self._swept_alternatives(evaluation):
            written = self._alternative(alternative, evaluation.real, light=True)
            swept = (*evaluation.alternative_frontier, written)
            evaluation = self._kept(replace(evaluation, alternative_frontier=swept))
        for job in jobs:
            done = evaluation.rows if job.place == "rows" else evaluation.frontier
            if job.key in [row.key for row in done]:
                continue
            row = self._row(job, evaluation.real)
            self.source.mark(job.place, row)
            add = evaluation.with_row if job.place == "rows" else evaluation.with_frontier
            evaluation = self._kept(add(row))
        return evaluation

    def _kept(self, evaluation: Evaluation) -> Evaluation:
        seconds = self.seconds_before + time.perf_counter() - self.began
        facts = {**evaluation.facts, "seconds": round(seconds, 3)}
        if evaluation.controls:
            facts["blind"] = [mark.to_json() for mark in blind_metrics(evaluation)]
        evaluation = replace(evaluation, facts=facts)
        self.on_row(evaluation)
        return evaluation

    # --- real text ----------------------------------------------------------------------------------------------------

    def _begin(self) -> Evaluation:
        facts = dict(self.facts)
        parts = {name: facts.pop(name) for name in ("model", "sampler", "data")}
        evaluation = Evaluation(**parts, judge=self._judge_facts(), facts=facts)
        if self.beside is not None:
            return self._take_over(self.beside, evaluation)
        if self.real is None:
            return evaluation
        judge, real = dict(evaluation.judge), self._measure_real(self.real)
        if self.judge is not None:
            names = ("token_perplexity", "perplexity")
            shuffled = self.assess.perplexities(self.assess.score_shuffled(self.real, "shuffled text"))
            for what, found in (("real", real), ("shuffled", shuffled)):
                judge[what] = {**{name: found[name].to_json() for name in names}, "n": len(self.real)}
        return replace(evaluation, judge=judge, real=real, controls=self._controls(), bound=self._bound())

    def _take_over(self, beside: Evaluation, own: Evaluation) -> Evaluation:
        """What another evaluation measured that no weights have a say in: an error where it asked something else."""
        self.processes.on_rank0(lambda: self._check_same(beside))
        scale = {name: beside.judge[name] for name in ("real", "shuffled") if name in beside.judge}
        return replace(
            own,
            judge={**own.judge, **scale},
            real=beside.real,
            controls=beside.controls if self.options.controls else {},
            alternatives=beside.alternatives,
            alternative_frontier=beside.alternative_frontier,
            bound=self._bound(),
        )

    def _check_same(self, beside: Evaluation) -> None:
        """Raise unless the real rows, the judges and what is asked of a text are the same."""
        judge = self._judge_facts()
        asked = {"judge": judge, "data": self.facts["data"], "metrics": sorted(self.metrics - _OF_ROWS), "real": {}}
        there = {**beside.to_json(), "metrics": sorted(set(beside.facts.get("metrics", ())) - _OF_ROWS), "real": {}}
        if self.real is not None:  # other tokens of the same text would show here
            asked["real"] = {name: interval.value for name, interval in self.assess.watched(self.real).items()}
            there["real"] = {name: beside.real[name].value for name in asked["real"] if name in beside.real}
        asked |= {name: self.facts[name] for name in ("seed", "num_samples")}
        names = ["metrics", "seed", "num_samples", *(f"judge.{name}" for name in judge)]
        names += [*(f"data.{name}" for name in asked["data"]), "real"]
        if (reason := first_difference(there, asked, names)) is not None:
            raise ValueError(f"what stands beside was measured otherwise: {reason}; measure it again, or leave it out")

    def _evidence(self, data: Data) -> Evidence | None:
        """What samples are compared with: of twice as many real rows as samples, one half; None: there are too few."""
        if "distances" not in self.metrics or data.real is None:
            return None
        pool = data.real[: 2 * self.options.num]
        if len(pool) < FEWEST_REAL:
            return None
        reader = self.source.reader
        most = max(int(pool.max()) + 1, reader.tokenizer.vocab_size)
        return Evidence(reader, pool, data.distances, seed=self.options.seed, vocab_size=most)

    def _controls(self) -> dict[str, dict[str, Measured]]:
        """Text without sense, measured as samples are."""
        if not self.options.controls or self.real is None:
            return {}
        rows = self.processes.on_rank0(self._draw_controls)
        return {name: self.assess.control_texts(found, f"control {name}") for name, found in rows.items()}

    def _draw_controls(self) -> dict[str, TokenRows]:
        """As many and as long as the real rows, made of the training text, or of real rows that are left."""
        assert self.real is not None
        reader, (num, width) = self.source.reader, self.real.shape
        length, decode = width - reader.num_bos, reader.tokenizer.decode
        vocab_size = reader.tokenizer.vocab_size
        borders = frozenset(token for token in (reader.bos_id, reader.tokenizer.eos_id) if token is not None)
        material = Material(self._material(length), sentence_ends(decode, vocab_size), borders)
        made = sample_controls(material, num=num, length=length, seed=self.options.seed)
        front = np.repeat(self.real[:1, : reader.num_bos], num, axis=0)
        return {name: np.concatenate((front, rows), axis=1) for name, rows in made.items()}

    def _material(self, length: int) -> TokenRows:
        if self.training is not None and len(self.training) >= _FEWEST_CONTROL_ROWS * length:
            count = min(len(self.training) // length, _MOST_CONTROL_ROWS)
            return np.asarray(self.training[: count * length], dtype=np.int32).reshape(count, length)
        assert self.real is not None
        spare = self.spare if self.spare is not None and len(self.spare) >= _FEWEST_CONTROL_ROWS else self.real
        return spare[:, self.source.reader.num_bos :]

    def _measure_real(self, rows: TokenRows) -> dict[str, Measured]:
        found = self.assess.real_texts(rows, "real text")
        if "continuation" in self.metrics:
            scores = self.assess.score(rows, "real continuations", border=self.source.border)
            found |= self.assess.perplexities(scores, "continuation_")
            found["continuation_entropy_bits"] = self.assess.entropy(rows, border=self.source.border)
        if "mauve" in self.metrics and self.spare is not None and len(self.spare) == len(rows):
            found |= self.assess.mauve(self.spare, "real text")
        for name in TOLERANCE:
            interval = Interval(found[name].value, found[name].low, found[name].high)
            found[name] = replace(found[name], facts={"band": list(TOLERANCE[name].band(interval))})
        return found

    def _bound(self) -> Measured | None:
        if "bound" not in self.metrics or not self.options.steps:  # it is the model's
            return None
        bound = self.source.bound(self.options.batch_size)
        if bound is None:
            return None
        interval = bootstrap_mean(bound.rows, seed=self.options.seed)
        facts = {
            "nats_per_token": bound.nats_per_token,
            "bits_per_token": bound.bits_per_token,
            "perplexity": bound.perplexity,
            "standard_error": bound.standard_error,
            "n": len(bound.rows),
            "draws": bound.draws_per_row,
        }
        return Measured(interval.value, interval.low, interval.high, facts)

    def _judge_facts(self) -> dict[str, Any]:
        if self.judge is None:
            return {}
        second = self.assess.second
        other = {} if second is None else {"second": {"name": second.name, **second.facts}}
        return {"name": self.judge.name, **self.judge.facts, **other}

    def _resume(self, earlier: Evaluation) -> Evaluation:
        old, judge = earlier.to_json(), self._judge_facts()
        known = {"judge": {"name": old["judge"].get("name"), **{name: old["judge"].get(name) for name in judge}}}
        reason = first_difference(old, self.facts, _SAME)
        reason = reason or first_difference(
            known, {"judge": judge}, ["judge.name", *(f"judge.{name}" for name in judge)]
        )
        if reason is not None:
            raise ValueError(f"the result file holds another evaluation: {reason}; give --json another file")
        return earlier

    # --- one row ------------------------------------------------------------------------------------------------------

    def _row(self, job: EvaluationJob, real: Mapping[str, Measured]) -> Row:
        temperature, matched = job.temperature, job.matched
        flags: tuple[str, ...] = ()
        if job.target is not None:
            drawn, temperature, matched = self._match(job, real)
        else:
            drawn = self.source.draw("text", job.steps, temperature=temperature, num=self.options.num_at(job.place))
        if matched is not None and not matched["reached"]:
            flags = (f"the entropy of {matched['to']} is out of reach: not matched",)
        metrics = self.assess.texts(drawn, job.name, light=job.place == "frontier")
        if "mauve" in self.metrics and job.place == "rows":
            metrics |= self.assess.mauve(drawn.tokens, job.name)
        if job.place == "rows" and matched is None:
            metrics |= self._given(job)
        seconds = drawn.columns["seconds"]
        return Row(
            steps=job.steps,
            calls=job.steps,
            num_samples=len(drawn),
            seconds=float(seconds.sum()),
            seconds_per_sample=float(seconds.mean()),
            temperature=temperature,
            flags=(*flags, *self.assess.flags(drawn.tokens, real)),
            matched=matched,
            metrics=metrics,
            facts={"calls_made": float(drawn.columns["calls"].mean())} if "calls" in drawn.columns else {},
        )

    def _swept_alternatives(self, evaluation: Evaluation) -> list[Alternative]:
        """The autoregressive models at the temperatures of their sweep that are not there yet."""
        rows = (*evaluation.alternatives, *evaluation.alternative_frontier)
        known = {(row.facts.get("name"), row.temperature) for row in rows}
        every = [(each, t) for each in self.alternatives for t in self.options.alternative_frontier]
        return [replace(each, temperature=t) for each, t in every if (each.name, t) not in known]

    def _alternative(self, alternative: Alternative, real: Mapping[str, Measured], *, light: bool = False) -> Row:
        """What an autoregressive model writes, measured as samples are; a call of its network for every token.

        light   as a row of the frontier is
        """
        options, reader = self.options, self.source.reader
        name, length = alternative.name, options.sampling.length
        num = options.num_at("frontier" if light else "rows")
        shown = f"{name}, temperature {alternative.temperature:g}" if light else name
        self.on_progress(f"{shown} writes", 0, num)
        drawn = self.processes.on_rank0(
            lambda: alternative.draw(num, length=length, bos_id=reader.bos_id, seed=options.seed)
        )
        seconds = drawn.columns["seconds"]
        metrics = self.assess.texts(drawn, shown, kept=True, light=light)
        if "mauve" in self.metrics and not light:
            metrics |= self.assess.mauve(drawn.tokens, name)
        if "brier" in self.metrics and self.real is not None and not light:
            metrics["brier_lm"] = self.processes.on_rank0(lambda: self._alternative_brier(alternative))
        return Row(
            steps=length - reader.num_bos,
            num_samples=len(drawn),
            seconds=float(seconds.sum()),
            seconds_per_sample=float(seconds.mean()),
            temperature=alternative.temperature,
            flags=self.assess.flags(drawn.tokens, real),
            metrics=metrics,
            facts={"name": name, "num_parameters": alternative.num_parameters},
        )

    def _alternative_brier(self, alternative: Alternative) -> Measured:
        """Only the tokens that are scored are written."""
        assert self.real is not None
        border, bos_id = self.source.border, self.source.reader.bos_id
        most = min(max(ORDERS), self.real.shape[1] - border)
        given, seed = self.real[:, :border], self.options.seed
        samples = [alternative.continue_rows(given, most, bos_id=bos_id, copy=k, seed=seed) for k in range(2)]
        found = brier_lm(np.stack(samples, 1), self.real[:, border : border + most], seed=seed)
        return Measured(found.value, found.low, found.high, {"contexts": len(given), "samples": len(samples)})

    def _given(self, job: EvaluationJob) -> dict[str, Measured]:
        """What is measured where part of a real row is given: continuations and repairs."""
        found: dict[str, Measured] = {}
        if self.real is None:
            return found
        num, temperature = len(self.real), job.temperature
        if "continuation" in self.metrics:
            drawn = self.source.draw("continuation", job.steps, temperature=temperature, num=num)
            scores = self.assess.score(drawn.tokens, f"{job.name}, continuations", border=self.source.border)
            found |= self.assess.perplexities(scores, "continuation_")
            found["continuation_entropy_bits"] = self.assess.entropy(drawn.tokens, border=self.source.border)
        if "accuracy" in self.metrics:
            drawn = self.source.draw("repair", job.steps, temperature=temperature, num=num)
            found["accuracy"] = self.assess.ratio(drawn, "hits", "free")
            found["accuracy_argmax"] = self.assess.ratio(drawn, "argmax_hits", "free")
        if "brier" in self.metrics:
            pair = [self.source.draw(kind, job.steps, temperature=temperature, num=num) for kind in _PAIR]
            found["brier_lm"] = self._brier([drawn.tokens[:, self.source.border :] for drawn in pair])
        return found

    def _brier(self, samples: Sequence[TokenRows]) -> Measured:
        """BrierLM of two continuations of every real row's first half."""
        assert self.real is not None
        truth = self.real[:, self.source.border :]
        found = brier_lm(np.stack(samples, 1)[:, :, : truth.shape[1]], truth, seed=self.options.seed)
        return Measured(found.value, found.low, found.high, {"contexts": len(truth), "samples": len(samples)})

    def _match(self, job: EvaluationJob, real: Mapping[str, Measured]) -> tuple[Drawn, float, dict[str, Any]]:
        """Samples whose entropy is the target's: a search on a pilot, corrected by what the whole set says.

        The pilot is the first samples of the set, so that the two differ by an offset that hardly moves with the
        temperature.
        """
        assert job.target is not None
        bits = job.target.entropy_bits
        target = self.processes.on_rank0(lambda: real["entropy_bits"].value if bits is None else bits)
        tolerance, offset, start = self.options.tolerance, 0.0, job.temperature
        pilot = min(self.options.pilot, self.options.num)
        asked: dict[float, float] = {}

        def entropy(temperature: float) -> float:
            if temperature not in asked:
                drawn = self.source.draw("text", job.steps, temperature=temperature, num=pilot, pilot=True)
                asked[temperature] = self.assess.entropy_bits(drawn.tokens)
            return asked[temperature]

        tried: list[tuple[float, float, Drawn]] = []
        for _ in range(_ROUNDS):
            match = find_temperature(entropy, target - offset, start=start, tolerance=tolerance / 2)
            if match.temperature in [temperature for _, temperature, _ in tried]:
                break
            drawn = self.source.draw("text", job.steps, temperature=match.temperature, num=self.options.num)
            found = self.assess.entropy_bits(drawn.tokens)
            tried.append((abs(found - target), match.temperature, drawn))
            if tried[-1][0] <= tolerance or not match.reached:
                break
            offset, start = found - match.entropy_bits, match.temperature
        distance, temperature, drawn = min(tried, key=lambda each: each[0])
        matched = {
            "to": job.target.to,
            "target_bits": target,
            "entropy_bits": self.assess.entropy_bits(drawn.tokens),
            "tolerance": tolerance,
            "reached": distance <= tolerance,
        }
        return drawn, temperature, matched


_FEWEST_CONTROL_ROWS, _MOST_CONTROL_ROWS = 8, 4096  # of real text that controls are made of
_ROUNDS = 3  # whole sets drawn at most for one matched row
