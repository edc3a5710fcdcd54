"""`fsdfm study ablate`: the cells of one factor, computed by the common runner, and its table with verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from fsdfm.data import SEPARATOR
from fsdfm.flow import UniformSource
from fsdfm.measure.evaluation import parse_steps
from fsdfm.measure.judges import make_judge
from fsdfm.measure.results import Evaluation
from fsdfm.show.plots import require_plots
from fsdfm.studies.ablation.cells import cell_variant, cells_of, compute_cell
from fsdfm.studies.ablation.factors import Factor, Variant, find_factor
from fsdfm.studies.ablation.setting import (
    AblationFiles,
    AblationSetting,
    base_facts,
    base_folder,
    parse_recipe,
    text_sha256,
)
from fsdfm.studies.ablation.summary import AblationScores, Verdict, verdicts
from fsdfm.studies.ablation.tables import AblationTables, ablation_report
from fsdfm.studies.ablation.timing import timing_cells
from fsdfm.studies.report import StudyReport
from fsdfm.studies.runner import Study, StudyResults, require_seeds, run_study

__all__ = ["AblationOutcome", "AblationRequest", "run_ablation"]


@dataclass(frozen=True, kw_only=True)
class AblationRequest:
    """What a user asks for, in the words of the command line (`fsdfm study ablate --help`)."""

    factor: str
    out: Path
    text: tuple[str, ...]
    held_out: str | None
    overrides: tuple[str, ...] = ()
    base: str | None = None
    judge: str = "smollm2"
    seeds: int = 3
    steps: str = "1,2,4,8"
    train_steps: int | None = None
    num: int = 32
    separator: str = SEPARATOR
    field: str = "text"
    full: bool = False
    workers: int | None = None
    device: str = "auto"


@dataclass(frozen=True)
class AblationOutcome:
    """What came of it."""

    report: Path
    markdown: str
    verdicts: tuple[Verdict, ...]


def run_ablation(request: AblationRequest, *, console: Console | None = None) -> AblationOutcome:
    """Run one factor's table, or resume it; Ctrl-C and SIGTERM raise `StoppedError`, and what is finished stays."""
    factor = find_factor(request.factor)
    files, setting = _prepare(request, factor)
    variants, timed = factor.chosen(full=request.full), factor.kind == "time"

    def tables(results: StudyResults) -> AblationTables:
        scores = read_scores(factor, variants, results, steps=setting.steps)
        found = verdicts(factor, scores, variants)
        return AblationTables(factor, variants, scores, found, setting, request.seeds)

    def report(results: StudyResults) -> StudyReport:
        return ablation_report(tables(results))

    study = Study(
        "ablation",
        (timing_cells if timed else cells_of)(variants, request.seeds),
        partial(compute_cell, files, setting),
        report,
        asdict(setting),
        part=factor.name,
    )
    results = run_study(study, files.folder, workers=1 if timed else request.workers, console=console)
    written = files.folder / factor.name / "ablation.md"
    return AblationOutcome(written, written.read_text(encoding="utf-8"), tuple(tables(results).verdicts))


# --- before the first step --------------------------------------------------------------------------------------------


def _prepare(request: AblationRequest, factor: Factor) -> tuple[AblationFiles, AblationSetting]:
    """Everything that can be wrong is found here."""
    _check(request, factor)
    recipe, steps = parse_recipe(request.overrides), parse_steps(request.steps)
    base = base_folder(request.base)
    checkpoint, weights = base_facts(base)
    if factor.name == "source" and type(checkpoint.path.source) is not UniformSource:
        raise ValueError(
            f"--base has the source {checkpoint.path.source}; to compare sources give a model of the uniform one"
        )
    length = recipe.data.length
    if not any(override.startswith("data.length") for override in request.overrides):
        length = min(length, checkpoint.length)
    timed = factor.kind == "time"
    setting = AblationSetting(
        base=weights,
        text=text_sha256(request.text),
        held_out=None if request.held_out is None or timed else text_sha256([request.held_out]),
        judge=None if timed else _public_judge(request.judge),
        steps=steps,
        train_steps=recipe.train.steps if request.train_steps is None else request.train_steps,
        num=request.num,
        length=length,
        separator=request.separator,
        field=request.field,
        overrides=request.overrides,
    )
    files = AblationFiles(
        folder=request.out.resolve(),
        base=base,
        text=tuple(name if _is_named(name) else str(Path(name).resolve()) for name in request.text),
        **{name: getattr(request, name) for name in ("held_out", "separator", "field", "judge", "device")},
    )
    return files, setting


def _check(request: AblationRequest, factor: Factor) -> None:
    """Raise for what can be told from the words alone."""
    require_seeds(request.seeds, least=2)
    if request.num < 2:
        raise ValueError(f"--num is {request.num}; allowed are 2 samples and more: one has no interval")
    if request.train_steps is not None and request.train_steps < 1:
        raise ValueError(f"--train-steps is {request.train_steps}; allowed are whole numbers >= 1")
    if not request.text:
        raise ValueError("the training text is missing; name it with --text FILE")
    if request.held_out is None and factor.kind != "time":
        raise ValueError("held-out text is missing; name it with --held-out FILE: without it no number has a scale")
    for name in filter(None, (*request.text, request.held_out)):
        if not _is_named(name) and not Path(name).exists():
            raise ValueError(f"{name} is not there; give a text file, or hf:NAME")
    if factor.figure is not None:
        require_plots()
    if factor.kind != "time":
        make_judge(request.judge)


def _is_named(text: str) -> bool:
    """Whether a text is somewhere else than in a file."""
    return text.startswith(("hf:", "builtin:"))


def _public_judge(name: str) -> str:
    """A judge without the folders of somebody's machine."""
    kind, colon, file = name.rpartition(":")
    return f"{kind}{colon}{Path(file).name}" if Path(file).exists() else name


# --- the numbers ------------------------------------------------------------------------------------------------------


def read_scores(
    factor: Factor, variants: Sequence[Variant], results: StudyResults, *, steps: tuple[int, ...]
) -> AblationScores:
    """The numbers of all cells, by variant and seed."""
    scores = AblationScores(steps)
    for variant in variants:
        if factor.kind == "time":
            assert variant.training is not None
            for seed, value in enumerate(results.of("time")):
                scores.add_times(variant.label, seed, value["rounds"][variant.training.name])
            continue
        for seed, value in enumerate(results.of(cell_variant(variant.training, variant.setup))):
            scores.add(variant.label, seed, Evaluation.from_json(value))
    return scores
