"""Log-probabilities of draws: by enumeration they are the sampler's law."""

import itertools

import pytest
import torch
from networks import MixerNet, TableNet
from worlds import SCHEDULES, world

from fsdfm.flow import RULES, Grid, sampler_law, transition_log_prob
from fsdfm.flow.exact import all_states
from fsdfm.learn.rollout import DrawnStep, DrawnTexts, Tempered, roll_out, weighted_log_prob
from fsdfm.noise import Noise

V, L = 3, 2
PATH, _ = world("uniform", SCHEDULES[0], V, L)
STATES = all_states(V, L)


def log_prob(model, rollout, chunk=256):
    ones = torch.ones(len(rollout.x_1))
    with torch.no_grad():
        return weighted_log_prob(model, rollout, rollout.features(model), weight=ones, chunk=chunk)[1]


def drawn(x_t, x_next, *, t, t_next, rule, candidates):
    size = (len(x_t),)
    times = torch.full(size, t, dtype=torch.float64)
    redraws = rule.redraws(PATH.schedule, t, t_next).expand(size)
    frozen = torch.zeros_like(candidates)
    return DrawnStep(x_t, x_next, times, torch.full_like(times, t_next - t), redraws, candidates, x_next, frozen)


def pairs():
    """Every state beside every other."""
    n = len(STATES)
    return STATES.repeat_interleave(n, 0), STATES.repeat(n, 1)


@pytest.mark.parametrize("name", ["exact", "single", "instant"])
def test_summed_over_all_draws_it_is_the_samplers_law(name):
    """Two steps; given the coins, their own probability w^|C| (1-w)^(L-|C|) is summed over, too."""
    rule, model, n = RULES[name], TableNet(V, L, seed=3), len(STATES)
    x_t, x_next = pairs()
    law = torch.eye(n, dtype=torch.float64)
    for t, t_next in [(0.0, 0.5), (0.5, 1.0)]:
        matrix = torch.zeros(n, n, dtype=torch.float64)
        w = float(PATH.schedule.redraw(torch.tensor(t), torch.tensor(t_next)))
        for coins in itertools.product([False, True], repeat=L):
            chance = 1.0
            candidates = torch.tensor(coins).expand_as(x_t)
            if rule.redraws_candidates:
                chance = w ** sum(coins) * (1 - w) ** (L - sum(coins))
            elif not all(coins):
                continue
            step = drawn(x_t, x_next, t=t, t_next=t_next, rule=rule, candidates=candidates)
            p = torch.exp(log_prob(model, DrawnTexts(PATH, rule, (step,))).double())
            possible = (candidates | (x_t == x_next)).all(1) if rule.redraws_candidates else True
            matrix += chance * (p * possible).view(n, n)
        law = law @ matrix
    expected = sampler_law(model, PATH, torch.eye(n, dtype=torch.float64), grid=Grid.uniform(2), jump=rule)
    torch.testing.assert_close(law, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["exact", "spaced", "single"])
def test_a_rollout_ends_as_the_sampler_and_has_the_same_probability_in_chunks(name):
    model, noise = MixerNet(V), Noise(1, range(6))
    x_0 = PATH.source.sample(noise, 5)
    frozen = torch.zeros_like(x_0, dtype=torch.bool)
    frozen[:, 0] = True
    rollout = roll_out(model, PATH, x_0, grid=Grid.uniform(3), noise=noise, rule=RULES[name], frozen=frozen)
    from fsdfm.flow import sample

    same = sample(model, PATH, x_0, grid=Grid.uniform(3), noise=noise, rule=RULES[name], frozen=frozen)
    assert torch.equal(rollout.x_1, same)
    assert bool((rollout.x_1[:, 0] == x_0[:, 0]).all())
    whole, parts = log_prob(model, rollout, None), log_prob(model, rollout, 4)
    torch.testing.assert_close(whole, parts)
    assert bool((whole < 0).all())


def test_a_markov_rules_steps_are_transition_log_prob():
    model, noise, rule = MixerNet(V), Noise(1, range(6)), RULES["single"]
    rollout = roll_out(model, PATH, PATH.source.sample(noise, 4), grid=Grid.uniform(3), noise=noise, rule=rule)
    expected = sum(
        transition_log_prob(model(s.x_t, s.t, s.h), s.x_t, s.x_next, redraws=s.redraws, jump=rule, path=PATH).sum(-1)
        for s in rollout.steps
    )
    torch.testing.assert_close(log_prob(model, rollout).double(), expected.detach(), atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_plain_autograd():
    model, noise, rule = MixerNet(V), Noise(1, range(6)), RULES["exact"]
    rollout = roll_out(model, PATH, PATH.source.sample(noise, 4), grid=Grid.uniform(3), noise=noise, rule=rule)
    weight = torch.linspace(-1, 1, 6)
    found = []
    for chunk in (None, 3):
        model.zero_grad()
        total, _ = weighted_log_prob(model, rollout, rollout.features(model), weight=weight, chunk=chunk)
        total.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_temperature_divides_the_logits():
    model = MixerNet(V)
    x = STATES[:4]
    t = torch.zeros(4)
    features = model.trunk(x, t, t + 1).flatten(0, 1)
    torch.testing.assert_close(Tempered(model, 0.5).logits_at(features), 2 * model.logits_at(features))
    with pytest.raises(ValueError, match="temperature is 0"):
        Tempered(model, 0)
