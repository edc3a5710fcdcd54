"""Trackers: one key of a recipe; numbers, texts and timelines arrive, and a tracker that fails loses nothing."""

from __future__ import annotations

import json
import sqlite3
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fsdfm.learn.trainer import TRACKER_NAMES, TrainerConfig
from fsdfm.run.tracking import TRACKERS, SafeTracker, open_tracker
from fsdfm.show.timeline import Timeline
from small_runs import train_quietly, write_recipe

TEXT = Timeline(["<b>", " sea"], [1, 2], steps=4)


class Recorder:
    """Stands for a tracker's module: remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return self if name in ("init", "SummaryWriter") else (name, *args)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, recorder)  # type: ignore[arg-type]
    board = types.SimpleNamespace(SummaryWriter=recorder.SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)  # type: ignore[arg-type]
    return recorder


def test_every_name_has_a_tracker() -> None:
    assert tuple(TRACKERS) == TRACKER_NAMES
    with pytest.raises(ValueError, match="tracker is 'mlflow'; allowed are auto, none, tensorboard"):
        TrainerConfig(tracker="mlflow")


def test_a_run_tells_its_tracker_everything(installed: Recorder, tmp_path: Path) -> None:
    words = [f"out={tmp_path}/run", "train.steps=2", "train.log_every=1", "train.save_every=2"]
    train_quietly(
        write_recipe(tmp_path), *words, "train.tracker=wandb", "sample.every=2", "sample.steps=2", "sample.length=8"
    )
    ((_, options),) = installed.of("init")
    assert options["config"]["train"]["steps"] == 2
    assert options["dir"] == str(tmp_path / "run")
    logged = [(args[0], options["step"]) for args, options in installed.of("log")]
    assert [step for values, step in logged if "loss" in values] == [1, 2]
    ((shown, step),) = [(values, step) for values, step in logged if "timelines" in values]
    assert step == 2
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row[2] for row in installed.of("Table")[0][1]["data"]] == samples[0]["texts"]
    assert "Training step 2" in shown["timelines"][1]
    assert installed.of("finish")


@pytest.mark.parametrize(("name", "text"), [("tensorboard", "add_text"), ("trackio", "Markdown"), ("wandb", "Table")])
def test_texts_are_logged_as_words_and_as_timelines(name: str, text: str, installed: Recorder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tracker = open_tracker(name, tmp_path, {}, say=print)
    assert tracker is not None
    tracker.log(1, {"loss": 2.0})
    tracker.show(3, [TEXT])
    tracker.close()
    assert installed.of(text)
    if name == "tensorboard":
        assert installed.of("add_scalar")[0][0] == ("loss", 2.0, 1)
        ((_, picture, step), options) = installed.of("add_image")[0]
        assert (picture.shape[2], step, options["dataformats"]) == (3, 3, "HWC")
    else:
        html = installed.of("Html")[0][0][0]
        assert "&lt;b&gt;" in html
        assert "<b>" not in html


def test_a_tracker_that_fails_is_dropped_with_a_warning() -> None:
    said: list[str] = []

    class Failing:
        def log(self, *_: Any) -> None:
            raise ConnectionError("gone")

        show = close = log

    tracker = SafeTracker(Failing(), said.append)
    tracker.log(1, {})
    tracker.show(1, [])
    tracker.close()
    assert said == ["warning: the tracker failed and is dropped (ConnectionError: gone)"]


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match=r"train.tracker is 'wandb', which is not installed: pip install 'fsdfm\[wandb\]'"
    ):
        open_tracker("wandb", tmp_path, {}, say=print)
    monkeypatch.setattr("fsdfm.run.tracking.find_spec", lambda name: None)
    assert open_tracker("auto", tmp_path, {}, say=print) is None
    assert open_tracker("none", tmp_path, {}, say=print) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_a_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio", reason="pip install 'fsdfm[trackio]'")
    said: list[str] = []
    tracker = open_tracker("trackio", tmp_path / "run", {"steps": 2}, say=said.append)
    assert tracker is not None, said
    tracker.log(1, {"loss": 2.0})
    tracker.show(2, [TEXT])
    tracker.close()
    assert said == []
    (database,) = (tmp_path / "trackio").glob("**/*.db")
    with sqlite3.connect(database) as kept:
        rows = [json.loads(row[0]) for row in kept.execute("select metrics from metrics order by step")]
    assert rows[0]["loss"] == 2.0
    assert "sea" in json.dumps(rows[1])
    pages = [*(tmp_path / "trackio").glob("**/*.html")]
    assert any("Training step 2" in file.read_text() for file in pages)
