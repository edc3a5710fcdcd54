import pytest
import torch

from fsdfm.noise import Noise, Purpose
from fsdfm.peers.transition import (
    clipped,
    draw_float32,
    draw_tokens,
    float32_survival,
    joint_matrix,
    masked_law,
    nucleus,
    strict_nucleus,
)


def test_clipping_is_what_an_arg_max_draw_means():
    assert torch.allclose(clipped(torch.tensor([2.0, -1.0, 2.0])), torch.tensor([0.5, 0.0, 0.5]).double())


def test_the_two_nuclei_differ_in_the_token_that_crosses():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    assert nucleus(probs, 0.7).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert strict_nucleus(probs, 0.7).tolist() == [1, 0, 0, 0]
    assert strict_nucleus(probs, 0.01).tolist() == [1, 0, 0, 0]
    assert torch.allclose(nucleus(probs, 0.999), probs)


def test_the_masked_law_by_hand():
    probs = torch.tensor([[[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]]).double()
    law = masked_law(probs, torch.tensor([[2, 0]]), reveal=torch.tensor(0.4), remask=torch.tensor(0.1))
    assert torch.allclose(law, torch.tensor([[[0.1, 0.3, 0.6], [0.9, 0.0, 0.1]]]).double())


def test_draws_follow_the_law():
    law = torch.tensor([0.2, 0.5, 0.3]).double().expand(1, 4000, 3)
    tokens = draw_tokens(law, Noise(3).uniform(Purpose.DESTINATION, 4000))
    shares = torch.bincount(tokens.flatten(), minlength=3) / 4000
    assert float((shares - law[0, 0]).abs().max()) < 4 * (0.25 / 4000) ** 0.5


def test_float32_cuts_the_tail_as_the_closed_form_says():
    """Theirs against the mask: the exponential of a float32 uniform is never below 2^-24."""
    reveal, p = 2.0**-12, 2.0**-12  # a = 2^24 reveal p/(1 - reveal) = 1: a share of 1/(e - 1)
    expected = float(float32_survival(torch.tensor(p), reveal))
    assert expected == pytest.approx(1 / (torch.e - 1), rel=1e-3)
    # The token wins where its exponential is below a times the mask's: enumerate the float32 grid near 1.
    mask = torch.empty(200_000).exponential_(generator=torch.Generator().manual_seed(0)).double()
    level = 2.0**-24 * mask * (2.0**24 * p * reveal / (1 - reveal))
    wins = torch.floor(level / 2.0**-24).clamp(min=0) * 2.0**-24  # uniforms 1 - k 2^-24 with k 2^-24 < level
    share = float(wins.mean() / level.mean())
    assert share == pytest.approx(expected, abs=0.01)
    assert float(float32_survival(torch.tensor(1e-3), 1 / 8)) > 0.999


def test_float32_draws_rarely_give_rare_tokens_but_common_ones_as_often():
    law = torch.tensor([0.25, 0.75]).expand(20_000, 2)
    u = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(1))
    assert float((draw_float32(law, u) == 0).double().mean()) == pytest.approx(0.25, abs=0.012)


def test_a_joint_matrix_is_the_product_of_positions():
    laws = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]).double().expand(4, 2, 2)
    assert torch.allclose(joint_matrix(laws)[0], torch.tensor([0.125, 0.125, 0.375, 0.375]).double())
    with pytest.raises(ValueError, match="not to 1"):
        joint_matrix(2 * laws)
