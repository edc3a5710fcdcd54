import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fsdfm import __version__
from fsdfm.cli import app

runner = CliRunner()


def run(*arguments):
    """The real command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "fsdfm", *arguments], capture_output=True, text=True, check=False)


def test_version():
    assert runner.invoke(app, ["--version"]).stdout.strip() == __version__


def test_help_names_every_command():
    text = runner.invoke(app, ["--help"]).stdout
    for command in ("bench", "train", "study"):
        assert command in text


@pytest.mark.slow
def test_bench_jump_writes_json(tmp_path):
    file = tmp_path / "deep" / "jump.json"
    result = runner.invoke(
        app, ["bench", "jump", "--length", "8", "--vocab-size", "50", "--repeats", "1", "--json", str(file)]
    )
    assert result.exit_code == 0
    assert "exact" in result.stdout
    assert json.loads(file.read_text())["exact"]["over_softmax"] > 0


@pytest.mark.slow
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    done = run("bench", "jump", "--repeats", "0")
    assert (done.returncode, done.stderr) == (2, "error: repeats is 0; allowed are whole numbers >= 1\n")
    occupied = tmp_path / "file"
    occupied.write_text("")
    done = run(
        "bench", "jump", "--length", "4", "--vocab-size", "9", "--repeats", "1", "--json", str(occupied / "x.json")
    )
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_importing_the_package_stays_light():
    code = "import sys, fsdfm; print([m for m in ('matplotlib', 'tokenizers', 'typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
