"""The checkerboard: its closed form against enumeration, its measurements against predictions, its files."""

import json
import math
import os
import sys

import pytest
import torch
from PIL import Image
from rich.console import Console

from fsdfm.flow import (
    ExactDenoiser,
    ExactJump,
    Grid,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    UniformSource,
    sample,
)
from fsdfm.flow.exact import all_states
from fsdfm.noise import Noise
from fsdfm.studies.checkerboard import Board, CheckerboardDenoiser, SamplingCase, run_checkerboard, train_network

SMALL = Board(8, 2)
SOURCES = {"uniform": UniformSource(8), "mask": MaskSource(9), "mixture": MixtureSource(9, 0.3)}
PICTURES = ["trajectories.png", "jumps.png", "few-steps.png", "trajectory-uniform.gif", "trajectory-mask.gif"]
SAMPLES, FRAMES = 600, 8  # 8 is also one of the few-step budgets: that setting is run once


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkerboard") / "new" / "folder"
    folder.mkdir(parents=True)
    for name in ("jumps.png", "checkerboard.json"):
        (folder / name).write_text("left by an earlier run")
    with open(os.devnull, "w") as nowhere:
        numbers = run_checkerboard(
            folder,
            samples=SAMPLES,
            frames=FRAMES,
            train_steps=40,
            board=SMALL,
            workers=1,
            console=Console(file=nowhere),
        )
    return folder, numbers


def binomial_error(p: float, count: int) -> float:
    return math.sqrt(p * (1 - p) / count)


# ---------------------------------------------------------------------------------------------------- the board


def test_the_board_is_uniform_over_its_allowed_cells():
    p_1 = SMALL.probabilities(9)
    assert p_1.shape == (9, 9)
    assert float(p_1.sum()) == pytest.approx(1)
    assert int((p_1 > 0).sum()) == 32
    assert p_1[0, 0] > 0
    assert p_1[0, 2] == 0
    assert p_1[8].sum() == p_1[:, 8].sum() == 0


def test_samples_of_the_board_follow_its_law():
    x_1 = SMALL.sample(Noise(1, range(20_000)))
    counts = torch.bincount(x_1[:, 0] * 8 + x_1[:, 1], minlength=64).to(torch.float64).view(8, 8)
    expected = SMALL.probabilities(8) * 20_000
    assert torch.equal(counts > 0, expected > 0)
    chi_square = ((counts - expected) ** 2 / expected.clamp(min=1)).sum()
    assert chi_square < 31 + 4 * math.sqrt(2 * 31)


def test_a_masked_sample_is_not_allowed():
    assert SMALL.allowed(torch.tensor([[0, 1], [0, 2], [0, 8], [8, 8]])).tolist() == [True, False, False, False]


@pytest.mark.parametrize(("size", "square"), [(8, 3), (8, 8), (8, 0), (0, 1), (6, 2)])
def test_an_impossible_board_is_refused(size, square):
    with pytest.raises(ValueError, match="multiple of twice the square"):
        Board(size, square)


def test_a_vocabulary_smaller_than_the_board_is_refused():
    with pytest.raises(ValueError, match="too small"):
        CheckerboardDenoiser(MixturePath(UniformSource(4)), SMALL)


# ------------------------------------------------------------------------------------------------ the posterior


@pytest.mark.parametrize("t", [0.0, 0.05, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("exponent", [1.0, 2.0])
@pytest.mark.parametrize("source", SOURCES)
def test_the_closed_form_equals_enumeration_in_every_state(source, exponent, t):
    path = MixturePath(SOURCES[source], PolynomialSchedule(exponent))
    states = all_states(path.source.vocab_size, 2)
    times = torch.full((len(states),), t, dtype=torch.float64)
    truth = ExactDenoiser(path, p_1=SMALL.probabilities(path.source.vocab_size))(states, times)
    closed = CheckerboardDenoiser(path, SMALL)(states, times, times)
    assert not closed.isnan().any()  # also where the path cannot be: a revealed pair off the board
    torch.testing.assert_close(closed.exp(), truth.exp(), rtol=0, atol=1e-12)


def test_many_exact_steps_end_on_the_board():
    path, noise = MixturePath(UniformSource(128)), Noise(0, range(1000))
    x_0 = path.source.sample(noise, 2)
    denoiser = CheckerboardDenoiser(path, Board())
    x_1 = sample(denoiser, path, x_0, grid=Grid.uniform(60), rule=ExactJump(), noise=noise)
    assert Board().allowed(x_0).double().mean() == pytest.approx(0.5, abs=0.06)
    assert Board().allowed(x_1).double().mean() > 0.97


# -------------------------------------------------------------------------------------------------- the network


def test_training_approaches_the_exact_posterior_and_leaves_the_global_random_state_alone():
    path = MixturePath(UniformSource(8))
    before = torch.get_rng_state()
    _, short = train_network(path, SMALL, seed=0, steps=1)
    _, long = train_network(path, SMALL, seed=0, steps=100)
    assert torch.equal(torch.get_rng_state(), before)
    assert long.kl_to_exact < 0.15 < short.kl_to_exact


def test_training_is_repeatable():
    path, x_t = MixturePath(MaskSource(9)), torch.tensor([[0, 8], [8, 8]])
    t = torch.tensor([0.2, 0.4], dtype=torch.float64)
    first, second = (train_network(path, SMALL, seed=3, steps=5)[0](x_t, t, t) for _ in range(2))
    assert torch.equal(first, second)


def test_training_for_no_steps_is_refused():
    with pytest.raises(ValueError, match="at least 1 step"):
        train_network(MixturePath(UniformSource(8)), SMALL, seed=0, steps=0)


# -------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.slow
def test_one_step_fits_half_the_samples_and_more_steps_fit_more(report):
    _, numbers = report
    for source in ("uniform", "mask"):
        for rule in ("exact", "single", "instant", "systematic"):
            one, two, eight = (
                numbers.outcomes[SamplingCase("exact", source, rule, steps)].on_allowed for steps in (1, 2, 8)
            )
            assert one == pytest.approx(0.5, abs=4 * binomial_error(0.5, SAMPLES))
            assert one + 0.05 < two < eight - 0.05
            assert eight > 0.8


@pytest.mark.slow
def test_exact_and_single_are_one_rule_under_the_mask_source(report):
    _, numbers = report
    exact, single = (numbers.outcomes[SamplingCase("exact", "mask", rule, 8)] for rule in ("exact", "single"))
    assert exact == single


@pytest.mark.slow
def test_every_masked_token_jumps_exactly_once(report):
    _, numbers = report
    for setting, outcome in numbers.outcomes.items():
        if setting.source == "mask":
            assert outcome.jumps_a_token == pytest.approx(1)


@pytest.mark.slow
def test_uniform_tokens_jump_about_once(report):
    _, numbers = report
    assert numbers.outcomes[SamplingCase("exact", "uniform", "exact", 1)].jumps_a_token == pytest.approx(
        7 / 8, abs=0.05
    )
    assert numbers.outcomes[SamplingCase("exact", "uniform", "exact", FRAMES)].jumps_a_token == pytest.approx(
        1, abs=0.15
    )


@pytest.mark.slow
def test_the_literal_instantaneous_rule_misses_what_the_theory_says(report):
    _, numbers = report
    for entry in numbers.never_reached:
        if entry.kappa == "t":
            harmonic = sum(1 / n for n in range(1, entry.steps + 1))
            assert entry.predicted == pytest.approx(math.exp(-harmonic))
            assert entry.moved_in_first_step == pytest.approx(-math.expm1(-1 / entry.steps), abs=0.05)
        else:
            assert entry.moved_in_first_step == 0  # g(0) = 0: the first step moves nothing
        error = binomial_error(entry.predicted, 2 * SAMPLES)
        assert entry.measured == pytest.approx(entry.predicted, abs=4 * error + 1e-9)


# ---------------------------------------------------------------------------------------------------- the files


@pytest.mark.slow
def test_the_folder_holds_what_it_promises_and_no_leftovers(report):
    folder, _ = report
    written = {*PICTURES, "checkerboard.json", "checkerboard.md", "setting.json", "cells", ".locks"}
    assert {file.name for file in folder.iterdir()} == written
    assert not list((folder / ".locks").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_valid_and_not_blank(report, name):
    with Image.open(report[0] / name) as picture:
        frames = getattr(picture, "n_frames", 1)
        assert frames == (FRAMES + 1 if name.endswith("gif") else 1)
        picture.seek(frames - 1)
        assert len(picture.convert("RGB").resize((200, 200)).getcolors(40_000)) > 20
    assert (report[0] / name).stat().st_size < 2_000_000


@pytest.mark.slow
def test_the_json_holds_every_number(report):
    folder, numbers = report
    stored = json.loads((folder / "checkerboard.json").read_text())
    assert stored["samples"] == SAMPLES
    assert stored["board"] == {"size": 8, "square": 2}
    assert set(stored["training"]) == {"uniform", "mask"}
    assert len(stored["never_reached"]) == 8
    assert len(stored["outcomes"]) == len(numbers.outcomes) == 2 * 2 * 4 * 4 + 2 * 2 * 4
    for record in stored["outcomes"]:
        setting = SamplingCase(*(record[name] for name in ("denoiser", "source", "rule", "steps", "kappa")))
        assert record["on_allowed"] == numbers.outcomes[setting].on_allowed
        assert record["jumps_a_token"] == numbers.outcomes[setting].jumps_a_token
        assert len(record["jumps_per_step"]) == setting.steps


@pytest.mark.slow
def test_captions_name_every_picture_and_state_measured_numbers(report):
    folder, numbers = report
    text = (folder / "checkerboard.md").read_text()
    assert all(name in text for name in PICTURES)
    share = numbers.outcomes[SamplingCase("network", "mask", "instant", FRAMES)].on_allowed
    assert f"{100 * share:.1f} %" in text
    assert "nan" not in text.lower().replace("instan", "")


# --------------------------------------------------------------------------------------------------- bad input


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write to"):
        run_checkerboard(tmp_path / "file" / "folder")


@pytest.mark.slow
def test_a_second_run_reads_its_cells_and_draws_the_same_pictures(report, tmp_path, monkeypatch):
    folder, numbers = report
    monkeypatch.setattr("fsdfm.studies.checkerboard.cells.trajectory", lambda *a, **k: pytest.fail("sampled anew"))
    before = (folder / "few-steps.png").read_bytes()
    with open(os.devnull, "w") as nowhere:
        again = run_checkerboard(
            folder,
            samples=SAMPLES,
            frames=FRAMES,
            train_steps=40,
            board=SMALL,
            workers=1,
            console=Console(file=nowhere),
        )
    assert again == numbers
    assert (folder / "few-steps.png").read_bytes() == before
    with pytest.raises(ValueError, match="another setting: samples was 600, now it is 20"):
        run_checkerboard(folder, samples=20, frames=FRAMES, train_steps=40, board=SMALL)


def test_no_samples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        run_checkerboard(tmp_path, samples=0)


def test_missing_plot_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"matplotlib.*fsdfm\[plots\]"):
        run_checkerboard(tmp_path)
