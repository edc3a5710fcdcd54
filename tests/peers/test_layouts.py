import json
import os
import shutil

import pytest
import torch
from peer_files import small_network, their_tensors, write_hugging_face, write_lightning
from peer_vectors import MDLM, SEDD, needs_golden, same, vectors
from safetensors.torch import save_file

from fsdfm.peers.layouts import SYSTEMS, ema_order, is_peer, open_layout

X, S = torch.arange(24).view(2, 12) * 9 % 257, torch.tensor([0.3, 2.0])


def logits(model):
    with torch.no_grad():
        return model(X, S)


@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.backbone."])
def test_safetensors_load_as_they_are(tmp_path, prefix):
    model = small_network()
    folder = write_hugging_face(tmp_path / "m", model, prefix)
    with open_layout(folder) as weights:
        assert (weights.system, weights.kind, weights.about.length) == ("mdlm", "raw", 16)
        assert torch.equal(logits(weights.load()), logits(model))
    assert is_peer(folder)


def test_lightning_gives_averaged_weights_unless_asked(tmp_path):
    raw, averaged = small_network(0), small_network(1)
    path = write_lightning(tmp_path / "duo.ckpt", raw, averaged)
    for kind, expected in ((None, averaged), ("ema", averaged), ("raw", raw)):
        with open_layout(path, weights=kind) as weights:
            assert weights.system == "duo"
            assert torch.equal(logits(weights.load()), logits(expected))


class Dangerous:
    def __reduce__(self):
        return os.system, ("touch executed",)


class Config:
    def __init__(self):
        self.lr = 3


def test_nothing_in_a_file_is_run_and_what_is_no_tensor_is_inert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_lightning(tmp_path / "mdlm.ckpt", small_network(0), small_network(1), hyper_parameters=Config())
    with open_layout(path) as weights:
        assert torch.equal(logits(weights.load()), logits(small_network(1)))
    write_lightning(path, small_network(0), small_network(1), hyper_parameters={"evil": Dangerous()})
    with pytest.raises(ValueError, match="only running it could read"):
        open_layout(path)
    assert not (tmp_path / "executed").exists()


def test_epsilon_hdlm_has_no_time_and_no_modulation(tmp_path):
    named = {
        name: value
        for name, value in their_tensors(small_network()).items()
        if "sigma_map" not in name and "adaLN" not in name
    }
    save_file(named, tmp_path / "model.safetensors")
    with open_layout(tmp_path) as weights:
        assert weights.system == "hdlm-epsilon"
        model = weights.load()
    assert torch.equal(logits(model)[0], logits(model)[0])
    with torch.no_grad():
        assert torch.equal(model(X, S), model(X, S + 1))  # whatever it is told


@pytest.mark.parametrize(
    ("config", "system"),
    [
        ({"model_type": "duo"}, "duo"),
        ({"model_type": None, "graph": {"type": "absorb"}}, "sedd-absorb"),
        ({"model_type": None, "graph": {"type": "uniform"}}, "sedd-uniform"),
        ({"model_type": None, "parameterization": {"name": "multi-round-sdtt"}}, "sdtt"),
    ],
)
def test_the_config_says_whose_they_are(tmp_path, config, system):
    with open_layout(write_hugging_face(tmp_path / "m", small_network(), **config)) as weights:
        assert weights.system == system
        assert weights.masked == (system in ("sedd-absorb", "sdtt"))
        assert weights.clock.name == ("none" if system == "sdtt" else "sigma")


@pytest.mark.parametrize(
    ("graph", "more", "message"),
    [
        ("absorb", {"noise": {"type": "cosine"}}, "noise.type in its config.json is 'cosine'"),
        ("uniform", {"noise": {"type": "geometric", "sigma_max": 10}}, "sigma from 0.0001 to 10"),
        ("absorb", {"scale_by_sigma": False}, "sedd-absorb is read with true"),
        ("uniform", {"scale_by_sigma": True}, "sedd-uniform is read with false"),
    ],
)
def test_scores_that_would_be_read_wrongly_are_refused(tmp_path, graph, more, message):
    folder = write_hugging_face(tmp_path / "m", small_network(), model_type=None, graph={"type": graph}, **more)
    with pytest.raises(ValueError, match=message):
        open_layout(folder)


PUBLISHED = {
    "mdlm_hf": ("mdlm", "mdlm_forward", "x", None, "logits_ema_sigma0"),
    "duo_hf": ("duo", "duo_forward", "x", "sigma", "logits_ema"),
    "sedd_absorb": ("sedd-absorb", "sedd_absorb_forward", "x_t", "sigma", "head"),
    "sedd_uniform": ("sedd-uniform", "sedd_uniform_forward", "x_t", "sigma", "head"),
    "sdtt": ("sdtt", "sdtt_forward", "x_t", None, "head"),
    "hdlm_epsilon": ("hdlm-epsilon", "hdlm_epsilon_forward", "x_t", None, "logits"),
    "hdlm_gamma": ("hdlm-gamma", None, None, None, None),  # blended inputs: test_hdlm
}


@needs_golden
@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_a_folder_as_published_is_recognised_and_says_what_its_authors_network_says(tmp_path, name):
    """config.json and model.safetensors, nothing told by us; the vectors' config and weights under those names."""
    system, file, x_t, sigma, expected = PUBLISHED[name]
    folder = MDLM if (MDLM / f"{name}_config.json").is_file() else SEDD
    weights = {"mdlm_hf": name, "duo_hf": name, "sdtt": "sdtt_student_weights"}.get(name, f"{name}_weights")
    shutil.copy(folder / f"{name}_config.json", tmp_path / "config.json")
    shutil.copy(folder / f"{weights}.safetensors", tmp_path / "model.safetensors")
    with open_layout(tmp_path) as found:
        assert (found.system, found.about.length) == (system, 16)
        assert found.config.num_heads == 4
        assert (name == "hdlm_gamma") == (found.about.gamma == 0.1)
        assert found.geometric == (name == "sedd_uniform")
        model = found.load()
    if file is not None:
        data = vectors(file)
        told = torch.zeros(3) if sigma is None else data[sigma]
        same(model(data[x_t], told), data[expected], 2e-5)


@needs_golden
def test_the_order_of_averaged_weights_is_the_originals():
    named = json.loads((MDLM / "mdlm_parameter_order.json").read_text())["ema_order"]
    assert list(ema_order(2)) == named


def test_alike_files_must_be_told_apart(tmp_path):
    folder = write_hugging_face(tmp_path / "m", small_network(), model_type="x")
    with pytest.raises(ValueError, match="say which"):
        open_layout(folder)
    with open_layout(folder, system="sdtt") as weights:
        assert weights.system == "sdtt"
    with open_layout(folder.rename(tmp_path / "my-sdtt-round-7")) as weights:
        assert weights.system == "sdtt"


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_clock(tmp_path, system):
    with open_layout(write_hugging_face(tmp_path / "m", small_network()), system=system) as weights:
        assert float(weights.clock(0.0)) >= 0


def damaged(folder, change):
    named = their_tensors(small_network())
    change(named)
    folder.mkdir()
    save_file(named, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n.pop("blocks.1.norm2.weight"), "norm2.weight is missing"),
        (lambda n: n.update(extra=torch.zeros(2)), "'extra' has no place"),
        (lambda n: n.update({"output_layer.linear.bias": torch.zeros(3)}), r"has shape \(3,\)"),
        (lambda n: n.update({"rotary_emb.inv_freq": torch.ones(4)}), "read wrongly"),
        (lambda n: n.pop("vocab_embed.embedding"), "no table"),
        (lambda n: n.pop("rotary_emb.inv_freq"), "number of heads"),
        (lambda n: [n.pop(k) for k in list(n) if k.startswith("blocks.0")], "not 0, 1, 2"),
    ],
)
def test_damage_is_said(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        open_layout(damaged(tmp_path / "mdlm", change), system="mdlm")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"nonsense")
    (tmp_path / "y.safetensors").write_bytes(b"nonsense")
    for name in ("x.ckpt", "y.safetensors", "absent"):
        with pytest.raises(ValueError, match=name):
            open_layout(tmp_path / name)
        assert not is_peer(tmp_path / name)
    torch.save({"a": torch.zeros(2)}, tmp_path / "z.ckpt")
    assert not is_peer(tmp_path / "z.ckpt")
    folder = write_hugging_face(tmp_path / "m", small_network())
    with pytest.raises(ValueError, match="leave the choice out"):
        open_layout(folder, weights="ema")
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="no config of a peer"):
        open_layout(folder)
    short = torch.load(write_lightning(tmp_path / "mdlm.ckpt", small_network(), small_network()), weights_only=True)
    short["ema"]["shadow_params"].pop()
    torch.save(short, tmp_path / "mdlm.ckpt")
    with pytest.raises(ValueError, match="averaged tensors"):
        open_layout(tmp_path / "mdlm.ckpt")
    del short["ema"]
    torch.save(short, tmp_path / "mdlm.ckpt")
    with pytest.raises(ValueError, match="no averaged weights"):
        open_layout(tmp_path / "mdlm.ckpt", weights="ema")


def test_values_that_are_not_there_are_not_believed(tmp_path):
    """One value may stand for a table of terabytes, and a thousand tensors for the same bytes."""
    torch.save({"vocab_embed.embedding": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "a.ckpt")
    table = torch.zeros(64, 64)
    torch.save({str(i): table for i in range(100)}, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises(ValueError, match="describes .* bytes of tensors and holds"):
            open_layout(tmp_path / name)
