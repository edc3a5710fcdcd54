"""`fsdfm push`: a checkpoint, its card and what was measured of it, on the hub."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fsdfm.checkpoint import load_model, newest
from fsdfm.checkpoint.embedded import find_model, stored_demo
from fsdfm.checkpoint.folder import CHECKPOINTS, damage
from fsdfm.checkpoint.hub import MODEL_FILES, read_hub_name, upload
from fsdfm.demo.card import card_text
from fsdfm.demo.hub_card import hub_card
from fsdfm.files import read_json, read_text, write_text
from fsdfm.measure.results import load_evaluation
from fsdfm.model.weights import weights_sha256
from fsdfm.run.weights import export

__all__ = ["push", "stage"]


def push(
    model: str | Path, name: str, *, results: Sequence[Path] = (), private: bool = False, message: str | None = None
) -> str:
    """Put a checkpoint, or a run's newest one without its training state, on the hub; the address of the commit.

    name      owner/name, or owner/name@branch, which is made if it is missing
    results   files of `fsdfm evaluate --json` of these very weights: their tables go into the card, their numbers into
              its metadata; an embedded model has its own unless some are given
    """
    where = read_hub_name(name)
    with TemporaryDirectory() as aside:
        folder = stage(model, Path(aside) / where.repo.partition("/")[2], results=results)
        return upload(folder, where, private=private, message=message or f"Upload {where.repo} with fsdfm")


def stage(model: str | Path, out: Path, *, results: Sequence[Path] = ()) -> Path:
    """Fill a new folder with what `push` uploads: the files of a checkpoint, the card with the hub's metadata."""
    place = find_model(model)
    if not (place / "config.json").exists():
        place = newest(place / CHECKPOINTS)[0] or place
    if (place / "training.json").exists():
        export(place, out)
        card = place / "README.md"
        write_text(out / "README.md", read_text(card) if card.exists() else read_text(out / "README.md"))
    else:
        if problem := damage(place, ("model.safetensors", "tokenizer.json")):
            raise ValueError(f"{problem}; nothing was uploaded")
        out.mkdir(parents=True)
        for file in MODEL_FILES:
            if (place / file).exists():
                shutil.copyfile(place / file, out / file)
    files = list(results) or _stored_results(out)
    text = card_text(out, files)[1] if files else read_text(out / "README.md")
    config = read_json(out / "config.json")
    evaluations = [load_evaluation(file) for file in files]
    write_text(out / "README.md", hub_card(text, config, evaluations, name=out.name))
    return out


def _stored_results(folder: Path) -> list[Path]:
    """The result files of this package that were measured with these weights."""
    sha256 = weights_sha256(load_model(folder).model)
    files = sorted((stored_demo() / "results").glob("*.json"))
    own = {file: load_evaluation(file) for file in files}
    mine = [file for file in files if own[file].model.get("checkpoint_sha256") == sha256]
    return sorted(mine, key=lambda file: -int(own[file].facts.get("num_samples", 0)))
