"""Rows of tokens: real ones cut from held-out text, and the documents that a row holds.

A row is what training saw and what a sampler makes: L tokens that may hold the end of one document and the beginning
of the next. A judge never saw two documents run together, so it scores each on its own; a row's likelihood is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fsdfm.data import Tokenizer
from fsdfm.measure.judges import Judge, Scores, shuffle_words

__all__ = ["Begin", "Piece", "Reader", "cut_rows", "score_pieces", "shuffle_pieces"]

TokenRows = npt.NDArray[np.int32]
Begin = Literal["document", "anywhere"]


@dataclass(frozen=True)
class Piece:
    """A document, or the part of one that a row holds: `text` is scored, `prefix` stands before it and is given."""

    row: int
    text: str
    prefix: str = ""


@dataclass(frozen=True)
class Reader:
    """Reads rows: `num_bos` tokens at the front (BOS, or none) are no text, and EOS and BOS part documents."""

    tokenizer: Tokenizer
    bos_id: int | None = None

    @property
    def num_bos(self) -> int:
        """Tokens at the front of a row that are given and no part of the text."""
        return int(self.bos_id is not None)

    def pieces(self, rows: TokenRows, *, border: int = 0, first: int = 0) -> list[Piece]:
        """The documents of rows [N, L] numbered from `first`; only what stands at `border` or behind it is scored."""
        found: list[Piece] = []
        for number, row in enumerate(rows.tolist(), start=first):
            start = self.num_bos
            for end in [*self._ends(row), len(row)]:
                if end > max(start, border):
                    found.append(self._piece(number, row[start:end], max(0, border - start)))
                start = end + 1
        return found

    def text(self, row: Sequence[int]) -> str:
        """A row as a reader wants it: its documents with a blank line between them."""
        return "\n\n".join(piece.text for piece in self.pieces(np.array([row], dtype=np.int32)))

    def _ends(self, row: Sequence[int]) -> list[int]:
        ends = {self.tokenizer.eos_id, self.bos_id}
        return [place for place in range(self.num_bos, len(row)) if row[place] in ends]

    def _piece(self, number: int, tokens: Sequence[int], num_given: int) -> Piece:
        whole = self.tokenizer.decode(tokens)
        if not num_given:
            return Piece(number, whole)
        given = self.tokenizer.decode(tokens[:num_given])
        # A character of several tokens may straddle the border; what both texts begin with is surely given.
        same = next((i for i, (a, b) in enumerate(zip(given, whole, strict=False)) if a != b), len(given))
        return Piece(number, whole[same:], whole[:same])


def score_pieces(judge: Judge, pieces: Sequence[Piece], num_rows: int, *, first: int = 0) -> Scores:
    """What a judge says of rows `first` .. `first` + `num_rows` - 1, each the sum over its documents."""
    nll = torch.zeros(num_rows, dtype=torch.float64)
    num_tokens = torch.zeros(num_rows, dtype=torch.int64)
    if pieces:
        prefixes = [piece.prefix for piece in pieces]
        scores = judge.score([piece.text for piece in pieces], prefixes=prefixes if any(prefixes) else None)
        rows = torch.tensor([piece.row - first for piece in pieces])
        nll.index_add_(0, rows, scores.nll)
        num_tokens.index_add_(0, rows, scores.num_tokens)
    return Scores(nll, num_tokens)


def shuffle_pieces(pieces: Sequence[Piece], *, seed: int) -> list[Piece]:
    """The documents with their words in random order: the other end of a judge's scale."""
    return [Piece(piece.row, shuffle_words(piece.text, seed=seed, index=piece.row), piece.prefix) for piece in pieces]


def cut_rows(
    tokens: npt.NDArray[Any],
    starts: npt.NDArray[np.int64],
    length: int,
    *,
    bos_id: int | None = None,
    begin: Begin = "document",
) -> TokenRows:
    """Every row of `length` tokens that a packed text holds, none overlapping another: int32 [N, length].

    begin   "document": each begins where a document begins; what is left of the last one is passed over.
            "anywhere": the text cut into blocks
    bos_id  stands in front of each row, given, and takes the place of its last token, as in training
    """
    wanted = length - int(bos_id is not None)
    if wanted < 1:
        raise ValueError(f"length is {length}; allowed are {1 + int(bos_id is not None)} tokens and more")
    chosen = _starts(np.asarray(starts), wanted, len(tokens)) if begin == "document" else None
    if chosen is None:
        chosen = np.arange(0, len(tokens) - wanted + 1, wanted)
    rows = np.empty((len(chosen), length), dtype=np.int32)
    for row, start in zip(rows, chosen, strict=True):
        row[length - wanted :] = tokens[start : start + wanted]
    if bos_id is not None:
        rows[:, 0] = bos_id
    return rows


def _starts(starts: npt.NDArray[np.int64], wanted: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Document starts, each the first behind the end of the row before; overlapping rows would look like copies."""
    chosen: list[int] = []
    place = 0
    while (index := int(np.searchsorted(starts, place))) < len(starts):
        start = int(starts[index])
        if start + wanted > num_tokens:
            break
        chosen.append(start)
        place = start + wanted
    return np.array(chosen, dtype=np.int64)
