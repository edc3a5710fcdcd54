"""Peers from recipes and from published weights to text."""

import io
from dataclasses import replace

import pytest
import torch
from peer_files import small_network, write_hugging_face, write_lightning
from rich.console import Console
from safetensors.torch import load_file, save_file

import fsdfm
from fsdfm.checkpoint import load_model
from fsdfm.flow import Grid, PolynomialSchedule, sample
from fsdfm.generate import SamplerConfig
from fsdfm.measure.evaluation import EvaluationRequest, run_evaluation
from fsdfm.noise import Noise
from fsdfm.peers.llada import Guided, LLaDARule
from fsdfm.peers.remdm import Cap
from fsdfm.peers.sampling import PEER_RULES, DuoRule, LawRule
from fsdfm.run import ImportConfig, import_weights
from small_runs import train_quietly, write_recipe

FEW = ["train.steps=2", "train.save_every=2"]
KINDS = {
    "mdlm": ["flow.source=mask"],
    "sedd-absorb": ["flow.source=mask"],
    "hdlm-epsilon": ["flow.source=mask"],
    "hdlm-gamma": ["flow.source=mask"],
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
        "hdlm-gamma": ("hybrid", "posterior"),
        "duo": ("sigma", "leave-one-out"),
        "sedd-uniform": ("geometric", "uniform-scores"),
    }[kind]
    assert isinstance(said(tmp_path / "run").text, str)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "noise"), [("absorb", "geometric"), ("uniform", "log-linear")])
def test_either_graph_of_sedd_trains_and_is_imported_with_either_noise(tmp_path, graph, noise):
    kind, clock = f"sedd-{graph}", {"geometric": "geometric", "log-linear": "sigma"}[noise]
    recipe = write_recipe(tmp_path, kind=kind)
    train_quietly(str(recipe), f"out={tmp_path / 'run'}", f"objective.noise={noise}", *KINDS[kind], *FEW)
    assert load_model(tmp_path / "run").model.config.clock == clock
    jump = "sedd" if graph == "absorb" else "sedd-uniform"
    assert isinstance(said(tmp_path / "run", jump=jump).text, str)
    model = small_network(vocab_size=257 if graph == "uniform" else 258)
    config = {"model_type": None, "graph": {"type": graph}, "noise": {"type": noise.replace("-", "")}}
    about = imported(tmp_path, write_hugging_face(tmp_path / "m", model, **config))
    assert (about.model.config.clock, about.facts["objective"]) == (clock, {"kind": kind, "noise": noise})


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


def uniform(system):
    return system in ("duo", "sedd-uniform")


@pytest.mark.parametrize("system", ["mdlm", "sdtt", "sedd-absorb", "sedd-uniform", "duo"])
def test_published_weights_become_checkpoints_that_write_and_infill(tmp_path, system):
    # the bytes, the end of a text, and the mask or Duo's padding
    model = small_network(vocab_size=257 if system == "sedd-uniform" else 258)
    imported(tmp_path, write_hugging_face(tmp_path / "m", model), system=system)
    lm = fsdfm.load(tmp_path / "out", device="cpu")
    rules = [name for name, rule in PEER_RULES.items() if (rule.source == "uniform") == uniform(system)]
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
        sigmas = {"none": torch.zeros(1), "sigma": -torch.log(0.001 + 0.999 * t), "geometric": -torch.log(t)}
        told = sigmas[bundle.model.config.clock]
        assert torch.allclose(bundle.model(x_t, t), model(x_t, told)[..., : 257 + (not uniform(system))], atol=1e-5)


def gamma_folder(tmp_path, gamma=0.3):
    """Their layout: no modulation in the last layer."""
    model = small_network(vocab_size=258)
    folder = write_hugging_face(tmp_path / "m", model, "", model_type="gamma_hybrid", graph={"gamma": gamma})
    named = load_file(folder / "model.safetensors")
    save_file({n: v for n, v in named.items() if "output_layer.adaLN" not in n}, folder / "model.safetensors")
    return folder


def test_gamma_hdlm_becomes_a_checkpoint_that_advises_its_sampler(tmp_path):
    imported(tmp_path, gamma_folder(tmp_path))
    bundle = load_model(tmp_path / "out")
    assert (bundle.model.config.blend, bundle.model.config.clock) == (0.3, "hybrid")
    lm = fsdfm.load(tmp_path / "out", device="cpu")
    advised = lm.generate(length=8, steps=4, seed=2).tokens
    assert advised == lm.generate(length=8, steps=4, seed=2, jump="hdlm-gamma:gamma=0.3").tokens
    released = lm.generate(length=8, steps=4, seed=2, jump="hdlm-gamma:gamma=0.3,own_score=network")
    assert released.changes[0] > lm.generate(length=8, steps=4, seed=2).changes[0]  # masks go at once
    assert lm.infill("ab[[2]]cd", steps=2).text.endswith("cd")
    with pytest.raises(ValueError, match="allowed are one"):
        SamplerConfig(jump="hdlm-gamma:own_score=best")


def held_out(tmp_path):
    file = tmp_path / "held.txt"
    file.write_text("<|endoftext|>".join(f"the {n} cats sat on a mat and saw {n} dogs run" for n in range(40)))
    return file


def published(folder, system):
    """A folder in a system's layout; epsilon-HDLM's has neither time nor modulation."""
    write_hugging_face(folder, small_network(vocab_size=257 if system == "sedd-uniform" else 258))
    if system == "hdlm-epsilon":
        named = load_file(folder / "model.safetensors")
        plain = {name: value for name, value in named.items() if "sigma_map" not in name and "adaLN" not in name}
        save_file(plain, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("system", ["mdlm", "sdtt", "sedd-absorb", "sedd-uniform", "duo", "hdlm-epsilon", "hdlm-gamma"])
def test_imported_weights_are_evaluated_repaired_and_trained_on(tmp_path, system):
    imported(tmp_path, published(tmp_path / "m", system), system=system)
    lm = fsdfm.load(tmp_path / "out", device="cpu")
    assert lm.infill("ab[[2]]cd", steps=2).text.endswith("cd")
    request = EvaluationRequest(
        model=str(tmp_path / "out"), held_out=str(held_out(tmp_path)), steps="1,2", num=2, length=16, threads=1
    )
    evaluation = run_evaluation(request, console=Console(file=io.StringIO())).evaluation
    assert [row.facts["calls_made"] for row in evaluation.plain] == [1, 2]
    assert all(row.metrics["accuracy"].value >= 0 for row in evaluation.plain)
    assert evaluation.bound.value > 0
    text = write_recipe(tmp_path, kind="mdlm" if system == "sdtt" else system).read_text()
    sizes = ("preset", "width", "num_blocks", "num_heads", "cond_width", "tokenizer")
    (tmp_path / "child.toml").write_text("\n".join(line for line in text.splitlines() if not line.startswith(sizes)))
    flow = [] if uniform(system) else ["flow.source=mask"]
    train_quietly(
        str(tmp_path / "child.toml"), f"out={tmp_path / 'child'}", f"model.parent={tmp_path / 'out'}", *flow, *FEW
    )
    assert load_model(tmp_path / "child").facts["training_step"] == 2


def test_a_student_beside_its_discriminator_is_an_mdlm(tmp_path):
    """DiDi-Instruct's folder: model.safetensors is the student, and nothing else in it is looked at."""
    folder = write_hugging_face(tmp_path / "m", small_network(vocab_size=258))
    (folder / "discriminator.safetensors").write_bytes(b"of no concern")
    imported(tmp_path, folder, system="mdlm")
    assert isinstance(said(tmp_path / "out", jump="mdlm").text, str)


def test_the_grid_tail_spends_its_last_call_where_almost_no_noise_is_left():
    schedule, start = PolynomialSchedule(), torch.zeros(1, dtype=torch.float64)
    times = SamplerConfig(grid="tail", steps=4).make_grid(start, schedule).times[0]
    assert times.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1 - 1e-5, 1], abs=1e-5)
    assert times[3] < 1
    assert SamplerConfig(grid="tail", steps=1).make_grid(start, schedule).times[0].tolist() == [0, 1]


def test_calls_in_which_a_text_asks_nothing_are_not_counted(tmp_path):
    """With a threshold that everything passes, all masks are revealed in the first of eight calls."""
    imported(tmp_path, write_hugging_face(tmp_path / "m", small_network(vocab_size=258)), system="mdlm")
    for jump, made in (("llada:threshold=1e-9,temperature=1", 1), ("mdlm", 8)):
        request = EvaluationRequest(
            **{"model": str(tmp_path / "out"), "held_out": str(held_out(tmp_path)), "steps": "8", "num": 2},
            **{"length": 16, "jump": jump, "metrics": "diversity", "controls": False, "threads": 1},
        )
        evaluation = run_evaluation(request, console=Console(file=io.StringIO())).evaluation
        assert evaluation.row(8).facts["calls_made"] == made


def test_a_block_for_every_call_is_the_arg_max_of_each(tmp_path):
    """The paper's setting for LLaDA: blocks of length / calls."""
    imported(tmp_path, write_hugging_face(tmp_path / "m", small_network(vocab_size=258)), system="mdlm")
    lm = fsdfm.load(tmp_path / "out", device="cpu")
    by_calls = lm.generate(length=8, steps=4, jump="llada:block_calls=1")
    assert by_calls.tokens == lm.generate(length=8, steps=4, jump="llada:block_length=2").tokens
    assert by_calls.changes == (2, 2, 2, 1)  # the first of the eight is given


def test_guidance_leads_away_from_the_text_without_its_prompt_and_costs_two_calls(tmp_path):
    imported(tmp_path, write_hugging_face(tmp_path / "m", small_network(vocab_size=258)), system="mdlm")
    lm = fsdfm.load(tmp_path / "out", device="cpu")
    plain, none, guided = (
        lm.generate("abcd", length=8, steps=4, jump=f"llada{option}") for option in ("", ":guidance=0", ":guidance=3")
    )
    assert plain.tokens == none.tokens != guided.tokens
    assert (plain.calls, guided.calls) == (4, 8)
    mask = lm.checkpoint.path.source.mask_token
    x_0 = torch.tensor([[256, *guided.tokens[:4], *[mask] * 3]])  # a text begins behind the end of another
    network = Guided(lm.network, x_0 != mask, guidance=3.0, mask_token=mask)
    expected = sample(
        network, lm.checkpoint.path, x_0, grid=Grid.uniform(4), noise=Noise(0), rule=LLaDARule(), frozen=x_0 != mask
    )
    assert expected[0, 1:].tolist() == list(guided.tokens)
    with pytest.raises(ValueError, match="leave --cache out"):
        lm.generate("abcd", length=8, steps=4, jump="llada:guidance=3", cache="prompt")
    with pytest.raises(ValueError, match="guidance is -1"):
        SamplerConfig(jump="llada:guidance=-1")


def test_options_of_a_rule_stand_behind_its_name():
    rule = SamplerConfig(jump="remdm-cap:eta=0.02,top_p=0.9").rule()
    assert rule == LawRule(Cap(eta=0.02, top_p=0.9))
    assert SamplerConfig(jump="duo:mixture=0.5").rule() == DuoRule(mixture=0.5)
    assert SamplerConfig(jump="dream-entropy:alg_temp=0.5,top_p=none").rule().top_p is None
    named = "llada:order=random,block_length=32"
    assert SamplerConfig(jump=named).to_json()["jump"] == named
    for bad, message in (
        ("remdm-cap:beta=1", "options of remdm-cap are top_p, eta"),
        ("remdm-cap:eta=2", "eta is 2"),
        ("remdm-cap:eta=much", "give numbers"),
        ("exact:eta=1", "options of exact are none"),
        ("llada:block_calls=1,block_length=4", "allowed is one of them"),
        ("duo:mixture=2", "mixture is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplerConfig(jump=bad)


def test_lightning_files_and_the_choice_of_weights(tmp_path):
    path = write_lightning(tmp_path / "mdlm.ckpt", small_network(0, vocab_size=258), small_network(1, vocab_size=258))
    assert imported(tmp_path, path).facts["weights"] == "averaged weights"
    (tmp_path / "out").rename(tmp_path / "first")
    assert "published" in imported(tmp_path, path, weights="raw").facts["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
