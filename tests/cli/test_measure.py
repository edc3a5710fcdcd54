"""`make measure`: its commands, run on a tiny model, leave result files from which every kind of table is filled."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdfm.checkpoint import save_model
from fsdfm.cli import app
from fsdfm.measure.results import load_evaluation
from tiny_models import random_bundle, save_judges

STORIES = "<|endoftext|>".join(f"The {k} cats sat on {k * k} mats, and then they slept. " for k in range(60))
ROOT = Path(__file__).parents[2]
DOCUMENT = """
<!-- results headline tiny*.json -->
<!-- /results -->
<!-- results claims tiny.json -->
<!-- /results -->
<!-- results controls tiny.json -->
<!-- /results -->
<!-- results equal-entropy sweeps/tiny.json sweeps/again.json -->
<!-- /results -->
<!-- results headline many/tiny*.json -->
<!-- /results -->
The guard flags <!-- number many/tiny.json 1 guard -->?<!-- /number -->.
<!-- number tiny.json 1 token_perplexity over real -->?<!-- /number -->
"""


def commands(folder: Path) -> list[list[str]]:
    """What `make measure` would run, without its installation, on what a test has."""
    given = {
        "MODEL": str(folder / "tiny"),
        "RESULTS": str(folder / "results"),
        "HELD_OUT": str(folder / "held.txt"),
        "TRAINING": str(folder / "held.txt"),
        "ALTERNATIVE": str(folder / "ar"),
        "JUDGES": f"--judge {folder / 'judge'} --second-judge {folder / 'ar'}",
        "ONE_JUDGE": f"--judge {folder / 'judge'}",
        "EVIDENCE": f"--training {folder / 'held.txt'}",
        "TEXTS": "perplexity,diversity,distances,copying",
        "COOL": "0.8,1",
        **{"NUM": "8", "FEW": "2", "POINT": "3", "MANY": "12", "BIN": "BIN", "STAMP": str(folder / "installed")},
    }
    (folder / "installed").touch()  # newer than what it is made of, or make would begin with an installation
    make = [
        "make",
        "--dry-run",
        "--no-print-directory",
        "measure",
        *(f"{name}={value}" for name, value in given.items()),
    ]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [shlex.split(line.removeprefix("BIN/fsdfm ")) for line in lines if line.startswith("BIN/fsdfm ")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_one_command_measures_all_that_the_tables_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdfm.measure.statistics.RESAMPLES", 50)
    save_model(tmp_path / "tiny", random_bundle(length=24))
    save_judges(tmp_path)
    shutil.copytree(tmp_path / "judge", tmp_path / "ar")
    (tmp_path / "held.txt").write_text(STORIES)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)  # no documents here that the last of the commands would fill
    asked = commands(tmp_path)
    assert [words[0] for words in asked] == ["results", *["evaluate"] * 7, "results"]
    for words in asked[:-1]:  # the last one asks for the cards of models that ship, which have no results here
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.stdout
    folder = tmp_path / "results"
    assert [row.steps for row in load_evaluation(folder / "tiny-more.json").plain] == [16, 32, 64]
    assert [row.steps for row in load_evaluation(folder / "tiny-brier.json").plain] == [1, 8]
    assert [row.steps for row in load_evaluation(folder / "tiny.json").plain] == [1, 2, 4, 8]
    assert len({row.temperature for row in load_evaluation(folder / "sweeps" / "tiny.json").frontier}) >= 2
    many, beside = (load_evaluation(folder / name) for name in ("many/tiny.json", "beside/two-judges.json"))
    assert [(row.steps, row.num_samples) for row in many.plain] == [(1, 12), (8, 12)]
    assert load_evaluation(folder / "tiny.json").alternatives == beside.alternatives
    assert [row.temperature for row in beside.alternative_frontier] == [0.8]
    shutil.copy(folder / "sweeps" / "tiny.json", folder / "sweeps" / "again.json")
    record = (folder / "sweeps" / "again.json").read_text().replace('"name": "tiny"', '"name": "again"')
    (folder / "sweeps" / "again.json").write_text(record)
    (tmp_path / "page.md").write_text(DOCUMENT)
    filled = CliRunner().invoke(app, ["results", "page.md", "--from", "results"], catch_exceptions=False)
    assert filled.stdout.strip() == "written anew: page.md"
    page = (tmp_path / "page.md").read_text()
    for part in (
        "| tiny | 64 |",
        "| ar | ",
        "| periodic-k |",
        "| again | 1 |",
        "holds: ",
        "BrierLM",
        "| tiny | 1 | 12 |",
    ):
        assert part in page, part
    assert CliRunner().invoke(app, ["results", "page.md", "--from", "results", "--check"]).exit_code == 0

    (folder / "tiny.json").unlink()
    shutil.rmtree(tmp_path / "tiny")
    save_model(tmp_path / "tiny", random_bundle(length=24, seed=1))  # new weights
    before = (folder / "beside" / "two-judges.json").read_bytes()
    for words in asked[1:3]:
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert (folder / "beside" / "two-judges.json").read_bytes() == before  # nothing of it was measured again
    again = load_evaluation(folder / "tiny.json")
    assert (again.real, again.controls, len(again.rows)) == (beside.real, beside.controls, 4)
