"""`fsdfm results`: it writes what is out of date, and with --check only says so."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fsdfm.checkpoint import load_model
from fsdfm.checkpoint.embedded import find_model
from fsdfm.cli import app
from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation
from fsdfm.model.weights import weights_sha256

TEXT = "In 8 calls <!-- number a.json 8 entropy_bits -->5<!-- /number --> bits.\n"


def test_check_fails_until_the_document_is_written(tmp_path: Path) -> None:
    row = Row(steps=8, metrics={"entropy_bits": Measured(6.25, 6.0, 6.5)})
    save_evaluation(Evaluation(model={"name": "a"}, rows=(row,)), tmp_path / "results" / "a.json")
    document = tmp_path / "a.md"
    document.write_text(TEXT)
    words = ["results", str(document), "--from", str(tmp_path / "results")]
    failed = CliRunner().invoke(app, [*words, "--check"])
    assert failed.exit_code == 1
    assert f"out of date: {document}" in failed.stderr
    assert document.read_text() == TEXT
    assert CliRunner().invoke(app, words).stdout.strip() == f"written anew: {document}"
    assert "6.25 [6.00, 6.50]" in document.read_text()
    agreed = CliRunner().invoke(app, [*words, "--check"])
    assert (agreed.exit_code, agreed.stdout.strip()) == (0, "documents, cards and result files agree")


def test_prune_removes_what_was_measured_of_weights_that_no_longer_ship(tmp_path: Path) -> None:
    name, sha256 = "fewstep", weights_sha256(load_model(find_model("fewstep")).model)
    row, written = Row(steps=8), Row(steps=255, facts={"name": "ar"})

    def save(file: str, sha: str, **parts: tuple[Row, ...]) -> Path:
        called = {"others.json": "others", "renoised.json": f"{name}, renoised"}.get(file, name)
        folder = "runs/others" if called == "others" else name
        model = {"name": called, "folder": folder, "checkpoint_sha256": sha}
        save_evaluation(Evaluation(model=model, **parts), tmp_path / file)
        return tmp_path / file

    kept = [save("own.json", sha256, rows=(row,)), save("others.json", "old", rows=(row,))]
    kept.append(save("beside.json", "old", alternatives=(written,)))
    (tmp_path / "sweeps").mkdir()
    gone = [save("old.json", "old", rows=(row,)), save("renoised.json", "old", rows=(row,))]
    gone.append(save("sweeps/old.json", "old", frontier=(row,)))
    done = CliRunner().invoke(app, ["results", "--prune", "--from", str(tmp_path)])
    assert done.stdout.strip() == f"removed: {', '.join(map(str, gone))}"
    assert [file.exists() for file in (*kept, *gone)] == [True] * 3 + [False] * 3
    again = CliRunner().invoke(app, ["results", "--prune", "--from", str(tmp_path)])
    assert again.stdout.strip() == "every result file is of the weights that ship"
    assert isinstance(CliRunner().invoke(app, ["results", "--prune", "--check"]).exception, ValueError)


def test_the_results_that_ship_agree_with_the_cards(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no documents here: the cards alone
    done = CliRunner().invoke(app, ["results", "--check"])
    assert (done.exit_code, done.stderr) == (0, "")
