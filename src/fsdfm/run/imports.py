"""Other people's weights, made checkpoint folders: one table of formats, each recognised by what is in the file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, cast

from rich.console import Console

from fsdfm.checkpoint import Checkpoint, WeightsName, is_llama2c
from fsdfm.checkpoint.hub import download_weights, find_hub_name
from fsdfm.checkpoint.huggingface import is_folder
from fsdfm.config import DataConfig, ModelSection
from fsdfm.data import SEPARATOR
from fsdfm.learn.registry import find_named
from fsdfm.peers.layouts import is_peer
from fsdfm.run.huggingface import SourceName, import_folder
from fsdfm.run.peers import import_peer
from fsdfm.run.released import import_released
from fsdfm.run.weights import import_llama2c

__all__ = ["FORMATS", "Format", "ImportConfig", "import_weights"]


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """What a user says of the weights; a format uses some of it and refuses the rest."""

    tokenizer: str | None = None  # a file or name; None: what the format usually has
    half: bool = False  # store the weights as float16
    texts: tuple[str, ...] = ()  # keep only the tokens that these inputs use
    separator: str = SEPARATOR  # stands between the documents of the texts
    min_count: int | None = None  # how often a token must be used in them to be kept; None: once
    preset: str | None = None  # a size of the paper's
    config: Path | None = None  # a JSON file with the settings
    weights: str | None = None  # ema, raw or teacher
    flow_source: str | None = None  # of an autoregressive model's denoiser: uniform (None), mask or mixture
    shift: bool = True  # keep the next-token shift of an autoregressive model
    length: int | None = None  # tokens per block; None: what the model knows, 1,024 at most
    system: str | None = None  # whose weights they are, where several peers' look alike


class Convert(Protocol):
    """(file or folder, out, what the user says, where to speak) -> the checkpoint that is now in `out`."""

    def __call__(self, source: Path, out: Path, config: ImportConfig, *, console: Console) -> Checkpoint:
        """Read it and write it."""
        ...


@dataclass(frozen=True)
class Format:
    """How weights of one kind are told and read; `uses` are the options that mean something to it."""

    about: str
    recognise: Callable[[Path], bool]
    convert: Convert
    uses: tuple[str, ...]


def import_weights(
    source: str | Path,
    out: str | Path,
    config: ImportConfig | None = None,
    *,
    format: str = "auto",
    console: Console | None = None,
) -> Checkpoint:
    """Make a checkpoint folder of a file or folder of weights; nothing in it is run."""
    source, config = locate(source), config or ImportConfig()
    name = recognise(source) if format == "auto" else format
    chosen = find_named({"auto": None, **FORMATS}, name, "format")
    assert chosen is not None
    default = ImportConfig()
    for option in fields(config):
        given = getattr(config, option.name) != getattr(default, option.name)
        if given and option.name not in (*chosen.uses, "half"):
            raise ValueError(
                f"{option.name.replace('_', '-')} is not used by the format {name} ({chosen.about}); leave it out"
            )
    return chosen.convert(source, Path(out), config, console=console or Console(stderr=True))


def locate(source: str | Path) -> Path:
    """A file or folder that is here, or a model on the hub, downloaded: `owner/name` or `owner/name@revision`."""
    if isinstance(source, str) and (name := find_hub_name(source)) is not None:
        return download_weights(name)
    if not Path(source).exists():
        raise ValueError(f"{source} is not there; name a file or folder of weights, or a model on the hub: owner/name")
    return Path(source)


def recognise(source: Path) -> str:
    """The first format of the table that a file or folder has."""
    for name, known in FORMATS.items():
        if known.recognise(source):
            return name
    known_formats = ", ".join(f"{name} ({format.about})" for name, format in FORMATS.items())
    raise ValueError(f"{source} has none of the formats that are known: {known_formats}; name one with --format")


def _is_torch_file(source: Path) -> bool:
    """A ZIP, as torch writes it; or a file that says so by its name, whose reader then says what is wrong with it."""
    return source.is_file() and (source.suffix == ".pth" or zipfile.is_zipfile(source))


def _from_llama2c(source: Path, out: Path, config: ImportConfig, **_: Console) -> Checkpoint:
    section = ModelSection(llama2c=str(source), llama2c_tokenizer=config.tokenizer, min_count=config.min_count)
    return import_llama2c(section, DataConfig(inputs=config.texts, separator=config.separator), out, half=config.half)


def _from_released(source: Path, out: Path, config: ImportConfig, *, console: Console) -> Checkpoint:
    return import_released(
        source,
        out,
        preset=config.preset,
        config=config.config,
        weights=cast(WeightsName | None, config.weights),  # any other word is an error there
        tokenizer=config.tokenizer or "gpt2",
        half=config.half,
        console=console,
    )


def _from_huggingface(source: Path, out: Path, config: ImportConfig, *, console: Console) -> Checkpoint:
    return import_folder(
        source,
        out,
        source=cast(SourceName | None, config.flow_source),  # any other word is an error there
        shift=config.shift,
        length=config.length,
        half=config.half,
        console=console,
    )


def _from_peer(source: Path, out: Path, config: ImportConfig, *, console: Console) -> Checkpoint:
    return import_peer(
        source,
        out,
        system=config.system,
        weights=config.weights,
        tokenizer=config.tokenizer or "gpt2",
        half=config.half,
        console=console,
    )


FORMATS: dict[str, Format] = {
    "llama2c": Format(
        "an autoregressive llama2.c checkpoint, legacy format",
        is_llama2c,
        _from_llama2c,
        ("tokenizer", "texts", "separator", "min_count"),
    ),
    "peer": Format(
        "MDLM, Duo, SEDD, SDTT or HDLM: safetensors, .bin or Lightning's .ckpt",
        is_peer,
        _from_peer,
        ("tokenizer", "weights", "system"),
    ),
    "fs-dfm": Format(
        "a .pth file of the paper's, FS-DFM or DFM",
        _is_torch_file,
        _from_released,
        ("tokenizer", "preset", "config", "weights"),
    ),
    "huggingface": Format(
        "a folder with config.json and safetensors of Llama, SmolLM2, Qwen2, Qwen3, GPT-2, LLaDA or Dream",
        is_folder,
        _from_huggingface,
        ("flow_source", "shift", "length"),
    ),
}
"""One line per format; the first that recognises a file reads it."""
