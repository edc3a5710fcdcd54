import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fsdfm.studies.ablation.run as composition
import fsdfm.studies.models as models
from fsdfm.checkpoint import save_model
from fsdfm.cli import app, main
from fsdfm.config import load_recipe
from fsdfm.data import Tokenizer
from fsdfm.measure.judges import save_causal
from fsdfm.model import CausalConfig, CausalModel
from fsdfm.studies.ablation import FACTORS, AblationRequest, run_ablation
from fsdfm.studies.ablation.cells import with_mask
from fsdfm.studies.ablation.factors import CONTROL, FineTuning, find_factor
from fsdfm.studies.ablation.setting import RECIPE
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.runner import StoppedError
from tiny_models import random_bundle

runner = CliRunner()
STORIES = "<|endoftext|>".join(f"The {k} cats sat on {k * k} mats, and then they slept. " for k in range(40))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablate")
    save_model(folder / "base", random_bundle(length=16))
    save_model(folder / "masked", random_bundle(length=16, source="mask"))
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=64, dropout=0.0)
    model = CausalModel(config)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    save_causal(folder / "judge", model, Tokenizer.bytes(), bos_id=256)
    (folder / "held.txt").write_text(STORIES)
    (folder / "train.txt").write_text(STORIES * 3)
    return folder


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("fsdfm.measure.statistics.RESAMPLES", 20)


def ask(files, factor, out, **changes):
    asked = {
        "factor": factor,
        "out": out,
        "text": (str(files / "train.txt"),),
        "held_out": str(files / "held.txt"),
        "base": str(files / "base"),
        "judge": str(files / "judge"),
        "overrides": ("train.batch_size=4", "data.length=16", "runtime.precision=float32"),
        **{"seeds": 2, "steps": "1", "train_steps": 2, "num": 2, "workers": 1},
    }
    return AblationRequest(**{**asked, **changes})


def command(files, out):
    """What `ask` asks for, on the command line."""
    words = ["study", "ablate", "start", "train.batch_size=4", "data.length=16", "runtime.precision=float32"]
    words += ["--out", str(out), "--text", str(files / "train.txt"), "--held-out", str(files / "held.txt")]
    words += ["--base", str(files / "base"), "--judge", str(files / "judge"), "--seeds", "2", "--steps", "1"]
    return [*words, "--num", "2"]


def ablate(files, factor, out, **changes):
    return run_ablation(ask(files, factor, out, **changes), console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """One folder for all factors: what two of them need is made once."""
    return tmp_path_factory.mktemp("together")


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_every_factor_prints_its_table_and_verdicts(files, together, name, monkeypatch):
    if name == "time":
        monkeypatch.setattr(composition, "AblationSetting", lambda **values: _setting(rounds=2, **values))
    out = together if name != "time" else together / "time-alone"
    outcome = ablate(files, name, out)
    factor = FACTORS[name]
    for variant in factor.chosen(full=False):
        assert variant.label in outcome.markdown
    for label, row in factor.paper.items():
        numbers = " | ".join(f"{value:,.2f}" for pair in row.values() for value in pair)
        assert f"| {label} | {numbers} |" in outcome.markdown
    assert len(outcome.verdicts) == len(factor.claims)
    assert all(v.result in ("reproduced", "refuted", "undecided") for v in outcome.verdicts)
    assert outcome.report.read_text() == outcome.markdown
    record = json.loads(outcome.report.with_name("ablation.json").read_text())
    assert [v["result"] for v in record["verdicts"]] == [v.result for v in outcome.verdicts]
    assert {"commit", "setting", "seeds", "values"} <= set(record)
    assert str(files) not in json.dumps(record)
    assert outcome.report.with_name("figure.png").exists() == (factor.figure is not None)
    if factor.kind == "quality":
        assert "real text" in outcome.markdown
        assert CONTROL.label in outcome.markdown
    assert not list((out / "runs").glob("*"))


def _setting(**values):
    from fsdfm.studies.ablation.setting import AblationSetting

    return AblationSetting(**values)


@pytest.mark.slow
def test_what_is_finished_is_not_done_again_and_what_two_factors_share_is_done_once(files, together, monkeypatch):
    first = ablate(files, "scalar", together)
    monkeypatch.setattr(models, "train", lambda *a, **k: pytest.fail("trained again"))
    ablate(files, "start", together)  # its few-step model is that of scalar
    monkeypatch.setattr(models, "run_evaluation", lambda *a, **k: pytest.fail("measured again"))
    assert ablate(files, "scalar", together).markdown == first.markdown


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(files, together, tmp_path, monkeypatch):
    whole = ablate(files, "start", together)
    real, calls = models.run_evaluation, []

    def stopped(request, **rest):
        calls.append(request)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(request, **rest)

    monkeypatch.setattr(models, "run_evaluation", stopped)
    with pytest.raises(StoppedError):
        ablate(files, "start", tmp_path)
    assert len(list((tmp_path / "cells").glob("*@*.json"))) == 2
    assert not (tmp_path / "start").exists()
    monkeypatch.setattr(models, "run_evaluation", real)
    assert ablate(files, "start", tmp_path).markdown == whole.markdown


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on(files, tmp_path, monkeypatch):
    real = models.train

    def half(recipe, overrides, **rest):
        real(recipe, [*overrides, "train.steps=1"], **rest)  # as if a signal had come after one step
        raise StoppedError

    monkeypatch.setattr(models, "train", half)
    with pytest.raises(StoppedError):
        ablate(files, "start", tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    monkeypatch.setattr(models, "train", real)
    ablate(files, "start", tmp_path)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_processes_give_what_one_process_gives(files, tmp_path):
    alone, together = (ablate(files, "start", tmp_path / str(n), workers=n) for n in (1, 2))
    assert [v.distance for v in together.verdicts] == [v.distance for v in alone.verdicts]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_processes_and_the_same_command_goes_on(files, tmp_path, number):
    words = [sys.executable, "-m", "fsdfm", *command(files, tmp_path), "--workers", "2", "--train-steps", "60"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "runs"
    while process.poll() is None and not (runs.exists() and list(runs.iterdir())):
        time.sleep(0.2)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "the same command resumes" in said
    assert "Traceback" not in said
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "## Verdict" in done.stdout


def test_the_mask_token_changes_nothing_else():
    bundle = random_bundle()
    masked = with_mask(bundle)
    x, t = torch.randint(257, (2, 8)), torch.tensor([0.2, 0.7])
    assert masked.path.source.vocab_size == 258
    assert masked.path.source.mask_token == 257
    torch.testing.assert_close(masked.model(x, t)[..., :257], bundle.model(x, t))


def test_factors_are_whole():
    for name, factor in FACTORS.items():
        labels = [variant.label for variant in factor.variants]
        assert factor.name == name
        assert len(set(labels)) == len(labels)
        assert {side for claim in factor.claims for side in (claim.better, claim.worse)} <= set(labels)
        assert set(factor.paper) <= set(labels)
        assert factor.figure is None or set(factor.figure) <= set(labels)
        for variant in factor.variants:
            if variant.training is not None:
                load_recipe(RECIPE, variant.training.overrides)


def test_equal_names_are_equal_trainings_and_setups():
    trainings: dict[str, FineTuning] = {}
    for variant in (variant for factor in FACTORS.values() for variant in factor.variants):
        if variant.training is not None:
            assert trainings.setdefault(variant.training.name, variant.training) == variant.training


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_factor_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'teacher'"):
        find_factor("teachers")
    with pytest.raises(ValueError, match="there are scalar, teacher"):
        find_factor("xyz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 1}, "one seed has no interval"),
        ({"num": 1}, "--num is 1"),
        ({"train_steps": 0}, "--train-steps is 0"),
        ({"text": ()}, "the training text is missing"),
        ({"held_out": None}, "held-out text is missing"),
        ({"text": ("nowhere.txt",)}, "nowhere.txt is not there"),
        ({"held_out": "nowhere.txt"}, "nowhere.txt is not there"),
        ({"steps": "0"}, "--steps is '0'"),
        ({"overrides": ("train.seed=3",)}, "train.seed is decided by"),
        ({"overrides": ("flow.source=mask",)}, "flow.source is decided by"),
        ({"overrides": ("optim.lrr=3",)}, "did you mean optim.lr"),
        ({"base": "nowhere"}, "nowhere"),
        ({"judge": "stories15m"}, "give the llama2.c file"),
    ],
)
def test_bad_input_is_named_before_anything_is_made(files, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ablate(files, "teacher", tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_sources_are_compared_from_a_uniform_base(files, tmp_path):
    with pytest.raises(ValueError, match="give a model of the uniform one"):
        ablate(files, "source", tmp_path / "out", base=str(files / "masked"))


def test_cells_of_another_setting_are_refused(files, tmp_path):
    _, setting = composition._prepare(ask(files, "start", tmp_path), FACTORS["start"])
    StudyFolder(tmp_path).claim({"study": "ablation", **asdict(setting)})
    with pytest.raises(ValueError, match="another setting: num was 2, now it is 4"):
        ablate(files, "start", tmp_path, num=4)


def test_a_folder_that_cannot_be_written_is_named(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="choose a folder you may write to"):
        ablate(files, "start", tmp_path / "file" / "out")


def test_the_command_says_what_is_wrong_in_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["fsdfm", "study", "ablate", "teachr", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "did you mean 'teacher'" in capsys.readouterr().err


def test_the_command_prints_the_report(files, together):
    words = [*command(files, together), "--train-steps", "2", "--workers", "1"]
    done = runner.invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "## Verdict" in done.stdout
    assert "ablation.json" in done.stderr
