"""What ships inside the package: two story models by name, and what was measured of them.

find_model(None)        the few-step model; its parent as long as there is no child
find_model("parent")    the embedded model of that name
find_model("runs/tiny") a folder
find_model("owner/name") a model on the hub, downloaded: see fsdfm.checkpoint.hub
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from fsdfm.checkpoint.hub import download_model, find_hub_name, snapshot_name
from fsdfm.files import nearest

__all__ = ["NAMES", "embedded_models", "find_model", "name_of", "stored_demo"]

ASSETS = Path(str(resources.files("fsdfm") / "assets"))
NAMES = ("fewstep", "parent")  # the better one first


def embedded_models() -> dict[str, Path]:
    """The models that this build holds, name -> folder, the better one first."""
    return {name: ASSETS / name for name in NAMES if (ASSETS / name).is_dir()}


def find_model(name: str | Path | None) -> Path:
    """The folder of a model: of an embedded one or one on the hub by its name, of any other as it is.

    None is the best embedded one. A `Path` is a path; only words may name what is not here.

    A folder here that bears an embedded model's name makes the name ambiguous, which is an error: a number measured of
    the wrong model looks like any other.
    """
    models = embedded_models()
    if name is None:
        if not models:
            raise ValueError(
                "this build of fsdfm has no embedded model; name the folder of a checkpoint, such as runs/tiny-dfm"
            )
        return next(iter(models.values()))
    folder, word = Path(name), str(name)
    if isinstance(name, str) and (hub := find_hub_name(name)) is not None:
        return download_model(hub)
    if word not in NAMES:
        return folder if folder.exists() or len(folder.parts) != 1 else _unknown(word)
    if folder.exists():
        raise ValueError(
            f"{word} is the name of an embedded model and of {folder.resolve()}; write that full path to mean the "
            "folder, or go elsewhere to mean the model"
        )
    if word not in models:
        raise ValueError(f"this build of fsdfm has no embedded model {word!r}; it has: {', '.join(models) or 'none'}")
    return models[word]


def stored_demo() -> Path:
    """The folder of the results and stories that `fsdfm demo` shows."""
    return ASSETS / "demo"


def name_of(folder: Path) -> str:
    """What to call a model's folder: an embedded one or one of the hub by its name, the same on every machine."""
    return folder.name if folder.parent == ASSETS else snapshot_name(folder) or str(folder)


def _unknown(word: str) -> Path:
    near = nearest(word, NAMES)
    meant = f"; did you mean {near}?" if near else ""
    raise ValueError(
        f"{word} is not a folder, nor an embedded model ({', '.join(NAMES)}){meant or '; name a checkpoint, or a run'}"
    )
