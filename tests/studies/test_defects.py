"""The study of defects on small texts: it runs, resumes, and its table says what each metric sees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fsdfm.studies.defects import run_defects

NAMES, THINGS = ["Lily", "Tom", "Ben", "Anna"], ["ball", "cat", "dog", "hat", "boat", "cake", "book"]


def stories(seed: int, count: int) -> str:
    rng = np.random.default_rng(seed)

    def story() -> str:
        name, thing, other = rng.choice(NAMES), rng.choice(THINGS), rng.choice(THINGS)
        lines = [f"One day {name} saw a {thing}.", f"The {thing} was near the {other}.", f"{name} has a {other} now."]
        return " ".join([*lines, f"He is {rng.choice(['happy', 'sad', 'old'])} with the {rng.choice(THINGS)}."])

    return "<|endoftext|>".join(story() for _ in range(count))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "held.txt").write_text(stories(0, 60))
    (tmp_path / "train.txt").write_text(stories(1, 40))
    return str(tmp_path / "held.txt"), str(tmp_path / "train.txt")


def test_metrics_see_what_they_are_for(files: tuple[str, str], tmp_path: Path) -> None:
    held, train = files
    run_defects(tmp_path / "out", held_out=held, training=train, num=24, workers=1)
    table = (tmp_path / "out" / "defects.md").read_text()
    z = json.loads((tmp_path / "out" / "defects.json").read_text())["z"]
    assert z["distinct-2"]["repetition"]["1.0"] < -3
    assert z["self-BLEU"]["lost variety"]["1.0"] > 3
    assert z["copied 8-grams"]["copying"]["1.0"] > 3
    assert z["n-gram precision"]["wrong agreement"]["1.0"] > 3
    assert abs(z["entropy"]["shuffled sentences"]["1.0"]) < 3  # the same words
    assert z["style, MMD"]["repetition"]["1.0"] > 3
    assert z["n-grams, MMD"]["lost variety"]["1.0"] > 3
    assert "## What is seen\n\n| metric | repetition | lost variety |" in table
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "cells").iterdir()}
    run_defects(tmp_path / "out", held_out=held, training=train, num=24, workers=1)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "cells").iterdir()} == before


def test_too_few_texts_are_refused(files: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a smaller --num"):
        run_defects(tmp_path / "out", held_out=files[0], training=files[1], num=50, workers=1)
