"""The demonstration on tiny random models and made-up results: everything is on the page, and can be made again."""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image
from typer.testing import CliRunner

from fsdfm.checkpoint import embedded, load_model, save_model
from fsdfm.checkpoint.embedded import name_of
from fsdfm.cli import app
from fsdfm.demo import write_card, write_demo
from fsdfm.demo.card import END, measured_markdown
from fsdfm.demo.page import NO_CHILD, NO_RESULTS, OTHER_WEIGHTS
from fsdfm.demo.stored import evaluate_commands, merge, read_stored, sampling_of
from fsdfm.demo.stories import Order, Programme, make_stories
from fsdfm.generate import LanguageModel, load
from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation
from fsdfm.model.weights import weights_sha256
from tiny_models import random_bundle

runner = CliRunner()
LENGTH = 400  # bytes: the longest text of the programme has 330
LONG = 12


def plainly(model, calls):
    return ()


def row(steps, perplexity, num=256, flags=(), temperature=1.0):
    metrics = {
        "token_perplexity": Measured(perplexity, 0.9 * perplexity, 1.1 * perplexity),
        "entropy_bits": Measured(6.5, 6.4, 6.6),
    }
    return Row(
        steps=steps,
        metrics=metrics,
        temperature=temperature,
        num_samples=num,
        seconds_per_sample=0.1 * steps,
        flags=flags,
    )


def result(name, sha256, *rows, temperature=1.0):
    return Evaluation(
        sampler={"temperature": temperature, "jump": "exact"},
        model={"name": name, "folder": name, "checkpoint_sha256": sha256},
        judge={"name": "smollm2"},
        data={"held_out": "valid.txt"},
        rows=rows,
        real={"token_perplexity": Measured(7.5, 7.25, 7.75), "entropy_bits": Measured(6.35, 6.25, 6.45)},
        facts={"seed": 0},
    )


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Both models, results of both (those of the parent in two files), and stories of the parent."""
    folder = tmp_path_factory.mktemp("built") / "assets"
    save_model(folder / "fewstep", random_bundle(length=LENGTH, budgets=(1, 2, 4, 8, 16)))
    save_model(folder / "parent", random_bundle(length=LENGTH))
    sha256 = weights_sha256(load_model(folder / "parent").model)
    results = folder / "demo" / "results"
    save_evaluation(result("parent", sha256, row(8, 246.5)), results / "parent.json")
    save_evaluation(result("parent", sha256, row(LONG, 31.25, num=64)), results / "parent-long.json")
    save_evaluation(
        result("fewstep", "of a younger model", row(8, 33.0, temperature=0.75), temperature=0.75),
        results / "fewstep-8.json",
    )
    save_evaluation(
        result("fewstep", "of a younger model", row(1, 90.0, flags=("noise",), temperature=0.9), temperature=0.9),
        results / "fewstep-1.json",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "ASSETS", folder)
        (folder / "demo" / "stories").mkdir()
        words = f"generate --model parent --steps 3 --seed 7 --num 2 --out {folder}/demo/stories/parent-3.json"
        assert runner.invoke(app, words.split(), catch_exceptions=False).exit_code == 0
    return folder


@pytest.fixture
def shipped(assets, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "ASSETS", assets)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Balance(HTMLParser):
    """Every tag that opens closes, in order; what the page fetches from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "input", "br", "link"):
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_shows_everything(shipped):
    done = runner.invoke(app, ["demo", "--out", "shown", "--long", str(LONG)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "look at shown/index.html" in done.stdout
    page = (shipped / "shown" / "index.html").read_text("utf-8")
    read = Balance(page)
    assert (read.open, read.fetched) == ([], [])
    words = "".join(read.words)
    for number in (
        "33.0 [29.7, 36.3]",
        "246 [222, 271]",
        "31.2 [28.1, 34.4]",
        "7.50 [7.25, 7.75]",
        "6.50 [6.40, 6.60]",
    ):
        assert number in words
    known = read_stored(embedded.ASSETS / "demo", {})
    programme = Programme.of(["fewstep", "parent"], known.sampling, long=LONG)
    assert {order.sampling for order in programme.fewer if order.steps == 1} == {(("temperature", 0.9),)}
    assert {order.sampling for order in programme.more} == {(("temperature", 0.75),)}
    assert [(order.model, order.steps) for order in programme.beside] == [
        ("fewstep", 8),
        ("parent", 8),
        ("parent", LONG),
    ]
    for order in programme.orders:
        assert order.shell in words
    assert "fsdfm generate --model parent --steps 3 --seed 7 --num 2" in words  # a stored story
    assert "Made with other weights" not in words
    assert "perplexity 90.0 [81.0, 99.0] ⚑" in words  # a flag goes with its number
    assert "Texts made like this one were not measured." in words  # 4 and 2 calls
    assert "data:image/svg+xml;base64," in page
    assert OTHER_WEIGHTS.format("fewstep") in words
    assert OTHER_WEIGHTS.format("parent") not in words
    assert NO_CHILD not in words
    for name in ("quality.png", "timeline.png"):
        with Image.open(shipped / "shown" / name) as picture:
            assert picture.width > 800


def test_the_embedded_models_are_shown_as_they_advise():
    """What the demonstration tells the sampler changes nothing: it was measured as `fsdfm generate` writes."""
    known = read_stored(embedded.stored_demo(), {})
    for name in embedded.embedded_models():
        lm = load(name, device="cpu", threads=1)
        measured = [row.steps for row in known.evaluations[name].plain if row.steps <= 64]
        assert len(measured) >= 4
        for steps in measured:
            told = dict(known.sampling(name, steps))
            advised = lm.sampler_config(steps=steps)
            assert told.get("temperature", 1.0) == (advised.temperature or 1.0)
            assert told.get("jump", "exact") == advised.to_json()["jump"]


def test_a_budget_that_was_not_measured_is_sampled_as_advised(assets):
    by_budget = {"1": 0.9, "8": 0.75}
    known = read_stored(assets / "demo", {})
    told = replace(known.evaluations["fewstep"], sampler={"temperature": by_budget, "jump": "spaced"})
    assert sampling_of(told) == (("jump", "spaced"),)
    assert sampling_of(told, row(8, 1.0, temperature=0.75)) == (("temperature", 0.75), ("jump", "spaced"))


def test_what_is_missing_is_said(shipped, assets):
    models = {"parent": load("parent")}
    index, first = write_demo("shown", long=9, stored=shipped / "nothing", models=models)
    words = "".join(Balance(index.read_text("utf-8")).words)
    assert NO_CHILD in words
    assert NO_RESULTS in words
    assert first.steps == 8
    assert sorted(file.name for file in index.parent.iterdir()) == ["index.html", "timeline.png"]
    assert [order.steps for order in Programme.of(["parent"], plainly, long=9).beside] == [8, 9]


@pytest.mark.parametrize("command", ["generate", "infill", "repair"])
def test_a_command_makes_the_same_text_again(shipped, command):
    order = next(
        order
        for order in Programme.of(["fewstep", "parent"], lambda *_: (("temperature", 0.5),), long=9).orders
        if order.command == command
    )
    calls = []
    story = make_stories([order], {"fewstep": load("fewstep")}, calls.append)[order]
    assert len(calls) == story.calls == order.steps
    done = runner.invoke(app, shlex.split(story.shell)[1:], catch_exceptions=False)
    assert done.stdout == "".join(story.timeline.pieces) + "\n"
    assert ("damaged tokens came back" in " ".join(story.notes)) == (command == "repair")


def test_half_of_the_mended_texts_is_given_to_the_real_model():
    """A few-step model is trained for dyadic steps: 8 of them from t = 1/2 are; no sentence on odd step sizes."""
    lm = load("parent", device="cpu")
    gaps, whole = (order.text for order in Programme.of(["parent"], plainly, long=8).mended)
    request = lm.encoder.gaps(gaps)
    assert sum(request.frozen[1:]) / len(request.tokens[1:]) == pytest.approx(0.5, abs=0.03)
    assert lm.checkpoint.tokenizer.decode(lm.checkpoint.tokenizer.encode(whole)) == whole


def test_warnings_become_notes():
    lm = LanguageModel(random_bundle(length=16, budgets=(1,)))
    story = make_stories([Order(model="m", steps=2)], {"m": lm}, lambda _: None)
    assert "this model was trained for 1/1" in next(iter(story.values())).notes[0]


def test_files_of_one_model_become_one():
    merged = merge(
        [result("z", "c", row(8, 1.0)), result("parent", "a", row(8, 2.0)), result("parent", "a", row(64, 1.0, 9))]
    )
    assert list(merged) == ["parent", "z"]
    assert [r.steps for r in merged["parent"].plain] == [8, 64]
    assert evaluate_commands(merged["parent"]) == [
        "fsdfm evaluate parent --judge smollm2 --held-out valid.txt --steps 8 --num 256 --seed 0",
        "fsdfm evaluate parent --judge smollm2 --held-out valid.txt --steps 64 --num 9 --seed 0",
    ]
    cooler = merge([result("parent", "a", row(8, 2.0, temperature=0.8)), result("parent", "a", row(1, 3.0))])
    assert [line.partition("--steps ")[2] for line in evaluate_commands(cooler["parent"])] == [
        "1 --num 256 --seed 0",
        "8 --num 256 --seed 0 --temperature 0.8",
    ]
    rounded = replace(cooler["parent"], facts={"seed": 0, "dtype": "bfloat16"})
    assert "--precision bfloat16" in evaluate_commands(rounded)[0]
    with pytest.raises(ValueError, match="parent have different weights"):
        merge([result("parent", "a", row(8, 2.0)), result("parent", "b", row(64, 1.0))])


def test_a_file_that_holds_no_stories_is_named(tmp_path):
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "odd.json").write_text('{"model": "x"}')
    with pytest.raises(ValueError, match="odd.json holds no stories"):
        read_stored(tmp_path, {})
    record = {"model": "parent", "generations": [], "settings": {"steps": 1, "seed": "<script>"}}
    (tmp_path / "stories" / "odd.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="odd.json holds no stories"):
        read_stored(tmp_path, {})


def test_the_card_holds_what_was_measured(shipped, assets):
    results = [assets / "demo" / "results" / name for name in ("parent.json", "parent-long.json")]
    card = assets / "parent" / "README.md"
    card.write_text("# Parent\n\nWritten by hand.\n")
    for _ in range(2):  # again: in the place of the old
        done = runner.invoke(app, ["card", "parent", *map(str, results)], catch_exceptions=False)
        assert done.exit_code == 0
    text = card.read_text()
    assert text.startswith("# Parent\n\nWritten by hand.\n\n<!-- measured")
    assert text.count("## Measured") == 1
    assert "| 8 | 246 [222, 271] | 6.50 [6.40, 6.60] |" in text
    assert "--steps 12 --num 64" in text
    card.write_text(text + "\nLimits.\n")
    assert write_card("parent", results).read_text() == text + "\nLimits.\n"
    with pytest.raises(ValueError, match="other weights than those in"):
        write_card("fewstep", [assets / "demo" / "results" / "fewstep-8.json"])


def test_the_stored_results_are_of_the_shipped_weights():
    """Whoever replaces the weights measures them again."""
    models = {name: load_model(name) for name in embedded.embedded_models()}
    known = read_stored(embedded.stored_demo(), {name: bundle.loaded for name, bundle in models.items()})
    for name, bundle in models.items():
        if name in known.evaluations:
            assert known.evaluations[name].model["checkpoint_sha256"] == weights_sha256(bundle.model)
            assert bundle.loaded.endswith(f"from {name_of(embedded.ASSETS / name)}")
    assert not any("other weights" in note for story in known.stories for note in story.notes)


def test_a_strangers_words_are_words_in_a_card():
    """What a result file says is no HTML, ends no code and closes no mark; its commands are one line each."""
    evil = "<img src=x>'; echo\n```\n<script>"
    measured = Row(steps=1, metrics={"entropy_bits": Measured(5.0), "token_perplexity": Measured(9.0)}, num_samples=3)
    found = Evaluation(
        model={"name": "n", "folder": evil},
        rows=(measured,),
        judge={"name": "<b>judge</b>\n"},
        data={"held_out": evil},
        sampler={"jump": "[x](y)"},
        facts={"seed": "<i>", "device": "`"},
    )
    before, _, code = measured_markdown(found).partition("```sh\n")
    assert not re.search(r"<(?!br>)|\]\(|\n```", before)
    (command, end, rest) = code.split("\n")
    assert (end, rest) == ("```", "")
    shell = shutil.which("bash")
    if shell is not None:
        told = subprocess.run(
            [shell, "-c", f"printf '%s|' {command}"], capture_output=True, text=True, check=True
        ).stdout
        assert told.split("|")[:8] == [
            "fsdfm",
            "evaluate",
            evil,
            "--judge",
            "<b>judge</b>\n",
            "--held-out",
            evil,
            "--steps",
        ]
    with pytest.raises(ValueError, match="a mark of the card; measure again"):
        measured_markdown(replace(found, data={"held_out": END}))
