"""The composition root: a recipe's names become objects here and nowhere else.

    result = train("tiny-dfm", ["train.steps=100"])  # the same call again resumes

A run's folder holds `recipe.toml` (the effective recipe), `run.json` (commit, versions), `metrics.jsonl`,
`samples.jsonl` and `checkpoints/`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from fsdfm import data, flow
from fsdfm.checkpoint import (
    CHECKPOINTS,
    Bundle,
    check_new,
    load_model,
    load_training,
    make_schedule,
    make_source,
    recover,
    save_checkpoint,
    save_model,
)
from fsdfm.config import (
    DataConfig,
    FlowConfig,
    ModelSection,
    ObjectiveConfig,
    Recipe,
    differences,
    load_recipe,
    recipe_names,
    to_toml,
)
from fsdfm.convert import (
    ReleasedWeights,
    Settings,
    WeightsName,
    convert_llama2c,
    open_released,
    preset_settings,
    read_settings,
)
from fsdfm.flow.grid import MirroredWeights
from fsdfm.learn.couple import Coupler, couple
from fsdfm.learn.journal import JsonLines, ProgressBar, tensorboard
from fsdfm.learn.objective import (
    Batch,
    CrossEntropy,
    FewStepObjective,
    FineTimes,
    GeneralisedKL,
    MultiplesOfH,
    Objective,
    PathLoss,
    PathObjective,
    TimeGrid,
)
from fsdfm.learn.optim import EMA, Optimiser, WithoutDropout
from fsdfm.learn.report import Report
from fsdfm.learn.teacher import TABLEAUS, ShortcutTeacher
from fsdfm.learn.trainer import Every, Feed, Hooks, MicroBatch, Trainer, TrainingState
from fsdfm.model import DiT, ModelConfig
from fsdfm.model.weights import weights_sha256
from fsdfm.noise import Noise
from fsdfm.plan import Workload
from fsdfm.runtime import ALONE, Processes, Runtime, commit, lock, require_strategy, stop_on_signal, versions

__all__ = [
    "Result",
    "convert",
    "export",
    "import_weights",
    "make_objective",
    "make_pairs",
    "make_path",
    "make_rows",
    "make_trainer",
    "make_workload",
    "prepare_corpus",
    "train",
]

_T = TypeVar("_T")

LOSSES: dict[str, PathLoss] = {"generalised-kl": GeneralisedKL(), "cross-entropy": CrossEntropy()}
# What may change between a run and its resumption; `train.steps` re-plans the learning rate's cosine.
_FREE = (
    "out",  # a run's folder may be moved
    "train.steps",
    "train.accumulate",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.entropy_alarm",
    "sample.",
    "runtime.",
)
_SIZES = ("width", "num_blocks", "num_heads", "num_kv_heads", "mlp_width", "cond_width", "style")


@dataclass(frozen=True)
class Result:
    """Where a run is, how far it came, and whether this process speaks for it."""

    folder: Path
    training_step: int
    finished: bool
    speaks: bool = True


def train(name: str | Path, overrides: Sequence[str] = (), *, console: Console | None = None) -> Result:
    """Train what a recipe says, or go on with it; SIGTERM and SIGINT save and end it early."""
    recipe = load_recipe(name, overrides)
    _check(recipe)
    require_strategy(recipe.runtime)
    out = Path(recipe.out)
    with Runtime(recipe.runtime) as runtime, ExitStack() as held:
        processes = runtime.processes
        speaks = (console or Console(stderr=True)) if processes.is_first else Console(quiet=True)
        place = processes.first(lambda: _claim(out, recipe, held, console=speaks))
        with processes.in_turn():
            bundle = _start(recipe, out) if place is None else load_model(place)
            rows = make_rows(recipe, bundle, out)
        processes.first(lambda: _describe(out, recipe))
        trainer = make_trainer(recipe, bundle, rows, runtime=runtime)
        if place is not None:
            trainer.load(TrainingState(*load_training(place, trainer.blank())))
        with processes.watch(f"what {out} has saved is whole"):
            return _fit(trainer, recipe, bundle, out=out, console=speaks)


def _claim(out: Path, recipe: Recipe, held: ExitStack, *, console: Console) -> Path | None:
    """Lock a run's folder; the checkpoint to go on from, if there is one and the recipe is still its own."""
    _check_writable(out)
    held.enter_context(lock(out))
    place, problems = recover(out / CHECKPOINTS)
    for problem in problems:
        console.print(f"warning: {problem}; using {place}", markup=False, highlight=False, soft_wrap=True)
    if place is not None:
        _check_same(out / "recipe.toml", recipe)
    return place


def _describe(out: Path, recipe: Recipe) -> None:
    _write(out / "recipe.toml", to_toml(recipe))
    _write(out / "run.json", json.dumps({"commit": commit(), "versions": versions()}, indent=2) + "\n")


# --- from names to objects --------------------------------------------------------------------------------------------


def make_path(config: FlowConfig, num_tokens: int) -> flow.Path:
    """Source and schedule over the tokens of a tokenizer, with one more for the mask where the source has one."""
    source: dict[str, Any] = {"name": config.source, "vocab_size": num_tokens + (config.source != "uniform")}
    if config.source == "mixture":
        source["mask_share"] = config.mask_share
    options = {"polynomial": {"exponent": config.exponent}, "cosine": {}, "exponential": {"rate": config.rate}}
    return flow.Path(make_source(source), make_schedule({"name": config.schedule, **options[config.schedule]}))


def make_objective(config: ObjectiveConfig, path: flow.Path) -> Objective:
    """Path loss or few-step training."""
    if not -30 <= config.smallest_h <= 0:
        raise ValueError(f"objective.smallest_h is {config.smallest_h}; allowed are -30 .. 0, the log2 of a step size")
    smallest = 2.0**config.smallest_h
    times: TimeGrid = MultiplesOfH() if config.times == "multiples-of-h" else FineTimes(smallest)
    loss = LOSSES[config.loss]
    if config.kind == "path":
        return PathObjective(path, loss=loss, h=smallest, times=times)
    weights = _named(flow.POLICIES, config.weights, "objective.weights")
    tableau = _named(TABLEAUS, config.teacher, "objective.teacher")
    return FewStepObjective(
        path,
        teacher=ShortcutTeacher(tableau, jump=flow.JUMPS[config.jump], average=config.average),
        weights=MirroredWeights(weights) if config.mirrored else weights,
        step_sizes=flow.dyadic_step_sizes(config.smallest_h),
        path_below_h=config.path_below_h,
        loss=loss,
        times=times,
        temperature=config.temperature,
    )


def make_trainer(recipe: Recipe, bundle: Bundle, rows: data.RowSource, *, runtime: Runtime) -> Trainer:
    """The trainer of a recipe, at its start: the bundle's weights are both the model's and their average's."""
    model = bundle.model
    ema = EMA(model, recipe.optim.ema)
    for network in (model, ema.module):
        runtime.place(network)
    return Trainer(
        model,
        make_objective(recipe.objective, bundle.path),
        make_feed(
            rows,
            recipe.train.batch_size,
            recipe.train.accumulate,
            bos_id=bundle.bos_id,
            processes=runtime.processes,
        ),
        optimiser=Optimiser(model, recipe.optim, steps=recipe.train.steps),
        ema=ema,
        runtime=runtime,
        config=recipe.train,
        teacher=WithoutDropout(model) if recipe.objective.network == "student" else None,
    )


def make_rows(recipe: Recipe, bundle: Bundle, out: Path) -> data.RowSource:
    """The training rows of a recipe: blocks of its corpus, or the pairs that a parent made."""
    section, seed = recipe.data, recipe.train.seed
    if section.pairs is None:
        corpus = prepare_corpus(section, _corpus_folder(recipe, out), bundle.tokenizer)
        return data.Blocks(
            corpus,
            section.length,
            seed,
            short_share=section.short_share,
            shortest=section.shortest,
            document_starts=section.document_starts,
            given_share=section.given_share,
        )
    pairs = data.Pairs(section.pairs, seed)
    found = (pairs.header.length, pairs.header.vocab_size)
    wanted = (section.length, bundle.path.source.vocab_size)
    if found != wanted:
        raise ValueError(
            f"data.pairs {section.pairs} has rows of {found[0]} of {found[1]} tokens, the recipe and its parent have "
            f"{wanted[0]} of {wanted[1]}; set data.length, or make pairs with this parent"
        )
    return pairs


def make_feed(
    rows: data.RowSource,
    batch_size: int,
    accumulate: int = 1,
    *,
    bos_id: int | None = None,
    processes: Processes = ALONE,
) -> Feed:
    """Micro-batches of training rows; with `bos_id`, a row of text begins with that token, given, and loses its last.

    Pairs come from a sampler, which has put the token there already.
    """
    portion, count = batch_size // accumulate, processes.count
    if portion % count:
        raise ValueError(
            f"train.batch_size is {batch_size} in {accumulate} portions over {count} processes; "
            f"allowed are multiples of {accumulate * count}, so that every process has as many rows"
        )

    def feed(start: int) -> Iterator[MicroBatch]:
        for part in data.batches(rows, portion, start, rank=processes.rank, num_ranks=count):
            x_1, real, given = part.x_1, part.real, part.given
            if bos_id is not None:
                given = torch.zeros_like(real) if given is None else given.roll(1, 1)
                given[:, 0] = True
            if bos_id is not None and part.x_0 is None:
                x_1 = torch.cat([torch.full_like(x_1[:, :1], bos_id), x_1[:, :-1]], 1)
                real = torch.cat([real[:, :1], real[:, :-1]], 1)
            whole = bool(real.all())
            real_or_all = None if whole else real
            batch = Batch(x_1, x_0=part.x_0, real=real_or_all, given=given, size=batch_size, processes=count)
            yield MicroBatch(batch, part.samples, part.next_sample)

    return feed


def _named(known: Mapping[str, _T], name: str, where: str) -> _T:
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{where} is {name!r}; allowed are {', '.join(known)}{hint}")


# --- text -------------------------------------------------------------------------------------------------------------


def prepare_corpus(
    config: DataConfig, folder: Path, tokenizer: data.Tokenizer | None = None, *, processes: int = 1
) -> data.Corpus:
    """The packed corpus in a folder, made from the inputs unless it is there; `tokenizer` wins over the config's.

    processes   that encode text; the corpus is the same, byte for byte

    Without inputs the corpus must be there already, which suits machines that hold the tokens but not the text.
    """
    prepared = (folder / "corpus.json").exists()
    if not config.inputs:
        if not prepared:
            raise ValueError(f"data.inputs is empty and {folder} is no corpus; name inputs, or a corpus as data.corpus")
        return data.Corpus.open(folder, tokenizer)
    documents = data.open_documents(config.inputs, config.separator, config.field, max_documents=config.max_documents)
    if tokenizer is None:
        tokenizer = _tokenizer(config, folder, documents, prepared=prepared)
    corpus = data.prepare(documents, tokenizer, folder, processes=processes)
    for kept in folder.parent.glob(f"{folder.name}.*.tokenizer.json"):
        kept.unlink()
    return corpus


def _tokenizer(config: DataConfig, folder: Path, documents: data.Documents, *, prepared: bool) -> data.Tokenizer:
    """The tokenizer that the config names; one that is trained is trained once, and kept until the corpus has it."""
    spec = config.tokenizer
    if spec is None:
        raise ValueError(
            "data.tokenizer is missing; name one: bytes, gpt2, bpe:SIZE or a path (a parent brings its own)"
        )
    if not spec.startswith("bpe:"):
        return data.make_tokenizer(spec)
    if prepared:
        corpus = data.Corpus.open(folder)
        if str(corpus.header.vocab_size) != spec.removeprefix("bpe:"):
            raise ValueError(
                f"{folder} was made with {corpus.header.vocab_size} tokens, not with {spec}; delete it, or name another"
            )
        return corpus.tokenizer
    request = hashlib.sha256(json.dumps([spec, dict(documents.identity)]).encode()).hexdigest()[:12]
    kept = folder.with_name(f"{folder.name}.{request}.tokenizer.json")
    if kept.exists():
        return data.Tokenizer.load(kept)
    tokenizer = data.make_tokenizer(spec, data.texts(documents))
    _write(kept, tokenizer.definition)
    return tokenizer


def _corpus_folder(recipe: Recipe, out: Path) -> Path:
    return Path(recipe.data.corpus) if recipe.data.corpus else out / "corpus"


# --- where weights come from ------------------------------------------------------------------------------------------


def _check(recipe: Recipe) -> None:
    """Raise for what can be told without text and weights, before hours are spent on making tokens."""
    section = recipe.model
    chosen = [name for name in ("preset", "parent", "llama2c") if getattr(section, name) is not None]
    if len(chosen) != 1:
        found = " and ".join(f"model.{name}" for name in chosen) or "none of them"
        raise ValueError(f"a model starts from model.preset, model.parent or model.llama2c; the recipe has {found}")
    sizes = [name for name in _SIZES if getattr(section, name) is not None]
    if section.preset is None and sizes:
        raise ValueError(f"model.{sizes[0]} is set, but model.{chosen[0]} decides it; leave it out")
    if section.preset is not None:
        model_config(recipe, vocab_size=2)
        if recipe.data.pairs is not None:
            raise ValueError("data.pairs are made by a parent; name it as model.parent in place of model.preset")
    make_objective(recipe.objective, make_path(recipe.flow, num_tokens=2))


def _start(recipe: Recipe, out: Path) -> Bundle:
    """The model of a new run."""
    if recipe.model.preset is not None:
        return _fresh(recipe, _corpus_folder(recipe, out))
    return _child(recipe) if recipe.model.parent is not None else _converted(recipe)


def _fresh(recipe: Recipe, folder: Path) -> Bundle:
    corpus = prepare_corpus(recipe.data, folder)
    path = make_path(recipe.flow, corpus.header.vocab_size)
    model = DiT(model_config(recipe, path.source.vocab_size), seed=recipe.train.seed)
    return _bundle(recipe, model, path, tokenizer=corpus.tokenizer)


def model_config(recipe: Recipe, vocab_size: int) -> ModelConfig:
    """The network of a recipe with a preset: the preset, what the recipe changes, and the objective's conditioning."""
    section = recipe.model
    assert section.preset is not None
    changes = {name: getattr(section, name) for name in (*_SIZES, "dropout") if getattr(section, name) is not None}
    conditioning = "step" if recipe.objective.kind == "fewstep" else "time"
    return ModelConfig.preset(section.preset, **changes, vocab_size=vocab_size, conditioning=conditioning)


def _child(recipe: Recipe) -> Bundle:
    assert recipe.model.parent is not None
    try:
        parent = load_model(recipe.model.parent)
    except ValueError as error:
        raise ValueError(f"model.parent: {error}") from error
    if recipe.data.tokenizer is not None and not recipe.data.tokenizer.startswith("bpe:"):
        named = data.make_tokenizer(recipe.data.tokenizer)
        if named.hash != parent.tokenizer.hash:
            raise ValueError(
                f"data.tokenizer {recipe.data.tokenizer!r} has {named.vocab_size} tokens and is not the parent's, "
                f"which has {parent.tokenizer.vocab_size}; leave it out to use the parent's"
            )
    path = make_path(recipe.flow, parent.tokenizer.vocab_size)
    if (path.source, path.schedule) != (parent.path.source, parent.path.schedule):
        raise ValueError(
            f"the recipe's flow is {path.source} with {path.schedule}, the parent's {parent.path.source} with "
            f"{parent.path.schedule}; make [flow] what the parent was trained with"
        )
    model = _adapted(parent.model, recipe)
    return _bundle(recipe, model, path, tokenizer=parent.tokenizer, bos_id=parent.bos_id)


def _converted(recipe: Recipe) -> Bundle:
    start = _from_llama2c(recipe.model, recipe.data, recipe.train.seed)
    path = make_path(recipe.flow, start.tokenizer.vocab_size)
    if path.source.vocab_size != start.model.config.vocab_size:
        raise ValueError(f"flow.source is {recipe.flow.source!r}; a converted model has no mask token: use uniform")
    model = _adapted(start.model, recipe)
    return _bundle(recipe, model, path, tokenizer=start.tokenizer, bos_id=start.bos_id)


def _from_llama2c(section: ModelSection, config: DataConfig, seed: int) -> Bundle:
    """The denoiser of a llama2.c checkpoint over the tokens that the inputs use; without inputs over all of them."""
    assert section.llama2c is not None
    for file in filter(None, (section.llama2c, section.llama2c_tokenizer)):
        if not Path(file).is_file():
            raise ValueError(f"{file} is not a file; name a llama2.c checkpoint and its tokenizer.bin")
    texts = None
    if config.inputs:
        texts = data.texts(
            data.open_documents(config.inputs, config.separator, config.field, max_documents=config.max_documents)
        )
    parts = convert_llama2c(section.llama2c, section.llama2c_tokenizer, texts, min_count=section.min_count, seed=seed)
    tokenizer = data.Tokenizer(parts.tokenizer.to_str(), parts.tokenizer.id_to_token(parts.eos_id))
    path = flow.Path(flow.UniformSource(len(parts.kept)))
    length = parts.causal.config.max_length
    facts = {"converted_from": Path(section.llama2c).name}
    return Bundle(parts.denoiser, path, tokenizer, length=length, bos_id=parts.bos_id, facts=facts)


def _adapted(model: DiT, recipe: Recipe) -> DiT:
    """The parent's network with the recipe's dropout, and aware of h where the objective needs it."""
    if recipe.model.dropout is not None and recipe.model.dropout != model.config.dropout:
        other = DiT(replace(model.config, dropout=recipe.model.dropout))
        other.load_state_dict(model.state_dict())
        model = other
    if recipe.objective.kind == "fewstep" and not model.config.is_step_aware:
        model = model.step_aware(seed=recipe.train.seed)
    return model


def _bundle(
    recipe: Recipe, model: DiT, path: flow.Path, *, tokenizer: data.Tokenizer, bos_id: int | None = None
) -> Bundle:
    budgets = None
    if model.config.is_step_aware:
        budgets = tuple(2**k for k in range(-recipe.objective.smallest_h + 1))
    text: dict[str, object] = {"inputs": [_public_name(name) for name in recipe.data.inputs]}
    if recipe.data.pairs is not None:
        text = {"pairs": _public_name(recipe.data.pairs)}
    facts = {"objective": asdict(recipe.objective), "data": text}
    return Bundle(model, path, tokenizer, recipe.data.length, bos_id=bos_id, budgets=budgets, facts=facts)


def _public_name(name: str) -> str:
    """An input as a model card names it: what the hub and we call it, of a file its name without the folders."""
    return name if name.startswith(("hf:", "builtin:")) else Path(name).name


def convert(section: ModelSection, config: DataConfig, out: str | Path, *, half: bool = False) -> Bundle:
    """Make a checkpoint folder of a llama2.c checkpoint, to be used or named as `model.parent`."""
    bundle = _from_llama2c(section, config, seed=0)
    save_model(out, bundle, dtype=torch.float16 if half else torch.float32)
    return bundle


def export(checkpoint: str | Path, out: str | Path, *, half: bool = False) -> Bundle:
    """Make a folder to share of a run or a checkpoint: the averaged weights and what describes them, nothing else."""
    bundle = load_model(checkpoint)
    save_model(out, bundle, dtype=torch.float16 if half else torch.float32)
    return bundle


# --- the paper's released weights -------------------------------------------------------------------------------------

_WEIGHTS = {"ema": "averaged weights", "raw": "weights as trained", "teacher": "the teacher's weights"}
_RELEASED_BUDGETS = tuple(2**k for k in range(11))  # 1, 2, 4, ... 1024 steps


def import_weights(
    file: str | Path,
    out: str | Path,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    weights: WeightsName | None = None,
    tokenizer: str = "gpt2",
    half: bool = False,
    console: Console | None = None,
) -> Bundle:
    """Make a checkpoint folder of one of the paper's released .pth files; nothing in the file is run.

    Tensors are read, checked and written one at a time, so the bundle that is returned has the model's shapes alone.

    preset, config   the settings: a size of the paper's, or a JSON file; neither: what the tensors tell
    weights          `ema`, `raw` or `teacher`; None: the averaged ones, and those as trained if there are none
    """
    if preset is not None and config is not None:
        raise ValueError(f"both preset {preset!r} and config {str(config)!r} are given; the settings come from one")
    settings = Settings() if preset is None else preset_settings(preset)
    settings = settings if config is None else read_settings(config)
    check_new(Path(out))
    console = console or Console(stderr=True)
    dtype = torch.float16 if half else torch.float32
    with open_released(file, settings, weights, dtype=dtype) as released:
        bundle = _released_bundle(released, data.make_tokenizer(tokenizer), console)
        with console.status(f"reading {released.path}, {released.path.stat().st_size / 1e9:.1f} GB"):
            about = {"file": released.path.name, "group": released.group, "sha256": data.file_sha256(released.path)}
            bundle = replace(bundle, facts={**bundle.facts, "imported": about})
            save_model(out, bundle, dtype=dtype, tensors=released)
    return bundle


def _released_bundle(released: ReleasedWeights, tokenizer: data.Tokenizer, console: Console) -> Bundle:
    """Everything but the weights; with one more token than the tokenizer has, the source is the mask."""
    network, settings, num_tokens = released.config, released.settings, tokenizer.vocab_size
    masked = settings.source == "mask" or (settings.source is None and network.vocab_size == num_tokens + 1)
    known = network.vocab_size - masked
    if known > num_tokens:
        raise ValueError(
            f"{released.path} has {known} tokens and the tokenizer only {num_tokens}; name the model's own tokenizer"
        )
    if known < num_tokens:
        console.print(
            f"warning: the model knows only the first {known} of the tokenizer's {num_tokens} tokens; "
            "it can write with it, but not read every text",
            highlight=False,
            soft_wrap=True,
        )
    with torch.device("meta"):
        model = DiT(network).eval()
    facts: dict[str, Any] = {"weights": _WEIGHTS[released.kind]}
    if released.training_step is not None:
        facts["training_step"] = released.training_step
    return Bundle(
        model,
        flow.Path((flow.MaskSource if masked else flow.UniformSource)(network.vocab_size)),
        tokenizer,
        length=settings.length,
        budgets=_RELEASED_BUDGETS if network.is_step_aware else None,
        facts=facts,
    )


# --- what a run will need ---------------------------------------------------------------------------------------------


def make_workload(recipe: Recipe) -> Workload:
    """The numbers of a recipe that decide its memory and time; nothing is read but the header of its parent."""
    _check(recipe)
    stages, share = 0, 0.0
    objective = make_objective(recipe.objective, make_path(recipe.flow, num_tokens=2))
    if isinstance(objective, FewStepObjective):
        stages = len(objective.teacher.tableau.stages)
        chances = objective.weights.probabilities(objective.step_sizes, 0)
        share = float(chances[objective.step_sizes >= objective.path_below_h].sum())
    on_cpu = recipe.runtime.device == "cpu"
    return Workload(
        model=_planned_model(recipe),
        length=recipe.data.length,
        batch_size=recipe.train.batch_size,
        accumulate=recipe.train.accumulate,
        steps=recipe.train.steps,
        bfloat16=recipe.runtime.precision == "bfloat16" or (recipe.runtime.precision == "auto" and not on_cpu),
        stages=stages,
        teacher_share=share,
    )


def _planned_model(recipe: Recipe) -> ModelConfig:
    """The network that a run would train, without its weights: a parent may still be a recipe itself."""
    section = recipe.model
    if section.preset is not None:
        return model_config(recipe, make_path(recipe.flow, _num_tokens(recipe)).source.vocab_size)
    if section.parent is None:
        raise ValueError("model.llama2c decides the size when it is converted; fsdfm convert it, and name model.parent")
    if Path(section.parent).is_dir():
        config = load_model(section.parent, device="meta").model.config
    else:
        recipes = [load_recipe(name) for name in recipe_names()]
        parents = [other for other in recipes if other.out == section.parent]
        if not parents:
            raise ValueError(f"model.parent {section.parent} is not there, and no recipe makes it; train it first")
        config = _planned_model(parents[0])
    if recipe.objective.kind == "fewstep" and not config.is_step_aware:
        config = replace(config, conditioning="step")
    return config if section.dropout is None else replace(config, dropout=section.dropout)


def _num_tokens(recipe: Recipe) -> int:
    spec = recipe.data.tokenizer or ""
    if spec.startswith("bpe:") and spec[4:].isdecimal():
        return int(spec[4:])
    return {"gpt2": 50257, "bytes": 257}.get(spec) or data.make_tokenizer(spec).vocab_size


# --- coupled pairs ----------------------------------------------------------------------------------------------------


def make_pairs(
    parent: str | Path,
    out: str | Path,
    *,
    num_pairs: int,
    steps: int = 64,
    length: int | None = None,
    jump: str = "exact",
    seed: int = 0,
    batch_size: int = 16,
    console: Console | None = None,
) -> int:
    """Let a parent run for many steps and keep its pairs (x_0, x_1): discrete reflow's data; resumable.

    Train on them with `model.parent` the same parent and `data.pairs` the folder.
    """
    bundle = load_model(parent)
    rule = _named(flow.JUMPS, jump, "jump")
    length = length or bundle.length
    coupler = Coupler(bundle.path, length, flow.Grid.uniform(steps), jump=rule, seed=seed, first_token=bundle.bos_id)
    about = {"parent": weights_sha256(bundle.model), "steps": steps, "jump": jump, "seed": seed}
    header = data.PairHeader(length=length, vocab_size=bundle.path.source.vocab_size, about=about)
    with data.PairWriter(out, header) as writer, Progress(console=console or Console(stderr=True)) as progress:
        task = progress.add_task("couple", total=num_pairs, completed=writer.count)
        for count in couple(bundle.model.eval(), coupler, writer, num_pairs=num_pairs, batch_size=batch_size):
            progress.update(task, completed=count)
        return writer.count


# --- the run's folder -------------------------------------------------------------------------------------------------


def _fit(trainer: Trainer, recipe: Recipe, bundle: Bundle, *, out: Path, console: Console) -> Result:
    """Train with everything written down."""
    processes = trainer.processes
    metrics, samples = JsonLines(out / "metrics.jsonl"), JsonLines(out / "samples.jsonl")
    board = None
    if processes.is_first:
        for file in (metrics, samples):
            file.rewind(trainer.training_step)
        board = tensorboard(out / "tensorboard")

    def save(trainer: Trainer) -> None:
        state = trainer.state()
        facts = {**bundle.facts, "training_step": trainer.training_step, "tokens_seen": trainer.tokens}
        assert isinstance(trainer.ema.module, DiT)
        average = replace(bundle, model=trainer.ema.module, facts=facts)
        save_checkpoint(
            out / CHECKPOINTS,
            average,
            state.tensors,
            numbers=state.numbers,
            keep=recipe.train.keep,
            processes=processes,
        )

    with ProgressBar(console, recipe.train.steps, trainer.training_step) as bar, stop_on_signal() as stop:
        if trainer.training_step:
            bar.say(f"resuming {out} at training step {trainer.training_step} of {recipe.train.steps}")

        def report(report: Report) -> None:
            if not processes.is_first:
                return
            metrics.write(report.to_json())
            bar.report(report)
            if board is not None:
                board(report)

        def show_samples(trainer: Trainer) -> None:  # by all processes, which may share the weights
            with trainer.runtime.autocast():
                texts = sample_texts(trainer.ema.module, bundle, recipe, training_step=trainer.training_step)
            trainer.runtime.settle(trainer.ema.module)
            if not processes.is_first:
                return
            samples.write({"training_step": trainer.training_step, "steps": recipe.sample.steps, "texts": texts})
            bar.say(f"sample at step {trainer.training_step}: {' '.join(texts[0].split())[:200]}")

        others = [Every(1, bar.step)]
        if recipe.sample.every:
            others.append(Every(recipe.sample.every, show_samples))
        trainer.hooks = Hooks(save=save, report=report, others=others)
        finished = trainer.fit(stop)
    return Result(out, trainer.training_step, finished, speaks=processes.is_first)


def sample_texts(model: Any, bundle: Bundle, recipe: Recipe, *, training_step: int) -> list[str]:
    """Some texts of a model; the same noise at every training step, so that only the model changes."""
    config = recipe.sample
    noise = Noise(recipe.train.seed, range(config.num))
    x_0 = bundle.path.source.sample(noise, config.length or recipe.data.length)
    frozen = None
    if bundle.bos_id is not None:
        frozen = torch.zeros_like(x_0, dtype=torch.bool)
        frozen[:, 0], x_0[:, 0] = True, bundle.bos_id
    device = next(model.parameters()).device
    x_1 = flow.sample(
        model,
        bundle.path,
        x_0.to(device),
        grid=flow.Grid.uniform(config.steps),
        jump=flow.ExactJump(),
        noise=noise,
        frozen=None if frozen is None else frozen.to(device),
    )
    return [bundle.tokenizer.decode(row) for row in x_1.tolist()]


def _check_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".lock"
        probe.touch()
    except OSError as error:
        raise ValueError(
            f"cannot write to {out}: {error.strerror}; choose a folder you may write to with out="
        ) from error


def _check_same(file: Path, recipe: Recipe) -> None:
    """Raise if a run would go on with other data, another model or another objective than it began with."""
    if not file.exists():
        return
    for key, (old, new) in differences(load_recipe(file), recipe).items():
        if not key.startswith(_FREE):
            raise ValueError(
                f"{file.parent} was begun with {key} = {old!r}, now it is {new!r}; "
                "go on with the old value, or start another run with out=FOLDER"
            )


def _write(path: Path, text: str) -> None:
    """Write a small file beside itself, then in its place."""
    side = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with side.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        side.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; make room or choose another folder") from error
