"""Scores are kept by everything that they depend on, and a broken file is no harm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdfm.measure.judges import Scores, TokenJudge
from fsdfm.measure.kept import ScoreStore, default_store
from fsdfm.measure.rows import Piece


def judge(name: str = "toy", bos_id: int | None = 0) -> TokenJudge:
    return TokenJudge(
        name=name,
        nll=lambda tokens: torch.zeros(len(tokens), tokens.shape[1] - 1),
        encode=lambda texts: [[1] * len(text) for text in texts],
        max_length=8,
        vocab_size=3,
        bos_id=bos_id,
    )


PIECES = [Piece(0, "one"), Piece(1, "two", "before")]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path / "scores")
    key = store.key(judge(), PIECES, 2)
    assert store.get(key) is None
    scores = Scores(torch.tensor([1.25, 1e-17 + 3], dtype=torch.float64), torch.tensor([3, 0]))
    store.put(key, scores)
    found = store.get(key)
    assert found is not None
    assert torch.equal(found.nll, scores.nll)
    assert torch.equal(found.num_tokens, scores.num_tokens)


def test_everything_has_a_say_in_the_key(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    keys = {
        store.key(judge(), PIECES, 2),
        store.key(judge("other"), PIECES, 2),
        store.key(judge(bos_id=None), PIECES, 2),
        store.key(judge(), PIECES, 3),
        store.key(judge(), PIECES[:1], 2),
        store.key(judge(), [PIECES[0], replace(PIECES[1], prefix="")], 2),
        store.key(judge(), [PIECES[0], replace(PIECES[1], row=0)], 2),
    }
    assert len(keys) == 7


def test_a_broken_file_and_a_folder_that_cannot_be_written_are_no_harm(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path / "scores")
    key = store.key(judge(), PIECES, 2)
    scores = Scores(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    store.put(key, scores)
    (file,) = (tmp_path / "scores").glob("*.json")
    file.write_text('{"nll": [1.0')
    assert store.get(key) is None
    (tmp_path / "plain").write_text("no folder")
    ScoreStore(tmp_path / "plain").put(key, scores)


def test_the_default_place_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDFM_CACHE", str(tmp_path / "here"))
    assert default_store().folder == tmp_path / "here" / "scores"
    monkeypatch.delenv("FSDFM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_store().folder == tmp_path / "cache" / "fsdfm" / "scores"
