"""The few-step study: its laws against the sampler's own, its cells resumable, its files complete."""

import importlib.util
import json
import math

import pytest
import torch
from rich.console import Console

from fsdfm.flow import (
    ExactDenoiser,
    ExactJump,
    Grid,
    InstantJump,
    SingleJump,
    UniformSource,
    quantile_draws,
    sample,
    sampler_law,
)
from fsdfm.flow.exact import all_states
from fsdfm.flow.path import MixturePath
from fsdfm.noise import Noise
from fsdfm.studies.truth import TruthSetting, run_truth
from fsdfm.studies.truth.cells import MethodTrial, cells_of, methods_of
from fsdfm.studies.truth.laws import (
    BUDGETS,
    conditional_total_correlation,
    cross_entropy_bits,
    entropy_bits,
    exact_tables,
    joint_law,
    law_of,
    make_tables,
    quantile_joint_law,
    score,
)
from fsdfm.studies.truth.methods import FULL, MASK, QUICK, make_objective
from fsdfm.studies.truth.network import TinyDenoiser
from fsdfm.studies.truth.summary import TruthNumbers, verdicts
from fsdfm.studies.truth.training import DataLaw, Lessons, train
from fsdfm.studies.truth.worlds import WORLDS, World, make_world

TINY = TruthSetting(parent_steps=4, child_steps=3, batch_size=16, pair_steps=2)
SOME = ("rk2", "reflow-2+rk2", "dfm/entropy-of-rk2")
QUIET = Console(quiet=True)


def small_world() -> World:
    weights = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    return World("small", MixturePath(UniformSource(3)), weights / weights.sum())


def random_network(world: World) -> TinyDenoiser:
    return TinyDenoiser(world.path.source.vocab_size, world.length, width=16, seed=3)


def test_the_quantile_coupling_is_the_law_of_coupled_samples():
    world = small_world()
    denoiser = ExactDenoiser(world.path, p_1=world.p_1)
    law = quantile_joint_law(denoiser, world, steps=4)
    states, copies = all_states(3, 3), 700
    x_0 = states.repeat_interleave(copies, 0)
    noise = Noise(seed=4, samples=range(len(x_0)))
    x_1 = sample(denoiser, world.path, x_0, grid=Grid.uniform(4), noise=noise, hook=quantile_draws(world.path, x_0))
    place = torch.tensor([9, 3, 1])
    counts = torch.bincount((x_0 * place).sum(1) * 27 + (x_1 * place).sum(1), minlength=27 * 27).view(27, 27)
    differences = (counts / copies - law).abs().sum(1) / 2
    assert float(differences.mean()) < 0.06  # 0.04 is what 700 samples of 27 outcomes give
    free = joint_law(denoiser, world, steps=4)
    assert conditional_total_correlation(world, law) < 0.9 * conditional_total_correlation(world, free)


def test_tied_pairs_are_enumerated_in_small_worlds_only():
    names = {world: {method.name for method in methods_of(world, full=True)} for world in WORLDS}
    assert "quantile-2+rk2" in names["topics"]
    assert not any("quantile" in name for name in names["markov"] | names["topics-mask"])


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_a_distribution_of_coupled_tokens(name: str):
    world = make_world(name)
    assert float(world.truth.sum()) == pytest.approx(1)
    assert float(world.start.sum()) == pytest.approx(1)
    assert world.truth.numel() <= 4096
    assert conditional_total_correlation(world) > 1
    if world.masked:
        hidden = (all_states(world.p_1.shape[0], world.length) == world.path.source.mask_token).any(1)
        assert float(world.truth[hidden].sum()) == 0


def test_the_markov_chain_has_the_entropy_of_the_first_measurement():
    assert float(entropy_bits(make_world("markov").truth)) == pytest.approx(6.5, abs=0.1)


def test_balanced_words_are_balanced():
    world = make_world("balanced")
    ones = all_states(2, 10).sum(1)
    assert float(world.truth[ones != 5].sum()) == 0
    assert int((world.truth > 0).sum()) == math.comb(10, 5)


def test_an_unknown_world_is_named():
    with pytest.raises(ValueError, match="unknown world 'moon'; choose from topics"):
        make_world("moon")


@pytest.mark.parametrize("name", ["markov", "topics", "balanced", "topics-mask"])
def test_under_the_exact_posterior_error_falls_with_steps_and_entropy_comes_down_to_the_truths(name: str):
    world = make_world(name)
    tables = exact_tables(world)
    scores = [score(law_of(tables[s], world, ExactJump()), world) for s in BUDGETS]
    tv = [s["tv"] for s in scores]
    assert tv == sorted(tv, reverse=True)
    truth = float(entropy_bits(world.truth))
    assert scores[0]["entropy"] == pytest.approx(truth + conditional_total_correlation(world))  # independent outputs
    assert scores[0]["entropy"] > scores[-1]["entropy"] > truth
    if name == "markov":  # .706 .448 .213 .094 and 9.40 8.75 7.71 7.07 bits in the first measurement, on another chain
        assert tv == pytest.approx([0.70, 0.45, 0.21, 0.09], abs=0.06)
        assert [s["entropy"] for s in scores] == pytest.approx([9.4, 8.75, 7.71, 7.07], abs=0.1)


@pytest.mark.parametrize("jump", [ExactJump(), SingleJump(), InstantJump()])
def test_the_factored_law_is_the_law_of_the_sampler(jump):
    world = small_world()
    network = random_network(world)
    tables = make_tables(network, world)
    for steps in BUDGETS:
        expected = sampler_law(network, world.path, world.start, grid=Grid.uniform(steps), jump=jump)
        torch.testing.assert_close(law_of(tables[steps], world, jump), expected, rtol=1e-9, atol=1e-12)


def test_the_factored_law_holds_under_the_mask_source_and_never_ends_in_a_mask():
    world = make_world("topics-mask")
    tables = exact_tables(world, budgets=(2,))
    exact = ExactDenoiser(world.path, p_1=world.p_1)
    expected = sampler_law(exact, world.path, world.start, grid=Grid.uniform(2), jump=ExactJump())
    torch.testing.assert_close(law_of(tables[2], world, ExactJump()), expected, rtol=1e-9, atol=1e-12)


def test_the_coupling_has_the_marginals_of_source_and_sampler():
    world = small_world()
    network = random_network(world)
    joint = joint_law(network, world, jump=ExactJump(), steps=8).double()
    pi = sampler_law(network, world.path, world.start.diag(), grid=Grid.uniform(8), jump=ExactJump())
    torch.testing.assert_close(world.start[:, None] * joint, pi, rtol=1e-4, atol=1e-8)
    generated = law_of(make_tables(network, world)[8], world, ExactJump())
    torch.testing.assert_close(world.start @ joint, generated, rtol=1e-4, atol=1e-8)


def test_pairs_are_drawn_from_the_coupling():
    world = small_world()
    joint = joint_law(random_network(world), world, jump=ExactJump(), steps=8)
    batch = DataLaw(world, joint).batch(Noise(0, range(60_000)))
    assert batch.x_0 is not None
    place = 3 ** torch.arange(2, -1, -1)
    index = (batch.x_0 * place).sum(-1) * 27 + (batch.x_1 * place).sum(-1)
    counted = torch.bincount(index, minlength=27 * 27).double() / len(index)
    expected = (world.start[:, None] * joint.double()).flatten()
    chi_square = float(((counted - expected) ** 2 / expected).sum()) * len(index)
    assert chi_square < 728 + 4 * math.sqrt(2 * 728)  # four standard deviations


def test_conditional_total_correlation_of_a_copied_bit_is_one_bit():
    copied = torch.tensor([[0.5, 0.0], [0.0, 0.5]], dtype=torch.float64)
    world = World("copied", MixturePath(UniformSource(2)), copied)
    assert conditional_total_correlation(world) == pytest.approx(1)
    decided = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0], [0, 0, 0, 1.0]])
    assert conditional_total_correlation(world, decided) == pytest.approx(0)  # x_0 decides: nothing left to coordinate
    independent = copied.flatten().float().expand(4, -1)
    assert conditional_total_correlation(world, independent) == pytest.approx(1)


def test_cross_entropy_under_the_truth_is_finite_for_forbidden_words():
    truth = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert cross_entropy_bits(truth, truth) == pytest.approx(0, abs=1e-3)
    assert 10 < cross_entropy_bits(1 - truth, truth) < 12


def test_the_step_aware_child_starts_as_its_parent_for_every_h():
    world = make_world("topics")
    parent = TinyDenoiser(4, 5, seed=1)
    states = all_states(4, 5)
    t = torch.rand(len(states), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    smallest = torch.full_like(t, 2.0**-10)
    before = parent(states, t, smallest)
    for h in (2.0**-9, 0.125, 1.0):
        assert torch.equal(parent(states, t, torch.full_like(t, h)), before)
    method = next(m for m in FULL if m.name == "rk2")
    lessons = Lessons(train_steps=3, batch_size=64)
    child = train(
        parent,
        make_objective(method, world.path, 3),
        DataLaw(world),
        lessons=lessons,
        seed=0,
        step_aware=True,
        watch=lambda step, ema: None,
    )
    assert torch.equal(parent(states, t, smallest), before)  # training works on a copy
    assert not torch.equal(child(states, t, smallest), child(states, t, torch.ones_like(t)))


def test_the_path_loss_alone_never_teaches_h():
    world = make_world("topics")
    method = next(m for m in FULL if m.name == "path-only")
    student = train(
        TinyDenoiser(4, 5),
        make_objective(method, world.path, 3),
        DataLaw(world),
        lessons=Lessons(train_steps=3, batch_size=64),
        seed=0,
        step_aware=False,
        watch=lambda step, ema: None,
    )
    x, t = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    assert torch.equal(student(x, t, t + 1), student(x, t, t + 0.125))
    assert not torch.equal(student.head.weight, TinyDenoiser(4, 5).head.weight)


def test_methods_name_what_they_need_and_come_after_it():
    for methods in (FULL, QUICK, MASK):
        names = [method.name for method in methods]
        assert len(set(names)) == len(names)
        for n, method in enumerate(methods):
            assert set(method.needs) <= set(names[:n])
    assert not any(method.pairs_from for method in methods_of("topics-mask", full=True))


def test_cells_of_a_world_and_seed_run_in_one_process_after_what_they_build_on():
    cells = cells_of("topics", 2, methods_of("topics", full=True))
    assert {cell.unit for cell in cells} == {"topics.2"}
    by_name = {cell.name: n for n, cell in enumerate(cells)}
    assert all(by_name[need] < n for n, cell in enumerate(cells) for need in cell.needs)
    assert by_name["topics.rk2.2"] == [cell.spec[1].name for cell in cells].index("rk2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("truth")
    results = run_truth(out, seeds=2, methods=SOME, setting=TINY, workers=1, console=QUIET)
    return out, results


@pytest.mark.slow
def test_a_run_leaves_complete_files(finished):
    out, results = finished
    numbers = json.loads((out / "truth.json").read_text())
    ran = {"exact", "dfm", "reflow-1", "reflow-2", *SOME}
    assert {row["method"] for row in numbers["rows"]} == ran
    assert numbers["setting"]["child_steps"] == 3
    assert len(numbers["cells"]) == 2 * len(ran)
    text = (out / "truth.md").read_text()
    assert all(f"| {name} |" in text for name in ran)
    assert "## Verdict" in text
    assert "## How far training converged" in text
    assert (out / "truth.png").read_bytes().startswith(b"\x89PNG")
    assert not list((out / "cells").glob(".*"))
    reflowed = results.cells["topics", "reflow-1", 0]
    assert (
        reflowed["conditional_total_correlation"] < results.cells["topics", "dfm", 0]["conditional_total_correlation"]
    )


@pytest.mark.slow
def test_the_temperature_control_has_the_entropy_it_was_asked_for(finished):
    _, results = finished
    for steps in BUDGETS:
        ours = results.values("topics", "dfm/entropy-of-rk2", "entropy", steps=steps)
        assert ours == pytest.approx(results.values("topics", "rk2", "entropy", steps=steps), abs=0.01)


@pytest.mark.slow
def test_a_second_run_skips_what_is_finished_and_repeats_what_is_missing_bit_by_bit(finished, monkeypatch):
    out, _ = finished
    computed = []
    original = MethodTrial.compute
    record = lambda self, method: computed.append(method.name) or original(self, method)  # noqa: E731
    monkeypatch.setattr(MethodTrial, "compute", record)
    file = out / "cells" / "topics.rk2.1.json"
    before = json.loads(file.read_text())
    file.unlink()
    run_truth(out, seeds=2, methods=SOME, setting=TINY, workers=1, console=QUIET)
    assert computed == ["rk2"]
    assert json.loads(file.read_text())["rules"] == before["rules"]


@pytest.mark.slow
def test_processes_give_the_cells_that_one_process_gives(finished, tmp_path):
    out, _ = finished
    run_truth(tmp_path, seeds=2, methods=["rk2"], setting=TINY, workers=2, console=QUIET)
    for name in ("topics.rk2.0.json", "topics.rk2.1.json"):
        ours, theirs = (json.loads((folder / "cells" / name).read_text()) for folder in (tmp_path, out))
        assert ours["rules"] == theirs["rules"]


@pytest.mark.slow
def test_cells_of_another_setting_are_refused(finished):
    out, _ = finished
    with pytest.raises(ValueError, match="holds cells of another setting"):
        run_truth(out, setting=TruthSetting(parent_steps=5, child_steps=3), console=QUIET)


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="unknown method 'rk9'"):
        run_truth(tmp_path / "a", methods=["rk9"], setting=TINY, console=QUIET)
    with pytest.raises(ValueError, match="seeds is -1"):
        run_truth(tmp_path / "b", seeds=-1, setting=TINY, console=QUIET)
    with pytest.raises(ValueError, match="unknown world 'moon'"):
        run_truth(tmp_path / "c", worlds=["moon"], setting=TINY, console=QUIET)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="choose a folder you may write to"):
        run_truth(tmp_path / "file", setting=TINY, console=QUIET)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fsdfm\[plots\]'"):
        run_truth(tmp_path, setting=TINY, console=QUIET)


def cell(world: str, method: str, seed: int, tv: float, entropy: float = 7.0) -> dict:
    scores = {str(s): {"tv": tv / s, "entropy": entropy, "cross_entropy": 8.0} for s in BUDGETS}
    rules = {"exact": scores, "single": scores, "instant": scores}
    return {"world": world, "method": method, "seed": seed, "rules": rules, "truth_entropy": 7.0}


def test_verdicts_follow_the_numbers():
    level = {"exact": 0.5, "dfm": 0.5, "path-only": 0.5, "rk2": 0.25, "rk4": 0.4}
    cells = [cell("topics", m, s, tv * (1 + 0.01 * s)) for m, tv in level.items() for s in range(4)]
    cells += [cell("topics", "chained", s, 0.3, entropy=6.0) for s in range(4)]
    cells += [cell("topics-mask", m, s, 0.5) for m in ("exact", "dfm", "path-only", "rk2") for s in range(4)]
    found = verdicts(TruthNumbers(cells))
    teacher = next(line for line in found if line.startswith("**Teacher"))
    assert teacher.startswith("**Teacher**: `rk2`, better than `rk4`")  # chained has less error than rk4, but collapsed
    assert "`chained` 0.59 [0.58, 0.60] (collapsed)" in teacher
    assert found[0].startswith("**What deserves text** (settled, teacher: `rk2`")
    assert "`rk4` 0.80 [0.80, 0.80]" in teacher
    assert any("`chained` topics (7.00 bits): 6.00 at 1" in line for line in found if line.startswith("**Collapse"))
    assert any("no few-step training gains separably" in line for line in found if line.startswith("**Mask"))
