"""`fsdfm results`: it writes what is out of date, and with --check only says so."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fsdfm.cli import app
from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation

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


def test_the_results_that_ship_agree_with_the_cards(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no documents here: the cards alone
    done = CliRunner().invoke(app, ["results", "--check"])
    assert (done.exit_code, done.stderr) == (0, "")
