"""What all cells of a folder share: the base, the texts, the judge, how long and how much; and where things stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdfm.checkpoint import Checkpoint, describe_model, load_model
from fsdfm.checkpoint.embedded import find_model
from fsdfm.config import Recipe, load_recipe
from fsdfm.files import file_sha256, write_json
from fsdfm.model.weights import weights_sha256

__all__ = ["RECIPE", "Place", "Setting", "base_folder", "flow_overrides", "parse_recipe"]

RECIPE = Path(__file__).with_name("base.toml")
# What `fsdfm ablate` decides, and why a user's override would not do what it says.
_DECIDED = ("out", "model.parent", "data.inputs", "data.corpus", "train.seed", "train.steps", "data.separator")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: cells of two do not compare, so a folder holds those of one.

    base, text, held_out   checksums: what they say, not where they stand
    held_out, judge        None: the factor needs none, and has no say in them
    overrides              values of base.toml that a user has changed
    temperatures           at which the base is also sampled, to see what cooling alone gains
    """

    base: str
    text: str
    held_out: str | None
    judge: str | None
    steps: tuple[int, ...]
    train_steps: int
    num: int
    length: int
    overrides: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.6, 0.8)
    rounds: int = 12

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it: tuples are lists."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found


@dataclass(frozen=True)
class Place:
    """Where the files of an ablation stand, and what they are made of: all that depends on the machine.

    setting.json            the setting of all cells
    corpus/                 the packed training text
    runs/TRAINING.SEED/     a training on its way, as `fsdfm train` keeps it
    models/TRAINING.SEED/   a finished one: averaged weights in half precision
    cells/NAME.json         a variant and a seed, a result file of `fsdfm evaluate`; NAME is TRAINING@SETUP.SEED
    FACTOR/                 ablation.md, ablation.json and figure.png
    """

    folder: Path
    base: Path
    text: tuple[str, ...]
    held_out: str | None
    separator: str
    field: str
    judge: str | None
    device: str = "auto"

    @property
    def corpus(self) -> Path:
        """The packed training text."""
        return self.folder / "corpus"

    @property
    def masked(self) -> Path:
        """The base with one token more."""
        return self.folder / "models" / "base+mask"

    def run(self, training: str, seed: int) -> Path:
        """A training on its way."""
        return self.folder / "runs" / f"{training}.{seed}"

    def model(self, training: str, seed: int) -> Path:
        """A finished training."""
        return self.folder / "models" / f"{training}.{seed}"

    def cell(self, name: str) -> Path:
        """A cell's file."""
        return self.folder / "cells" / f"{name}.json"

    def claim(self, setting: Setting) -> None:
        """Make the folder the setting's own, or raise for one that holds cells of another."""
        file = self.folder / "setting.json"
        found: dict[str, Any] = {}
        if file.exists():
            try:
                found = json.loads(file.read_text())
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{file} cannot be read ({error}); remove the folder, or choose another --out"
                ) from error
        said = {key: value for key, value in setting.to_json().items() if value is not None}
        for key, value in said.items():
            if found.get(key, value) != value:
                raise ValueError(
                    f"{self.folder} holds cells of another setting: {key} was {_short(found[key])}, now it is "
                    f"{_short(value)}; give the old one, or another --out"
                )
        write_json(file, {**found, **said})


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:18] + "…"


def base_folder(name: str | None) -> Path:
    """The folder of the base: one that is named, or the embedded parent."""
    return find_model(name or "parent").resolve()


def base_facts(folder: Path) -> tuple[Checkpoint, str]:
    """The base and the checksum of its weights."""
    try:
        bundle = load_model(folder)
    except ValueError as error:
        raise ValueError(f"--base: {error}") from error
    return bundle, weights_sha256(bundle.model)


def text_sha256(inputs: Sequence[str]) -> str:
    """What a list of texts says of itself: checksums of files, names of anything else."""
    return " ".join(file_sha256(Path(name)) if Path(name).is_file() else name for name in inputs)


def flow_overrides(bundle: Checkpoint) -> list[str]:
    """[flow] as a model has it."""
    config = describe_model(bundle)
    source, schedule = dict(config["source"]), dict(config["schedule"])
    values = {"source": source["name"], "schedule": schedule.pop("name"), **schedule}
    if "mask_share" in source:
        values["mask_share"] = source["mask_share"]
    return [f"flow.{key}={value}" for key, value in values.items()]


def parse_recipe(overrides: Sequence[str]) -> Recipe:
    """base.toml with some values replaced; what `fsdfm ablate` decides itself is refused."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _DECIDED or key.startswith("flow."):
            raise ValueError(f"{key} is decided by the options of fsdfm ablate and by the factor; leave it out")
    return load_recipe(RECIPE, overrides)
