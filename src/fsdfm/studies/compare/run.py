"""`fsdfm study compare`: the cells of the comparison, computed by the common runner, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from fsdfm.checkpoint.embedded import find_model
from fsdfm.config import Recipe, load_recipe
from fsdfm.data import SEPARATOR
from fsdfm.files import file_sha256
from fsdfm.measure.evaluation import parse_steps
from fsdfm.measure.judges import make_judge
from fsdfm.measure.results import Evaluation
from fsdfm.studies.ablation.setting import base_facts, text_sha256
from fsdfm.studies.compare.cells import cells_of, compute_cell, measured, needed_trainings, recipe_overrides
from fsdfm.studies.compare.setting import FULL, QUICK, CompareFiles, ComparePrecision, CompareScale, CompareSetting
from fsdfm.studies.compare.systems import TRAININGS, SystemRow, chosen_variants
from fsdfm.studies.compare.tables import compare_report
from fsdfm.studies.report import StudyReport
from fsdfm.studies.runner import Study, StudyResults, run_study

__all__ = ["CompareRequest", "run_compare"]


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What a user asks for, in the words of the command line (`fsdfm study compare --help`)."""

    out: Path
    held_out: str | None
    text: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    quick: bool = False
    judge: str = "smollm2"
    steps: str | None = None
    train_steps: int | None = None
    num: int | None = None
    length: int | None = None
    seed: int = 0
    separator: str = SEPARATOR
    workers: int | None = None
    device: str = "auto"
    precision: ComparePrecision = "float32"


def run_compare(request: CompareRequest, *, console: Console | None = None) -> StudyResults:
    """Run the comparison, or resume it; Ctrl-C and SIGTERM raise `StoppedError`, and what is finished stays."""
    weights = _read_weights(request.weights)
    variants = chosen_variants(request.only, list(weights))
    files, setting = _prepare(request, variants, weights)

    def report(results: StudyResults) -> StudyReport:
        found = {v.name: Evaluation.from_json(results.of(measured(v))[0]) for v in variants}
        return compare_report(variants, found, setting)

    study = Study("compare", cells_of(variants), partial(compute_cell, files, setting), report, asdict(setting))
    return run_study(study, request.out, workers=request.workers, console=console)


def _read_weights(words: Sequence[str]) -> dict[str, str]:
    """{"mdlm": "models/mdlm"} of mdlm=models/mdlm."""
    found: dict[str, str] = {}
    for word in words:
        name, sign, folder = word.partition("=")
        if not sign or not folder or name in found:
            raise ValueError(f"--weights is {word!r:.80}; write each system once, SYSTEM=FOLDER or SYSTEM/LABEL=FOLDER")
        if not (find_model(folder) / "config.json").is_file():
            raise ValueError(f"--weights {name}: {folder} holds no config.json; import published weights first")
        found[name] = str(Path(folder).resolve()) if Path(folder).exists() else folder
    return found


def _scale(request: CompareRequest) -> CompareScale:
    """How much is done: the default or the quick one, and what the user says otherwise."""
    scale = QUICK if request.quick else FULL
    said = {name: getattr(request, name) for name in ("train_steps", "num", "length")}
    for name, value in said.items():
        if value is not None and value < 2:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed are whole numbers >= 2")
    steps = scale.steps if request.steps is None else parse_steps(request.steps)
    return replace(scale, steps=steps, **{name: value for name, value in said.items() if value is not None})


def _prepare(
    request: CompareRequest, variants: Sequence[SystemRow], weights: Mapping[str, str]
) -> tuple[CompareFiles, CompareSetting]:
    """Everything that can be wrong is found here."""
    trains = any(variant.model in TRAININGS for variant in variants)
    if request.held_out is None:
        raise ValueError("held-out text is missing; name it with --held-out FILE: without it no number has a scale")
    if trains and not request.text:
        raise ValueError("the training text is missing; name it with --text FILE, or published weights with --weights")
    for name in (*request.text, request.held_out):
        if not name.startswith(("hf:", "builtin:")) and not Path(name).exists():
            raise ValueError(f"{name} is not there; give a text file, or hf:NAME")
    scale = _scale(request)
    make_judge(request.judge)
    base = find_model("parent").resolve()
    setting = CompareSetting(
        base=base_facts(base)[1],
        text=text_sha256(request.text),
        held_out=text_sha256([request.held_out]),
        judge=Path(request.judge).name,
        seed=request.seed,
        separator=request.separator,
        weights={name: file_sha256(find_model(folder) / "config.json") for name, folder in weights.items()},
        precision=request.precision,
        **asdict(scale),
    )
    files = CompareFiles(
        folder=request.out.resolve(),
        base=base,
        text=tuple(str(Path(name).resolve()) if Path(name).exists() else name for name in request.text),
        held_out=request.held_out,
        judge=request.judge,
        device=request.device,
        separator=request.separator,
        weights=weights,
    )
    for name in needed_trainings(variants):
        _check_parts(name, load_recipe(TRAININGS[name].recipe, recipe_overrides(TRAININGS[name], files, setting)))
    return files, setting


def _check_parts(name: str, recipe: Recipe) -> None:
    """Raise where a recipe builds on a file that is not there."""
    teacher = getattr(recipe.objective, "teacher", None)
    parts = [recipe.model.causal_start, recipe.model.llama2c_tokenizer, getattr(teacher, "checkpoint", None)]
    for part in filter(None, parts):
        if not Path(part).exists():
            raise ValueError(
                f"{name} ({TRAININGS[name].recipe}) builds on {part}, which is not in this folder; put it here "
                "(docs/train.md says where it comes from), or name the other systems with --only"
            )
