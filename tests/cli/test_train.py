"""The training commands as a user gives them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from llama2c_files import STORIES, Llama, write_vocabulary
from safetensors.torch import load_file
from typer.testing import CliRunner

from fsdfm.checkpoint import load_model
from fsdfm.cli import app
from fsdfm.config import find_recipe
from fsdfm.data import Corpus, Pairs
from small_runs import write_recipe

runner = CliRunner()
COMMAND = [sys.executable, "-m", "fsdfm"]
ENVIRONMENT = {**os.environ, "COLUMNS": "200"}


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, env=ENVIRONMENT)


def test_train_trains(tmp_path):
    recipe = write_recipe(tmp_path)
    result = runner.invoke(app, ["train", str(recipe), f"out={tmp_path / 'run'}", "train.steps=4"])
    assert result.exit_code == 0, result.output
    assert "finished, training step 4" in result.stdout
    assert load_model(tmp_path / "run").facts["training_step"] == 4


def test_prepare_makes_a_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("one<|end|>two")
    arguments = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "corpus"), "--tokenizer", "bytes"]
    for _ in range(2):
        result = runner.invoke(app, [*arguments, "--separator", "<|end|>"])
        assert result.exit_code == 0, result.output
        assert "2 documents, 8 tokens" in result.stdout
    assert len(Corpus.open(tmp_path / "corpus")) == 8


def test_import_makes_a_parent_of_an_autoregressive_model(tmp_path):
    Llama().write(tmp_path / "model.bin")
    vocabulary = write_vocabulary(tmp_path / "tokenizer.bin")
    (tmp_path / "stories.txt").write_text("\n".join(STORIES * 9))
    arguments = ["import", str(tmp_path / "model.bin"), "--out", str(tmp_path / "parent"), "--half"]
    arguments += ["--tokenizer", str(vocabulary), "--texts", str(tmp_path / "stories.txt")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    bundle = load_model(tmp_path / "parent")
    assert bundle.tokenizer.decode(bundle.tokenizer.encode(STORIES[1])) == STORIES[1]
    recipe = tmp_path / "child.toml"
    recipe.write_text(
        f"""
        out = "{tmp_path / "child"}"
        data = {{ inputs = ["{tmp_path / "stories.txt"}"], length = 16 }}
        model = {{ parent = "{tmp_path / "parent"}" }}
        objective = {{ kind = "fewstep", teacher = {{ tableau = "chained" }} }}
        train = {{ steps = 2, batch_size = 4 }}
        runtime = {{ device = "cpu", threads = 1 }}
        """
    )
    result = runner.invoke(app, ["train", str(recipe)])
    assert result.exit_code == 0, result.output
    child = load_model(tmp_path / "child")
    assert (child.bos_id, child.model.config.conditioning, child.model.config.next_token) == (1, "step", True)
    again = runner.invoke(app, arguments)
    assert isinstance(again.exception, ValueError)
    assert "not empty" in str(again.exception)


def test_reflow_keeps_pairs_and_resumes(tmp_path):
    recipe = write_recipe(tmp_path)
    assert runner.invoke(app, ["train", str(recipe), f"out={tmp_path / 'parent'}", "train.steps=2"]).exit_code == 0
    arguments = [
        "reflow",
        str(tmp_path / "parent"),
        "--out",
        str(tmp_path / "pairs"),
        "--steps",
        "3",
        "--batch-size",
        "2",
    ]
    assert runner.invoke(app, [*arguments, "--num", "3"]).exit_code == 0
    first = Pairs(tmp_path / "pairs").tokens[:3].tolist()
    assert runner.invoke(app, [*arguments, "--num", "5"]).exit_code == 0
    pairs = Pairs(tmp_path / "pairs")
    assert (len(pairs), pairs.tokens[:3].tolist()) == (5, first)
    other = runner.invoke(app, [*arguments, "--num", "5", "--seed", "1"])
    assert isinstance(other.exception, ValueError)
    assert "other pairs" in str(other.exception)
    coupled = [*arguments, "--num", "2", "--draws", "quantile", "--temperature", "0.8", "--precision", "bfloat16"]
    coupled[3] = str(tmp_path / "coupled")
    assert runner.invoke(app, coupled).exit_code == 0
    assert Pairs(tmp_path / "coupled").header.about["draws"] == "quantile"
    for option, value, sentence in (
        ("--autoregressive", "model.bin", "--autoregressive needs --corpus"),
        ("--draws", "quantil", "did you mean 'quantile'?"),
        ("--jump", "single", "allowed are exact and spaced"),
        ("--precision", "half", "precision is 'half'; allowed are auto, float32, bfloat16"),
    ):
        wrong = runner.invoke(app, [*coupled, option, value])
        assert sentence in str(wrong.exception)


def test_import_knows_what_is_in_a_file(tmp_path):
    (tmp_path / "noise.bin").write_bytes(bytes(range(200)))
    Llama().write(tmp_path / "model.bin")
    for arguments, sentence in (
        (["noise.bin"], "has none of the formats that are known: llama2c (an autoregressive"),
        (["nowhere.bin"], "is not there"),
        (["model.bin", "--preset", "1.3b"], "preset is not used by the format llama2c"),
        (["model.bin", "--format", "gguf"], "format is 'gguf'; allowed are auto, llama2c, peer, fs-dfm, huggingface"),
    ):
        file, *options = arguments
        result = runner.invoke(app, ["import", str(tmp_path / file), "--out", str(tmp_path / "out"), *options])
        assert sentence in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_recipes_are_listed_shown_and_copied(tmp_path):
    listed = runner.invoke(app, ["recipe", "list"], env=ENVIRONMENT).stdout
    assert "tiny-dfm" in listed
    assert "Pre-train a small discrete flow model" in listed
    assert runner.invoke(app, ["recipe", "show", "tiny-dfm"]).stdout == find_recipe("tiny-dfm").read_text()
    assert "steps = 7\n" in runner.invoke(app, ["recipe", "show", "tiny-dfm", "train.steps=7"]).stdout
    copy = tmp_path / "mine.toml"
    assert runner.invoke(app, ["recipe", "copy", "tiny-dfm", str(copy)]).exit_code == 0
    assert copy.read_text() == find_recipe("tiny-dfm").read_text()
    again = runner.invoke(app, ["recipe", "copy", "tiny-dfm", str(copy)])
    assert "choose another file" in str(again.exception)


def test_help_explains_the_commands():
    for command, words in (("train", "recipe"), ("prepare", "--tokenizer"), ("import", "--min-count")):
        assert words in runner.invoke(app, [command, "--help"], env=ENVIRONMENT).stdout.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train.stpes=3"], "error: train.stpes is not a key of a recipe; did you mean train.steps?"),
        (["out=/proc/nowhere"], "error: cannot write to /proc/nowhere"),
        (["data.length=100000"], "error: length is 100000; allowed are 1 <= length <="),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    recipe = write_recipe(tmp_path)
    result = run("train", str(recipe), f"out={tmp_path / 'run'}", *arguments)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if not line.startswith("tokenize")]
    assert len(lines) == 1
    assert lines[0].startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_ends_well(tmp_path, number):
    recipe = write_recipe(tmp_path)
    arguments = ["train.steps=150", "train.save_every=1000", "train.log_every=1"]
    out = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, "train", str(recipe), f"out={out}", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"stopped and saved; the same command resumes it" in said
    assert len(list((out / "checkpoints").iterdir())) == 1
    again = runner.invoke(app, ["train", str(recipe), f"out={out}", *arguments])
    assert again.exit_code == 0
    runner.invoke(app, ["train", str(recipe), f"out={tmp_path / 'whole'}", *arguments])
    for name in ("model.safetensors", "training.safetensors"):
        one, two = (
            load_file(folder / "checkpoints" / "step-0000000150" / name) for folder in (out, tmp_path / "whole")
        )
        assert all(torch.equal(value, two[key]) for key, value in one.items())
