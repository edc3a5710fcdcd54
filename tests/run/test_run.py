import io
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch
from llama2c_files import STORIES, Llama, write_vocabulary
from rich.console import Console
from safetensors.torch import load_file

from fsdfm import data
from fsdfm import run as module
from fsdfm.checkpoint import causal_over, load_model, save_model
from fsdfm.config import DataConfig, load_recipe, recipe_names
from fsdfm.data import PairHeader, PairWriter
from fsdfm.files import lock
from fsdfm.flow import Grid, MaskSource
from fsdfm.generate import LanguageModel
from fsdfm.learn import CanvasObjective, FewStepObjective, PathObjective, RewardObjective, SweepObjective
from fsdfm.learn.journal import JsonLines, duration
from fsdfm.learn.optim import Optimiser, WithoutDropout
from fsdfm.learn.reflow import Reflow, collect_pairs
from fsdfm.learn.trainer import Trainer
from fsdfm.model import ARCHITECTURES, Architecture, CausalHeadConfig, DiT, Network
from fsdfm.model.layers import RotaryScaling
from fsdfm.run import (
    PairsConfig,
    make_inverse_pairs,
    make_objective,
    make_pairs,
    make_path,
    make_timed_pairs,
    make_workload,
    model_config,
    prepare_corpus,
    train,
)
from fsdfm.runtime import Runtime, RuntimeConfig
from small_runs import train_quietly, write_recipe
from tiny_models import random_bundle


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


def train_silently(recipe, *overrides):
    console = Console(file=io.StringIO(), width=200)
    result = train(recipe, list(overrides), console=console)
    return result, console.file.getvalue()


def tensors(run):
    """All that a run's last checkpoint holds, training state included."""
    last = sorted((run / "checkpoints").iterdir())[-1]
    return {name: load_file(last / name) for name in ("model.safetensors", "training.safetensors")}


def assert_same(one, two):
    first, second = tensors(one), tensors(two)
    for file in first:
        assert first[file].keys() == second[file].keys()
        for name, value in first[file].items():
            assert torch.equal(value, second[file][name]), name


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_writes_down_what_it_did(recipe, tmp_path):
    out = tmp_path / "run"
    result, said = train_silently(recipe, f"out={out}", "sample.every=6", "sample.steps=2")
    assert (result.folder, result.training_step, result.finished) == (out, 12, True)
    assert "step 12  loss" in said
    assert "tokens/s" in said
    assert load_recipe(out / "recipe.toml").train.steps == 12
    assert {"commit", "versions"} == set(json.loads((out / "run.json").read_text()))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["training_step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert all(math.isfinite(line["loss"]) for line in lines)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(line["training_step"], len(line["texts"])) for line in samples] == [(6, 2), (12, 2)]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-0000000009", "step-0000000012"]
    bundle = load_model(out)
    assert bundle.budgets is None
    assert bundle.facts["training_step"] == 12
    assert bundle.facts["objective"]["kind"] == "path"
    assert bundle.length == 16


def child_of(parent, out):
    """What a recipe of a preset changes to start from a parent."""
    sizes = ("preset", "width", "num_blocks", "num_heads", "cond_width")
    return [*(f"model.{name}=none" for name in sizes), "data.tokenizer=none", f"model.parent={parent}", f"out={out}"]


def test_a_child_starts_as_its_parent_and_knows_its_budgets(recipe, tmp_path):
    parent = tmp_path / "parent"
    train_silently(recipe, f"out={parent}")
    few = write_recipe(tmp_path, kind="fewstep")
    changes = child_of(parent, tmp_path / "child")
    start = module.start(load_recipe(few, changes), tmp_path / "child")
    inputs = torch.zeros(2, 16, dtype=torch.int64), torch.tensor([0.1, 0.7]), torch.tensor([0.25, 2.0**-10])
    before = load_model(parent).model
    assert torch.equal(start.model.eval()(*inputs), before(*inputs))
    result, _ = train_silently(few, *changes)
    assert result.finished
    child = load_model(tmp_path / "child")
    assert child.budgets == tuple(2**k for k in range(11))
    assert child.model.config.conditioning == "step"
    assert child.tokenizer.hash == load_model(parent).tokenizer.hash
    with pytest.raises(ValueError, match=r"model\.width is set, but model\.parent decides it"):
        train_silently(few, *changes, f"out={tmp_path / 'x'}", "model.width=32")
    with pytest.raises(ValueError, match="make \\[flow\\] what the parent was trained with"):
        train_silently(few, *changes, f"out={tmp_path / 'x'}", "flow.exponent=2")
    (tmp_path / "other.txt").write_text("Some other text about dogs and their many friends. " * 40)
    config = DataConfig(inputs=(str(tmp_path / "other.txt"),), tokenizer="bpe:270")
    other = prepare_corpus(config, tmp_path / "other").folder
    with pytest.raises(ValueError, match="leave it out to use the parent's"):
        train_silently(few, *changes, f"out={tmp_path / 'x'}", f"data.tokenizer={other}")


def test_transitions_are_counted_then_trained(recipe, tmp_path):
    parent = tmp_path / "parent"
    train_silently(recipe, f"out={parent}")
    few = write_recipe(tmp_path, kind="fewstep")
    changes = child_of(parent, tmp_path / "child")
    linked = ["objective.loss=cross-entropy", "objective.teacher=none"]
    changes += [*linked, "model.transition_rank=4"]
    start = module.start(load_recipe(few, changes), tmp_path / "child")
    counted = start.model.joint.left @ start.model.joint.right.T
    assert counted[ord("c"), ord("a")] > counted[ord("a"), ord("c")] + 0.1  # cats, and hardly an ac
    result, _ = train_silently(few, *changes)
    assert result.finished
    child = load_model(tmp_path / "child")
    assert child.model.config.transition_rank == 4
    trained = child.model.joint.left @ child.model.joint.right.T
    assert not torch.allclose(trained, counted)
    again = [*child_of(tmp_path / "child", tmp_path / "next"), *linked]
    for rank in ((), ("model.transition_rank=4",)):
        onward = module.start(load_recipe(few, [*again, *rank]), tmp_path / "next")
        assert torch.equal(onward.model.joint.left, child.model.joint.left)
    gated = [*child_of(tmp_path / "child", tmp_path / "gated"), *linked, "model.transition_gates=8", "train.steps=2"]
    onward = module.start(load_recipe(few, gated), tmp_path / "gated").model.joint
    assert torch.equal(onward.left, child.model.joint.left)
    assert not bool(onward.gates.out.weight.any())
    assert train_silently(few, *gated)[0].finished
    learnt = load_model(tmp_path / "gated").model
    assert learnt.config.posterior.gate_width == 8
    assert bool(learnt.joint.gates.out.weight.any())
    with pytest.raises(ValueError, match="model.transition_gates is for a DiT with transitions"):
        train_silently(few, *child_of(parent, tmp_path / "y"), *linked, "model.transition_gates=8")
    with pytest.raises(ValueError, match="model.transition_rank is 5, but the parent has transitions of rank 4"):
        train_silently(few, *again, "model.transition_rank=5")
    for wrong in ([*changes, f"out={tmp_path / 'x'}"], again):  # links that are asked for, and those of a parent
        with pytest.raises(ValueError, match="set it to .none., or start from a model without one"):
            train_silently(few, *wrong, "objective.teacher=shortcut")
    none = module.start(
        load_recipe(few, [*child_of(parent, tmp_path / "none"), "model.transition_rank=0"]), tmp_path / "none"
    )
    assert none.model.joint is None


@dataclass(frozen=True)
class LettersConfig:
    vocab_size: int
    width: int = 8
    to_dict = asdict

    @classmethod
    def from_dict(cls, values):
        return cls(**values)


class LettersNetwork(Network):
    """No transformer: every position by itself."""

    def __init__(self, config, *, seed=0):
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocab_size, config.width)
        self.head = torch.nn.Linear(config.width, config.vocab_size)

    def trunk(self, x_t, t, h):
        return torch.tanh(self.embedding(x_t) + t.float()[:, None, None])

    def logits_at(self, features):
        return self.head(features)


@pytest.fixture
def own(monkeypatch):
    """What a recipe of a preset changes to train a registered network with fresh weights."""
    monkeypatch.setitem(ARCHITECTURES, "letters", Architecture(LettersConfig, LettersNetwork))
    sizes = [f"model.{name}=none" for name in ("preset", "width", "num_blocks", "num_heads", "cond_width", "dropout")]
    return [*sizes, "model.architecture=letters", "model.network.width=4"]


def test_a_network_of_ones_own_is_trained_resumed_and_a_parent(recipe, tmp_path, own):
    parent = tmp_path / "own"
    train_silently(recipe, f"out={parent}", *own, "train.steps=5", "sample.every=5", "sample.steps=2")
    result, _ = train_silently(recipe, f"out={parent}", *own, "sample.every=5", "sample.steps=2")
    assert (result.finished, result.training_step) == (True, 12)
    bundle = load_model(parent)
    assert isinstance(bundle.model, LettersNetwork)
    assert bundle.model.config == LettersConfig(bundle.path.source.vocab_size, width=4)
    assert LanguageModel(bundle).generate(length=8, steps=2).calls == 2
    child = [word for word in child_of(parent, tmp_path / "child") if "preset" not in word]
    train_silently(recipe, *own[:-2], *child, "train.steps=1")
    assert isinstance(load_model(tmp_path / "child").model, LettersNetwork)
    with pytest.raises(ValueError, match="only dit and transformer can be planned"):
        make_workload(load_recipe(recipe, [*own[:-2], *child]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.network.depth=2", r"model\.network is not what model\.architecture = .letters. takes: .*'depth'"),
        ("model.preset=tiny", r"model\.preset is not used by model\.architecture = .letters.; remove it"),
        ("model.dropout=0.1", r"model\.dropout is not used by model\.architecture = .letters.; remove it"),
        ("model.architecture=dit", r"model\.network is not used by model\.architecture = .dit."),
        ("model.architecture=letter", r"allowed are dit, transformer, .*causal \(did you mean 'letters'\?\)"),
        ("model.network=wide", r"model\.network is 'wide'; it is a section"),
        ("objective.kind=fewstep", r"trains several step sizes, and .*letters.*is told none"),
        ("data.pairs=pairs", r"data\.pairs are made by a parent"),
    ],
)
def test_what_a_network_of_ones_own_has_no_use_for(recipe, tmp_path, own, change, message):
    with pytest.raises(ValueError, match=message):
        train_silently(recipe, f"out={tmp_path / 'run'}", *own, change)
    assert not (tmp_path / "corpus").exists()  # told before anything is made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.dropout=0.1", r"model\.dropout is set, but the config of LettersNetwork has no dropout"),
        ("objective.kind=fewstep", "LettersNetwork cannot be made step-aware"),
        ("model.causal_blocks=1", r"model\.causal_blocks is for a DiT"),
        ("model.transition_rank=2", "LettersNetwork takes no transitions"),
    ],
)
def test_what_a_parent_of_ones_own_cannot_become(recipe, tmp_path, own, change, message):
    parent = tmp_path / "own"
    train_silently(recipe, f"out={parent}", *own, "train.steps=1")
    child = [word for word in child_of(parent, tmp_path / "child") if "preset" not in word]
    with pytest.raises(ValueError, match=message):
        train_silently(recipe, *own[:-2], *child, "objective.loss=cross-entropy", change)


def test_a_mask_source_has_one_token_more(recipe, tmp_path):
    train_silently(recipe, f"out={tmp_path / 'run'}", "flow.source=mask", "sample.every=12", "sample.steps=2")
    bundle = load_model(tmp_path / "run")
    assert bundle.path.source == MaskSource(258)
    assert bundle.model.config.vocab_size == 258


def llama_files(tmp_path):
    """An autoregressive model and its text: what a recipe on them changes, and what makes it start from the model."""
    Llama().write(tmp_path / "model.bin")
    write_vocabulary(tmp_path / "tokenizer.bin")
    (tmp_path / "stories.txt").write_text("\n".join(STORIES * 5))
    changes = [f"model.{name}=none" for name in ("preset", "width", "num_blocks", "num_heads", "cond_width")]
    changes += ["data.tokenizer=none", f"data.inputs={tmp_path / 'stories.txt'}", f"data.corpus={tmp_path / 'llama'}"]
    start = [f"model.llama2c={tmp_path / 'model.bin'}", f"model.llama2c_tokenizer={tmp_path / 'tokenizer.bin'}"]
    return changes, start


def test_an_autoregressive_model_is_a_start(recipe, tmp_path):
    changes, start = llama_files(tmp_path)
    changes += [*start, "sample.every=4", "sample.steps=2", f"out={tmp_path / 'run'}"]
    train_silently(recipe, *changes)
    bundle = load_model(tmp_path / "run")
    assert bundle.model.config.next_token
    assert bundle.bos_id == 1
    feed = module.make_feed(data.Blocks(data.Corpus.open(tmp_path / "llama"), 8), 4, bos_id=1)
    batch = next(feed(0))
    assert bool((batch.x_1[:, 0] == 1).all())
    assert batch.given[:, 0].all()
    assert int(batch.given.sum()) == 4
    told = data.Blocks(data.Corpus.open(tmp_path / "llama"), 8, given_share=1.0)
    batch = next(module.make_feed(told, 4, bos_id=1)(0))
    assert batch.given[:, 0].all()
    assert torch.equal(batch.given[:, 1:], told.rows(range(4)).given[:, :-1]), "the gap moves with the text"
    with pytest.raises(ValueError, match="is not a file"):
        train_silently(recipe, *changes, "model.llama2c=nothing.bin", f"out={tmp_path / 'x'}")
    with pytest.raises(ValueError, match="has no mask token"):
        train_silently(recipe, *changes, "flow.source=mask", f"out={tmp_path / 'x'}")


def test_inverse_text_and_step_pairs_train_a_child(recipe, tmp_path):
    """Text with inverse-autoregressive noise, quantile-coupled pairs at large steps, some plain text."""
    changes, start = llama_files(tmp_path)
    parent = tmp_path / "parent"
    train_silently(recipe, *changes, *start, "train.steps=2", f"out={parent}")
    runtime, quiet = RuntimeConfig(device="cpu", threads=1), Console(quiet=True)

    def code(out, num, **options):
        config = PairsConfig(num=num, seed=1, **options)
        return make_inverse_pairs(
            parent,
            tmp_path / "model.bin",
            tmp_path / "llama",
            out=tmp_path / out,
            config=config,
            autoregressive_tokenizer=tmp_path / "tokenizer.bin",
            runtime=runtime,
            console=quiet,
        )

    assert code("inverse", 5, batch_size=2) == 5
    assert code("inverse", 8, batch_size=8) == 8
    assert code("whole", 8, batch_size=8) == 8
    pairs = data.Pairs(tmp_path / "inverse")
    np.testing.assert_array_equal(pairs.tokens, data.Pairs(tmp_path / "whole").tokens)
    assert bool((pairs.tokens[:, :, 0] == 1).all()), "both ends begin with the token that is given"
    assert pairs.header.about["corpus"] == "llama"
    make_pairs(
        parent, tmp_path / "quantile", PairsConfig(num=4, steps=2, draws="quantile"), runtime=runtime, console=quiet
    )
    length = f"data.length={pairs.header.length}"
    child = [f"model.parent={parent}", f"data.pairs={tmp_path / 'inverse'}", "data.text_share=0.5", length]
    child += [f"data.step_pairs={tmp_path / 'quantile'}", "data.step_pairs_from=0.5", "objective.kind=fewstep"]
    child += ["objective.teacher=none", "objective.weights=PU", "objective.spaced_share=0.5"]
    result, _ = train_silently(recipe, *changes, *child, f"out={tmp_path / 'child'}")
    assert result.finished
    facts = load_model(tmp_path / "child").facts["data"]
    assert facts == {"pairs": ["inverse", "quantile"], "inputs": ["stories.txt"]}
    for change, sentence in (
        ("data.pairs=none", "text_share is set, but pairs is not"),
        ("data.step_pairs_from=[0.5, 1.0]", "step_pairs has 1 folders and step_pairs_from 2 step sizes"),
        ("data.step_pairs_from=2.0", "allowed are step sizes 0 < h <= 1"),
        ("objective.spaced_share=1.5", "allowed are 0 <= spaced_share <= 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            train_silently(recipe, *changes, *child, change, f"out={tmp_path / 'x'}")
    train_silently(recipe, f"out={tmp_path / 'bytes'}")
    with pytest.raises(ValueError, match="has no first token that is given"):
        make_inverse_pairs(tmp_path / "bytes", tmp_path / "model.bin", tmp_path / "llama", out=tmp_path / "x")
    with pytest.raises(ValueError, match="does not know the token"):
        causal_over(tmp_path / "model.bin", ["<s>", "no such"], tmp_path / "tokenizer.bin")


def test_pairs_of_a_parent_train_a_child(recipe, tmp_path):
    """Discrete reflow: the other end of each row is the noise that the parent made it of."""
    parent = tmp_path / "parent"
    train_silently(recipe, f"out={parent}")
    bundle = load_model(parent)
    maker = Reflow(bundle.model, bundle.path, 16, Grid.uniform(4))
    with PairWriter(tmp_path / "pairs", PairHeader(16, 257, {"parent": "parent"})) as writer:
        list(collect_pairs(maker, writer, num_pairs=20))
    child = tmp_path / "child.toml"
    child.write_text(
        f"""
        out = "{tmp_path / "child"}"
        data = {{ pairs = "{tmp_path / "pairs"}", length = 16 }}
        model = {{ parent = "{parent}" }}
        train = {{ steps = 3, batch_size = 4 }}
        runtime = {{ device = "cpu", threads = 1 }}
        """
    )
    result, _ = train_silently(child)
    assert result.finished
    assert load_model(tmp_path / "child").facts["data"] == {"pairs": ["pairs"]}
    x_0 = next(module.make_feed(data.Pairs(tmp_path / "pairs"), 4, bos_id=3)(0))
    assert x_0.x_0.shape == (4, 16)
    assert bool(x_0.given[:, 0].all())
    with pytest.raises(ValueError, match=r"rows of 16 of 257 tokens, the recipe and its parent have 8 of 257"):
        train_silently(child, "data.length=8", f"out={tmp_path / 'x'}")
    with pytest.raises(ValueError, match=r"model\.parent: nowhere is not a folder"):
        train_silently(child, "model.parent=nowhere", f"out={tmp_path / 'x'}")


def test_pairs_that_remember_their_time_train_a_child(recipe, tmp_path):
    """The perturbed form of reflow: rows are stored on their way, at a time that belongs to the pair."""
    parent, folder = tmp_path / "parent", tmp_path / "timed"
    train_silently(recipe, f"out={parent}")
    corpus = next(path.parent for path in tmp_path.rglob("corpus.json"))
    runtime, quiet = RuntimeConfig(device="cpu", threads=1), Console(quiet=True)

    def make(out, num, **options):
        config = PairsConfig(num=num, steps=2, seed=3, **options)
        return make_timed_pairs(parent, corpus, tmp_path / out, config=config, runtime=runtime, console=quiet)

    assert (make("timed", 5, batch_size=2), make("timed", 12), make("whole", 12)) == (5, 12, 12)
    pairs = data.Pairs(folder)
    np.testing.assert_array_equal(pairs.tokens, data.Pairs(tmp_path / "whole").tokens)
    batch = pairs.rows(range(12))
    order = [int((pairs.tokens[:, 1] == row.numpy()).all(-1).argmax()) for row in batch.x_1]
    assert batch.t.tolist() == data.pair_times(3, order).tolist()
    child = tmp_path / "child.toml"
    child.write_text(
        f"""
        out = "{tmp_path / "child"}"
        data = {{ pairs = "{folder}", length = 16 }}
        model = {{ parent = "{parent}" }}
        train = {{ steps = 3, batch_size = 4 }}
        runtime = {{ device = "cpu", threads = 1 }}
        """
    )
    result, _ = train_silently(child)
    assert result.finished
    with pytest.raises(ValueError, match="remember their times"):
        train_silently(child, "objective.kind=fewstep", f"out={tmp_path / 'x'}")
    with pytest.raises(ValueError, match="free draws on a uniform grid"):
        make("other", 2, draws="quantile")


def test_short_rows_are_scored_where_they_are_real(recipe, tmp_path):
    result, _ = train_silently(recipe, f"out={tmp_path / 'run'}", "data.short_share=0.5", "data.shortest=4")
    assert result.finished


@pytest.mark.parametrize("kind", ["path", "fewstep"])
def test_unseen_text_is_measured_and_changes_nothing(tmp_path, kind):
    recipe = write_recipe(tmp_path, kind=kind)
    (tmp_path / "unseen.txt").write_text("".join(f"The {k} dogs ran to {k * k} cats. " for k in range(100)))
    _, said = train_silently(
        recipe, f"out={tmp_path / 'run'}", f"held_out.inputs={tmp_path / 'unseen.txt'}", "held_out.every=4"
    )
    train_silently(recipe, f"out={tmp_path / 'plain'}")
    assert_same(tmp_path / "run", tmp_path / "plain")
    records = [json.loads(line) for line in (tmp_path / "run" / "held-out.jsonl").read_text().splitlines()]
    assert [record["training_step"] for record in records] == [4, 8, 12]
    losses = [record["held_out_loss"] for record in records]
    assert losses[2] < losses[0], "the same rows and noise every time: it learns"
    assert set(records[0]["by_t"]) == {"0", "0.25", "0.5", "0.75"}
    assert f"held-out loss at step 12: {losses[2]:.4g}" in said
    with pytest.raises(ValueError, match="every is 0 and num 64"):
        train_silently(recipe, f"out={tmp_path / 'x'}", "held_out.every=0")


@pytest.mark.parametrize(
    "name",
    [name for name in recipe_names() if not name.startswith(("tiny-causal", "stories-next", "imported", "peer"))],
)
def test_every_recipe_builds_its_objects(name):
    recipe = load_recipe(name)
    path = make_path(recipe.flow, 50257 if name.startswith("paper") else 2048)
    objective = make_objective(recipe.objective, path)
    if name.startswith("peer-"):
        return  # a story model, with an objective of its own
    own = {"sweep": SweepObjective, "canvas": CanvasObjective, "reward": RewardObjective}
    if recipe.objective.kind in own:
        assert isinstance(objective, own[recipe.objective.kind])
        return  # the file says the shape, or the parent
    assert isinstance(objective, PathObjective if name.endswith("dfm") else FewStepObjective)
    parent = load_recipe(re.sub("fewstep|inverse|crf|paper$", "dfm", name))
    if parent.model.preset is None:
        return  # the file says the shape
    with torch.device("meta"):
        model = DiT(model_config(parent, path.source.vocab_size))
        if recipe.model.parent is not None:
            model = model.step_aware()
    assert model.config.dropout == parent.model.dropout
    sizes = {"170m": 169.6e6, "1300m": 1.331e9, "1700m": 1.705e9}
    for size, count in sizes.items():
        if f"-{size}-" in name:
            assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=2e-3)


def test_a_student_can_teach_itself(tmp_path):
    few = write_recipe(tmp_path, kind="fewstep")
    recipe = load_recipe(few, [f"out={tmp_path / 'run'}", "objective.teacher.network=student"])
    bundle = module.start(recipe, tmp_path / "run")
    rows = module.make_rows(recipe, bundle, tmp_path / "run")
    trainer = module.make_trainer(recipe, bundle, rows, runtime=Runtime(RuntimeConfig(device="cpu")))
    assert isinstance(trainer.teacher, WithoutDropout)
    assert trainer.teacher.model is trainer.model
    assert trainer.fit()


def test_the_story_model_can_begin_to_write_canvases(tmp_path):
    """The recipe's network has the parent's weights, and sees canvases from one token before."""
    bundle, parent = module.start(load_recipe("novels-canvas"), tmp_path), load_model("parent")
    config = bundle.model.config
    assert (config.canvas, config.window, config.next_token) == (64, 448, True)
    assert torch.equal(bundle.model.head.weight, parent.model.head.weight)
    assert bundle.bos_id == parent.bos_id
    x = torch.arange(1, 129)[None]
    context = bundle.model.read_all(x)
    assert context.before.tolist() == [[1, 64]]
    assert bundle.model.trunk(x, torch.ones(1) / 2, context=context).shape == (1, 128, 288)


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "fewstep"])
def test_the_same_command_goes_on_where_it_was(tmp_path, kind):
    recipe = write_recipe(tmp_path, kind=kind)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_silently(recipe, f"out={whole}")
    calls = []

    def stop_at(step):
        def stopping(self, portions, train_step=Trainer._train_step):
            if self.training_step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            train_step(self, portions)
            calls.append(self.training_step)

        return stopping

    for step in (4, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_train_step", stop_at(step))
            result, _ = train_silently(recipe, f"out={parts}")
        assert (result.training_step, result.finished) == (step + 1, False)
    result, said = train_silently(recipe, f"out={parts}")
    assert "resuming" in said
    assert result.finished
    assert calls == [1, 2, 3, 4, 5, 6, 7, 8]
    assert_same(whole, parts)
    again, _ = train_silently(recipe, f"out={parts}")
    assert again == result
    steps = [json.loads(line)["training_step"] for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6, 8, 10, 12]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(recipe, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out in (whole, broken):
        train_silently(recipe, f"out={out}")
    file = broken / "checkpoints" / "step-0000000012" / "training.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))
    result, said = train_silently(recipe, f"out={broken}")
    assert "training.safetensors is damaged" in said
    assert "using" in said
    assert "resuming" in said
    assert "at training step 9 of 12" in said
    assert result.finished
    (broken / "checkpoints" / "step-0000000012.damaged").rename(tmp_path / "damaged")
    assert_same(whole, broken)


def test_a_run_goes_on_as_it_began(recipe, tmp_path):
    out = f"out={tmp_path / 'run'}"
    train_silently(recipe, out)
    with pytest.raises(ValueError, match=r"was begun with optim\.lr = 0\.01, now it is 0\.5"):
        train_silently(recipe, out, "optim.lr=0.5")
    result, _ = train_silently(recipe, out, "train.steps=14", "train.log_every=1", "sample.every=7", "sample.steps=1")
    assert result.training_step == 14


def test_nan_stops_and_leaves_the_checkpoints_whole(recipe, tmp_path, monkeypatch):
    out = tmp_path / "run"
    clip = Optimiser.clip
    count = iter(range(100))
    monkeypatch.setattr(Optimiser, "clip", lambda self: math.nan if next(count) == 7 else clip(self))
    with pytest.raises(ValueError, match=r"norm is nan at training step 7, on the samples 56, 57, .*63;"):
        train_silently(recipe, f"out={out}")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-0000000003", "step-0000000006"]
    monkeypatch.undo()
    train_silently(recipe, f"out={out}")
    train_silently(recipe, f"out={tmp_path / 'whole'}")
    assert_same(out, tmp_path / "whole")


def test_two_runs_do_not_share_a_folder(recipe, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with lock(out), pytest.raises(ValueError, match="in use by another run"):
        train_silently(recipe, f"out={out}")


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


@pytest.mark.slow
def test_kill_9_at_twenty_moments_changes_no_bit(tmp_path):
    """Real processes, killed soon after their start, in the middle of a save, and at random moments of training."""
    recipe = write_recipe(tmp_path, kind="fewstep")
    arguments = ["train.steps=140", "train.save_every=2", "train.log_every=20", "sample.every=50", "sample.steps=2"]
    context = multiprocessing.get_context("forkserver")  # forks of one process that has torch: quick to start
    context.set_forkserver_preload(["fsdfm.run"])
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(out):
        process = context.Process(target=train_quietly, args=(str(recipe), f"out={out}", *arguments))
        process.start()
        return process

    def saved(step):
        names = [path.name[5:15] for path in killed.glob("checkpoints/step-*")]
        return any(int(name) >= step for name in names)

    process = start(whole)
    process.join()
    assert process.exitcode == 0
    moments, found = random.Random(0), []
    for kill in range(20):
        process = start(killed)
        if kill % 4 == 0:
            time.sleep(moments.uniform(0.0, 0.2))
        else:
            wait_until(lambda step=5 * kill: saved(step))
            time.sleep(moments.uniform(0.0, 0.1))
            if kill % 2:
                wait_until(lambda: any(killed.glob("checkpoints/*.unfinished/*")))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found += killed.glob("checkpoints/*.unfinished")
    assert len(found) >= 5  # kills in the middle of a save
    process = start(killed)
    process.join()
    assert process.exitcode == 0
    assert_same(whole, killed)
    assert len(list((killed / "checkpoints").iterdir())) == 2
    lines = [json.loads(line)["training_step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert lines == sorted(set(lines))
    assert lines[-1] == 140


# --- bad input --------------------------------------------------------------------------------------------------------


def test_output_that_cannot_be_written(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(ValueError, match="cannot write to .*; make room there, or choose a folder"):
            train_silently(recipe, f"out={out}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "the corpus is empty"), ("short", r"length is 16; allowed are 1 <= length <= 6")],
    ids=["empty", "short"],
)
def test_too_little_text(tmp_path, text, sentence):
    recipe = write_recipe(tmp_path, text=text)
    with pytest.raises(ValueError, match=sentence):
        train_silently(recipe, f"out={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_text_that_is_not_utf8(recipe, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(ValueError, match=r"text\.txt"):
        train_silently(recipe, f"out={tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "model.transition_rank=4",
            'a model with a joint posterior is trained on its likelihood; set it to "cross-entropy"',
        ),
        ("model.transition_rank=-4", "model.transition_rank is -4; allowed are whole numbers >= 0"),
        ("objective.teacher.tableau=rk3", r"objective\.teacher\.tableau is 'rk3'; allowed are rk2, rk4.*did you mean"),
        ("objective.weights=TB-30", "allowed are TB-10, TB-20"),
        ("objective.smallest_h=3", "allowed are -30 .. 0"),
        ("model.parent=x", r"the recipe has model\.preset and model\.parent"),
        ("model.preset=none", "the recipe has none of them"),
        ("data.pairs=x", "name it as model.parent"),
        ("model.preset=huge", "allowed are tiny, stories, 170m"),
        ("data.tokenizer=none", r"data\.tokenizer is missing"),
        ("data.tokenizer=klingon", "allowed are bytes, gpt2"),
        ("data.inputs=[]", "data.inputs is empty and"),
        ("data.inputs=gone.txt", "gone.txt is not a file"),
        ("runtime.device=cuda:77", "try auto or cpu"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, override, sentence):
    recipe = write_recipe(tmp_path, kind="fewstep")
    with pytest.raises(ValueError, match=sentence):
        train_silently(recipe, f"out={tmp_path / 'run'}", override)
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_trained_tokenizer_is_trained_once(tmp_path, monkeypatch):
    write_recipe(tmp_path)
    config = DataConfig(inputs=(str(tmp_path / "text.txt"),), tokenizer="bpe:300")
    with pytest.MonkeyPatch.context() as patch:  # interrupted after the training of the tokenizer
        patch.setattr(data, "prepare", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(config, tmp_path / "bpe")
    monkeypatch.setattr(data, "make_tokenizer", lambda *_: pytest.fail("trained again"))
    corpus = prepare_corpus(config, tmp_path / "bpe")
    assert corpus.header.vocab_size == 300
    assert len(prepare_corpus(config, tmp_path / "bpe")) == len(corpus)
    assert len(prepare_corpus(DataConfig(inputs=()), tmp_path / "bpe")) == len(corpus)
    assert not list(tmp_path.glob("bpe.*"))
    with pytest.raises(ValueError, match="was made with 300 tokens, not with bpe:310"):
        prepare_corpus(DataConfig(inputs=config.inputs, tokenizer="bpe:310"), tmp_path / "bpe")


@pytest.mark.parametrize("name", ["corpus", "*"])
def test_only_the_tokenizer_that_was_trained_here_is_removed(tmp_path, name):
    (tmp_path / "text.txt").write_text("a fox and a crow met in the wood " * 20)
    mine = [tmp_path / file for file in ("corpus.best.tokenizer.json", "x.y.tokenizer.json", "tokenizer.json")]
    for file in mine:
        file.write_text("precious")
    prepare_corpus(DataConfig(inputs=(str(tmp_path / "text.txt"),), tokenizer="bpe:262"), tmp_path / name)
    assert [file.read_text() for file in mine] == ["precious"] * 3
    assert len(list(tmp_path.glob("*tokenizer.json"))) == 3


def test_metrics_forget_what_a_resumed_run_says_again(tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.rewind(5)
    for step in (2, 4, 6):
        file.write({"training_step": step})
    with file.path.open("a") as end:
        end.write('{"training_st')  # the process died here
    file.rewind(4)
    assert [json.loads(line)["training_step"] for line in file.path.read_text().splitlines()] == [2, 4]
    with pytest.raises(ValueError, match="cannot write"):
        JsonLines(tmp_path / "gone" / "metrics.jsonl").write({})


def test_durations_are_said_as_people_say_them():
    times = [3, 75, 3600, 5 * 3600 + 600, 90000]
    assert [duration(t) for t in times] == ["3 s", "1 min 15 s", "1 h 0 min", "5 h 10 min", "1 d 1 h"]


def test_importing_the_package_stays_light():
    code = "import fsdfm, sys; assert not {'rich.progress', 'tomlkit', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bar_on_a_terminal(recipe, tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    train(recipe, [f"out={tmp_path / 'run'}"], console=console)
    said = console.file.getvalue()
    assert "12/12" in said
    assert "tokens/s" in said


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_an_export_is_the_averaged_model_without_its_training(tmp_path):
    recipe = write_recipe(tmp_path, kind="path")
    train_silently(recipe, f"out={tmp_path / 'run'}")
    module.export(tmp_path / "run", tmp_path / "shared", half=True)
    ours, theirs = load_model(tmp_path / "run"), load_model(tmp_path / "shared")
    for name, value in ours.model.state_dict().items():
        assert torch.equal(theirs.model.state_dict()[name], value.half().float())
    files = {file.name for file in (tmp_path / "shared").iterdir()}
    assert files == {"README.md", "checksums.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert "(float16)" in (tmp_path / "shared" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "shared" / "config.json").read_text()
    with pytest.raises(ValueError, match="not empty"):
        module.export(tmp_path / "run", tmp_path / "shared")


def test_an_export_for_longer_rows_has_the_same_weights_at_other_angles(tmp_path):
    bundle = random_bundle()
    save_model(tmp_path / "model", bundle)
    made = module.export(tmp_path / "model", tmp_path / "long", rotary="ntk:2")
    found = load_model(tmp_path / "long")
    assert made.length == found.length == 2 * bundle.length
    assert found.model.config.scaling == RotaryScaling(kind="ntk", factor=2.0)
    state = found.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in bundle.model.state_dict().items())
    whole = LanguageModel(found).generate(length=2 * bundle.length, steps=1)
    assert whole.blocks == 1  # one row, where the model itself writes overlapping blocks
    again = module.export(tmp_path / "long", tmp_path / "longer", rotary="linear:4")
    assert (again.length, again.model.config.scaling) == (4 * bundle.length, RotaryScaling(kind="linear", factor=4.0))
    for wrong in ("ntk", "ntk:0.5", "yarn:2", "2"):
        with pytest.raises(ValueError, match="allowed are ntk:FACTOR"):
            module.export(tmp_path / "model", tmp_path / "no", rotary=wrong)
    save_model(tmp_path / "head", random_bundle(posterior=CausalHeadConfig(num_blocks=1, cond_width=8)))
    with pytest.raises(ValueError, match="without a causal head"):
        module.export(tmp_path / "head", tmp_path / "no", rotary="ntk:2")
    assert not (tmp_path / "no").exists()


def test_a_kept_tokenizer_belongs_to_its_texts(tmp_path, monkeypatch):
    """What an interrupted preparation leaves is not taken for other texts of the same corpus folder."""

    def stops(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "prepare", stops)
    for name in ("one", "two"):
        text = tmp_path / f"{name}.txt"
        text.write_text(f"{name} word after another " * 50)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(DataConfig(inputs=(str(text),), tokenizer="bpe:260"), tmp_path / "corpus")
    assert len(list(tmp_path.glob("corpus.*.tokenizer.json"))) == 2
