"""Checkpoints: one folder that says all about itself, written beside its place, synced, and renamed into it.

step-0000001000/
  config.json           format version, network, source, schedule, budgets, length, tokenizer, step, commit
  model.safetensors     the averaged weights: what a user wants
  tokenizer.json        the tokenizer
  README.md             the model card, free to be edited
  training.safetensors  the weights as trained and the optimiser's moments  } only in a run's own
  training.json         training step, next sample                          } checkpoints
  checksums.json        size and SHA-256 of every file above except README.md

bundle = load_model("runs/tiny-dfm")  # a run's folder, or one of its checkpoints
bundle.model, bundle.path, bundle.tokenizer, bundle.length
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdfm import flow
from fsdfm.data import Tokenizer
from fsdfm.model import DiT, ModelConfig
from fsdfm.runtime import commit, versions

__all__ = [
    "FORMAT_VERSION",
    "SCHEDULES",
    "SOURCES",
    "Bundle",
    "load_model",
    "load_training",
    "make_schedule",
    "make_source",
    "newest",
    "recover",
    "save_checkpoint",
    "save_model",
]

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints
_CONFIG, _WEIGHTS, _TOKENIZER, _CARD = "config.json", "model.safetensors", "tokenizer.json", "README.md"
_MOMENTS, _NUMBERS, _CHECKSUMS = "training.safetensors", "training.json", "checksums.json"
_UNFINISHED, _TRASH, _DAMAGED = ".unfinished", ".trash", ".damaged"
_SYSTEM_ERRORS = (OSError, SafetensorError)

SOURCES: dict[str, type[flow.Source]] = {
    "uniform": flow.UniformSource,
    "mask": flow.MaskSource,
    "mixture": flow.MixtureSource,
}
SCHEDULES: dict[str, type[flow.Schedule]] = {
    "polynomial": flow.PolynomialSchedule,
    "cosine": flow.CosineSchedule,
    "exponential": flow.ExponentialSchedule,
}


def make_source(spec: Mapping[str, Any]) -> flow.Source:
    """The source that a mapping describes: `{"name": "mixture", "vocab_size": 257, "mask_share": 0.5}`."""
    options = {key: value for key, value in spec.items() if key not in ("name", "mask_token")}
    source: flow.Source = _pick(SOURCES, "source", spec)(**options)
    return source


def make_schedule(spec: Mapping[str, Any]) -> flow.Schedule:
    """The schedule that a mapping describes: `{"name": "polynomial", "exponent": 1.0}`."""
    options = {key: value for key, value in spec.items() if key != "name"}
    schedule: flow.Schedule = _pick(SCHEDULES, "schedule", spec)(**options)
    return schedule


def _pick(known: Mapping[str, Callable[..., Any]], what: str, spec: Mapping[str, Any]) -> Callable[..., Any]:
    if spec.get("name") not in known:
        raise ValueError(f"{what} is {spec.get('name')!r}; allowed are {', '.join(known)}")
    return known[spec["name"]]


def _describe(known: Mapping[str, type], thing: object) -> dict[str, Any]:
    name = next((name for name, kind in known.items() if type(thing) is kind), None)
    if name is None:
        raise ValueError(f"{thing!r} has no name in checkpoints; allowed are {', '.join(known)}")
    return {"name": name, **vars(thing)}


@dataclass(frozen=True)
class Bundle:
    """A model and what it needs to be used.

    length    tokens of the blocks it was trained on
    bos_id    the token that stands, given and frozen, at position 0 of a next-token model; None: there is none
    budgets   the numbers of steps it was trained for; None: it does not know its step size
    facts     anything else that a reader may want to know: objective, training step, commit, versions
    loaded    what loading did, in one sentence
    """

    model: DiT
    path: flow.Path
    tokenizer: Tokenizer
    length: int
    bos_id: int | None = None
    budgets: tuple[int, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    loaded: str = ""


# --- writing ----------------------------------------------------------------------------------------------------------


def save_model(folder: str | Path, bundle: Bundle, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model for others to use; `dtype=torch.float16` halves it. The folder must be new or empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; choose another folder, or delete it")
    with _aside(folder) as side:
        _write_model(side, bundle, dtype)
        _write_checksums(side)
    return folder


def save_checkpoint(
    folder: Path, bundle: Bundle, tensors: Mapping[str, Tensor], *, numbers: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a run's checkpoint into `folder` and drop all but the last `keep`; on failure nothing saved is lost.

    tensors, numbers   the training state beyond the averaged weights; `numbers` holds the `training_step`
    """
    place = folder / f"step-{numbers['training_step']:010d}"
    with _aside(place) as side:
        _write_model(side, bundle, torch.float32)
        _write_tensors(side / _MOMENTS, tensors, torch.float32)
        _write_text(side / _NUMBERS, json.dumps(dict(numbers), indent=2) + "\n")
        _write_checksums(side)
    for old in _steps(folder)[:-keep]:
        _remove(old)
    return place


@contextmanager
def _aside(place: Path) -> Iterator[Path]:
    """A folder to fill, which at the end is in `place` as a whole, or not at all."""
    side = place.with_name(place.name + _UNFINISHED)
    try:
        _remove(side)
        side.mkdir(parents=True)
        yield side
        _sync(side)
        if place.exists():
            _remove(place)
        side.replace(place)
        _sync(place.parent)
    except _SYSTEM_ERRORS as error:
        shutil.rmtree(side, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(
            f"cannot write {place}: {reason}; what was saved before is untouched: make room or choose a folder "
            "you may write to, and run again"
        ) from error
    except BaseException:
        shutil.rmtree(side, ignore_errors=True)
        raise


def _remove(folder: Path) -> None:
    """Delete a folder so that no half of it is ever found under its name."""
    if not folder.exists():
        return
    trash = folder.with_name(folder.name + _TRASH)
    shutil.rmtree(trash, ignore_errors=True)
    folder.replace(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _write_model(folder: Path, bundle: Bundle, dtype: torch.dtype) -> None:
    config = {
        "format": "fsdfm",
        "format_version": FORMAT_VERSION,
        "model": bundle.model.config.to_dict(),
        "num_parameters": sum(p.numel() for p in bundle.model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "source": _describe(SOURCES, bundle.path.source),
        "schedule": _describe(SCHEDULES, bundle.path.schedule),
        "length": bundle.length,
        "budgets": None if bundle.budgets is None else list(bundle.budgets),
        "bos_id": bundle.bos_id,
        "tokenizer": bundle.tokenizer.hash,
        **{"commit": commit(), "versions": versions(), **bundle.facts},
    }
    _write_tensors(folder / _WEIGHTS, bundle.model.state_dict(), dtype)
    _write_text(folder / _CONFIG, json.dumps(config, indent=2) + "\n")
    _write_text(folder / _TOKENIZER, bundle.tokenizer.definition)
    _write_text(folder / _CARD, _card(config))


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    stored = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype).contiguous()
        for name, value in tensors.items()
    }
    save_file(stored, path, metadata={"format": "pt"})
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _write_checksums(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.name != _CARD)
    sums = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    _write_text(folder / _CHECKSUMS, json.dumps(sums, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def _card(config: Mapping[str, Any]) -> str:
    network, source, schedule = config["model"], config["source"], config["schedule"]
    budgets = config["budgets"]
    steps = f"trained for {', '.join(map(str, budgets))} steps" if budgets else "takes any number of steps, best many"
    rows = {
        "Parameters": f"{config['num_parameters']:,} ({config['dtype']}), the moving average of the training",
        "Network": f"{network['num_blocks']} blocks of width {network['width']}, {network['num_heads']} heads",
        "Source": json.dumps(source),
        "Schedule": json.dumps(schedule),
        "Length": f"{config['length']} tokens",
        "Steps": steps,
        "Tokenizer": f"`tokenizer.json`, hash {config['tokenizer'][:12]}",
        "Objective": json.dumps(config.get("objective")),
        "Data": json.dumps(config.get("data")),
        "Trained": f"{config.get('training_step', '?')} training steps",
        "Made by": f"fsdfm {config['versions']['fsdfm']}, commit {config['commit'][:12]}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "# A discrete flow matching language model\n\n"
        "It writes all positions of a text at once, in a few steps from noise to text.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        "It says what its training data made likely; nothing it writes is checked for truth or harm.\n"
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def load_model(folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Bundle:
    """The model in a folder, ready for use: every tensor checked, none missing, none left over.

    `folder` is a checkpoint, or a run, whose newest whole checkpoint is taken.
    """
    place, problems = _resolve(Path(folder))
    if (problem := damage(place, (_WEIGHTS, _TOKENIZER))) is not None:
        raise ValueError(f"{problem}; get it again")
    config = _read_config(place)
    tokenizer = Tokenizer.load(place / _TOKENIZER)
    if tokenizer.hash != config["tokenizer"]:
        raise ValueError(f"{place / _TOKENIZER} is not the tokenizer that {_CONFIG} names; get the checkpoint again")
    with torch.device("meta"):
        model = DiT(ModelConfig.from_dict(config["model"]))
    tensors = _read_tensors(place / _WEIGHTS)
    _check_names(place, {name: value.shape for name, value in model.state_dict().items()}, tensors)
    model.load_state_dict({name: value.to(device, dtype) for name, value in tensors.items()}, assign=True)
    known = {"format", "format_version", "model", "source", "schedule", "length", "budgets", "bos_id", "tokenizer"}
    return Bundle(
        model=model.eval(),
        path=flow.Path(make_source(config["source"]), make_schedule(config["schedule"])),
        tokenizer=tokenizer,
        length=config["length"],
        bos_id=config["bos_id"],
        budgets=None if config["budgets"] is None else tuple(config["budgets"]),
        facts={key: value for key, value in config.items() if key not in known},
        loaded="; ".join(
            [
                *problems,
                f"loaded {len(tensors)} of {len(tensors)} tensors, {config['num_parameters']:,} parameters "
                f"({config['dtype']}, averaged weights, training step {config.get('training_step', '?')}) from {place}",
            ]
        ),
    )


def load_training(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and numbers of the training state in a checkpoint that `newest` found whole."""
    if not (folder / _MOMENTS).exists():
        raise ValueError(f"{folder} holds a model but no training state; name it as model.parent to train it further")
    return _read_tensors(folder / _MOMENTS), json.loads((folder / _NUMBERS).read_text("utf-8"))


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The last whole checkpoint in a folder of checkpoints, and a sentence on each later one that is damaged."""
    problems: list[str] = []
    for place in reversed(_steps(folder)):
        if (problem := damage(place)) is None:
            return place, problems
        problems.append(problem)
    if problems:
        raise ValueError(f"no checkpoint in {folder} is whole ({'; '.join(problems)}); delete it to start anew")
    return None, []


def recover(folder: Path) -> tuple[Path | None, list[str]]:
    """`newest`, after which damaged checkpoints are set aside as NAME.damaged and unfinished ones are gone."""
    for rest in [*folder.glob(f"*{_UNFINISHED}"), *folder.glob(f"*{_TRASH}")]:
        shutil.rmtree(rest, ignore_errors=True)
    place, problems = newest(folder)
    for later in _steps(folder):
        if place is not None and later.name > place.name:
            aside = later.with_name(later.name + _DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            later.replace(aside)
    return place, problems


def damage(folder: Path, files: Sequence[str] = ()) -> str | None:
    """What is wrong with a checkpoint, or nothing; one of a newer format is an error, not damage.

    Only the files named are read, or all of them if there is no name.
    """
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text("utf-8"))
        for name in (_CONFIG, *(files or sums)):
            path = folder / name
            if path.stat().st_size != sums[name]["bytes"]:
                return f"{path} is damaged: it has {path.stat().st_size} bytes, not {sums[name]['bytes']}"
            if _sha256(path) != sums[name]["sha256"]:
                return f"{path} is damaged: its content is not what was written"
            if name == _CONFIG:
                _read_config(folder)
    except FileNotFoundError as error:
        return f"{folder} is not a whole checkpoint: {Path(error.filename).name} is missing"
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        return f"{folder} is damaged: {_CHECKSUMS} cannot be used ({error})"
    return None


def _resolve(folder: Path) -> tuple[Path, list[str]]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name a checkpoint, or a run that has one")
    if (folder / _CONFIG).exists():
        return folder, []
    place, problems = newest(folder / CHECKPOINTS)
    if place is None:
        raise ValueError(f"{folder} holds no checkpoint; train it first, or name another folder")
    return place, problems


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal())


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / _CONFIG).read_text("utf-8"))
    version = config.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{folder} has checkpoint format {version}; this program reads up to {FORMAT_VERSION}: update fsdfm"
        )
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except _SYSTEM_ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}; get it again") from error


def _check_names(place: Path, expected: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{place / _WEIGHTS} does not fit its {_CONFIG}: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}; get it again"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ValueError(f"{place / _WEIGHTS}: {name} has shape {tuple(found[name].shape)}, not {tuple(shape)}")
