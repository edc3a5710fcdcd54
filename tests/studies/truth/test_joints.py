"""Joint posteriors by enumeration: against the sampler's own law, by closed forms, and where they are exact."""

from __future__ import annotations

import pytest
import torch

from fsdfm.flow import ExactJump, MaskSource, MixturePath, UniformSource, total_variation
from fsdfm.studies.truth.joints import FAMILIES, joint_sampler_law, sweep_law, whole_posterior
from fsdfm.studies.truth.laws import exact_tables, law_of, score, transition_error
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
