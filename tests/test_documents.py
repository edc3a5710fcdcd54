"""Every shell block of README, docs and model cards: bash reads it, its options are known, and it runs, small.

bash runs each block with commands that only write down how they were called, so that loops, functions, variables and
comments mean what they mean in a shell. Every call of `fsdfm` is then parsed by the real command line, recipes and
their overrides included, and runs: all calls of a document in their order in one folder, with the changes of SMALL.
What cannot run here stands in NOT_RUN with the reason, and is parsed all the same.
"""

import importlib.util
import inspect
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fsdfm.checkpoint import save_model
from fsdfm.cli import app
from fsdfm.config import load_recipe, recipe_names
from fsdfm.generate import SamplerConfig, load
from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation
from tiny_models import random_bundle, save_judges

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
]
BLOCK = re.compile(r"^ *```+ *(?:sh|bash|shell|console)\b[^\n]*\n(.*?)^ *```", re.M | re.S)
RECORDED = (
    "fsdfm",
    "pip",
    "make",
    "torchrun",
    "srun",
    "scontrol",
    "curl",
    "python",
    "tensorboard",
    "hf",
    "mypy",
    "ruff",
)
RECORD = '#!/bin/bash\nprintf "%s\\x1f" "${0##*/}" "$@" >> "$RECORD"\nprintf "\\n" >> "$RECORD"\n'

# Calls that only their options are checked of: a pattern of the words, and why.
NOT_RUN = {
    r"^serve\b": "serves until it is stopped; tests/serve starts it",
    r"^import (FS_DFM|kuleshov|SmolLM2|Qwen3|LLaDA)": "weights from elsewhere, gigabytes",
    r"^(generate|evaluate|train).*\b(models/fs-dfm|models/mdlm|imported/)": "weights from elsewhere",
    r"^(import|train|export|reflow).*stories(15M|-dfm|-inverse)": "wants stories15M and its corpus",
    r"^train stories-|^train peer-|^train paper-|^train imported-": "hours, and corpora of their own",
    r"stories15m:": "wants stories15M as a judge",
    r"^study (truth|sudoku|ablate|defects)": "minutes to hours, or MiniLM; tests/studies runs them small",
    r"^bench\b.*(--plot|170m)": "minutes; tests/bench runs it small",
    r"^demo\b|^card\b|^results\b": "writes into the package; tests/demo and tests/cli run them elsewhere",
    r"--beside": "wants what was measured with stories15M; tests/cli/test_measure.py takes over a file of its own",
    r"--watch": "a terminal",
    r"^study (compare|faults)": "minutes to hours, and a judge; tests/studies runs them small",
    r"--steps auto|--grid fitted": "wants a model that knows its entropy curve; tests/generate has one",
    r"owner/|HuggingFaceTB/|GSAI-ML/|kuleshov-group/|--tasks": "wants a network",
    r"^train novels-": "books of your own",
    r"^generate.*\bsudoku": "wants a network of the study; tests/studies/sudoku asks one",
    r"--matched": "searches a temperature for minutes; tests/measure does it small",
}
BUDGET = 4  # network calls at most
SMALL = {"--num": "2", "--length": "24", "--judge": "judge", "--second-judge": "other", "--processes": "1"}
ADDED = {
    "evaluate": [("--length", "24"), ("--num", "2"), ("--frontier", "none"), ("--no-controls",)],
    "generate": [("--length", "24")],
    "reflow": [("--length", "16")],  # as data.length below: a child reads rows as long as the pairs
}
OVERRIDES = {
    "train.steps": "2",
    "train.batch_size": "2",
    "data.inputs": '["small.txt"]',
    "data.tokenizer": "bytes",
    "data.length": "16",
    "model.width": "16",
    "model.num_blocks": "1",
    "model.num_heads": "2",
    "runtime.threads": "1",
}
INHERITED = ("model.width", "model.num_blocks", "model.num_heads")  # a child has its parent's


def blocks_of(document: Path) -> list[tuple[int, str]]:
    """Every shell block with the line that it begins in."""
    text = document.read_text("utf-8")
    return [(text.count("\n", 0, found.start()) + 1, found[1]) for found in BLOCK.finditer(text)]


def record(block: str, folder: Path) -> list[list[str]]:
    """The commands that bash makes of a block, each a list of words."""
    for name in RECORDED:
        (folder / name).write_text(RECORD)
        (folder / name).chmod(0o755)
    log = folder / "record"
    log.write_text("")
    path = f"{folder}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-eu", "-c", block],
        env={"PATH": path, "RECORD": str(log), "SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{block}"
    return [line.split("\x1f")[:-1] for line in log.read_text().splitlines()]


@cache
def calls_of(document: Path) -> list[tuple[int, list[str]]]:
    """The commands of a document: line of the block, words."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for line, block in blocks_of(document):
            found += [(line, words) for words in record(block, Path(folder)) if words[0] != "scontrol"]
    return found


def own_words(words: list[str]) -> list[str] | None:
    """What `fsdfm` is told by a command, torchrun's and srun's included; None: it is another program."""
    if words[0] == "fsdfm":
        return words[1:]
    return words[words.index("fsdfm") + 1 :] if words[0] in ("torchrun", "srun") and "fsdfm" in words else None


def parse(words: list[str]) -> None:
    """Raise where the command line does not know these words, or a recipe these keys."""
    command = typer.main.get_command(app)
    context = command.make_context("fsdfm", [*words], resilient_parsing=False)
    rest = [*words]
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None, name
        context = command.make_context(name, [*rest], parent=context) if "--help" not in rest else context
    if words[0] in ("train", "plan") or words[:2] == ["recipe", "show"]:
        recipe = context.params.get("recipe") or context.params.get("name")
        if recipe in recipe_names():
            load_recipe(recipe, context.params.get("overrides") or [])
        else:
            assert recipe.endswith(".toml"), f"there is no recipe {recipe}"


WITH_BLOCKS = [pytest.param(each, id=str(each.relative_to(ROOT))) for each in DOCUMENTS if blocks_of(each)]


@pytest.mark.parametrize("document", WITH_BLOCKS)
def test_every_command_of_a_document_is_known(document):
    outputs = [words[words.index("--out") + 1] for _, words in calls_of(document) if "--out" in words]
    for line, words in calls_of(document):
        told = own_words(words)
        try:
            if told is not None:
                parse(told)
            elif words[0] == "make":
                known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
                assert {word for word in words[1:] if "=" not in word} <= set(known), words
            elif words[0] == "python":
                made = words[1].partition("/")[0] in outputs  # by a command of the document
                assert made or (ROOT / words[1]).exists() or words[1].startswith("-"), f"there is no {words[1]}"
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{document.name}:{line}: {' '.join(words)}: {error!r}") from error


def shrink(words: list[str]) -> list[str]:
    """The same command with small sizes."""
    small = [*words]
    for place, word in enumerate(words[:-1]):
        if word in SMALL:
            small[place + 1] = SMALL[word]
        if word == "--steps" and words[place + 1] not in ("auto", "none"):
            few = [part for part in words[place + 1].replace("..", ",").split(",") if int(part) <= BUDGET]
            small[place + 1] = ",".join(few) or str(BUDGET)
    if "--from-samples" not in words:  # whose file has decided it all
        small += [part for option in ADDED.get(words[0], []) if option[0] not in words for part in option]
    if words[0] == "train":
        said = {word.partition("=")[0] for word in words}
        child = "fewstep" in words[1] or "data.pairs" in said
        keys = [key for key in OVERRIDES if key not in said and not (child and key in INHERITED)]
        small += [f"{key}={OVERRIDES[key]}" for key in keys]
    return small


STORY = "<|endoftext|>".join(f"The {k} cats sat on {k * k} mats. They were happy. " * 4 for k in range(40))


def provide(words: list[str]) -> None:
    """What a user would have: texts, trained models and results, where a command names some that are missing."""
    for word in words[1:]:
        name = Path(word.rpartition("=")[2].strip('[]"'))
        if name.is_absolute() or name.exists() or ("--out" in words and words[words.index("--out") + 1] == word):
            continue
        if name.suffix == ".txt":
            name.write_text(STORY)
        elif name.suffix == ".json" and words[0] == "report":
            measured = {"token_perplexity": Measured(30.0, 28.0, 32.0), "entropy_bits": Measured(6.0, 5.9, 6.1)}
            made = Evaluation(model={"name": name.stem}, judge={"name": "judge"}, real=measured)
            save_evaluation(made.with_row(Row(steps=8, metrics=measured)), name)
        elif name.parts[:1] == ("runs",) and words[0] != "train":
            save_model(name, random_bundle())


@pytest.mark.slow
@pytest.mark.parametrize("document", WITH_BLOCKS)
def test_every_command_of_a_document_runs(document, tmp_path, monkeypatch):
    calls = calls_of(document)
    monkeypatch.chdir(tmp_path)
    save_judges(tmp_path)
    done = set()
    for line, words in calls:
        told = own_words(words)
        if words[0] != "fsdfm" or told is None:
            continue
        small = shrink(told)  # another judge may make a command possible here
        if " ".join(small) in done or any(re.search(skip, " ".join(small)) for skip in NOT_RUN):
            continue
        done.add(" ".join(small))
        provide(small)
        result = CliRunner().invoke(app, small, catch_exceptions=True)
        said = f"{document.name}:{line}: fsdfm {' '.join(small)}: {result.exception!r}\n{result.output[-600:]}"
        assert result.exit_code == 0, said


def test_what_is_not_run_is_in_a_document():
    calls = [" ".join(own_words(words) or []) for each in DOCUMENTS for _, words in calls_of(each)]
    for skip in NOT_RUN:
        assert any(re.search(skip, call) for call in calls), f"no document has {skip}; take it off the list"


def load_module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_hook(name: str):
    return load_module(ROOT / "docs" / f"{name}.py")


def test_every_formula_is_typeset_where_it_stands():
    pytest.importorskip("latex2mathml")
    markdown = pytest.importorskip("markdown")
    hook = load_hook("math_hook")
    page = hook.on_page_markdown((ROOT / "docs" / "mathematics.md").read_text())
    assert page.count("<math") > 150
    assert not re.search(r"\$|\\[a-z]+", page)  # no LaTeX is left
    line = hook.on_page_markdown("the sum of\n$`A_s`$ and more")
    assert markdown.markdown(line).count("<p>") == 1
    drawn = hook.on_page_markdown(r"$`x_0 \sim p_0`$")
    assert "<mo>&#x0223C;</mo>" in drawn  # space around it
    assert "font-weight: bold" in hook.on_page_markdown(r"$`\mathbf{1} p^{\top}`$")  # Chromium ignores mathvariant
    assert "</msub><mspace" in hook.on_page_markdown(r"$`\log_2 h`$")


def test_the_lesson_shows_each_idea_before_any_code():
    """Source, path, posterior, jump and the price of few steps: a picture in each section, and formulas typeset."""
    pytest.importorskip("latex2mathml")
    lesson = (ROOT / "docs" / "learn-the-method.md").read_text()
    sections = lesson.split("```", 1)[0].split("\n## ")[1:]
    pictures = [re.findall(r"!\[.+?\]\((.+?)\)", section) for section in sections]
    assert [len(found) for found in pictures[:5]] == [1, 0, 1, 1, 2], "the source is drawn with the path"
    assert all((ROOT / "docs" / name).is_file() for found in pictures for name in found)
    page = load_hook("math_hook").on_page_markdown(lesson)
    assert "$" not in page
    assert not re.search(r"\b[xκ]_[t01]\b", re.sub(r"```.*?```", "", page, flags=re.DOTALL))


def test_the_pictures_of_the_lesson_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    tool = load_module(ROOT / "tools" / "lesson_pictures.py")
    lm = load("parent", threads=1)
    path, posterior, jump, board = tool.draw_path(lm), tool.draw_posterior(lm), tool.draw_jump(lm), tool.draw_steps(200)
    assert [len(figure.axes) for figure in (path, posterior, jump, board)] == [2, 3, 1, 4]
    for axes in path.axes:  # both sources end in the sentence
        words = [text.get_text() for text in axes.texts][-19:]
        assert "".join(words) == tool.SENTENCE.replace(" ", "")
    peak = [max(bar.get_width() for bar in axes.patches) for axes in posterior.axes]
    assert peak[0] < 0.3 < peak[1] < peak[2], "the law sharpens with t"
    shares = [int(re.search(r"(\d+)% right", axes.get_title())[1]) for axes in board.axes]
    assert shares == sorted(shares)
    assert shares[0] < 65 < 80 < shares[-1]


def test_lists_of_docstrings_are_lists_on_the_api_pages():
    pytest.importorskip("griffe")
    markdown = pytest.importorskip("markdown")
    hook = load_hook("api_hook")
    lists = "steps, h   calls\nseed       a number,\n           whole"
    doc = f"How to sample.\n\n    lm.generate()\n\n{lists}\n\nThe end <a, b>, `<c>`."
    page = markdown.markdown(hook.to_markdown(doc))
    assert "<code>steps, h</code>: calls</li>" in page
    assert page.count("<li>") == 2
    assert "whole</li>" in page.replace("\n", "")
    assert "<p>The end &lt;a, b&gt;, <code>&lt;c&gt;</code>.</p>" in page
    assert "<pre><code>lm.generate()" in page
    config = hook.to_markdown(inspect.getdoc(SamplerConfig))
    assert all(f"- `{name}`: " in config for name in ("steps", "target", "seed", "start", "curve"))
