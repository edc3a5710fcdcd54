"""Checkpoints: one folder that says all about itself, written beside its place, synced, and renamed into it.

step-0000001000/
  config.json           format version, network, source, schedule, budgets, length, tokenizer, step, commit
  model.safetensors     the averaged weights: what a user wants
  tokenizer.json        the tokenizer
  README.md             the model card, free to be edited
  training.safetensors  the weights as trained and the optimiser's moments  } only in a run's own
  training.json         training step, next sample                          } checkpoints
  *.distcp, .metadata   in place of training.safetensors where processes share the weights: each wrote its part
  checksums.json        size and SHA-256 of every file above except README.md

checkpoint = load_model("runs/tiny-dfm")  # a run's folder, or one of its checkpoints
checkpoint.model, checkpoint.path, checkpoint.tokenizer, checkpoint.length
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdfm import flow
from fsdfm.checkpoint.embedded import find_model, name_of
from fsdfm.data import Tokenizer
from fsdfm.files import file_sha256, read_text, sync
from fsdfm.model import (
    Network,
    NetworkConfig,
    Transformer,
    architecture_of,
    find_architecture,
    to_bfloat16,
    to_int8,
)
from fsdfm.model.filling import Precision, fill_network
from fsdfm.runtime import ALONE, Processes, commit, is_sharded, load_shards, placed, save_shards, versions

__all__ = [
    "FORMAT_VERSION",
    "SCHEDULES",
    "SOURCES",
    "Checkpoint",
    "check_new",
    "describe_model",
    "load_model",
    "load_training",
    "make_schedule",
    "make_source",
    "newest",
    "recover",
    "require_finite",
    "save_checkpoint",
    "save_model",
]

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints
_CONFIG, _WEIGHTS, _TOKENIZER, _CARD = "config.json", "model.safetensors", "tokenizer.json", "README.md"
_MOMENTS, _NUMBERS, _CHECKSUMS = "training.safetensors", "training.json", "checksums.json"
_SHARDS = ".metadata"  # the index of a training state that several processes wrote
_UNFINISHED, _TRASH, _DAMAGED = ".unfinished", ".trash", ".damaged"
_SYSTEM_ERRORS = (OSError, SafetensorError)
_LARGEST_TEXT = {
    _CHECKSUMS: 2**20,
    _CONFIG: 2**20,
    _NUMBERS: 2**20,
    _TOKENIZER: 2**28,
}  # bytes; a mangled file has more
_LARGEST_HEADER = 2**24  # of a safetensors file
_LONGEST = 2**20  # tokens that a model may say it was trained on: generation makes room for them
_MOST_STEPS = 2**20  # that it may say it was trained for
_AVERAGED = "averaged weights"  # what is stored unless a checkpoint's facts say otherwise
_RENAMED_KEYS = {"link_rank": "transition_rank"}  # in config.json of earlier checkpoints
_RENAMED_TENSORS = {"link_tables.": "joint."}
_DTYPES = {  # safetensors' names
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

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
    options = {key: value for key, value in spec.items() if key != "name" and (key, value) != ("mask_token", None)}
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
class Checkpoint:
    """A model and what it needs to be used.

    length    tokens of the blocks it was trained on
    bos_id    the token that stands, given and frozen, at position 0 of a next-token model; None: there is none
    budgets   the numbers of steps it was trained for; None: it does not know its step size
    facts     anything else that a reader may want to know: objective, training step, commit, versions
    loaded    what loading did, in one sentence
    """

    model: Network
    path: flow.MixturePath
    tokenizer: Tokenizer
    length: int
    bos_id: int | None = None
    budgets: tuple[int, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    loaded: str = ""

    def __post_init__(self) -> None:
        if self.budgets is not None and not _are_budgets(self.budgets):
            raise ValueError(
                f"budgets is {self.budgets!r:.80}; allowed are whole numbers from 1 to {_MOST_STEPS}, at least one, or "
                "None for a model that does not know its step size"
            )


# --- writing ----------------------------------------------------------------------------------------------------------


def save_model(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a model for others to use; `dtype=torch.float16` halves it. The folder must be new or empty.

    tensors   the weights where the checkpoint's model has only their shapes (is on the meta device): taken one by one
    """
    folder = Path(folder)
    check_new(folder)
    with _aside(folder) as side:
        _write_model(side, checkpoint, dtype, tensors=tensors)
        _write_checksums(side)
    return folder


def check_new(folder: Path) -> None:
    """Raise where `save_model` would write over something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; choose another folder, or delete it")


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    *,
    numbers: Mapping[str, Any],
    keep: int = 2,
    processes: Processes = ALONE,
) -> Path:
    """Write a run's checkpoint into `folder` and drop all but the last `keep`; on failure nothing saved is lost.

    tensors, numbers   the training state beyond the averaged weights; `numbers` holds the `training_step`
    processes          all of them call this; each writes its share of the state, the first everything else
    """
    place = folder / f"step-{numbers['training_step']:010d}"
    sharded = any(is_sharded(value) for value in tensors.values())
    weights = processes.whole(checkpoint.model.state_dict())
    with _aside(place, processes) as side:
        if sharded:
            save_shards(side, tensors, processes)

        def write() -> None:
            _write_model(side, checkpoint, torch.float32, tensors=weights)
            if not sharded:
                _write_tensors(side / _MOMENTS, tensors, torch.float32)
            _write_text(side / _NUMBERS, json.dumps(dict(numbers), indent=2) + "\n")

        processes.on_rank0(write)
        _write_checksums(side, processes)

    def tidy() -> None:
        for old in _steps(folder)[:-keep]:
            _remove(old)

    processes.on_rank0(tidy)
    return place


@contextmanager
def _aside(place: Path, processes: Processes = ALONE) -> Iterator[Path]:
    """A folder to fill, which at the end is in `place` as a whole, or not at all."""
    side = place.with_name(place.name + _UNFINISHED)

    def make() -> None:
        _remove(side)
        side.mkdir(parents=True)

    def finish() -> None:
        sync(side)
        if place.exists():
            _remove(place)
        side.replace(place)
        sync(place.parent)

    try:
        processes.on_rank0(make)
        yield side
        processes.on_rank0(finish)
    except _SYSTEM_ERRORS as error:
        _clear(side, processes)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(
            f"cannot write {place}: {reason}; what was saved before is untouched: make room or choose a folder "
            "you may write to, and run again"
        ) from error
    except BaseException:
        _clear(side, processes)
        raise


def _clear(side: Path, processes: Processes) -> None:
    if processes.is_rank0:
        shutil.rmtree(side, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Delete a folder so that no half of it is ever found under its name."""
    if not folder.exists():
        return
    trash = folder.with_name(folder.name + _TRASH)
    shutil.rmtree(trash, ignore_errors=True)
    folder.replace(trash)
    shutil.rmtree(trash, ignore_errors=True)


def describe_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What config.json says of a model whose weights are stored as `dtype`."""
    return {
        "format": "fsdfm",
        "format_version": FORMAT_VERSION,
        "architecture": architecture_of(checkpoint.model.config),
        "model": checkpoint.model.config.to_dict(),
        "num_parameters": sum(p.numel() for p in checkpoint.model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "source": _describe(SOURCES, checkpoint.path.source),
        "schedule": _describe(SCHEDULES, checkpoint.path.schedule),
        "length": checkpoint.length,
        "budgets": None if checkpoint.budgets is None else list(checkpoint.budgets),
        "bos_id": checkpoint.bos_id,
        "tokenizer": checkpoint.tokenizer.hash,
        **{"commit": commit(), "versions": versions(), **checkpoint.facts},
    }


def _write_model(
    folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    config = describe_model(checkpoint, dtype)
    _write_tensors(folder / _WEIGHTS, checkpoint.model.state_dict(), dtype, tensors=tensors)
    _write_text(folder / _CONFIG, json.dumps(config, indent=2) + "\n")
    _write_text(folder / _TOKENIZER, checkpoint.tokenizer.definition)
    _write_text(folder / _CARD, _card(config))


def _write_tensors(
    path: Path, shapes: Mapping[str, Tensor], dtype: torch.dtype, *, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write a safetensors file of the tensors of these shapes, one after the other: a lazy mapping is read once."""
    types = {name: dtype if value.is_floating_point() else value.dtype for name, value in shapes.items()}
    order = sorted(
        shapes, key=lambda name: (-types[name].itemsize, name)
    )  # every tensor begins at a multiple of its size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + shapes[name].numel() * types[name].itemsize
        header[name] = {"dtype": _DTYPES[types[name]], "shape": list(shapes[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            value = (shapes if tensors is None else tensors)[name].detach().to("cpu", types[name])
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def _write_checksums(folder: Path, processes: Processes = ALONE) -> None:
    names = processes.on_rank0(lambda: sorted(path.name for path in folder.iterdir() if path.name != _CARD))

    def checksum(name: str) -> dict[str, Any]:
        return {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}

    sums = dict(zip(names, processes.map(checksum, names), strict=True))
    processes.on_rank0(lambda: _write_text(folder / _CHECKSUMS, json.dumps(sums, indent=2) + "\n"))


def _card(config: Mapping[str, Any]) -> str:
    network, source, schedule = config["model"], config["source"], config["schedule"]
    budgets = config["budgets"]
    steps = f"trained for {', '.join(map(str, budgets))} steps" if budgets else "takes any number of steps, best many"
    rows = {
        "Parameters": f"{config['num_parameters']:,} ({config['dtype']}), {config.get('weights', _AVERAGED)}",
        "Network": _network_row(config["architecture"], network),
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
    if "imported" in config:
        rows["Imported"] = "from `{file}` ({group}), SHA-256 `{sha256}`".format(**config["imported"])
        rows["Licence"] = "that of the weights; it came with them, not with fsdfm"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "# A discrete flow matching language model\n\n"
        "It writes all positions of a text at once, in a few steps from noise to text.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        "It says what its training data made likely; nothing it writes is checked for truth or harm.\n"
    )


def _network_row(architecture: str, network: Mapping[str, Any]) -> str:
    if {"num_blocks", "width", "num_heads"} <= set(network):
        return f"{network['num_blocks']} blocks of width {network['width']}, {network['num_heads']} heads"
    return f"{architecture}: " + ", ".join(f"{name} {value}" for name, value in network.items())


# --- reading ----------------------------------------------------------------------------------------------------------


def load_model(
    folder: str | Path | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "float32",
) -> Checkpoint:
    """The model in a folder, ready for use: every tensor checked, none missing, none left over.

    folder      a checkpoint; a run, whose newest whole checkpoint is taken; or the name of an embedded model; None: the
                best embedded one
    precision   bfloat16 and int8, on a CPU, hold the products' weights so; a plain transformer is filled part by part
                and never stands in memory as float32
    """
    place, problems = _resolve(find_model(folder))
    if (problem := damage(place, (_WEIGHTS, _TOKENIZER))) is not None:
        raise ValueError(f"{problem}; get it again")
    try:
        checkpoint, tensors = _read(place, problems)
    except (KeyError, TypeError, AttributeError, StopIteration, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{place} cannot be used: its {_CONFIG} or {_TOKENIZER} is not what fsdfm writes ({error!r:.200}); "
            "get it again"
        ) from error
    if precision != "float32" and isinstance(checkpoint.model, Transformer):
        fill_network(checkpoint.model, tensors, precision)
        return checkpoint
    checkpoint.model.load_state_dict({name: value.to(device, dtype) for name, value in tensors.items()}, assign=True)
    if precision != "float32":
        require_finite(checkpoint.model)
        (to_int8 if precision == "int8" else to_bfloat16)(checkpoint.model)
    return checkpoint


def require_finite(model: Network) -> None:
    """Raise if a weight is NaN or infinite: the model could only write nonsense."""
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the weights {name} hold NaN or infinity; the checkpoint is spoilt: take an earlier one")


class _StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read and checked when it is asked for."""

    def __init__(self, place: Path, stored: Mapping[str, str], shapes: Mapping[str, torch.Size]):
        self._place, self._stored, self._shapes = place, stored, shapes

    def __getitem__(self, name: str) -> Tensor:
        with _open_tensors(self._place / _WEIGHTS) as file:
            return _take(self._place, file, self._stored[name], shape=self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _read(place: Path, problems: list[str]) -> tuple[Checkpoint, Mapping[str, Tensor]]:
    """What a checkpoint holds, its model still without weights, and the weights."""
    config = _read_config(place)
    tokenizer = Tokenizer.load(place / _TOKENIZER)
    if tokenizer.hash != config["tokenizer"]:
        raise ValueError(f"{place / _TOKENIZER} is not the tokenizer that {_CONFIG} names; get the checkpoint again")
    path = flow.MixturePath(make_source(config["source"]), make_schedule(config["schedule"]))
    architecture = find_architecture(config.get("architecture", "dit"))
    network = architecture.read({_RENAMED_KEYS.get(key, key): value for key, value in config["model"].items()})
    _check_numbers(place, config, network, path=path)
    with _open_tensors(place / _WEIGHTS) as file:
        stored = {_present_name(name): name for name in file.keys()}  # noqa: SIM118 (not a dict)
        names = set(stored)
        blocks = getattr(network, "num_blocks", 0)
        if blocks > len(names):  # before a million empty blocks are built
            raise ValueError(f"{place / _WEIGHTS} has {len(names)} tensors, too few for {blocks} blocks")
        with torch.device("meta"):
            model = architecture.build(network)
        expected = {name: value.shape for name, value in model.state_dict().items()}
        _check_names(place, set(expected), names)
    tensors = _StoredTensors(place, stored, expected)
    known = {"format", "format_version", "model", "num_parameters", "dtype", "source", "schedule", "length", "budgets"}
    known |= {"architecture", "bos_id", "tokenizer"}
    checkpoint = Checkpoint(
        model=model.eval(),
        path=path,
        tokenizer=tokenizer,
        length=config["length"],
        bos_id=config["bos_id"],
        budgets=None if config["budgets"] is None else tuple(config["budgets"]),
        facts={key: value for key, value in config.items() if key not in known},
        loaded="; ".join(
            [
                *problems,
                f"loaded {len(tensors)} of {len(tensors)} tensors, {config['num_parameters']:,} parameters "
                f"({config['dtype']}, {config.get('weights', _AVERAGED)}, "
                f"training step {config.get('training_step', '?')}) from {name_of(place)}",
            ]
        ),
    )
    return checkpoint, tensors


def _present_name(name: str) -> str:
    """What a tensor is called today."""
    for old, new in _RENAMED_TENSORS.items():
        name = name.replace(old, new)
    return name


def load_training(folder: Path, like: Mapping[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and numbers of the training state in a checkpoint that `newest` found whole.

    like   how this process holds them: of a tensor that it shares with others it gets its part, whoever wrote it
    """
    if (folder / _MOMENTS).exists():
        stored = {_present_name(name): value for name, value in _read_tensors(folder / _MOMENTS).items()}
        tensors = {name: placed(value, (like or {}).get(name)) for name, value in stored.items()}
    elif (folder / _SHARDS).exists():
        tensors = load_shards(folder, like)
    else:
        raise ValueError(f"{folder} holds a model but no training state; name it as model.parent to train it further")
    return tensors, json.loads(read_text(folder / _NUMBERS, _LARGEST_TEXT[_NUMBERS]))


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
        sums = _read_json(folder / _CHECKSUMS)
        there = [name for name in (_MOMENTS, _NUMBERS, _SHARDS) if (folder / name).exists()]
        for name in (_CONFIG, *(files or {*sums, *there})):
            if problem := _file_damage(folder, name, sums):
                return problem
            if name == _CONFIG:
                _read_config(folder)
    except FileNotFoundError as error:
        return f"{folder} is not a whole checkpoint: {Path(error.filename).name} is missing"
    except (OSError, KeyError, TypeError) as error:
        return f"{folder} is damaged: {_CHECKSUMS} cannot be used ({error})"
    except _UnusableError as error:
        return f"{folder} is damaged: {error}"
    return None


def _file_damage(folder: Path, name: str, sums: Mapping[str, Any]) -> str | None:
    """What is wrong with one file: what it is, then its size, and its content last, which takes longest."""
    path = folder / name
    if Path(name).name != name or (path.exists() and not path.is_file()):
        return f"{folder} is damaged: {name[:80]!r} is not a file of a checkpoint"
    size = path.stat().st_size
    if name in (_WEIGHTS, _MOMENTS) and size > _memory():
        return f"{path} has {size} bytes, more than this machine's memory, {_memory()} bytes"
    if size != sums[name]["bytes"]:
        return f"{path} is damaged: it has {size} bytes, not {sums[name]['bytes']!r:.40}"
    if size > _LARGEST_TEXT.get(name, size):
        return f"{path} is damaged: it has {size} bytes; allowed are {_LARGEST_TEXT[name]}"
    if file_sha256(path) != sums[name]["sha256"]:
        return f"{path} is damaged: its content is not what was written"
    return None


def _memory() -> int:
    """The machine's memory in bytes: weights that are larger are not read, not even to be checked."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 2**63


class _UnusableError(Exception):
    """A file of JSON that holds something else."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_text(path, _LARGEST_TEXT[path.name]))
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"{path.name} cannot be used ({error})") from error
    if not isinstance(record, dict):
        raise _UnusableError(f"{path.name} cannot be used (it is no object)")
    return record


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
    config = _read_json(folder / _CONFIG)
    version = config.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{folder} has checkpoint format {version}; this program reads up to {FORMAT_VERSION}: update fsdfm"
        )
    return config


@contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file; only its header is read, and nothing of a header that is too long to be true."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"{path} cannot be read: its header has {length} bytes, allowed are {_LARGEST_HEADER}")
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except _SYSTEM_ERRORS as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}; get it again") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with _open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _take(place: Path, file: Any, name: str, *, shape: torch.Size) -> Tensor:
    """A tensor of the shape and kind that it must have."""
    value: Tensor = file.get_tensor(name)
    if value.shape != shape:
        raise ValueError(f"{place / _WEIGHTS}: {name} has shape {tuple(value.shape)}, not {tuple(shape)}; get it again")
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(f"{place / _WEIGHTS}: {name} holds {value.dtype}, which are no weights; get it again")
    return value


def _check_names(place: Path, expected: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(name[:80] for name in found - expected)
    if missing or unexpected:
        raise ValueError(
            f"{place / _WEIGHTS} does not fit its {_CONFIG}: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}; get it again"
        )


def _check_numbers(place: Path, config: Mapping[str, Any], network: NetworkConfig, *, path: flow.MixturePath) -> None:
    """Raise where the numbers of a config.json could not have been written by `save_model`."""
    budgets, first = config["budgets"], config["bos_id"]
    fits = {
        "length": _is_count(config["length"]) and config["length"] <= _LONGEST,
        "num_parameters": _is_count(config["num_parameters"]),
        "budgets": budgets is None or (isinstance(budgets, list) and _are_budgets(budgets)),
        "bos_id": first is None or (type(first) is int and 0 <= first < network.vocab_size),
        "source": type(path.source.vocab_size) is int and path.source.vocab_size == network.vocab_size,
    }
    canvas, window = getattr(network, "canvas", None), getattr(network, "window", None)
    if fits["length"] and (canvas or 1) > config["length"]:
        raise ValueError(f"{place / _CONFIG}: canvas is {canvas!r:.80}, longer than its texts; get it again")
    if (window or 1) > _LONGEST:
        raise ValueError(f"{place / _CONFIG}: window is {window!r:.80}; allowed are {_LONGEST}; get it again")
    for name, right in fits.items():
        if not right:
            raise ValueError(
                f"{place / _CONFIG}: {name} is {config[name]!r:.80}, which fits no such model; get it again"
            )


def _are_budgets(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(_is_count(value) and value <= _MOST_STEPS for value in values)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1
