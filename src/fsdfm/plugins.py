"""Modules of your own that register networks, rules, objectives or rewards, imported because *you* name them.

    fsdfm --plugin own_network.py generate --model conv        # or FSDFM_PLUGINS=own_network.py in the environment
    plugins = ["own_objective"]                                # in a recipe

Importing a module runs its code. So a name comes from the command line, the environment or the recipe that the user
names, and from nowhere else: a checkpoint, a run's folder or a result file says what it needs, never where that is.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

__all__ = ["import_plugin", "imported_plugins", "is_imported"]

_IMPORTED: dict[str, None] = {}  # in the order of import


def imported_plugins() -> tuple[str, ...]:
    """The plugins of this process, for processes that it starts: files by their whole path."""
    return tuple(_IMPORTED)


def is_imported(name: object) -> bool:
    """Whether to import this would run nothing new: the user has named it already, by its file or by its name."""
    if not isinstance(name, str):
        return False
    files = [Path(known) for known in _IMPORTED if known.endswith(".py")]
    return name in _IMPORTED or (Path(name).absolute() if name.endswith(".py") else name) in (
        *files,
        *(file.stem for file in files),
    )


def import_plugin(name: str) -> None:
    """Import a module by the path of its file, NAME.py, or by its name: in the current folder, or as installed."""
    is_file = isinstance(name, str) and name.endswith(".py")
    if not is_file and not (isinstance(name, str) and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"the plugin {name!r} is no module; give a file such as my_network.py, or a name: my_network")
    file = Path(name).absolute()
    if is_file and not file.is_file():
        raise ValueError(f"there is no plugin {name}; give the path of a Python file, or the name of a module")
    found = _import(name, file.stem if is_file else name, file.parent if is_file else Path.cwd())
    if is_file and not _is_same(file, found):
        raise ValueError(f"the plugin {name} has the name of another module, {found or file.stem}; rename the file")
    _IMPORTED[str(file) if is_file else name] = None


def _import(name: str, module: str, folder: Path) -> str | None:
    """Import a module with a folder before all others; its file."""
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        return getattr(importlib.import_module(module), "__file__", None)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ImportError | SyntaxError) else f", {place.filename}, line {place.lineno}"
        hint = "it must stand in the current folder or be installed" if isinstance(error, ImportError) else "mend it"
        raise ValueError(
            f"the plugin {name} cannot be imported ({type(error).__name__}: {error}{where}); {hint}"
        ) from error
    finally:
        sys.path.remove(str(folder))


def _is_same(file: Path, found: str | None) -> bool:
    return found is not None and os.path.exists(found) and os.path.samefile(file, found)
