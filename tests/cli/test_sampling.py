"""Every command that samples takes the same options, and a checkpoint's advice is followed."""

import dataclasses
import json
from inspect import signature
from typing import get_args

import pytest
from typer.testing import CliRunner

import fsdfm
from fsdfm.checkpoint import save_model
from fsdfm.cli import app
from fsdfm.cli.evaluating import evaluate
from fsdfm.cli.sampling import NoiseSamplingOptions, SamplingOptions, WritingOptions
from fsdfm.cli.training import reflow
from fsdfm.cli.writing import generate, infill, repair
from fsdfm.config import SampleConfig
from fsdfm.generate import SamplerConfig, check_advice, fit_curve, read_advice
from fsdfm.measure.evaluation import EvaluationRequest
from fsdfm.run import PairsConfig
from tiny_models import random_bundle


def test_the_options_are_those_of_the_sampler_with_its_defaults():
    said = {field.name: field.default for field in dataclasses.fields(WritingOptions)}
    unsaid = ("keep_states", "curve")
    known = {field.name: field.default for field in dataclasses.fields(SamplerConfig) if field.name not in unsaid}
    assert said == known
    SamplerConfig(**WritingOptions().options())


@pytest.mark.parametrize("command", [generate, infill, repair, evaluate, reflow], ids=lambda each: each.__name__)
def test_every_command_that_samples_declares_them_alike(command):
    group = NoiseSamplingOptions if command is reflow else SamplingOptions  # pairs begin with noise, at t = 0
    theirs = signature(command).parameters
    model = signature(generate).parameters
    for field in dataclasses.fields(group):
        if field.name == "steps" and command in (evaluate, reflow):
            continue  # budgets, and the many steps of a parent
        assert theirs[field.name].default == field.default
        (kind, option), (own, told) = (get_args(each[field.name].annotation) for each in (model, theirs))
        assert (own, told.help) == (kind, option.help)


def test_samples_while_training_take_the_same_options_with_the_same_defaults():
    own = {field.name: field.default for field in dataclasses.fields(SampleConfig)}
    of_the_run = ("seed",)  # train.seed, so that only the model changes from one look to the next
    theirs = {field.name: field.default for field in dataclasses.fields(NoiseSamplingOptions)}
    assert {name: own[name] for name in theirs if name not in of_the_run} == {
        name: default for name, default in theirs.items() if name not in of_the_run
    }
    assert own.keys() - theirs.keys() == {"every", "num", "length", "renoise"}
    asked = SampleConfig(steps=3, final_temperature=0.5, top_k=4, grid="kappa")
    assert asked.sampler() == SamplerConfig(steps=3, final_temperature=0.5, top_k=4, grid="kappa")
    assert SampleConfig().sampler() == SamplerConfig()


def test_what_the_commands_make_of_them_has_the_same_defaults():
    for config in (EvaluationRequest, PairsConfig):
        own = {field.name: field.default for field in dataclasses.fields(config)}
        for field in dataclasses.fields(NoiseSamplingOptions):
            assert field.name == "steps" or own[field.name] == field.default


def test_an_exported_model_is_sampled_as_its_maker_advises(tmp_path):
    save_model(tmp_path / "model", random_bundle())
    words = ["--sampling", "jump=spaced", "--sampling", "temperature=1:0.9,8:0.85"]
    done = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--out", str(tmp_path / "shared"), *words])
    assert done.exit_code == 0, done.output
    lm = fsdfm.load(tmp_path / "shared", threads=1)
    advised = lm.sampler_config(steps=8)
    assert (advised.jump, advised.temperature) == ("spaced", 0.85)
    assert lm.sampler_config(steps=1).temperature == 0.9
    assert lm.sampler_config(steps=8, temperature=1.0, jump="exact") == SamplerConfig(
        steps=8, temperature=1.0, jump="exact"
    )
    again = ["export", str(tmp_path / "shared"), "--out", str(tmp_path / "plain"), "--sampling", "none"]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert "sampling" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert CliRunner().invoke(app, [*again[:3], str(tmp_path / "kept")]).exit_code == 0
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["sampling"]["jump"] == "spaced"


def test_an_exported_model_can_choose_its_own_budget(tmp_path):
    """The curve joins the advice that is there, is that of `fit_curve`, and `--steps auto` follows it."""
    bundle = random_bundle()
    bundle.facts["sampling"] = {"jump": "spaced"}
    save_model(tmp_path / "model", bundle)
    (tmp_path / "held.txt").write_text("some text<|endoftext|>another one<|endoftext|>")
    words = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "shared"), "--fit-curve"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "held.txt")])
    assert done.exit_code == 0, done.output
    lm = fsdfm.load(tmp_path / "shared", threads=1)
    advised = lm.sampler_config(steps="auto", target="quality=0.5")
    expected = fit_curve(lm, ["some text", "another one"])
    assert advised.curve is not None
    assert advised.curve.nats == pytest.approx(expected.nats, abs=1e-4)
    assert advised.steps == advised.curve.steps_for(0.5)
    assert advised.jump == "spaced"
    (tmp_path / "empty.txt").write_text(" \n")
    refused = CliRunner().invoke(app, [*words[:3], str(tmp_path / "no"), "--fit-curve", str(tmp_path / "empty.txt")])
    assert refused.exit_code != 0
    assert not (tmp_path / "no").exists()


def test_one_temperature_holds_at_every_budget():
    advice = read_advice(["temperature=0.7"])
    assert {SamplerConfig(steps=steps).advised(advice).temperature for steps in (1, 8, 1024)} == {0.7}


@pytest.mark.parametrize(
    "words",
    [["jump=bold"], ["jump"], ["jump=exact", "jump=single"], ["top_q=1"], ["temperature=1:2:3"], ["temperature=8:-1"]],
)
def test_advice_that_nobody_could_follow_is_refused(words):
    with pytest.raises(ValueError, match=r"allowed|write"):
        read_advice(words)


def test_advice_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="for every budget"):
        check_advice({"temperature": 0.9})


@pytest.mark.parametrize("steps", [0, -1, 2.5, "8", True])
def test_advised_steps_must_be_possible(steps):
    with pytest.raises(ValueError, match="steps"):
        check_advice({"steps": steps})
