"""What keeps the package in order: the command line's options, names used once, tests beside what they test."""

import ast
import importlib
import os
import re
import subprocess
import sys
import traceback
from collections import defaultdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fsdfm.checkpoint import save_model
from fsdfm.cli import app
from fsdfm.data import Blocks
from fsdfm.flow import Sampler
from fsdfm.learn.optim import Optimiser
from tiny_models import random_bundle

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "fsdfm", ROOT / "tests"
OPTIONS = Path(__file__).with_name("command_line.txt")

# Tests of several modules of their package, or of a property of all of it.
OF_SEVERAL = {
    "checkpoint/test_mangled",
    "checkpoint/test_pinned",
    "cli/test_cli",
    "cli/test_evaluate",
    "cli/test_generate",
    "cli/test_measure",
    "cli/test_results",
    "cli/test_train",
    "data/test_pinned",
    "demo/test_demo",
    "flow/test_pinned",
    "flow/test_reference",
    "flow/test_renoise",
    "flow/test_source_and_path",
    "generate/test_interface",
    "generate/test_limits",
    "generate/test_pinned",
    "generate/test_reference",
    "learn/test_pinned",
    "measure/judges/test_hostile",
    "measure/test_evaluation_processes",
    "measure/test_pinned",
    "model/test_pinned",
    "peers/test_pinned",
    "run/test_pinned",
    "run/test_run",
    "run/test_run_processes",
    "serve/test_contract",
    "serve/test_pinned",
    "show/test_blocks",
    "show/test_controls",
    "show/timeline/test_timeline",
    "studies/ablation/test_ablation",
    "studies/checkerboard/test_checkerboard",
    "studies/truth/test_truth",
    "test_documents",
    "test_examples",
    "test_guards",
}


def describe_commands() -> str:
    """Every command with its arguments and options, one per line."""
    lines: list[str] = []

    def walk(command, name):
        words = [p.name.upper() if p.param_type_name == "argument" else p.opts[0] for p in command.params]
        if words or not hasattr(command, "commands"):
            lines.extend([name, *(f"  {word}" for word in sorted(words))])
        for each in sorted(getattr(command, "commands", ())):
            walk(command.commands[each], f"{name} {each}")

    walk(typer.main.get_command(app), "fsdfm")
    return "\n".join(lines) + "\n"


def test_the_command_line_is_what_is_written_down():
    """A change of options is a change of the interface: `python tests/test_guards.py` writes the list anew."""
    assert describe_commands() == OPTIONS.read_text()


def test_files_are_read_in_one_place():
    """`fsdfm.files` reads plain files of a bounded size; what stands here is the package's own, or the system's."""
    own = {"serve/page/__init__.py", "cli/study.py", "studies/ablation/run.py", "bench/measure.py"}  # just written
    own |= {"adapters/portable.py", "data/documents.py"}  # stands alone; the source of Python's own modules
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("read_text", "read_bytes"):
                found.add(file.relative_to(SOURCE).as_posix())
    assert found <= own, found - own


def test_a_public_class_name_is_defined_once():
    places = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(SOURCE)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, twice


def test_tests_stand_where_what_they_test_stands():
    for file in TESTS.rglob("test_*.py"):
        place = file.relative_to(TESTS).with_suffix("")
        if place.as_posix() in OF_SEVERAL or place.name == "test_pinned":  # numbers of a whole package
            continue
        module = SOURCE / place.parent / place.name.removeprefix("test_")
        assert module.with_suffix(".py").exists() or module.is_dir(), f"{place} tests no module of its name"
    for name in OF_SEVERAL:
        assert (TESTS / f"{name}.py").exists(), f"{name} is gone; take it off the list"


def test_every_package_has_tests():
    for folder in SOURCE.rglob("__init__.py"):
        package = folder.parent.relative_to(SOURCE)
        if package.parts[:1] == ("assets",) or package.as_posix() in ("serve/page", "show/quality"):
            continue
        assert any((TESTS / package).rglob("test_*.py")), f"{package} has no tests"


NOT_PER = re.compile(
    r"\b(one|once|bool|index|uniform|numbers?|bits|nats|bytes|seconds|tokens|samples|jumps) an? "
    r"(row|token|position|process|step|training step|sample|budget|seed|block|line|stage|round|request)\b"
    r"(?! (that|has|needs|was|is|may|can|asks)\b)|\b(run|command) goes on\b"
)


def test_public_text_says_per_row_and_resumes():
    """Plain English: one number per row, not one a row; a run resumes, it does not go on."""
    files = [ROOT / "README.md", *SOURCE.rglob("*.py"), *(ROOT / "recipes").glob("*.toml")]
    files += [file for file in (ROOT / "docs").rglob("*.md") if file.name != "lab-notes.md"]
    said = [
        f"{file.relative_to(ROOT)}: {found[0]}" for file in files for found in NOT_PER.finditer(file.read_text("utf-8"))
    ]
    assert not said, said


OURS_ALONE = re.compile(
    r"\b(typist|assessor|coupler|bundles?|company|churn)\b|\b(tied|coded) (draws|noise|pairs|text)\b|\btied-\d"
    r"|\bnoise that spells\b|\blinks between\b|\bstratified jump",
    re.IGNORECASE,
)


def test_words_that_only_we_knew_do_not_come_back():
    """Reviewers know these things under other names: checkpoint, quantile coupling, CRF, systematic jump, batch."""
    files = [ROOT / "README.md", *SOURCE.rglob("*.py"), *(ROOT / "recipes").glob("*.toml"), OPTIONS]
    files += [file for file in (ROOT / "docs").rglob("*.md") if file.name != "lab-notes.md"]
    said = [f"{f.relative_to(ROOT)}: {found[0]}" for f in files for found in OURS_ALONE.finditer(f.read_text("utf-8"))]
    assert not said, said


def test_every_package_has_a_page_of_the_api():
    packages = {file.parent.name for file in SOURCE.glob("*/__init__.py")} - {"assets", "cli"}  # commands have --help
    pages = {file.stem for file in (ROOT / "docs" / "api").glob("*.md")}
    index = (ROOT / "docs" / "api" / "index.md").read_text("utf-8")
    assert packages <= pages
    assert all(f"]({name}.md)" in index for name in pages - {"index"})


def test_make_bench_runs_every_benchmark():
    made = set(re.findall(r"fsdfm bench (\w+)", (ROOT / "Makefile").read_text()))
    known = {command.name for command in typer.main.get_command(app).commands["bench"].commands.values()}
    assert made == known


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"], ["evaluate", "--help"]])
def test_help_does_not_import_torch(words):
    code = (
        "import sys; from typer.testing import CliRunner; from fsdfm.cli import app\n"
        f"done = CliRunner().invoke(app, {words!r}); assert done.exit_code == 0, done.output\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fsdfm train tiny-", {"tiny-causal", "tiny-dfm", "tiny-fewstep"}),
        ("fsdfm recipe show stories-p", {"stories-paper"}),
        ("fsdfm generate --model pa", {"parent"}),
        ("fsdfm evaluate few", {"fewstep"}),
        ("fsdfm generate --jump sp", {"spaced"}),
        ("fsdfm eval", {"evaluate"}),
    ],
)
def test_tab_completes_names_without_torch(line, expected):
    code = (
        "import sys\n"
        "try:\n    from fsdfm.cli import main; main()\n"
        "except SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_FSDFM_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = ['fsdfm']\n{code}"],
        env={**os.environ, **words},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {word.split(",")[-1] for word in done.stdout.split()} == expected


def test_names_that_tab_completes_are_those_of_the_package():
    import fsdfm.peers  # noqa: F401  (gives their rules their names)
    from fsdfm.checkpoint.embedded import NAMES
    from fsdfm.cli.completion import EMBEDDED, RULE_NAMES, complete_recipes
    from fsdfm.config import recipe_names
    from fsdfm.flow import RULES

    assert EMBEDDED == NAMES
    assert set(RULE_NAMES) <= set(RULES)  # a test before may have added rules of its own
    assert {name for name in RULES if type(RULES[name]).__module__.startswith("fsdfm.")} <= set(RULE_NAMES)
    assert set(recipe_names()) <= set(complete_recipes(""))


def test_the_walks_of_the_design_are_those_of_the_code(tmp_path, monkeypatch):
    """The arrows of docs/design.md are the files on the stack, from a command to the sampler, from bytes to a step."""
    text = (ROOT / "docs" / "design.md").read_text("utf-8").partition("## Two walks")[2].partition("\n## ")[0]
    paragraphs = [each for each in text.split("\n\n") if "→" in each]
    walks = [re.findall(r"(?:files: |→\s)`(\w+/\w+\.py)`", each) for each in paragraphs]
    assert [len(walk) for walk in walks] == [each.count("→") + 1 for each in paragraphs] == [4, 6]

    seen: dict[str, list[str]] = {}

    def look(owner, name):
        original = getattr(owner, name)

        def looked(*args, **kwargs):
            stack = [Path(frame.filename) for frame in traceback.extract_stack()]
            own = [path.relative_to(SOURCE).as_posix() for path in stack if path.is_relative_to(SOURCE)]
            seen[name] = [*dict.fromkeys(own)]
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, looked)

    look(Sampler, "question")
    look(Blocks, "rows")
    look(importlib.import_module("fsdfm.learn.path"), "chunked_loss")
    look(Optimiser, "step")
    monkeypatch.chdir(tmp_path)
    save_model(Path("model"), random_bundle())
    Path("small.txt").write_text("The cats sat on mats. " * 99)
    small = "train.steps=1 train.batch_size=2 data.tokenizer=bytes data.length=16 model.width=16 model.num_blocks=1"
    for words in (
        "generate ab --model model --steps 1 --length 8",
        f'train tiny-dfm data.inputs=["small.txt"] model.num_heads=2 runtime.threads=1 out=run {small}',
    ):
        done = CliRunner().invoke(app, words.split())
        assert done.exit_code == 0, done.output

    command, *_, sampler = walks[0]
    corpus, batches, trainer, path, losses, optimiser = walks[1]
    assert (sampler, corpus, losses, optimiser) == (
        "flow/sampler.py",
        "data/corpus.py",
        "learn/losses.py",
        "learn/optim.py",
    )

    def since(begin, name):
        return seen[name][seen[name].index(begin) :]

    assert [*since(command, "question"), sampler] == walks[0]
    assert since(trainer, "rows") == [trainer, batches]
    assert since(trainer, "chunked_loss") == [trainer, path]
    assert since(trainer, "step") == [trainer]


if __name__ == "__main__":
    OPTIONS.write_text(describe_commands())
