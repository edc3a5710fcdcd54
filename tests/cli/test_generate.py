import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fsdfm.checkpoint import save_model
from fsdfm.cli import app, main
from fsdfm.cli.output import Output
from tiny_models import random_bundle

runner = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny", random_bundle(budgets=(1, 2, 4))))


def run(model, *arguments, **options):
    return runner.invoke(app, [*arguments, "--model", model, "--device", "cpu"], catch_exceptions=False, **options)


def test_only_the_text_is_on_standard_output(model):
    done = run(model, "generate", "Once", "--steps", "2", "--suffix", "end.")
    assert done.exit_code == 0
    assert done.stdout.startswith("Once")
    assert done.stdout.endswith("end.\n")
    assert "2 network calls" in done.stderr
    assert "seed 0" in done.stderr
    assert run(model, "generate", "Once", "--steps", "2", "--suffix", "end.").stdout == done.stdout
    assert run(model, "generate", "Once", "--steps", "2", "--suffix", "end.", "--seed", "1").stdout != done.stdout


def test_a_long_text_is_written_block_by_block(model, monkeypatch):
    asked = ("generate", "Once", "--steps", "1", "--length", "100", "--suffix", "end.")
    whole = json.loads(run(model, *asked, "--format", "json").stdout)["generations"][0]
    written, write = [], Output.write_text
    monkeypatch.setattr(Output, "write_text", lambda self, text: (written.append(text), write(self, text)))
    done = run(model, *asked)
    assert done.stdout == whole["text"] + "\n"
    assert len(written) > 2
    assert "overlapping blocks" in done.stderr


def test_json_carries_the_states(model):
    done = run(model, "generate", "Once", "--steps", "4", "--num", "2", "--format", "json", "--states")
    record = json.loads(done.stdout)
    assert record["command"] == "generate"
    assert record["settings"]["steps"] == 4
    assert len(record["generations"]) == 2
    first = record["generations"][0]
    assert (first["calls"], first["seed"], len(first["changes"]), len(first["states"])) == (4, 0, 4, 5)
    assert "".join(first["pieces"]) == first["text"]
    assert record["generations"][1]["text"] != first["text"]


def test_infill_reads_standard_input(model):
    done = run(model, "infill", "-", "--steps", "2", "--start", "0", input="ab[[3]]cd\n")
    assert done.exit_code == 0
    assert done.stdout.startswith("ab")
    assert done.stdout.endswith("cd\n")


def test_repair_reports_what_it_did(model):
    done = run(model, "repair", "a damaged text", "--damaged", "2:9", "--steps", "2", "--start", "0")
    assert done.stdout.startswith("a ")
    assert done.stdout.endswith(" text\n")
    assert "of 14 tokens replaced, 7 damaged" in done.stderr
    done = run(model, "repair", "a damaged text", "--corrupt", "0.5", "--steps", "2", "--start", "0")
    assert "of the 7 corrupted tokens recovered" in done.stderr
    done = run(model, "repair", "a damaged text", "--corrupt", "0.5", "--blind", "--steps", "2", "--start", "0")
    assert "1 network call in" in done.stderr  # a network of random weights finds nothing odd
    assert "0 of 14 tokens replaced, 0 damaged" in done.stderr


def test_the_file_says_the_format(model, tmp_path):
    run(model, "generate", "Once", "--steps", "2", "--out", str(tmp_path / "deep" / "a.html"))
    assert "<html" in (tmp_path / "deep" / "a.html").read_text()
    run(model, "generate", "Once", "--steps", "2", "--out", str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text())["generations"][0]["steps"] == 2
    done = run(model, "generate", "Once", "--steps", "2", "--out", str(tmp_path / "a.txt"))
    assert (tmp_path / "a.txt").read_text().startswith("Once")
    assert done.stdout == ""


def test_timeline_and_watch(model):
    done = run(model, "generate", "Once", "--steps", "2", "--format", "timeline")
    assert "step 2" in done.stdout
    done = run(model, "generate", "Once", "--steps", "2", "--watch")
    assert done.stdout.startswith("Once")
    assert "step 2 of 2" in done.stderr


def test_warnings_are_sentences(model):
    done = run(model, "generate", "--steps", "3", "--length", "40")
    assert done.stderr.startswith("warning: 40 tokens are more than the 32")
    assert "warning: a step has the size h = 1/3, and this model was trained for 1/1, 1/2, 1/4" in done.stderr


def fail(capsys, monkeypatch, *arguments):
    """The exit code and the standard error of the real entry point."""
    monkeypatch.setattr(sys, "argv", ["fsdfm", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--steps", "0"], "steps is 0"),
        (["generate", "--steps", "1000000"], "steps is 1000000"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x" * 40], "leaves no room in a length of 32"),
        (["generate", "a<|endoftext|>b"], "ends a document"),
        (["generate", "a\udcff"], "not a UTF-8 string"),
        (["generate", "--num", "0"], "num is 0"),
        (["generate", "--num", "2", "--watch"], "--watch shows one text"),
        (["generate", "--states"], "--states goes with --format json"),
        (["generate", "--format", "png"], "a picture needs a file"),
        (["generate", "--out", "story.gif"], "pictures are written as .png"),
        (["generate", "--device", "abacus"], "device is 'abacus'"),
        (["infill", "an [[array]]"], "opens no gap"),
        (["infill", ""], "the text is empty"),
        (["repair", ""], "the text is empty"),
        (["repair", "abc", "--damaged", "1-2"], "write BEGIN:END"),
        (["repair", "abc", "--corrupt", "2"], "share is 2.0"),
    ],
)
def test_bad_input_is_one_sentence(capsys, monkeypatch, model, arguments, message):
    code, told = fail(capsys, monkeypatch, *arguments, "--model", model)
    assert code == 2
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


def test_bad_folders_are_one_sentence(capsys, monkeypatch, model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    (tmp_path / "empty").mkdir()
    spoilt = save_model(tmp_path / "spoilt", random_bundle())
    weights = load_file(spoilt / "model.safetensors")
    weights["head.weight"][0, 0] = torch.nan
    save_file(weights, spoilt / "model.safetensors")
    for arguments, message in (
        (["--model", str(tmp_path / "nowhere")], "is not a folder"),
        (["--model", str(tmp_path / "empty")], "holds no checkpoint"),
        (["--model", str(spoilt)], "is damaged"),
        (["--model", model, "--out", str(blocked / "a.txt")], "cannot write"),
    ):
        code, told = fail(capsys, monkeypatch, "generate", *arguments)
        assert code == 2
        assert message in told
        assert told.count("\n") == 1


def test_a_strange_name_is_no_markup_after_the_work(model, tmp_path, monkeypatch):
    done = run(model, "generate", "Once", "--steps", "1", "--out", str(tmp_path / "x[/b].txt"))
    assert done.exit_code == 0
    assert "x[/b].txt: 1 network call in" in done.stderr
    (tmp_path / "text.txt").write_text("a fox met a crow " * 20)
    words = ["prepare", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "c[/b]")]
    done = runner.invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "c[/b]: 1 documents" in done.stdout


def test_an_error_cannot_command_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fsdfm", "generate", "--model", "\x1b]0;owned\x07[/b]"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "\\x1b]0;owned\\x07[/b]" in said
    assert "\x1b" not in said
