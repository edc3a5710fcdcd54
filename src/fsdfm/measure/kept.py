"""Scores that are kept: what a judge said of a set of texts is looked up, not computed again.

Real held-out text, the same text shuffled and the negative controls are the same in every evaluation of one judge, one
text and one tokenizer. A store is a folder with one small file for each set of texts, named by what it depends on:

    SHA-256(judge's name and facts, every text and what stands before it)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdfm.files import read_text, write_json
from fsdfm.measure.judges import Judge, Scores
from fsdfm.measure.rows import Piece

__all__ = ["ScoreStore", "default_store"]

_MOST_BYTES = 2**24


@dataclass(frozen=True)
class ScoreStore:
    """A folder of scores."""

    folder: Path

    def key(self, judge: Judge, pieces: Sequence[Piece], num_rows: int) -> str:
        """What the scores of these documents of rows depend on."""
        digest = hashlib.sha256()
        said = {"judge": judge.name, "facts": dict(judge.facts), "rows": num_rows}
        digest.update(json.dumps(said, sort_keys=True, default=str).encode())
        for piece in pieces:
            digest.update(json.dumps([piece.row, piece.prefix, piece.text]).encode())
        return digest.hexdigest()

    def get(self, key: str) -> Scores | None:
        """The scores, if they are kept and can be read."""
        try:
            record = json.loads(read_text(self._file(key), _MOST_BYTES))
            nll = torch.tensor(record["nll"], dtype=torch.float64)
            return Scores(nll, torch.tensor(record["num_tokens"], dtype=torch.int64))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, scores: Scores) -> None:
        """Keep scores; where the folder cannot be written they are computed again next time."""
        record = {"nll": scores.nll.tolist(), "num_tokens": scores.num_tokens.tolist()}
        try:
            write_json(self._file(key), record, indent=None)
        except ValueError:
            return

    def _file(self, key: str) -> Path:
        return self.folder / f"{key[:40]}.json"


def default_store() -> ScoreStore:
    """In $FSDFM_CACHE, else in $XDG_CACHE_HOME/fsdfm, else in ~/.cache/fsdfm."""
    named = os.environ.get("FSDFM_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdfm"
    return ScoreStore(base / "scores")
