"""Joint posteriors by enumeration: against the sampler's own law, by closed forms, and where they are exact."""

from __future__ import annotations

import pytest
import torch

from fsdfm.flow import RULES, ExactJump, Grid, MaskSource, MixturePath, UniformSource, sample, total_variation
from fsdfm.flow.exact import all_states
from fsdfm.flow.posterior import posterior_of
from fsdfm.noise import Noise
from fsdfm.studies.truth.joints import (
    FAMILIES,
    independent_table,
    joint_sampler_law,
    joint_table,
    sweep_law,
    swept_law,
    trained_law,
    whole_posterior,
)
from fsdfm.studies.truth.laws import BUDGETS, exact_tables, law_of, make_tables, score, transition_error
from fsdfm.studies.truth.methods import FULL, make_objective
from fsdfm.studies.truth.network import JointDenoiser, TinyDenoiser
from fsdfm.studies.truth.training import DataLaw, Lessons, train
from fsdfm.studies.truth.worlds import World, make_world


def world(*, masked: bool = False, markov: bool = False) -> World:
    weights = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4
    if markov:
        weights = weights.sum((1, 2))[:, None, None] * weights[0][:, :, None] * weights[1][None]
    weights = weights / weights.sum()
    if not masked:
        return World("small", MixturePath(UniformSource(3)), weights)
    return World("small-mask", MixturePath(MaskSource(4)), torch.nn.functional.pad(weights, (0, 1) * 3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_independent_draws_give_the_law_of_the_plain_sampler(masked: bool, steps: int) -> None:
    place = world(masked=masked)
    plain = law_of(exact_tables(place, budgets=(steps,))[steps], place, ExactJump())
    joint = joint_sampler_law(place, steps, family=FAMILIES["independent"])
    assert float(joint.sum()) == pytest.approx(1)
    assert total_variation(plain, joint) < 1e-12


def test_families_keep_what_they_say_they_keep() -> None:
    joint = whole_posterior(world(), torch.full((3,), 0.4, dtype=torch.float64))
    chain, alone = FAMILIES["chain"](joint), FAMILIES["independent"](joint)
    for i in range(3):
        others = [j + 1 for j in range(3) if j != i]
        assert torch.allclose(alone.sum(others), joint.sum(others))
    for pair in ((1, 2), (2, 3)):
        rest = [j for j in (1, 2, 3) if j not in pair]
        assert torch.allclose(chain.sum(rest), joint.sum(rest))
    assert not torch.allclose(chain, joint)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8])
def test_with_the_whole_posterior_both_rules_are_right_in_any_number_of_steps(masked: bool, steps: int) -> None:
    """(x_t, x') with x' from p(. | x_t) has the law of (x_t, x_1), and a step does with x' what the path does."""
    place = world(masked=masked)
    for law in (joint_sampler_law, sweep_law):
        assert total_variation(law(place, steps, family=FAMILIES["whole"]), place.truth) < 1e-12


def test_independent_positions_are_right_where_one_turns_at_a_time() -> None:
    place, alone = world(), FAMILIES["independent"]
    assert total_variation(sweep_law(place, 3, family=alone), place.truth) < 1e-12
    assert total_variation(sweep_law(place, 2, family=alone), place.truth) > 1e-3
    assert total_variation(joint_sampler_law(place, 8, family=alone), place.truth) > 1e-3


def test_a_chain_is_all_that_a_markov_chain_needs() -> None:
    place = world(markov=True)
    assert total_variation(joint_sampler_law(place, 1, family=FAMILIES["chain"]), place.truth) < 1e-12
    assert total_variation(joint_sampler_law(world(), 1, family=FAMILIES["chain"]), world().truth) > 1e-3


def test_the_share_of_right_words_is_that_of_what_can_be() -> None:
    place = make_world("balanced")
    law = torch.full_like(place.truth, 1 / len(place.truth))
    assert score(law, place)["valid"] == pytest.approx(252 / 1024)  # 10 choose 5 of 2^10
    assert score(place.truth, place)["valid"] == pytest.approx(1)


def test_transitions_are_judged_by_pairs_alone() -> None:
    place = world()
    assert transition_error(place.truth, place.truth, vocab=3) == 0
    chain = joint_sampler_law(place, 1, family=FAMILIES["chain"])
    assert transition_error(chain, place.truth, vocab=3) < 1e-12  # all pairs of neighbours right
    assert total_variation(chain, place.truth) > 1e-3  # the text is not
    half = torch.tensor([0.5, 0.0, 0.0, 0.5], dtype=torch.float64)  # 00 and 11
    even = torch.full((4,), 0.25, dtype=torch.float64)
    assert transition_error(even, half, vocab=2) == pytest.approx(0.5)
    assert transition_error(even, torch.tensor([1.0, 0, 0, 0]), vocab=2) == pytest.approx(0.75)  # 1 has no successor
    assert transition_error(torch.ones(2) / 2, torch.ones(2) / 2, vocab=2) == 0


# --- trained heads ----------------------------------------------------------------------------------------------------


def parent(place: World) -> TinyDenoiser:
    return TinyDenoiser(place.path.source.vocab_size, place.length, width=16, seed=3)


def error_in_one_call(network: JointDenoiser, place: World) -> float:
    return total_variation(trained_law(place, 1, lambda t: joint_table(network, place, t)), place.truth)


def shaken(place: World, kind: str) -> JointDenoiser:
    """A head that says something: every weight but those of h a random number."""
    network = JointDenoiser(parent(place), kind, seed=4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in network.joint.named_parameters():
            if not name.startswith("step"):
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.7)
    return network


@pytest.mark.parametrize("kind", ["crf", "causal"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_table_holds_the_heads_own_probability_of_every_text(kind: str, masked: bool) -> None:
    place = world(masked=masked)
    network, states = shaken(place, kind), all_states(place.p_1.shape[0], 3)
    table = joint_table(network, place, 0.3).flatten(1)
    t = torch.full((len(states),), 0.3, dtype=torch.float64)
    held = torch.where(place.path.source.movable(states), -1, states)
    for n in (0, 7, len(states) - 2):
        shown = states[n : n + 1].expand_as(states)
        with torch.no_grad():
            posterior = posterior_of(network, shown, t, h=t * 0 + 0.5).given(
                held[n : n + 1].expand_as(states), forbidden=place.path.source.mask_token
            )
            said = posterior.log_prob(states).exp().double()
        assert float(table[n].sum()) == pytest.approx(1)
        assert torch.allclose(table[n], said, atol=1e-6)
    assert torch.allclose(
        trained_law(place, 1, lambda t: joint_table(network, place, t)),
        place.start @ joint_table(network, place, 0.0).flatten(1),
    )


@pytest.mark.parametrize("kind", ["crf", "causal"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_head_that_says_nothing_yet_has_the_law_of_its_parent(kind: str, masked: bool) -> None:
    place = world(masked=masked)
    network, plain = JointDenoiser(parent(place), kind), make_tables(parent(place), place)
    for steps in BUDGETS:
        law = trained_law(place, steps, lambda t: joint_table(network, place, t))
        assert total_variation(law, law_of(plain[steps], place, ExactJump())) < 1e-6
        swept = swept_law(place, steps, lambda t: joint_table(network, place, t))
        alone = swept_law(place, steps, lambda t: independent_table(parent(place), place, t))
        assert total_variation(swept, alone) < 1e-6


@pytest.mark.parametrize("kind", ["crf", "causal"])
@pytest.mark.parametrize(("rule", "law"), [("exact", trained_law), ("sweep", swept_law)])
def test_the_law_is_that_of_the_samplers_draws(kind: str, rule: str, law) -> None:
    place, num = world(), 500
    network = shaken(place, kind)
    noise = Noise(seed=6, samples=range(num))
    with torch.no_grad():
        x_0 = place.path.source.sample(noise, 3)
        x_1 = sample(network, place.path, x_0, grid=Grid.uniform(2), noise=noise, rule=RULES[rule])
    counted = torch.bincount((x_1 * torch.tensor([9, 3, 1])).sum(1), minlength=27) / num
    expected = law(place, 2, lambda t: joint_table(network, place, t))
    chi_square = float(((counted - expected) ** 2 / expected).sum()) * num
    assert chi_square < 26 + 4 * (2 * 26) ** 0.5  # four standard deviations


@pytest.mark.parametrize("name", ["crf", "causal", "causal-prefixes"])
def test_training_moves_the_head_and_never_the_weights_of_h(name: str) -> None:
    place = world()
    method = next(method for method in FULL if method.name == name)
    start = JointDenoiser(parent(place), method.posterior)
    child = train(
        start,
        make_objective(method, place.path, 12),
        DataLaw(place),
        lessons=Lessons(train_steps=12, batch_size=64),
        seed=0,
        step_aware=False,
        watch=lambda step, ema: None,
    )
    before, after = (error_in_one_call(network, place) for network in (start, child))
    assert after < before
    t = torch.zeros(1, dtype=torch.float64)
    x = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        said = [posterior_of(child, x, t, h=t + h).log_prob(x + 1) for h in (1.0, 2.0**-10)]
    assert torch.equal(*said)
