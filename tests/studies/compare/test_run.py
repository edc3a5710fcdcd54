"""`fsdfm study compare` from end to end on tiny weights, and what it refuses."""

from pathlib import Path

import pytest

from fsdfm.checkpoint import save_model
from fsdfm.studies.compare import CompareRequest, run_compare
from tiny_models import random_bundle, save_judges


def words(count: int) -> str:
    return "<|endoftext|>".join(f"the {n} cats sat on a mat and saw {n} dogs run away" for n in range(count))


def request(tmp_path: Path, **options) -> CompareRequest:  # type: ignore[no-untyped-def]
    held_out = tmp_path / "held.txt"
    held_out.write_text(words(40))
    given = {"out": tmp_path / "out", "held_out": str(held_out), "workers": 1, "num": 2, "length": 16, "steps": "1,2"}
    return CompareRequest(**{**given, "quick": True, **options})


def test_published_weights_are_measured_and_what_is_finished_is_kept(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FSDFM_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "m", random_bundle(source="mask"))
    save_judges(tmp_path)
    asked = request(
        tmp_path,
        judge=str(tmp_path / "judge"),
        weights=(f"mdlm={tmp_path / 'm'}",),
        only=("mdlm", "remdm-cap", "llada-paper"),
    )
    run_compare(asked)
    first = (tmp_path / "out" / "compare.md").read_text()
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "cells").iterdir()}
    assert len(times) == 3
    assert "ReMDM-cap" in first
    run_compare(asked)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "cells").iterdir()} == times
    with pytest.raises(ValueError, match="another setting: num"):
        run_compare(request(tmp_path, judge=asked.judge, weights=asked.weights, only=asked.only, num=3))


def test_a_recipe_that_builds_on_an_absent_file_is_refused(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    save_judges(tmp_path)
    text = tmp_path / "train.txt"
    text.write_text(words(4))
    with pytest.raises(ValueError, match=r"ours \(stories-causal\) builds on stories15M.bin, which is not"):
        run_compare(request(tmp_path, text=(str(text),), only=("mdlm", "ours"), judge=str(tmp_path / "judge")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": None}, "held-out text is missing"),
        ({}, "training text is missing"),
        ({"text": ("absent.txt",)}, "absent.txt is not there"),
        ({"weights": ("mdlm",)}, "SYSTEM=FOLDER"),
        ({"num": 1}, "--num is 1"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(tmp_path: Path, options, message) -> None:  # type: ignore[no-untyped-def]
    text = tmp_path / "train.txt"
    text.write_text(words(4))
    if "num" in options:
        options = {**options, "text": (str(text),)}
    with pytest.raises(ValueError, match=message):
        run_compare(request(tmp_path, **options))
    assert not (tmp_path / "out").exists()
