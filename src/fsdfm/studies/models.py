"""What cells do with models: train one by a recipe, measure one; each saves on the way, and the same call resumes."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdfm.measure.evaluation import EvaluationRequest, run_evaluation
from fsdfm.measure.results import load_evaluation
from fsdfm.run import export, train
from fsdfm.studies.runner import StoppedError

__all__ = ["measure_model", "quoted", "train_model"]


def train_model(
    recipe: str | Path, overrides: Sequence[str], *, run: Path, model: Path, half: bool = False
) -> dict[str, Any]:
    """The value of a cell that trains: the run stands in `run` while it lasts, the finished model in `model`."""
    if not model.exists():
        if not train(recipe, [*overrides, f"out={quoted(run)}"], console=_silence()).finished:
            raise StoppedError
        export(run, model, half=half)
    shutil.rmtree(run, ignore_errors=True)  # its weights are the model now, the rest served to resume
    return {"model": model.name}


def measure_model(request: EvaluationRequest) -> dict[str, Any]:
    """The value of a cell that measures: a result file of `fsdfm evaluate`; its rows grow in `request.json`."""
    if not run_evaluation(request, console=_silence()).finished:
        raise StoppedError
    assert request.json is not None
    rows = Path(request.json)
    found = load_evaluation(rows).to_json()
    rows.unlink()
    return found


def quoted(path: Path) -> str:
    """A path as an override of a recipe spells it."""
    return json.dumps(str(path))


def _silence() -> Console:
    """The runner draws one progress bar for all cells."""
    return Console(file=io.StringIO())
