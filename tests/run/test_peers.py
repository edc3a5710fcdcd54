"""Peers from recipes and from published weights to text."""

import io
from dataclasses import replace

import pytest
import torch
from peer_files import small_network, write_hugging_face, write_lightning
from rich.console import Console

import fsdfm
from fsdfm.checkpoint import load_model
from fsdfm.peers.sampling import PEER_RULES
from fsdfm.run import ImportConfig, import_weights
from small_runs import train_quietly, write_recipe

FEW = ["train.steps=2", "train.save_every=2"]
KINDS = {
    "mdlm": ["flow.source=mask"],
    "sedd-absorb": ["flow.source=mask"],
    "hdlm-epsilon": ["flow.source=mask"],
    "duo": ["objective.curriculum_steps=1"],
    "sedd-uniform": [],
}


def said(folder, **options):
    return fsdfm.load(folder, device="cpu").generate(length=8, steps=2, seed=1, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_trains_it_and_its_checkpoint_writes(tmp_path, kind):
    recipe = write_recipe(tmp_path, kind=kind)
    train_quietly(str(recipe), f"out={tmp_path / 'run'}", *KINDS[kind], *FEW)
    model = load_model(tmp_path / "run").model
    assert (model.config.clock, model.config.says) == {
        "mdlm": ("none", "posterior"),
        "sedd-absorb": ("sigma", "posterior"),
        "hdlm-epsilon": ("none", "posterior"),
        "duo": ("sigma", "leave-one-out"),
        "sedd-uniform": ("sigma", "uniform-scores"),
    }[kind]
    assert isinstance(said(tmp_path / "run").text, str)


def test_a_round_learns_from_its_parent_and_resumes(tmp_path):
    train_quietly(str(write_recipe(tmp_path, kind="mdlm")), f"out={tmp_path / 'parent'}", "flow.source=mask", *FEW)
    text = write_recipe(tmp_path, kind="sdtt").read_text()
    sizes = ("preset", "width", "num_blocks", "num_heads", "cond_width")
    child = "\n".join(line for line in text.splitlines() if not line.startswith(sizes))
    (tmp_path / "sdtt.toml").write_text(child)
    settings = [
        f"out={tmp_path / 'child'}",
        "flow.source=mask",
        "objective.step=0.125",
        f"model.parent={tmp_path / 'parent'}",
    ]
    train_quietly(str(tmp_path / "sdtt.toml"), *settings, *FEW)
    train_quietly(str(tmp_path / "sdtt.toml"), *settings, "train.steps=4", "train.save_every=2")
    whole = [setting.replace("child", "whole") for setting in settings]
    train_quietly(str(tmp_path / "sdtt.toml"), *whole, "train.steps=4", "train.save_every=2")
    assert load_model(tmp_path / "child").facts["training_step"] == 4
    assert isinstance(said(tmp_path / "whole", jump="remdm-cap").text, str)
    with pytest.raises(ValueError, match="learns from the parent"):
        train_quietly(str(write_recipe(tmp_path, kind="sdtt")), f"out={tmp_path / 'x'}", "flow.source=mask", *FEW)


def test_a_parent_of_the_uniform_source_is_a_start_for_a_mask(tmp_path):
    train_quietly(str(write_recipe(tmp_path)), f"out={tmp_path / 'parent'}", *FEW)
    text = write_recipe(tmp_path, kind="mdlm").read_text()
    sizes = ("preset", "width", "num_blocks", "num_heads", "cond_width")
    (tmp_path / "mdlm.toml").write_text("\n".join(line for line in text.splitlines() if not line.startswith(sizes)))
    settings = [f"out={tmp_path / 'child'}", f"model.parent={tmp_path / 'parent'}", *FEW]
    with pytest.raises(ValueError, match="make \\[flow\\] what the parent"):
        train_quietly(str(tmp_path / "mdlm.toml"), "flow.source=mask", *settings)
    train_quietly(str(tmp_path / "mdlm.toml"), "flow.source=mask", "model.add_mask=true", *settings)
    bundle = load_model(tmp_path / "child")
    assert bundle.path.source.mask_token == bundle.tokenizer.vocab_size
    with pytest.raises(ValueError, match="leave it out"):
        train_quietly(str(write_recipe(tmp_path, kind="path")), "model.add_mask=true", "model.preset=none", *settings)


def imported(tmp_path, source, **options):
    config = ImportConfig(tokenizer="bytes", **options)
    return import_weights(source, tmp_path / "out", config, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("system", ["mdlm", "sdtt", "sedd-absorb", "duo"])
def test_published_weights_become_checkpoints_that_write_and_infill(tmp_path, system):
    model = small_network(vocab_size=258)  # the bytes, the end of a text, and the mask or Duo's padding
    imported(tmp_path, write_hugging_face(tmp_path / "m", model), system=system)
    lm = fsdfm.load(tmp_path / "out", device="cpu")
    rules = [name for name, rule in PEER_RULES.items() if (rule.source == "uniform") == (system == "duo")]
    texts = {name: lm.generate(length=8, steps=3, seed=2, jump=name).text for name in ("exact", *rules)}
    assert all(isinstance(text, str) for text in texts.values())
    assert len(set(texts.values())) > 1
    infilled = lm.infill("ab[[2]]cd", steps=2).text
    assert infilled.startswith("ab")
    assert infilled.endswith("cd")
    bundle = load_model(tmp_path / "out")
    assert bundle.facts["imported"]["group"] == system
    x_t, t = torch.arange(8)[None], torch.tensor([0.25])
    with torch.no_grad():
        told = {"none": torch.zeros(1), "sigma": -torch.log(0.001 + 0.999 * t)}[bundle.model.config.clock]
        assert torch.allclose(bundle.model(x_t, t), model(x_t, told)[..., : 257 + (system != "duo")], atol=1e-5)


def test_lightning_files_and_the_choice_of_weights(tmp_path):
    path = write_lightning(tmp_path / "mdlm.ckpt", small_network(0, vocab_size=258), small_network(1, vocab_size=258))
    assert imported(tmp_path, path).facts["weights"] == "averaged weights"
    (tmp_path / "out").rename(tmp_path / "first")
    assert "published" in imported(tmp_path, path, weights="raw").facts["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "hdlm-gamma"}, "blends the mask"),
        ({"system": "sedd-uniform"}, "geometric schedule"),
        ({"system": "gpt"}, "allowed are mdlm"),
        ({"weights": "best"}, "allowed are ema and raw"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tmp_path, options, message):
    folder = write_hugging_face(tmp_path / "m", small_network())
    with pytest.raises(ValueError, match=message):
        imported(tmp_path, folder, **options)
    assert not (tmp_path / "out").exists()


def test_a_wrong_tokenizer_is_refused(tmp_path):
    folder = write_hugging_face(tmp_path / "m", small_network(vocab_size=300))
    with pytest.raises(ValueError, match="model's own tokenizer"):
        imported(tmp_path, folder)


def test_a_hub_name_without_a_network_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="connect, or download https://huggingface.co/a/b/tree/c into a folder"):
        imported(tmp_path, "a/b@c")
    with pytest.raises(ValueError, match="owner/name"):
        imported(tmp_path, "absent")


def test_a_duo_model_is_no_parent_for_the_path_loss(tmp_path):
    imported(tmp_path, write_hugging_face(tmp_path / "m", small_network(vocab_size=258)), system="duo")
    text = write_recipe(tmp_path).read_text()
    sizes = ("preset", "width", "num_blocks", "num_heads", "cond_width")
    (tmp_path / "path.toml").write_text("\n".join(line for line in text.splitlines() if not line.startswith(sizes)))
    settings = [f"out={tmp_path / 'x'}", f"model.parent={tmp_path / 'out'}", "objective.loss=cross-entropy", *FEW]
    with pytest.raises(ValueError, match="says leave-one-out"):
        train_quietly(str(tmp_path / "path.toml"), *settings)
    assert replace(load_model(tmp_path / "out").model.config, says="posterior").says == "posterior"
