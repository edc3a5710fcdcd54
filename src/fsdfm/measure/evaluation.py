"""The composition root of `fsdfm evaluate`: names become models, judges, texts and files here and nowhere else.

outcome = run_evaluation(EvaluationRequest(model="runs/tiny-dfm", judge="smollm2", held_out="valid.txt"))
outcome.evaluation.row(8)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from fsdfm import data as texts
from fsdfm.checkpoint import Checkpoint, describe_model, load_model
from fsdfm.checkpoint.embedded import find_model
from fsdfm.files import file_sha256, lock
from fsdfm.generate import LanguageModel, SamplerConfig, load
from fsdfm.measure.alternative import Alternative, make_alternative
from fsdfm.measure.archive import Archive
from fsdfm.measure.distances import hidden_features, trunk_features
from fsdfm.measure.evaluator import Data, MatchTarget, OnRow, Options, evaluate, evaluate_samples
from fsdfm.measure.evidence import TextFeatures
from fsdfm.measure.judges import Judge, TokenJudge, make_judge
from fsdfm.measure.kept import default_store
from fsdfm.measure.mauve import Features, huggingface_features, minilm_features
from fsdfm.measure.results import Evaluation, Row, load_evaluation, save_evaluation
from fsdfm.measure.rows import Begin, Reader, TokenRows, cut_rows
from fsdfm.measure.sampling import SamplingPlan
from fsdfm.model.weights import weights_sha256
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import (
    ALONE,
    Processes,
    Runtime,
    RuntimeConfig,
    commit,
    interrupt_on_sigterm,
    process_count,
    share_threads,
    spawn_local,
    versions,
)
from fsdfm.terminal import moving_bar, say

__all__ = ["DEFAULT_STEPS", "EvaluationOutcome", "EvaluationRequest", "count", "parse_steps", "run_evaluation"]

DEFAULT_STEPS, DEFAULT_NUM = "1..64", 256
DEFAULT_FRONTIER = "0.8,0.9"  # beside the temperature of the rows themselves, where there is a judge
_NONE = "none"
_SAMPLING = ("jump", "grid", "temperature", "final_temperature", "top_k", "top_p", "start", "renoise", "cache")
_SAME_SAMPLES = ("model.checkpoint_sha256", "sampler", "seed", "data", "dtype", "device")
# What belongs to sampling, and so has no say where samples are there already.
_OF_SAMPLING = (
    *(
        "model",
        "length",
        "temperature",
        "final_temperature",
        "top_k",
        "top_p",
        "jump",
        "grid",
        "start",
        "renoise",
        "cache",
        "seed",
    ),
    *("held_out", "matched", "frontier", "samples", "precision", "alternative", "alternative_frontier"),
)


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What a user asks for, in the words of the command line (`fsdfm evaluate --help`)."""

    model: str | None = None
    judge: str | None = None
    second_judge: str | None = None
    alternative: tuple[str, ...] = ()
    beside: Path | None = None
    held_out: str | None = None
    separator: str = texts.SEPARATOR
    field: str = "text"
    begin: Begin = "document"
    training: tuple[str, ...] = ()
    steps: str | None = None
    num: int | None = None
    length: int | None = None
    seed: int = 0
    temperature: float | None = None
    final_temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    jump: str | None = None
    grid: str = "uniform"
    start: float | None = None
    renoise: float = 0.0
    cache: str = "off"
    metrics: str | None = None
    mauve: str | None = None
    features: str | None = None
    matched: tuple[str, ...] = ()
    frontier: str | None = None
    alternative_frontier: str | None = None
    controls: bool = True
    json: Path | None = None
    samples: Path | None = None
    from_samples: Path | None = None
    name: str | None = None
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "float32"
    threads: int = 0
    batch_size: int = 16
    processes: int = 1


@dataclass(frozen=True)
class EvaluationOutcome:
    """What was measured, and whether that is all that was asked for; None: not even real text was.

    speaks   whether this process is the one to say so
    """

    evaluation: Evaluation | None
    finished: bool
    speaks: bool = True


def run_evaluation(request: EvaluationRequest, *, console: Console | None = None) -> EvaluationOutcome:
    """Measure what a request asks for; Ctrl-C or SIGTERM ends it early with what is finished.

    The processes that `torchrun` started, or `request.processes` of this machine, share the work: no number changes,
    and the first one writes and speaks.
    """
    run = _Run(console or Console(stderr=True))
    each = request if request.processes == 1 else _for_each(request)
    try:
        with interrupt_on_sigterm(), spawn_local(request.processes, _follow, each):
            run(each)
    except KeyboardInterrupt:
        return EvaluationOutcome(run.known, finished=False, speaks=run.speaks)
    return EvaluationOutcome(run.known, finished=True, speaks=run.speaks)


def _for_each(request: EvaluationRequest) -> EvaluationRequest:
    """What each of the processes is asked, the machine's threads shared out among them."""
    return replace(request, processes=1, threads=request.threads or share_threads(request.processes))


def _follow(request: EvaluationRequest) -> None:
    """What processes other than the first do."""
    _Run(Console(stderr=True))(request)


class _Run:
    """A request on its way in one of the processes.

    known    what is measured so far
    speaks   whether this is the process that writes and speaks
    """

    def __init__(self, console: Console):
        self.console, self.speaks = console, True
        self.known: Evaluation | None = None

    def __call__(self, request: EvaluationRequest) -> None:
        """Measure."""
        processes = Processes.join() if process_count() > 1 else ALONE
        self.speaks = processes.is_rank0
        console = self.console if self.speaks else Console(quiet=True)
        kept = [str(file) for file in (request.json, request.samples) if file is not None]
        saved = (f"what {' and '.join(kept)} holds is whole",) if kept else ("nothing is kept", "give --json FILE")
        with ExitStack() as held:
            held.enter_context(processes.watch(*saved))
            held.enter_context(processes)
            processes.on_rank0(lambda: _own(request, held))
            earlier = processes.on_rank0(lambda: _earlier(request.json))
            compose = _from_model if request.from_samples is None else _from_samples
            task = compose(request, processes, held, console=console)
            report = held.enter_context(_Report(console))
            if earlier is not None:
                self.known = earlier
                there = count(len(report.known(earlier)), "row")
                report.say(f"{request.json}: {there} there already")
            self.known = task(earlier, lambda evaluation: self._keep(evaluation, request, report), report.on_progress)

    def _keep(self, evaluation: Evaluation, request: EvaluationRequest, report: _Report) -> None:
        if self.speaks and request.json is not None:
            save_evaluation(evaluation, request.json)
        self.known = evaluation  # at once: a stop says what the file holds
        report.evaluation(evaluation)


_Task = Callable[[Evaluation | None, OnRow, Callable[[str, int, int], None]], Evaluation]


def _from_model(request: EvaluationRequest, processes: Processes, held: ExitStack, *, console: Console) -> _Task:
    """An evaluation of a model: everything that can be wrong is found before the first sample."""
    with processes.in_turn():  # the first downloads what is missing, and says what is wrong
        _check_texts(request)
        stored = load(request.model, device=request.device, threads=request.threads)
        lm = stored
        if request.precision != "float32":  # its weights may be rounded; what is described are those in the folder
            lm = load(request.model, device=request.device, precision=request.precision, threads=request.threads)
        lm.runtime.processes = processes  # each holds the whole model
        checkpoint = lm.checkpoint
        options = _options(request, checkpoint)
        reader = Reader(checkpoint.tokenizer, checkpoint.bos_id)
        data = _open_data(request, reader, options, held=held, speaks=processes.is_rank0)
        judge, second = _judges(request, lm.runtime.device)
        data = replace(
            data,
            second=second,
            alternatives=_alternatives(request, reader, options),
            distances=_distance_features(request, judge, data.features),
            beside=_beside(request),
        )
        model = _describe(request, stored)
        about = {"model": model if options.steps else {"name": model["name"]}, **_stamp()}
        file = request.samples if processes.is_rank0 else None
        archive = None if file is None else _archive(file, about, data, options=options, lm=lm)
    data = _shared(data, processes)
    _warn(console, data, options)

    def run(earlier: Evaluation | None, on_row: OnRow, on_progress: Callable[[str, int, int], None]) -> Evaluation:
        return evaluate(
            checkpoint,
            data,
            judge,
            options=options,
            about=about,
            runtime=lm.runtime,
            archive=archive,
            earlier=earlier,
            on_row=on_row,
            on_progress=on_progress,
        )

    return run


def _judges(request: EvaluationRequest, device: Any) -> tuple[Judge | None, Judge | None]:
    """The judge and the second one, as far as they are named."""
    if request.second_judge is not None and request.judge in (None, request.second_judge):
        raise ValueError(
            f"--second-judge is {request.second_judge} and --judge {request.judge}; name two different judges, "
            "of two families where you can"
        )
    first, second = (
        None if name is None else make_judge(name, device=device) for name in (request.judge, request.second_judge)
    )
    return first, second


def _alternatives(request: EvaluationRequest, reader: Reader, options: Options) -> tuple[Alternative, ...]:
    """The autoregressive models that are named."""
    length, batch_size = options.sampling.length, request.batch_size
    found = tuple(
        make_alternative(spec, reader.tokenizer, length=length, batch_size=batch_size) for spec in request.alternative
    )
    if len({each.name for each in found}) < len(found):
        raise ValueError(
            f"--alternative names {', '.join(each.name for each in found)}: two of one name; give a folder another one"
        )
    return found


def _beside(request: EvaluationRequest) -> Evaluation | None:
    """The result file whose real text, controls and autoregressive models are taken over."""
    return None if request.beside is None else load_evaluation(request.beside)


def _check_texts(request: EvaluationRequest) -> None:
    """Raise where a request asks for what only real text can give."""
    if request.held_out is not None:
        return
    if request.judge is not None:
        raise ValueError(
            f"--judge {request.judge} needs --held-out FILE: without real text a perplexity has no scale and the "
            "collapse guard no band"
        )
    if "data" in request.matched:
        raise ValueError("--matched data needs the data: --held-out FILE")


def _options(request: EvaluationRequest, checkpoint: Checkpoint) -> Options:
    """What to measure of a model."""
    config = SamplerConfig(seed=request.seed, **{name: getattr(request, name) for name in _SAMPLING})
    sampling = SamplingPlan(
        length=request.length or checkpoint.length, config=config, advice=checkpoint.facts.get("sampling")
    )
    return Options(
        sampling=sampling,
        steps=() if request.steps == _NONE else parse_steps(request.steps or DEFAULT_STEPS),
        num=request.num or DEFAULT_NUM,
        metrics=_metrics(request.metrics),
        matched=tuple(_target(text, sampling.length) for text in request.matched),
        frontier=_frontier(request),
        alternative_frontier=_alternative_frontier(request),
        controls=request.controls,
        batch_size=request.batch_size,
    )


def _frontier(request: EvaluationRequest) -> tuple[float, ...]:
    """The temperatures to sweep beside the rows' own: a comparison of two models needs the curve."""
    default = DEFAULT_FRONTIER if request.judge is not None else _NONE
    text = default if request.frontier is None else request.frontier
    found = () if text == _NONE else _numbers(text, "--frontier")
    return tuple(temperature for temperature in found if temperature != request.temperature)


def _alternative_frontier(request: EvaluationRequest) -> tuple[float, ...]:
    """The temperatures of the autoregressive models' sweep."""
    if request.alternative_frontier is None:
        return ()
    if not request.alternative:
        raise ValueError("--alternative-frontier goes with --alternative; name a model, or leave it out")
    return tuple(_numbers(request.alternative_frontier, "--alternative-frontier"))


def _from_samples(request: EvaluationRequest, processes: Processes, held: ExitStack, **_: Console) -> _Task:
    """An evaluation of samples that are there already, which every process reads."""
    assert request.from_samples is not None
    with processes.in_turn():
        _check_no_sampling(request)
        archive = Archive.open(request.from_samples)
        options = _stored_options(request, archive)
        reader = Reader(texts.Tokenizer(archive.header["tokenizer"]), archive.header["bos_id"])
        data = _open_data(request, reader, options, held=held, speaks=processes.is_rank0)
        runtime = Runtime(RuntimeConfig(device=request.device, threads=request.threads))
        judge, second = _judges(request, runtime.device)
        distances = _distance_features(request, judge, data.features)
        data = replace(data, second=second, distances=distances, beside=_beside(request))
    data = _shared(data, processes)

    def run(earlier: Evaluation | None, on_row: OnRow, on_progress: Callable[[str, int, int], None]) -> Evaluation:
        about = {"started": _now()}
        return evaluate_samples(
            archive,
            data,
            judge,
            options=options,
            about=about,
            processes=processes,
            earlier=earlier,
            on_row=on_row,
            on_progress=on_progress,
        )

    return run


def _check_no_sampling(request: EvaluationRequest) -> None:
    """Raise where a request says how to sample what was sampled already."""
    defaults = {f.name: f.default for f in fields(EvaluationRequest)}
    for name in _OF_SAMPLING:
        if getattr(request, name) != defaults[name]:
            option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is given with --from-samples, whose file has decided it; leave it out")


def _stored_options(request: EvaluationRequest, archive: Archive) -> Options:
    """What to measure of the samples in a file."""
    rows = archive.records("row")
    if not rows:
        raise ValueError(f"{archive.file} holds no complete row; let fsdfm evaluate --samples finish one")
    return Options(
        sampling=_stored_plan(archive.header),
        steps=parse_steps(request.steps) if request.steps else tuple(sorted({row["steps"] for row in rows})),
        num=request.num or _largest_common(rows),
        metrics=_metrics(request.metrics),
        controls=request.controls,
    )


def _stored_plan(header: Mapping[str, Any]) -> SamplingPlan:
    """How the samples of a file were drawn."""
    known = dict(header["sampler"])
    length, temperature = int(known.pop("length")), known.pop("temperature", 1.0)
    known["jump"] = {"stratified": "systematic"}.get(known.get("jump", "exact"), known.get("jump"))
    advice = {"temperature": temperature} if isinstance(temperature, Mapping) else None
    config = SamplerConfig(seed=header["seed"], temperature=None if advice else temperature, **known)
    return SamplingPlan(length=length, config=config, advice=advice)


def _largest_common(rows: Sequence[Mapping[str, Any]]) -> int:
    """The number of samples that every row has; a row may have been completed more than once, with more of them.

    Rows of the frontier have fewer on purpose, and no say.
    """
    most: dict[str, int] = {}
    for row in [row for row in rows if row["place"] == "rows"] or rows:
        key = repr((row["place"], row["steps"], row["temperature"], (row["matched"] or {}).get("to")))
        most[key] = max(row["num"], most.get(key, 0))
    return min(most.values())


# --- what is measured against -----------------------------------------------------------------------------------------


def _open_data(request: EvaluationRequest, reader: Reader, options: Options, *, held: ExitStack, speaks: bool) -> Data:
    """Held-out rows, the training text and MAUVE's features, as far as they are named.

    speaks   the process that does reads the texts; the others have the features only
    """
    facts: dict[str, Any] = {}
    real, training = None, None
    features = None if request.mauve is None else _features(request.mauve)
    store = default_store()
    if not speaks:
        return Data(features=features, store=store)
    if request.held_out is not None:
        corpus = _corpus((request.held_out,), request, reader.tokenizer, held=held)
        real = _real_rows(corpus, request, reader, options=options)
        facts |= {
            "held_out": Path(request.held_out).name,
            "held_out_sha256": _sha256(Path(request.held_out)) or corpus.header.sha256,
            "begin": request.begin,
        }
    if request.training:
        corpus = _corpus(request.training, request, reader.tokenizer, held=held)
        training = corpus.tokens
        facts |= {
            "training": ", ".join(Path(name).name for name in request.training),
            "training_sha256": corpus.header.sha256,
        }
    if features is not None:
        facts["mauve_features"] = request.mauve
    if request.features is not None:
        facts["distance_features"] = request.features
    return Data(real, training, features, facts=facts, store=store)


def _shared(data: Data, processes: Processes) -> Data:
    """The data with the first process's real rows."""
    real, facts = processes.on_rank0(lambda: (data.real, data.facts))
    return replace(data, real=real, facts=facts)


def _real_rows(corpus: texts.Corpus, request: EvaluationRequest, reader: Reader, *, options: Options) -> TokenRows:
    length = options.sampling.length
    rows = cut_rows(corpus.tokens, corpus.starts, length, bos_id=reader.bos_id, begin=request.begin)
    if len(rows) < 2:
        raise ValueError(
            f"{request.held_out} holds {len(rows)} rows of {length} tokens that begin where a document begins; "
            "give more text, a shorter --length, or --begin anywhere"
        )
    return _shuffled(rows)[: 2 * options.num]  # and no more are looked at


def _shuffled(rows: TokenRows) -> TokenRows:
    """The rows in a random order, always the same: the first stand for the whole text, and more begin with them."""
    order = Noise(0).uniform(Purpose.SHUFFLE, len(rows))[0].argsort().numpy()
    shuffled: TokenRows = rows[order]
    return shuffled


def _corpus(
    inputs: tuple[str, ...], request: EvaluationRequest, tokenizer: texts.Tokenizer, *, held: ExitStack
) -> texts.Corpus:
    """A prepared corpus, or text made into one that lasts as long as the run."""
    if len(inputs) == 1 and Path(inputs[0]).is_dir():
        return texts.Corpus.open(inputs[0], tokenizer)
    documents = texts.open_documents(inputs, request.separator, request.field)
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="fsdfm-")))
    return texts.prepare(documents, tokenizer, folder / "corpus", progress=False)


def _features(name: str) -> Features:
    return minilm_features() if name == "minilm" else huggingface_features(name)


def _distance_features(
    request: EvaluationRequest, judge: Judge | None, meaning: Features | None
) -> dict[str, TextFeatures]:
    """What --features names, and the features of MAUVE."""
    own = named_features(request.features or "", judge)
    return own if meaning is None else {"meaning": meaning, **own}


def named_features(names: str, judge: Judge | None) -> dict[str, TextFeatures]:
    """Hidden states of a text by name: judge, trunk (of the parent), trunk:MODEL, with commas between."""
    found: dict[str, TextFeatures] = {}
    for name in filter(None, names.split(",")):
        kind, _, model = name.strip().partition(":")
        if kind == "judge":
            if not isinstance(judge, TokenJudge):
                raise ValueError("--features judge needs the judge whose hidden states they are: --judge")
            found["judge"] = hidden_features(judge)
        elif kind == "trunk":
            found["trunk"] = trunk_features(load_model(find_model(model or "parent")))
        else:
            raise ValueError(f"--features holds {name!r}; allowed are judge, trunk (of the parent) and trunk:MODEL")
    return found


def _target(text: str, length: int) -> MatchTarget:
    """What --matched names."""
    if text == "data":
        return MatchTarget("data")
    try:
        bits = float(text)
    except ValueError:
        pass
    else:
        if not 0 < bits < float("inf"):
            raise ValueError(f"--matched is {text}; an entropy is a number of bits above 0")
        return MatchTarget(bits, bits)
    file, _, steps = text.rpartition(":")
    if not file or not steps.isdecimal():
        raise ValueError(f"--matched is {text!r}; write data, a number of bits, or FILE:STEPS of a result file")
    baseline = load_evaluation(Path(file))
    if baseline.sampler.get("length", length) != length:
        raise ValueError(
            f"{file} has samples of {baseline.sampler['length']} tokens, not {length}: their entropies do not compare; "
            "give the same --length"
        )
    row = baseline.row(int(steps))
    if row is None or "entropy_bits" not in row.metrics:
        raise ValueError(f"{file} has no row of {steps} steps; it has {[row.steps for row in baseline.plain]}")
    return MatchTarget(f"{baseline.name} at {steps} steps", row.metrics["entropy_bits"].value)


def parse_steps(text: str) -> tuple[int, ...]:
    """Budgets: `1,2,4,8`, or `1..64` for the powers of two from the one to the other."""
    first, dots, last = text.partition("..")
    if dots:
        if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
            found = tuple(2**k for k in range(31) if int(first) <= 2**k <= int(last))
            if found:
                return found
        raise ValueError(f"--steps is {text!r}; write 1..64 for the powers of two from 1 to 64")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"--steps is {text!r}; write budgets such as 1,2,4,8, or 1..64 for powers of two")
    return tuple(dict.fromkeys(map(int, parts)))


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; write numbers such as 0.7,0.8,0.9") from None


def _metrics(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


# --- what a result file says of itself --------------------------------------------------------------------------------


def _describe(request: EvaluationRequest, lm: LanguageModel) -> dict[str, Any]:
    folder = find_model(request.model).resolve()
    of_run = folder.parent.parent.name if folder.parent.name == "checkpoints" else ""
    return {
        "name": request.name or " ".join(filter(None, (of_run, folder.name))),
        "folder": folder.name,
        "checkpoint_sha256": weights_sha256(lm.checkpoint.model),
        "config": _config(lm.checkpoint),
        "num_parameters": sum(p.numel() for p in lm.checkpoint.model.parameters()),
    }


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json, its inputs without the folders of somebody's machine."""
    config = describe_model(checkpoint)
    about = config.get("data")
    if isinstance(about, Mapping) and isinstance(about.get("inputs"), list):
        config["data"] = {**about, "inputs": [Path(str(name)).name for name in about["inputs"]]}
    return config


def _stamp() -> dict[str, Any]:
    return {"commit": commit(), "versions": versions(), "started": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _archive(file: Path, about: Mapping[str, Any], data: Data, *, options: Options, lm: LanguageModel) -> Archive:
    header = {
        **about,
        "sampler": options.sampling.to_json(),
        "data": {name: value for name, value in data.facts.items() if not name.startswith(("training", "mauve"))},
        "seed": options.seed,
        "dtype": "bfloat16" if lm.runtime.bfloat16 else lm.checkpoint.model.precision,
        "device": lm.runtime.device.type,
        "bos_id": lm.checkpoint.bos_id,
        "tokenizer": lm.checkpoint.tokenizer.definition,
    }
    if file.is_dir():
        file = file / "samples.jsonl"
    return Archive.create(file, header, _SAME_SAMPLES)


def _own(request: EvaluationRequest, held: ExitStack) -> None:
    """Keep other evaluations away from the files that this one writes."""
    for file in {None if path is None else path.resolve() for path in (request.json, request.samples)}:
        if file is not None and (file.is_dir() or file.is_file() or not file.exists()):  # not a device
            held.enter_context(lock(file, beside=not file.is_dir()))


def _earlier(file: Path | None) -> Evaluation | None:
    """What a result file holds, if it is there; where none could be written is an error now, not after hours."""
    if file is None:
        return None
    if file.exists() and file.stat().st_size:
        return load_evaluation(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}; choose another folder") from error
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"cannot write {file}: the folder is read-only; choose one you may write to")
    return None


def _sha256(path: Path) -> str | None:
    return file_sha256(path) if path.is_file() else None


# --- what a user sees -------------------------------------------------------------------------------------------------


def _warn(console: Console, data: Data, options: Options) -> None:
    """Say what a run will not be able to say."""
    told = []
    if data.real is None:
        told.append("no --held-out text: no real row, no collapse guard, no accuracy, no perplexity")
    elif len(data.real) < options.num:
        told.append(
            f"the held-out text has only {len(data.real)} rows of {options.sampling.length} tokens for {options.num} "
            "samples; the guard compares as many samples as there are rows"
        )
    for sentence in told:
        say(console, f"note: {sentence}")


class _Report:
    """Progress on standard error: a bar where it is a terminal, and a line for every finished row."""

    def __init__(self, console: Console):
        self.console = console
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = moving_bar(console, *columns, transient=True)
        self.task: Any = None
        self.told: set[Any] = set()

    def __enter__(self) -> _Report:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def on_progress(self, what: str, done: int, total: int) -> None:
        if self.task is None or self.progress.tasks[-1].description != what:
            if self.task is not None:
                self.progress.remove_task(self.task)
            self.task = self.progress.add_task(what, total=total)
        self.progress.update(self.task, completed=done, total=total)

    def say(self, sentence: str) -> None:
        say(self.console, sentence)

    def known(self, evaluation: Evaluation) -> list[str]:
        """A sentence on every row that was not told of yet; it is told of now."""
        rows = [("rows", row) for row in evaluation.rows] + [("frontier", row) for row in evaluation.frontier]
        new = [(place, row) for place, row in rows if (place, row.key) not in self.told]
        self.told |= {(place, row.key) for place, row in new}
        return [_sentence(row) for _, row in new]

    def evaluation(self, evaluation: Evaluation) -> None:
        """Say what has come since the last time."""
        if (scale := _scale(evaluation)) is not None and not evaluation.rows and not evaluation.frontier:
            self.say(scale)
        for sentence in self.known(evaluation):
            self.say(sentence)


def _sentence(row: Row) -> str:
    perplexity = row.metrics.get("token_perplexity")
    parts = [f"{count(row.steps, 'step')} at temperature {row.temperature:.4g}"]
    parts += [] if perplexity is None else [f"perplexity {perplexity.value:.2f}"]
    parts += [f"entropy {row.metrics['entropy_bits'].value:.2f} bits", f"{row.seconds_per_sample:.2f} s per sample"]
    return ", ".join(parts) + "".join(f"; {flag}" for flag in row.flags)


def count(number: int, thing: str) -> str:
    """A number of things: 1 row, 2 rows."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _scale(evaluation: Evaluation) -> str | None:
    judge = evaluation.judge
    if "real" not in judge:
        return None
    real, shuffled = (judge[what]["token_perplexity"]["value"] for what in ("real", "shuffled"))
    return f"{judge['name']}: real text {real:.2f}, word-shuffled {shuffled:.0f} ({judge['real']['n']} rows)"
