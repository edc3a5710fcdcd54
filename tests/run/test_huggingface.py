"""Hugging Face folders as checkpoints: saved, loaded, sampled from and trained like any other."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fsdfm
from fsdfm.checkpoint import load_model
from fsdfm.cli import app
from fsdfm.measure.evaluation import EvaluationRequest, run_evaluation
from fsdfm.model import Transformer, architecture_of, find_architecture
from fsdfm.peers.dream import DreamRule
from fsdfm.peers.llada import LLaDARule
from fsdfm.run import import_folder
from huggingface_folders import save_family, save_masked
from small_runs import train_quietly

RECIPE = """
[data]
inputs = ["{text}"]
corpus = "{folder}/corpus"
length = 16
[model]
parent = "{folder}/parent"
open_steps = {open_steps}
[flow]
source = "{source}"
[objective]
{objective}
[optim]
lr = 3e-3
warmup = 2
[train]
steps = 16
batch_size = 8
log_every = 2
save_every = 8
keep = 9
[runtime]
device = "cpu"
threads = 1
"""


def write_recipe(folder: Path, source: str, kind: str = "path", open_steps: int = 0) -> str:
    (folder / "text.txt").write_text("a little dog liked to play with a red ball. " * 60)
    recipe = folder / "recipe.toml"
    objective = 'kind = "path"' if kind == "path" else 'kind = "fewstep"\nteacher.tableau = "rk2"'
    options = {"source": source, "objective": f'{objective}\nloss = "cross-entropy"', "open_steps": open_steps}
    recipe.write_text(RECIPE.format(text=folder / "text.txt", folder=folder, **options))
    return str(recipe)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@torch.no_grad()
@pytest.mark.parametrize("name", ["smollm2", "gpt2"])
@pytest.mark.parametrize("source", ["uniform", "mask", "mixture"])
def test_an_imported_model_is_its_original_under_the_mask(name: str, source: Any, tmp_path: Path) -> None:
    original = save_family(name, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "out", source=source)
    bundle = load_model(tmp_path / "out")
    model = bundle.model
    assert isinstance(model, Transformer)
    assert model.config.vocab_size == bundle.path.source.vocab_size == 300 + (source != "uniform")
    assert (bundle.bos_id, bundle.length, model.config.next_token) == (0, 64, True)
    x = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    model.see_future(0.0)
    found = model(x, torch.tensor([0.1, 0.9]))[:, 1:, :300]
    torch.testing.assert_close(found, original(x).logits[:, :-1, :300], atol=1e-4, rtol=0)
    lm = fsdfm.load(tmp_path / "out")
    text = lm.generate("a little dog", length=24, steps=4)
    assert text.text.startswith("a little dog")
    assert lm.infill("a [[3]] dog", steps=2).text.endswith(" dog")


def test_a_model_without_its_shift_and_in_bfloat16(tmp_path: Path) -> None:
    save_family("qwen3", tmp_path / "hf")
    bundle = import_folder(tmp_path / "hf", tmp_path / "out", shift=False, half=True, length=32)
    assert (bundle.bos_id, bundle.length) == (None, 32)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "bfloat16" in card
    assert "from `hf` (qwen3)" in card
    assert not load_model(tmp_path / "out").model.config.next_token
    texts = [fsdfm.load(tmp_path / "out", precision=name).generate(length=12, steps=2).text for name in PRECISIONS]
    assert all(texts)


PRECISIONS: Any = ("float32", "bfloat16", "int8")


@torch.no_grad()
@pytest.mark.parametrize(("kind", "rule"), [("llada", LLaDARule), ("Dream", DreamRule)])
def test_masked_models_stay_what_they_are(kind: str, rule: type, tmp_path: Path) -> None:
    original = save_masked(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "parent", length=16)
    bundle = load_model(tmp_path / "parent")
    assert bundle.path.source.mask_token == 299
    assert bundle.bos_id == (None if kind == "llada" else 1)
    x = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    t = torch.zeros(2)
    torch.testing.assert_close(bundle.model(x, t), original(x)[..., :300])
    lm = fsdfm.load(tmp_path / "parent")
    assert isinstance(lm.sampler_config().rule(), rule)  # its authors' way, unless said
    for options in ({}, {"jump": "exact"}, {"jump": LLaDARule(4, temperature=1.0)}, {"jump": "dream"}):
        result = lm.generate("a little", length=16, steps=4, **options)  # type: ignore[arg-type]
        assert 299 not in result.tokens
    with pytest.raises(ValueError, match=f"is a {kind} model, a denoiser already"):
        import_folder(tmp_path / "hf", tmp_path / "other", source="uniform")


@pytest.mark.parametrize("kind", ["llada", "Dream"])
def test_masked_models_fill_repair_and_are_evaluated_in_every_precision(kind: str, tmp_path: Path) -> None:
    save_masked(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "parent", length=16)
    held_out = tmp_path / "held.txt"
    held_out.write_text("<|endoftext|>".join(f"a little {n} story of {n} cats and a dog" for n in range(60)))
    for precision in PRECISIONS:
        lm = fsdfm.load(tmp_path / "parent", precision=precision)
        filled = lm.infill("a little[[3]]story", steps=2)
        assert filled.text.startswith("a little")
        assert filled.text.endswith("story")
        assert 299 not in lm.repair("a little story", [2, 3], steps=2).tokens
        with pytest.raises(ValueError, match="noise is the mask, so it takes every word for right"):
            lm.repair("a little story", steps=2)
        request = EvaluationRequest(
            model=str(tmp_path / "parent"),
            held_out=str(held_out),
            steps="2",
            num=2,
            length=12,
            precision=precision,
            controls=False,
            threads=1,
        )
        evaluation = run_evaluation(request, console=Console(file=io.StringIO())).evaluation
        assert evaluation is not None
        (row,) = evaluation.plain
        assert 0 <= row.metrics["accuracy"].value <= 1
        assert row.facts["calls_made"] == 2


@pytest.mark.parametrize(("name", "source", "kind"), [("smollm2", "uniform", "path"), ("gpt2", "mask", "fewstep")])
def test_an_imported_model_learns(name: str, source: Any, kind: str, tmp_path: Path) -> None:
    save_family(name, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "parent", source=source, length=16)
    recipe = write_recipe(tmp_path, source, kind)
    train_quietly(recipe, f"out={tmp_path}/run")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    bundle = load_model(tmp_path / "run")
    assert bundle.model.config.is_step_aware == (kind == "fewstep")
    assert bundle.budgets is None if kind == "path" else bundle.budgets is not None
    assert "head.weight" not in bundle.model.state_dict()  # still tied
    fsdfm.load(tmp_path / "run").generate("a", length=16, steps=2)


def test_llada_can_be_a_parent(tmp_path: Path) -> None:
    save_masked("llada", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "parent", length=16)
    train_quietly(write_recipe(tmp_path, "mask"), f"out={tmp_path}/run")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    assert load_model(tmp_path / "run").path.source.mask_token == 299


def test_attention_opens_while_it_trains(tmp_path: Path) -> None:
    save_family("qwen2", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "parent", length=16)
    recipe = write_recipe(tmp_path, "uniform", open_steps=16)
    train_quietly(recipe, f"out={tmp_path}/run")
    half, whole = (load_model(tmp_path / f"run/checkpoints/step-{n:010d}").model.config for n in (8, 16))
    assert (half.future, whole.future) == (0.5, 1.0)  # type: ignore[union-attr]
    train_quietly(recipe, f"out={tmp_path}/twice", "train.steps=8", "model.open_steps=8")
    with pytest.raises(ValueError, match="model.open_steps is 17; allowed are 0 to train.steps = 16"):
        train_quietly(recipe, f"out={tmp_path}/never", "model.open_steps=17")


@pytest.mark.parametrize("embedded", ["parent"])
def test_only_imported_models_open(embedded: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "uniform", open_steps=4)
    with pytest.raises(ValueError, match="model.open_steps is for models imported"):
        train_quietly(recipe, f"out={tmp_path}/run", f"model.parent={embedded}")


def test_the_command(tmp_path: Path) -> None:
    save_family("smollm2", tmp_path / "hf")
    runner, out = CliRunner(), str(tmp_path / "out")
    done = runner.invoke(app, ["import", str(tmp_path / "hf"), "--out", out, "--flow-source", "mask", "--length", "32"])
    assert done.exit_code == 0, done.output
    assert "300" not in load_model(out).facts["weights"]
    assert load_model(out).length == 32
    for words, sentence in (
        (["--flow-source", "noise"], "source is 'noise'"),
        (["--preset", "1.3b"], "preset is not used by the format huggingface"),
        (["--length", "65"], "length is 65; allowed are 1 to 64"),
    ):
        failed = runner.invoke(app, ["import", str(tmp_path / "hf"), "--out", str(tmp_path / "other"), *words])
        assert sentence in str(failed.exception)
        assert not (tmp_path / "other").exists()


def test_a_checkpoint_names_its_network(tmp_path: Path) -> None:
    save_family("smollm2", tmp_path / "hf")
    bundle = import_folder(tmp_path / "hf", tmp_path / "out")
    assert bundle.model.embedding.weight.is_meta  # only shapes: the weights went from file to file
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architecture"] == "transformer"
    assert load_model(tmp_path / "out").facts["imported"]["group"] == "llama"
    assert architecture_of(bundle.model.config) == "transformer"
    with pytest.raises(ValueError, match="architecture is 'mamba'; allowed are dit, transformer"):
        find_architecture("mamba")


@pytest.mark.parametrize(("source", "shift"), [("uniform", True), ("mixture", False)])
def test_the_recipe_of_the_guide_trains_it(source: Any, shift: bool, tmp_path: Path) -> None:
    save_family("smollm2", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "parent", source=source, shift=shift, length=16)
    (tmp_path / "text.txt").write_text("a little dog liked to play with a red ball. " * 60)
    places = [f"out={tmp_path}/run", f"model.parent={tmp_path}/parent", f"data.corpus={tmp_path}/corpus"]
    small = ["data.max_documents=none", "data.length=16", "data.shortest=8", "train.steps=4", "train.batch_size=4"]
    small += ["train.accumulate=2", "train.log_every=2", "optim.warmup=1", "runtime.device=cpu", "sample.every=0"]
    choices = [f"flow.source={source}", "model.open_steps=4"]
    train_quietly("imported-dfm", *places, f'data.inputs=["{tmp_path}/text.txt"]', *small, *choices)
    model = load_model(tmp_path / "run").model
    assert (model.config.next_token, model.config.future) == (shift, 1.0)
