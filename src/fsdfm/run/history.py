"""Recipes that runs wrote before: read as today's, so that those runs resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdfm.config import Recipe, parse, read_values

__all__ = ["read_recipe"]

_TEACHER_KEYS = ("average", "jump", "temperature", "network")
_FEW_STEP_KEYS = ("weights", "anneal_every", "mirrored")


def read_recipe(file: Path) -> Recipe:
    """The recipe that a run wrote into its folder; its plugins are not imported, only the user's own recipe's are."""
    values = read_values(file)
    _modernise(values)
    try:
        return parse(Recipe, values)
    except ValueError as error:
        raise ValueError(
            f"{file} was written by another version of fsdfm and cannot be resumed with this one ({error}); "
            "start another run with out=FOLDER, with the old one as model.parent"
        ) from error


def _modernise(values: dict[str, Any]) -> None:
    """Bring the sections of older versions, which wrote every key whether it was used or not, to today's."""
    objective, flow, model = (values.get(name, {}) for name in ("objective", "flow", "model"))
    if "path_below_h" in objective:
        _modernise_objective(objective)
        section = values.get("data", {})
        if any(_is_text_file(name) for name in section.get("inputs", ())):
            section.setdefault("separator", "")  # it was the default: the file is one document
    used = {"mask_share": flow.get("source") == "mixture"}
    used |= {"exponent": flow.get("schedule") == "polynomial", "rate": flow.get("schedule") == "exponential"}
    for key, is_used in used.items():
        if not is_used:
            flow.pop(key, None)
    if model.get("llama2c") is None:
        model.pop("min_count", None)
    if "link_rank" in model:
        model["transition_rank"] = model.pop("link_rank")


def _is_text_file(name: str) -> bool:
    return not name.startswith(("builtin:", "hf:")) and not name.endswith((".jsonl", ".ndjson", ".json", ".parquet"))


def _modernise_objective(section: dict[str, Any]) -> None:
    from_h = section.pop("path_below_h")
    teacher = {"kind": "shortcut", "tableau": section.pop("teacher", "rk4"), "from_h": from_h}
    teacher |= {key: section.pop(key) for key in _TEACHER_KEYS if key in section}
    if section.get("kind", "path") == "path":
        for key in _FEW_STEP_KEYS:
            section.pop(key, None)
        return
    if section.get("weights") != "AG":
        section.pop("anneal_every", None)
    section["teacher"] = teacher if from_h <= 1 else {"kind": "none"}
