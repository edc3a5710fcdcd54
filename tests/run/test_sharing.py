"""`fsdfm push`: what lands on the hub, its card and its metadata; the commands against a hub of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import fsdfm
from fsdfm.checkpoint import load_model
from fsdfm.checkpoint.hub import MODEL_FILES
from fsdfm.cli import app
from fsdfm.demo.hub_card import hub_card
from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation
from fsdfm.model.weights import weights_sha256
from fsdfm.run.sharing import push, stage
from hub_stand_in import TOKEN, Hub, run_hub, use_hub
from small_runs import train_quietly, write_recipe
from tiny_models import save_tiny


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with run_hub() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        yield hub


def measured(folder: Path, file: Path) -> Path:
    """A result file of a checkpoint: one row with a flag, one without."""
    metrics = {"token_perplexity": Measured(19.04, 18.1, 20.07), "entropy_bits": Measured(6.37, 6.34, 6.39)}
    evaluation = Evaluation(
        model={"name": "tiny", "checkpoint_sha256": weights_sha256(load_model(folder).model)},
        judge={"name": "smollm2"},
        data={"held_out": "valid.txt"},
        rows=(
            Row(steps=1, num_samples=96, temperature=0.88, metrics=metrics),
            Row(steps=2, num_samples=96, metrics=metrics, flags=("collapse: distinct_2 below real text's",)),
        ),
    )
    save_evaluation(evaluation, file)
    return file


def metadata(card: str) -> dict:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_a_pushed_model_is_the_model(hub: Hub, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    results = measured(folder, tmp_path / "results.json")
    before = (folder / "README.md").read_text()
    address = push(folder, "ann/tiny", results=[results])
    assert address.startswith(f"{hub.address}/ann/tiny/commit/")
    assert set(hub.files("ann/tiny")) == set(MODEL_FILES)
    assert fsdfm.load("ann/tiny").generate(length=12).text == fsdfm.load(folder).generate(length=12).text
    assert (folder / "README.md").read_text() == before
    card = hub.files("ann/tiny")["README.md"].decode()
    about = metadata(card)
    assert (about["library_name"], about["pipeline_tag"]) == ("fsdfm", "text-generation")
    (entry,) = about["model-index"]
    (result,) = entry["results"]
    assert result["dataset"]["name"] == "valid.txt (held out)"
    first, *_, last = result["metrics"]
    assert first["name"] == "perplexity (token) under smollm2, 1 call, temperature 0.88"
    assert (first["type"], first["value"]) == ("perplexity", 19.04)
    assert first["args"] == {"calls": 1, "temperature": 0.88, "samples": 96, "interval_95": [18.1, 20.07]}
    assert last["name"].endswith("flagged: collapse: distinct_2 below real text's")
    assert "19.0 [18.1, 20.1]" in card  # the table of `fsdfm card`


def test_a_branch_and_what_its_author_wrote(hub: Hub, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\n# My model\n")
    push(folder, "ann/tiny@beta")
    card = hub.files("ann/tiny", "beta")["README.md"].decode()
    assert metadata(card)["license"] == "mit"
    assert metadata(card)["tags"][-1] == "mine"
    assert "# My model" in card
    assert hub.files("ann/tiny") == {}


def test_results_of_other_weights_are_refused(hub: Hub, tmp_path: Path) -> None:
    results = measured(save_tiny(tmp_path / "other", seed=1), tmp_path / "results.json")
    with pytest.raises(ValueError, match="measured with other weights"):
        push(save_tiny(tmp_path / "model"), "ann/tiny", results=[results])
    assert hub.repositories == {}


def test_an_embedded_model_brings_its_own_results(tmp_path: Path) -> None:
    card = (stage("fewstep", tmp_path / "fewstep") / "README.md").read_text()
    metrics = [each for result in metadata(card)["model-index"][0]["results"] for each in result["metrics"]]
    assert {each["args"]["calls"] for each in metrics} >= {1, 2, 4, 8}
    assert load_model(tmp_path / "fewstep").length == 256


def test_a_run_is_shared_without_its_training_state(hub: Hub, tmp_path: Path) -> None:
    train_quietly(write_recipe(tmp_path), f"out={tmp_path}/run", "train.steps=1")
    push(tmp_path / "run", "ann/run")
    assert set(hub.files("ann/run")) == set(MODEL_FILES)
    assert load_model("ann/run").facts["training_step"] == 1


def test_metadata_survives_what_is_not_a_number() -> None:
    row = Row(steps=1, metrics={"perplexity": Measured(float("inf")), "mauve": Measured(0.5)})
    evaluation = Evaluation(model={"name": "x"}, rows=(row,))
    about = metadata(hub_card("# x\n", {}, [evaluation], name="x"))
    assert [each["type"] for each in about["model-index"][0]["results"][0]["metrics"]] == ["mauve"]
    assert "model-index" not in metadata(hub_card(hub_card("# x\n", {}, [evaluation], name="x"), {}, [], name="x"))
    assert metadata(hub_card("# x\n", {"imported": {"file": "bob/llama@1"}}, [], name="x"))["base_model"] == "bob/llama"
    assert replace(evaluation, rows=()).rows == ()


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-m", "fsdfm", *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(code, capture_output=True, text=True, check=False, env={**kept, **environment})


@pytest.mark.slow
def test_the_commands_take_the_hub_s_own_settings(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    with run_hub() as hub:
        own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        pushed = run(["push", str(folder), "ann/tiny", "--private"], **own)
        assert pushed.returncode == 0, pushed.stderr
        assert pushed.stdout.startswith(f"{hub.address}/ann/tiny/commit/")
        assert TOKEN not in pushed.stdout + pushed.stderr
        words = ["generate", "--model", "ann/tiny", "--length", "12", "--steps", "2"]
        first = run(words, **own)
        assert first.returncode == 0, first.stderr
    again = run(words, **own, HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout
    absent = run(["generate", "--model", "ann/none"], **own, HF_HUB_OFFLINE="1")
    assert absent.returncode == 2
    assert absent.stderr.startswith("error: ann/none is no folder here")
    assert "Traceback" not in absent.stderr


def test_the_push_command_names_its_fault(tmp_path: Path) -> None:
    failed = CliRunner().invoke(app, ["push", str(tmp_path), "nobody"])
    assert "no name of a model on the hub" in str(failed.exception)
