"""What the commands share: options, the console, files to write."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from fsdfm import files

__all__ = [
    "SEPARATOR",
    "JsonOption",
    "OutOption",
    "PrecisionOption",
    "SeedOption",
    "SeparatorOption",
    "check_writable",
    "console",
    "is_echo",
    "require_one_process",
    "write_json",
]

console = Console()

OutOption = Annotated[Path, typer.Option("--out", help="Folder to write to; it is made if it is missing.")]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same result.")]
PrecisionOption = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"],
    typer.Option(help="bfloat16, on a GPU or CPU that has it, and int8, on a CPU, are faster: nearly the same text."),
]
SeparatorOption = Annotated[
    str, typer.Option(help="Stands between the documents of a text file; '': the file is one document.")
]
SEPARATOR = "<|endoftext|>"  # fsdfm.data.SEPARATOR, named again so that help need not import torch; a test compares
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]

_SHARED = ("train", "evaluate")  # whose work several processes share


def require_one_process(command: str | None) -> None:
    """Raise where torchrun started a command several times, each of which would do the whole of its work."""
    if "WORLD_SIZE" not in os.environ:  # what torchrun says; without it torch need not be imported
        return
    from fsdfm.runtime import process_count

    if process_count() > 1 and command not in _SHARED:
        raise ValueError(
            f"torchrun started {process_count()} processes, which fsdfm {command or ''} would not share its work with; "
            f"allowed are {' and '.join(_SHARED)}: start it without torchrun"
        )


def is_echo(error: ValueError) -> bool:
    """Whether the first of several processes says this already."""
    if "fsdfm.runtime" not in sys.modules:  # nor has it raised anything
        return False
    from fsdfm.runtime import EchoError

    return isinstance(error, EchoError)


def check_writable(file: Path | None) -> None:
    """Raise before the work, not after it, where the result could not be written."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ValueError(
            f"cannot write {file}: {error.strerror}; choose a file in a folder you may write to"
        ) from error


def write_json(result: dict[str, Any], file: Path | None) -> None:
    """Write a result, if a file is named."""
    if file is not None:
        files.write_json(file, result, indent=2)
