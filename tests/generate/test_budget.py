"""Budgets: the excess of a grid, the best grid, targets."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from worlds import SCHEDULES, world

from fsdfm.flow import ExactDenoiser, ExactJump, Grid, PolynomialSchedule, sampler_law
from fsdfm.generate import EntropyCurve, LanguageModel, SamplerConfig, fit_curve
from fsdfm.generate.budget import BudgetTarget, seconds_per_call
from fsdfm.generate.run import blocks_of, least_known
from fsdfm.model import CausalHeadConfig
from tiny_models import random_bundle

LINEAR = EntropyCurve((4.0, 2.0, 0.0))
STEEP = EntropyCurve(tuple(6 * math.exp(-4 * k / 16) for k in range(17)))


def test_of_a_straight_curve_equal_steps_are_best():
    """e(k, k') = c (k' - k)^2 / 2, so E of S equal steps is c / (2 S)."""
    for steps in (1, 2, 4, 8):
        shares = LINEAR.plan(steps)
        np.testing.assert_allclose(shares, np.linspace(0, 1, steps + 1), atol=1e-9)
        assert LINEAR.excess(shares) == pytest.approx(4 / (2 * steps), rel=1e-3)


def test_the_plan_is_the_best_of_all_grids():
    """Against every grid of three steps on a coarser set of cuts."""
    planned = STEEP.excess(STEEP.plan(3))
    best = min(STEEP.excess([0, *cuts, 1]) for cuts in combinations(np.arange(1, 16) / 16, 2))
    uniform = STEEP.excess([0, 1 / 3, 2 / 3, 1])
    assert planned <= best + 1e-3
    assert planned < uniform


def test_more_calls_waste_less_and_a_target_is_met():
    wasted = [STEEP.excess(STEEP.plan(steps)) for steps in (1, 2, 3, 4, 8, 16)]
    assert all(b < a for a, b in pairwise(wasted))
    steps = STEEP.steps_for(0.3)
    assert STEEP.excess(STEEP.plan(steps)) <= 0.3 < STEEP.excess(STEEP.plan(steps - 1))
    start = STEEP.plan(4, 0.5)
    assert start[0] == 0.5
    assert start[-1] == 1.0


def test_under_the_mask_source_the_excess_bounds_the_samplers_kl():
    """H(k) by enumeration: its integral is the entropy per token, and L E(grid) >= KL(data || sampler)."""
    vocab, length = 3, 3
    path, data = world("mask", SCHEDULES[0], vocab, length, seed=2)
    joint = data[:vocab, :vocab, :vocab]

    def entropy(p):
        return -float((p[p > 0] * p[p > 0].log()).sum())

    def left(k):
        """E over who is known, with probability k each, of the entropy of a position that is not."""
        total = 0.0
        for i in range(length):
            others = [j for j in range(length) if j != i]
            for known in range(2 ** len(others)):
                own = [j for n, j in enumerate(others) if known >> n & 1]
                chance = k ** len(own) * (1 - k) ** (len(others) - len(own))
                hidden = [j for j in range(length) if j not in own and j != i]
                both = joint.sum(hidden) if hidden else joint
                given = joint.sum([*hidden, i])
                total += chance * (entropy(both) - entropy(given))
        return total / length

    curve = EntropyCurve(tuple(left(k / 64) for k in range(65)))
    area = float(np.trapezoid(curve.nats, dx=1 / 64))
    assert area * length == pytest.approx(entropy(joint), rel=1e-3)
    start = torch.zeros([vocab + 1] * length, dtype=torch.float64)
    start[(vocab,) * length] = 1.0
    truth, divergences = ExactDenoiser(path, p_1=data), []
    for shares in (np.linspace(0, 1, 3), curve.plan(2)):
        law = sampler_law(truth, path, start.flatten(), grid=Grid([*shares]), jump=ExactJump())
        p, q = data.flatten(), law
        divergence = float((p[p > 0] * (p[p > 0] / q[p > 0]).log()).sum())
        assert 0 < divergence <= length * curve.excess([*shares]) + 1e-3
        divergences.append(divergence)
    assert divergences[1] <= divergences[0] + 1e-3


def test_a_fitted_grid_begins_exactly_where_its_row_does():
    """0.3 in single precision is 1.2e-8 off; where kappa_t = t, the times are the plan's own shares."""
    config, starts = SamplerConfig(grid="fitted", steps=4, curve=STEEP), torch.tensor([0.3], dtype=torch.float64)
    times = config.make_grid(starts, PolynomialSchedule(1)).times[0]
    np.testing.assert_allclose(times, STEEP.plan(4, 0.3), rtol=1e-12)


def test_a_fitted_curve_falls_and_an_automatic_budget_follows_it():
    lm = LanguageModel(random_bundle())
    curve = fit_curve(lm, ["some text", "another one"], points=5)
    assert len(curve.nats) == 5
    assert lm.sampler_config(steps="auto", curve=LINEAR, target="calls=5").steps == 5
    config = lm.sampler_config(steps="auto", curve=STEEP, target="quality=0.3")
    assert config.steps == STEEP.steps_for(0.3)
    assert config.grid == "fitted"
    made = lm.generate("x", steps="auto", curve=STEEP, target="calls=3")
    assert made.calls == 3
    assert seconds_per_call(lm, 8) > 0
    assert 1 <= lm.sampler_config(steps="auto", target="ms=50").num_steps() <= 64


def test_a_model_advises_its_curve():
    bundle = random_bundle()
    bundle.facts["sampling"] = {"curve": [4.0, 2.0, 0.0], "steps": 2, "temperature": {"2": 0.9}}
    lm = LanguageModel(bundle)
    config = lm.sampler_config(steps="auto")
    assert config.num_steps() == LINEAR.steps_for(0.3)
    assert config.temperature == 0.9
    grid = config.make_grid(torch.tensor([0.0, 0.5], dtype=torch.float64), bundle.path.schedule)
    assert grid.times[:, 0].tolist() == [0.0, 0.5]
    assert lm.sampler_config().steps == 2


def test_the_less_is_left_to_write_the_fewer_calls():
    """Of a straight curve e per written token is c (1 - k) / (2 S): half the text given, half the calls."""
    assert [LINEAR.steps_for(0.25, share) for share in (0.0, 0.5, 0.75)] == [8, 4, 2]
    lm, curve = LanguageModel(random_bundle()), EntropyCurve((3.0, 1.5, 0.0))
    options = {"length": 28, "steps": "auto", "curve": curve, "target": "quality=0.25", "suffix": "."}
    assert lm.generate(**options).calls == 6
    half, all_but_one = "thirteen here", "a text of twenty-five toke"
    assert lm.generate(half, **options).calls == 3
    assert lm.generate(all_but_one[:25], **options).calls == 1
    together = lm.generate([half, "b", half], **options)  # each has its own budget, whatever is beside it
    assert [made.calls for made in together] == [3, 6, 3]
    assert together[0].tokens == lm.generate(half, **options).tokens
    assert lm.sampler_config(steps="auto", curve=curve, target="quality=0.25", start=0.5).steps < 6
    assert lm.stream(half, **options).steps == 3


def test_a_long_text_has_the_budget_of_its_emptiest_block():
    lm = LanguageModel(random_bundle())
    blocks = blocks_of(lm.checkpoint, 80)
    request = lm.encoder.continuation("x" * 24, None, length=80, begin="anywhere")
    share, turns = least_known(request, blocks)
    assert turns == len(blocks)
    assert share == pytest.approx(0.5, abs=0.05)  # later blocks know half, the first three quarters of itself
    assert least_known(lm.encoder.continuation(None, None, length=80), blocks)[0] == 0


def test_a_time_is_that_of_all_blocks(monkeypatch):
    lm = LanguageModel(random_bundle())
    monkeypatch.setattr("fsdfm.generate.model.seconds_per_call", lambda lm, length: 0.01)
    one, many = (lm.encoder.continuation(None, None, length=length) for length in (lm.checkpoint.length, 80))
    turns = len(blocks_of(lm.checkpoint, 80))
    assert turns > 1
    assert lm.sampler_config(one, steps="auto", target="ms=200").steps == 20
    assert lm.sampler_config(many, steps="auto", target="ms=200").steps == 20 // turns


def test_where_positions_are_drawn_in_order_one_call_wastes_nothing():
    lm = LanguageModel(random_bundle(posterior=CausalHeadConfig(num_blocks=1, cond_width=8)))
    assert lm.sampler_config(steps="auto").num_steps() == 1
    assert lm.sampler_config(steps="auto", target="calls=3").num_steps() == 3
    assert lm.sampler_config(steps="auto", curve=LINEAR).num_steps() == LINEAR.steps_for(0.3)


def test_the_curve_of_a_canvas_model_is_that_of_a_canvas(monkeypatch):
    lm, lengths = LanguageModel(random_bundle()), []
    monkeypatch.setattr(lm.checkpoint.model, "config", replace(lm.checkpoint.model.config, canvas=8))
    inner = lm.network.posterior

    def posterior(x_t, *rest, **options):
        lengths.append(x_t.shape[1])
        return inner(x_t, *rest, **options)

    monkeypatch.setattr(lm.network, "posterior", posterior)
    fit_curve(lm, ["a text that is longer than a canvas"], points=3)
    seconds_per_call(lm, 32)
    assert set(lengths) == {8}


@pytest.mark.parametrize("text", ["quality", "calls=2.5", "ms=-3", "speed=3", "quality=nan"])
def test_a_target_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="allowed are quality=0.3"):
        BudgetTarget.read(text)


def test_what_is_refused():
    with pytest.raises(ValueError, match="belongs to steps auto"):
        SamplerConfig(target="calls=3")
    lm = LanguageModel(random_bundle())
    with pytest.raises(ValueError, match="needs the model's entropy curve"):
        lm.generate("x", steps="auto")
    with pytest.raises(ValueError, match="advises no entropy curve"):
        lm.generate("x", grid="fitted")
    with pytest.raises(ValueError, match="at least 3 numbers"):
        EntropyCurve((1.0, 0.5))


def test_time_buys_whole_calls_and_at_least_one():
    steps = {ms: BudgetTarget.read(f"ms={ms}").steps(None, seconds=0.01) for ms in (1, 10, 25, 99, 10_000)}
    assert steps == {1: 1, 10: 1, 25: 2, 99: 9, 10_000: 64}
