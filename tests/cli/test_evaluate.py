import io
import json
import os
import shutil
import signal
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fsdfm.checkpoint import save_model
from fsdfm.cli import app, main
from fsdfm.files import InUseError, lock
from fsdfm.measure.evaluation import parse_steps
from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation
from fsdfm.show.quality.terminal import print_tables
from tiny_models import random_bundle, save_judges

runner = CliRunner()
STORIES = "<|endoftext|>".join(f"The {k} cats sat on {k * k} mats, and then they slept. " for k in range(40))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    save_model(folder / "tiny", random_bundle(length=24))
    save_judges(folder)
    (folder / "held.txt").write_text(STORIES)
    return folder


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("fsdfm.measure.statistics.RESAMPLES", 100)


def arguments(files, *more):
    judge, held = str(files / "judge"), str(files / "held.txt")
    sweep = [] if "--frontier" in more else ["--frontier", "none"]
    return ["evaluate", str(files / "tiny"), "--judge", judge, "--held-out", held, "--num", "4", *sweep, *more]


def test_temperatures_are_swept_and_controls_measured_unless_told_otherwise(files, tmp_path):
    words = ["evaluate", str(files / "tiny"), "--judge", str(files / "judge"), "--held-out", str(files / "held.txt")]
    words += ["--num", "4", "--steps", "1", "--metrics", "perplexity"]
    assert run(*words, "--json", str(tmp_path / "a.json")).exit_code == 0
    found = load_evaluation(tmp_path / "a.json")
    assert [row.temperature for row in found.frontier] == [0.8, 0.9]
    assert {"unigram", "markov-4", "cycle", "echo", "top-k", "mirror-k", "periodic-k"} <= set(found.controls)
    assert all("token_perplexity" in metrics for metrics in found.controls.values())
    assert {"metric", "above_real", "above_models"} <= set(found.facts["blind"][0])
    run(*words, "--json", str(tmp_path / "b.json"), "--frontier", "none", "--no-controls")
    other = load_evaluation(tmp_path / "b.json")
    assert (other.frontier, dict(other.controls)) == ((), {})
    assert other.real["token_perplexity"] == found.real["token_perplexity"]
    assert other.rows[0].metrics == found.rows[0].metrics


@pytest.mark.slow
def test_a_report_is_written_beside_the_tables(files, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    more = ["--steps", "1", "--metrics", "perplexity", "--frontier", "0.8,1.2", "--report", str(out)]
    done = run(*arguments(files, *more))
    assert done.exit_code == 0
    assert {"report.md", "results.csv", "frontier.png", "latency.png"} <= {file.name for file in out.iterdir()}
    assert "negative controls" in (out / "report.md").read_text()
    with pytest.raises(ValueError, match="--report is not used with --tasks"):
        run("evaluate", "--tasks", "x", "--report", str(out))


def test_an_autoregressive_model_stands_beside_it(files, tmp_path):
    out = tmp_path / "a.json"
    more = ["--steps", "1", "--metrics", "perplexity", "--no-controls", "--alternative", str(files / "judge")]
    done = run(*arguments(files, *more, "--json", str(out)))
    assert "judge, autoregressive: " in done.stdout
    (row,) = load_evaluation(out).alternatives
    assert row.facts["name"] == "judge"
    assert row.seconds_per_sample > 0
    assert row.metrics["token_perplexity"].value > 0
    shutil.copytree(files / "judge", tmp_path / "run" / "model")  # another joins what is measured already
    run(*arguments(files, *more, "--json", str(out), "--alternative", str(tmp_path / "run" / "model")))
    old, new = load_evaluation(out).alternatives
    assert (old, new.facts["name"]) == (row, "run")
    twice = [*more, "--alternative", str(files / "judge"), "--steps", "1"]
    with pytest.raises(ValueError, match="two of one name"):
        run(*arguments(files, *twice))


def test_two_judges_must_be_two(files):
    judge = str(files / "judge")
    done = runner.invoke(app, arguments(files, "--second-judge", judge, "--steps", "1"))
    assert done.exit_code != 0


def run(*words):
    return runner.invoke(app, list(words), catch_exceptions=False)


def test_a_table_on_standard_output_and_a_result_file(files, tmp_path):
    out = tmp_path / "deep" / "a.json"
    done = run(*arguments(files, "--steps", "1,2", "--json", str(out), "--training", str(files / "held.txt")))
    assert done.exit_code == 0
    for words in ("(token)", "real data", "copied", "⚑a: noise: ", "likelihood bound"):
        assert words in done.stdout
    assert "judge: real text" in done.stderr
    assert "2 steps at temperature 1, perplexity" in done.stderr
    found = load_evaluation(out)
    assert [row.steps for row in found.rows] == [1, 2]
    assert found.real["copied_8grams"].value == 1  # it is its own training text
    record = json.loads(out.read_text())
    assert record["model"]["name"] == record["model"]["folder"] == "tiny"
    assert record["model"]["config"]["model"]["width"] == 32
    assert record["sampler"]["length"] == 24
    assert record["data"] == {
        **{"held_out": "held.txt", "training": "held.txt", "begin": "document", "n_real": 4},
        **{key: record["data"][key] for key in ("held_out_sha256", "training_sha256")},
    }
    assert {"seed", "num_samples", "commit", "versions", "started", "seconds", "dtype", "device"} <= set(record)
    assert record["dtype"] == "float32"
    assert str(tmp_path) not in out.read_text()
    before = out.read_bytes()
    again = run(*arguments(files, "--steps", "1,2", "--json", str(out), "--training", str(files / "held.txt")))
    assert "2 rows there already" in again.stderr
    assert out.read_bytes() == before
    assert again.stdout == done.stdout


@pytest.mark.parametrize("option", ["--json", "--samples"])
def test_two_evaluations_never_write_one_file(files, tmp_path, option):
    """The second is refused at once, in a sentence that names the first, and leaves the file as it is."""
    out = tmp_path / "a.out"
    words = arguments(files, "--steps", "1", "--metrics", "perplexity", "--no-controls", option, str(out))
    with lock(out, beside=True):
        done = runner.invoke(app, words)
        assert isinstance(done.exception, InUseError)
        assert f"process {os.getpid()}" in str(done.exception)
        assert not out.exists()
    assert run(*words).exit_code == 0
    assert out.exists()
    assert not list(tmp_path.glob(".*.lock"))


def test_an_evaluation_keeps_others_out_while_it_writes(files, tmp_path, monkeypatch):
    """The lock is held when results are saved, of the result file and of the samples."""
    import fsdfm.measure.evaluation as composition

    out, samples, held = tmp_path / "a.json", tmp_path / "s.jsonl", []

    def save(evaluation, file):
        for path in (out, samples):
            with pytest.raises(InUseError), lock(path, beside=True):
                pass
            held.append(path)

    monkeypatch.setattr(composition, "save_evaluation", save)
    more = ("--steps", "1", "--metrics", "perplexity", "--no-controls", "--json", str(out), "--samples", str(samples))
    assert run(*arguments(files, *more)).exit_code == 0
    assert held


def test_interrupted_it_says_so_and_goes_on(files, tmp_path, monkeypatch):
    import fsdfm.measure.evaluation as composition

    out, real_save = tmp_path / "a.json", composition.save_evaluation

    def save(evaluation, file):
        real_save(evaluation, file)
        if len(evaluation.rows) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(composition, "save_evaluation", save)
    words = arguments(files, "--steps", "1,2", "--json", str(out), "--metrics", "perplexity")
    done = run(*words)
    assert done.exit_code == 130
    assert f"in {out}; the same command resumes" in done.stderr
    monkeypatch.setattr(composition, "save_evaluation", real_save)
    assert "1 row there already" in run(*words).stderr
    assert [row.steps for row in load_evaluation(out).rows] == [1, 2]


def test_samples_are_kept_for_another_judge(files, tmp_path):
    kept = tmp_path / "samples.jsonl"
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    more = ["--metrics", "perplexity,accuracy", "--frontier", "0.7", "--matched", "4.5", "--steps", "2"]
    run(*arguments(files, *more, "--samples", str(kept), "--json", str(first)))
    done = run("evaluate", "--from-samples", str(kept), "--judge", str(files / "other"), "--json", str(second))
    assert done.exit_code == 0
    assert "Frontier" in done.stdout
    assert "At matched entropy" in done.stdout
    a, b = load_evaluation(first), load_evaluation(second)
    assert [row.key for row in a.rows] == [row.key for row in b.rows]
    assert a.rows[0].metrics["accuracy"] == b.rows[0].metrics["accuracy"]
    assert a.rows[0].metrics["token_perplexity"] != b.rows[0].metrics["token_perplexity"]
    assert (a.judge["name"], b.judge["name"]) == ("judge", "other")
    assert a.model == b.model
    refused = runner.invoke(app, arguments(files, *more, "--samples", str(kept), "--seed", "1"))
    assert "holds other samples: its seed is 0, now it is 1" in str(refused.exception)


def test_a_precision_is_told_beside_the_weights_it_rounds(files, tmp_path):
    found = {}
    for precision in ("float32", "int8", "bfloat16"):
        out = tmp_path / f"{precision}.json"
        words = ["--steps", "1", "--metrics", "perplexity", "--json", str(out), "--precision", precision]
        assert run(*arguments(files, *words)).exit_code == 0
        found[precision] = json.loads(out.read_text())
    assert {name: record["dtype"] for name, record in found.items()} == {name: name for name in found}
    assert found["int8"]["model"] == found["bfloat16"]["model"] == found["float32"]["model"]
    words = ["--steps", "1", "--metrics", "perplexity", "--json", str(out), "--precision", "int8"]
    assert "dtype" in str(runner.invoke(app, arguments(files, *words)).exception)


def test_without_held_out_text_it_says_what_is_not_measured(files):
    done = run("evaluate", str(files / "tiny"), "--steps", "1", "--num", "2")
    assert "note: no --held-out text" in done.stderr
    assert "entropy" in done.stdout


def test_budgets():
    assert parse_steps("1..16") == (1, 2, 4, 8, 16)
    assert parse_steps("3..20") == (4, 8, 16)
    assert parse_steps("8, 2") == (8, 2)
    for wrong in ("", "0", "8,x", "5..4", "..", "1...4", "5..7", "-1"):
        with pytest.raises(ValueError, match="--steps is"):
            parse_steps(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "fast"], "--steps is 'fast'"),
        (["--num", "1"], "num is 1"),
        (["--length", "4"], "length is 4"),
        (["--temperature", "0"], "temperature is 0"),
        (["--jump", "high"], "jump is 'high'"),
        (["--grid", "fine"], "grid is 'fine'"),
        (["--start", "1"], "start is 1"),
        (["--metrics", "speed"], "metrics holds 'speed'"),
        (["--metrics", "copying"], "needs the training text: --training"),
        (["--matched", "much"], "--matched is 'much'"),
        (["--matched", "-3"], "--matched is -3"),
        (["--matched", "nowhere.json:8"], "cannot read nowhere.json"),
        (["--frontier", "cold"], "--frontier is 'cold'"),
        (["--frontier", "0"], "temperature is 0"),
        (["--training", "nowhere.txt"], "nowhere.txt is not a file"),
        (["--length", "4000"], "rows of 4000 tokens"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--judge", "nowhere.bin"], "nowhere.bin is not a file"),
        (["--from-samples", "nowhere.jsonl"], "MODEL is given with --from-samples"),
    ],
)
def test_bad_input_is_one_sentence(capsys, monkeypatch, files, words, message):
    monkeypatch.setattr(sys, "argv", ["fsdfm", *arguments(files, *words)])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


def test_bad_files_are_one_sentence(capsys, monkeypatch, files, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.jsonl").write_text("{}\n")
    folder = str(files / "tiny")
    for words, message in (
        ([folder, "--judge", str(files / "judge")], "needs --held-out FILE"),
        ([folder, "--matched", "data"], "--matched data needs the data"),
        ([str(tmp_path / "no")], "is not a folder"),
        ([folder, "--json", str(tmp_path / "a.json")], "is not a result file"),
        ([folder, "--samples", str(tmp_path / "b.jsonl")], "is not a sample file"),
        ([folder, "--json", str(tmp_path / "a.json" / "c.json")], "cannot write"),
        (["--from-samples", str(tmp_path / "no")], "is not a sample file"),
        ([folder, "--held-out", str(tmp_path / "no")], "is not a file"),
    ):
        monkeypatch.setattr(sys, "argv", ["fsdfm", "evaluate", *words])
        with pytest.raises(SystemExit) as left:
            main()
        told = capsys.readouterr().err.splitlines()
        assert left.value.code == 2
        assert message in told[-1]
        assert [line[:5] for line in told if not line.startswith("note:")] == ["error"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fold_to_the_width_there_is(width):
    metrics = {name: Measured(1234.5, 1000.0, 1500.0) for name in ("token_perplexity", "entropy_bits", "accuracy")}
    metrics |= {name: Measured(0.5, 0.25, 0.75) for name in ("distinct_1", "distinct_2", "self_bleu", "repetition")}
    row = Row(steps=8, metrics=metrics, flags=("collapse: entropy_bits below real text's 7 .. 8",))
    evaluation = Evaluation(model={"name": "tiny"}, rows=(row,), frontier=(row,), real=metrics)
    out = io.StringIO()
    print_tables(evaluation, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    tables = [line for line in lines if line and line[0] in "┏┃┡│└"]
    assert max(map(len, tables)) <= width
    assert all(line[-1] in "┓┃┩│┘" for line in tables)
    assert any("⚑a" in line for line in tables)
    assert "⚑a: collapse: entropy_bits below real text's 7 .. 8" in lines
    assert sum("real data" in line for line in tables) >= 3


def test_torchrun_is_for_commands_that_share_their_work(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["fsdfm", "generate"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "torchrun started 2 processes, which fsdfm generate would not share" in capsys.readouterr().err


def test_sigterm_stops_it_as_ctrl_c_does(files, tmp_path, monkeypatch):
    usual = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("fsdfm.measure.evaluation.save_evaluation", lambda *_: signal.raise_signal(signal.SIGTERM))
    done = run(*arguments(files, "--steps", "1", "--json", str(tmp_path / "a.json"), "--metrics", "diversity"))
    assert done.exit_code == 130
    assert "stopped with 0 finished rows" in done.stderr
    assert signal.getsignal(signal.SIGTERM) is usual
