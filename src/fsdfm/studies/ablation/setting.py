"""What all cells of a folder share: the base, the texts, the judge, how long and how much; and where things stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdfm.checkpoint import Checkpoint, describe_model, load_model
from fsdfm.checkpoint.embedded import find_model
from fsdfm.config import Recipe, load_recipe
from fsdfm.data import SEPARATOR
from fsdfm.files import file_sha256
from fsdfm.model.weights import weights_sha256

__all__ = [
    "RECIPE",
    "AblationFiles",
    "AblationSetting",
    "base_facts",
    "base_folder",
    "flow_overrides",
    "parse_recipe",
    "text_sha256",
]

RECIPE = Path(__file__).with_name("base.toml")
# What `fsdfm study ablate` decides, and why a user's override would not do what it says.
_DECIDED = ("out", "model.parent", "data.inputs", "data.corpus", "train.seed", "train.steps", "data.separator")


@dataclass(frozen=True, kw_only=True)
class AblationSetting:
    """What all cells share: cells of two settings do not compare, so a folder holds those of one.

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
    separator: str = SEPARATOR
    field: str = "text"
    overrides: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.6, 0.8)
    rounds: int = 12


@dataclass(frozen=True)
class AblationFiles:
    """Where the files of an ablation stand, and what they are made of: all that depends on the machine.

    corpus/                 the packed training text
    runs/                   a training on its way, as `fsdfm train` keeps it; rows of an evaluation that is not finished
    models/TRAINING.SEED/   a finished training: averaged weights in half precision
    cells/NAME.json         TRAINING@SETUP.SEED: a result file of `fsdfm evaluate`; TRAINING.SEED: its model is there
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

    def rows(self, name: str) -> Path:
        """A measurement on its way, a result file that grows row by row."""
        return self.folder / "runs" / f"{name}.json"


def base_folder(name: str | None) -> Path:
    """The folder of the base: one that is named, or the embedded parent."""
    return find_model(name or "parent").resolve()


def base_facts(folder: Path) -> tuple[Checkpoint, str]:
    """The base and the checksum of its weights."""
    try:
        checkpoint = load_model(folder)
    except ValueError as error:
        raise ValueError(f"--base: {error}") from error
    return checkpoint, weights_sha256(checkpoint.model)


def text_sha256(inputs: Sequence[str]) -> str:
    """What a list of texts says of itself: checksums of files, names of anything else."""
    return " ".join(file_sha256(Path(name)) if Path(name).is_file() else name for name in inputs)


def flow_overrides(checkpoint: Checkpoint) -> list[str]:
    """[flow] as a model has it."""
    config = describe_model(checkpoint)
    source, schedule = dict(config["source"]), dict(config["schedule"])
    values = {"source": source["name"], "schedule": schedule.pop("name"), **schedule}
    if "mask_share" in source:
        values["mask_share"] = source["mask_share"]
    return [f"flow.{key}={value}" for key, value in values.items()]


def parse_recipe(overrides: Sequence[str]) -> Recipe:
    """base.toml with some values replaced; what `fsdfm study ablate` decides itself is refused."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in _DECIDED or key.startswith("flow."):
            raise ValueError(f"{key} is decided by the options of fsdfm study ablate and by the factor; leave it out")
    return load_recipe(RECIPE, overrides)
