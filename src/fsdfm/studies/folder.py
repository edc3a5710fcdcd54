"""The folder of a study: it belongs to one setting, a finished cell is a file, and who computes what is locked.

setting.json       what all cells share; a folder of another setting is refused
cells/NAME.json    a finished cell: whole or absent, never computed again
cells/NAME.*       what a cell leaves for those that build on it: weights, states
.locks/            locks of running processes; they die with their process, however that ends
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdfm.files import InUseError, lock, read_json, replace_file, write_json

__all__ = ["CellValue", "StudyFolder"]

_SECONDS_BETWEEN_TRIES = 0.05
_LARGEST_CELL = 2**28  # bytes

CellValue = dict[str, Any]
"""What a cell computed, as JSON holds it."""


@dataclass(frozen=True)
class StudyFolder:
    """Where the cells of a study stand; several processes may work in it at once."""

    path: Path

    @property
    def cells(self) -> Path:
        """The folder of the cells."""
        return self.path / "cells"

    def file(self, name: str, suffix: str = ".json") -> Path:
        """The file of a cell, or one beside it; a name may hold slashes."""
        return self.cells / f"{name.replace('/', '~')}{suffix}"

    # --- cells --------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a cell is finished."""
        return self.file(name).exists()

    def read(self, name: str) -> CellValue:
        """What a finished cell holds."""
        file = self.file(name)
        try:
            found: CellValue = dict(read_json(file, _LARGEST_CELL))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}); remove it, and the same command computes it anew"
            ) from error
        return found

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Finish a cell."""
        write_json(self.file(name), value)

    def keep(self, name: str, suffix: str, write: Callable[[Path], object]) -> None:
        """Write a file beside a cell, whole or not at all; `write` is given the path to write to."""
        replace_file(self.file(name, suffix), write)

    # --- one setting --------------------------------------------------------------------------------------------------

    def claim(self, setting: Mapping[str, Any]) -> None:
        """Make the folder the setting's own, or raise for one that holds cells of another.

        A value of None has no say: what it stands for is not used, and cells with any value of it go together.
        """
        said: dict[str, Any] = json.loads(json.dumps({k: v for k, v in setting.items() if v is not None}))
        with self.hold("setting", wait=True):
            write_json(self.path / "setting.json", {**self._matching(said), **said})

    def _matching(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """The setting that the folder has, if any; raise where it says something else."""
        file = self.path / "setting.json"
        if not file.exists():
            if any(self.cells.glob("*.json")):
                raise ValueError(f"{self.path} holds cells without their setting.json; choose another folder")
            return {}
        try:
            found = dict(read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{file} cannot be read ({error}); remove the folder, or choose another") from error
        for key, value in said.items():
            if found.get(key, value) != value:
                raise ValueError(
                    f"{self.path} holds cells of another setting: {key} was {_short(found[key])}, now it is "
                    f"{_short(value)}; give the old one, or choose another folder"
                )
        return found

    # --- who computes what --------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Keep other processes from a name; False: one of them has it already, and we do not `wait` for it."""
        with ExitStack() as held:
            yield self._take(held, self.path / ".locks" / name.replace("/", "~"), wait=wait)

    def _take(self, held: ExitStack, owned: Path, *, wait: bool) -> bool:
        while True:
            try:
                held.enter_context(lock(owned, beside=True))
                return True
            except InUseError:
                if not wait:
                    return False
                time.sleep(_SECONDS_BETWEEN_TRIES)

    def is_held(self, name: str) -> bool:
        """Whether another process, or another part of this one, has a name at this moment."""
        with self.hold(name) as ours:
            return not ours


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:18] + "…"
