"""Draws tied to the noise: the same on average, much more certain one by one."""

import pytest
import torch
from worlds import coupled_data

from fsdfm.flow import (
    ExactDenoiser,
    Filter,
    Grid,
    MaskSource,
    Path,
    PolynomialSchedule,
    UniformSource,
    sample,
    tied_draws,
    tied_law,
    total_variation,
)
from fsdfm.flow.exact import all_states
from fsdfm.noise import Noise


def own_evidence(others: torch.Tensor, kappa: float) -> torch.Tensor:
    """p(. | x_t) for each token k that the position may show: [V, V], by Bayes' rule."""
    vocab = len(others)
    likelihood = (1 - kappa) / vocab + kappa * torch.eye(vocab, dtype=torch.float64)
    posterior = others * likelihood
    return posterior / posterior.sum(-1, keepdim=True)


@pytest.mark.parametrize("kappa", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [2, 3, 7, 40])
def test_on_average_over_the_noise_nothing_changes(vocab, kappa):
    others = torch.rand(vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(vocab)) ** 6
    others /= others.sum()
    free = own_evidence(others, kappa)
    tied = tied_law(free, torch.arange(vocab), torch.full((vocab,), kappa, dtype=torch.float64))
    torch.testing.assert_close(tied.sum(-1), torch.ones(vocab, dtype=torch.float64))
    assert bool((tied >= 0).all())
    torch.testing.assert_close(tied.mean(0), free.mean(0))
    entropy = torch.special.entr(tied).sum(-1).mean(), torch.special.entr(free).sum(-1).mean()
    assert entropy[0] < 0.8 * entropy[1] or vocab < 4, "but given the noise much less is left to chance"


def test_at_the_start_a_token_is_a_quantile():
    """At t = 0 the posterior says nothing of what is shown, and k picks the k-th of V equal shares of it."""
    posterior = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    tied = tied_law(posterior.expand(4, -1), torch.arange(4), torch.zeros(4))
    expected = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(tied, expected)


def test_a_certain_posterior_stays_certain():
    sure = torch.eye(5, dtype=torch.float64)
    for shown in (0, 3):
        tied = tied_law(sure[[3]], torch.tensor([shown]), torch.tensor([0.4]))
        torch.testing.assert_close(tied, sure[[3]])


@pytest.mark.parametrize("schedule", [PolynomialSchedule(1.0), PolynomialSchedule(2.0)])
def test_tied_samples_follow_the_data_and_the_noise(schedule):
    """The law of x_1 is nearly that of free draws, and x_0 says much more about x_1."""
    path = Path(UniformSource(6), schedule)
    p_1 = coupled_data(6, 2, seed=3)
    noise = Noise(seed=1, samples=range(6000))
    x_0 = path.source.sample(noise, 2)
    options = {"grid": Grid.uniform(24), "noise": noise}
    denoiser = ExactDenoiser(path, p_1=p_1)
    free = sample(denoiser, path, x_0, **options)
    tied = sample(denoiser, path, x_0, hook=tied_draws(path, x_0), **options)
    laws = [torch.bincount(x[:, 0] * 6 + x[:, 1], minlength=36) / len(x) for x in (free, tied)]
    errors = [total_variation(law.double(), p_1.flatten()) for law in laws]
    assert errors[0] < 0.07  # of the steps, and of 6,000 samples
    assert errors[1] < errors[0] + 0.04

    def information(x_1):
        joint = torch.bincount(x_0[:, 0] * 6 + x_1[:, 0], minlength=36).double().view(6, 6) / len(x_1)
        return float((joint * torch.log2(joint / joint.sum(1, True) / joint.sum(0, True)).nan_to_num(0, 0, 0)).sum())

    assert information(tied) > 2.5 * information(free)


def test_the_filter_comes_before_the_tie():
    """With top-1 every draw is the likeliest token, tied or not."""
    path, states = Path(UniformSource(3)), all_states(3, 2)
    noise = Noise(seed=0, samples=range(9))
    denoiser = ExactDenoiser(path, p_1=coupled_data(3, 2, seed=5))
    options = {"grid": Grid.uniform(1), "noise": noise}
    free = sample(denoiser, path, states, filter=Filter(top_k=1), **options)
    tied = sample(denoiser, path, states, hook=tied_draws(path, states, filter=Filter(top_k=1)), **options)
    assert torch.equal(free, tied)


def test_only_uniform_noise_has_something_to_give():
    with pytest.raises(ValueError, match="the uniform source only"):
        tied_draws(Path(MaskSource(4)), torch.zeros(1, 2, dtype=torch.int64))
