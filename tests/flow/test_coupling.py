"""Quantile coupling: the same on average, much more certain one by one."""

import pytest
import torch
from worlds import coupled_data

from fsdfm.flow import (
    ExactDenoiser,
    Filter,
    Grid,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    Rows,
    UniformSource,
    alike,
    inverse_autoregressive_noise,
    quantile_draws,
    quantile_law,
    sample,
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
    coupled = quantile_law(free, torch.arange(vocab), torch.full((vocab,), kappa, dtype=torch.float64))
    torch.testing.assert_close(coupled.sum(-1), torch.ones(vocab, dtype=torch.float64))
    assert bool((coupled >= 0).all())
    torch.testing.assert_close(coupled.mean(0), free.mean(0))
    entropy = torch.special.entr(coupled).sum(-1).mean(), torch.special.entr(free).sum(-1).mean()
    assert entropy[0] < 0.8 * entropy[1] or vocab < 4, "but given the noise much less is left to chance"


def test_at_the_start_a_token_is_a_quantile():
    """At t = 0 the posterior says nothing of what is shown, and k picks the k-th of V equal shares of it."""
    posterior = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    coupled = quantile_law(posterior.expand(4, -1), torch.arange(4), torch.zeros(4))
    expected = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(coupled, expected)


def test_a_certain_posterior_stays_certain():
    sure = torch.eye(5, dtype=torch.float64)
    for shown in (0, 3):
        coupled = quantile_law(sure[[3]], torch.tensor([shown]), torch.tensor([0.4]))
        torch.testing.assert_close(coupled, sure[[3]])


@pytest.mark.parametrize("schedule", [PolynomialSchedule(1.0), PolynomialSchedule(2.0)])
def test_tied_samples_follow_the_data_and_the_noise(schedule):
    """The law of x_1 is nearly that of free draws, and x_0 says much more about x_1."""
    path = MixturePath(UniformSource(6), schedule)
    p_1 = coupled_data(6, 2, seed=3)
    noise = Noise(seed=1, samples=range(6000))
    x_0 = path.source.sample(noise, 2)
    options = {"grid": Grid.uniform(24), "noise": noise}
    denoiser = ExactDenoiser(path, p_1=p_1)
    free = sample(denoiser, path, x_0, **options)
    coupled = sample(denoiser, path, x_0, hook=quantile_draws(path, x_0), **options)
    laws = [torch.bincount(x[:, 0] * 6 + x[:, 1], minlength=36) / len(x) for x in (free, coupled)]
    errors = [total_variation(law.double(), p_1.flatten()) for law in laws]
    assert errors[0] < 0.07  # of the steps, and of 6,000 samples
    assert errors[1] < errors[0] + 0.04

    def information(x_1):
        joint = torch.bincount(x_0[:, 0] * 6 + x_1[:, 0], minlength=36).double().view(6, 6) / len(x_1)
        return float((joint * torch.log2(joint / joint.sum(1, True) / joint.sum(0, True)).nan_to_num(0, 0, 0)).sum())

    assert information(coupled) > 2.5 * information(free)


def test_the_filter_comes_before_the_tie():
    """With top-1 every draw is the likeliest token, coupled or not."""
    path, states = MixturePath(UniformSource(3)), all_states(3, 2)
    noise = Noise(seed=0, samples=range(9))
    denoiser = ExactDenoiser(path, p_1=coupled_data(3, 2, seed=5))
    options = {"grid": Grid.uniform(1), "noise": noise}
    free = sample(denoiser, path, states, filter=Filter(top_k=1), **options)
    coupled = sample(denoiser, path, states, hook=quantile_draws(path, states, filter=Filter(top_k=1)), **options)
    assert torch.equal(free, coupled)


def test_only_uniform_noise_has_something_to_give():
    with pytest.raises(ValueError, match="a quantile coupling needs the uniform source"):
        quantile_draws(MixturePath(MaskSource(4)), torch.zeros(1, 2, dtype=torch.int64))


def test_an_order_permutes_the_tied_draws_and_nothing_else():
    """Renaming the tokens, tying in their own order and naming them back is the same as tying in the other order."""
    path, vocab = MixturePath(UniformSource(7)), 7
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    rank = torch.argsort(order)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(2))
    x_0 = torch.tensor([[0, 3, 6, 2, 5]])

    def rows(x):
        where = torch.arange(5)
        return Rows(torch.zeros_like(where), where, x, torch.tensor([0.3]), torch.tensor([0.4]))

    ordered = quantile_draws(path, x_0, order=order)(logits, rows(x_0))
    renamed = quantile_draws(path, rank[x_0])(logits[:, order], rows(rank[x_0]))[:, rank]
    torch.testing.assert_close(ordered, renamed)
    assert not torch.allclose(ordered, quantile_draws(path, x_0)(logits, rows(x_0)))


def test_coded_noise_is_uniform_whatever_the_context():
    """Given any law p of the next token, x ~ p gives uniform noise, and the noise gives x back as a quantile of p."""
    vocab, num = 5, 200_000
    order = torch.tensor([3, 0, 4, 1, 2])
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.5, 0.3, 0.05, 0.15, 0.0], dtype=torch.float64)
    x_1 = torch.multinomial(probs, num, replacement=True, generator=generator)
    u = torch.rand(num, generator=generator, dtype=torch.float64)
    x_0 = inverse_autoregressive_noise(probs.expand(num, -1), x_1, u, order=order)
    shares = torch.bincount(x_0, minlength=vocab) / num
    assert float((shares - 1 / vocab).abs().max()) < 5 * (0.2 * 0.8 / num) ** 0.5
    place = torch.argsort(order)[x_0] / vocab  # the noise pins the quantile to an interval of 1/V
    end = probs[order].cumsum(0)[torch.argsort(order)[x_1]]
    assert bool((place < end + 1e-12).all())
    assert bool((place + 1 / vocab > end - probs[x_1] - 1e-12).all())


def test_inverse_autoregressive_noise_gives_a_whole_text():
    """A Markov chain's noise is jointly uniform: neither neighbours nor the first and the last know each other."""
    vocab, num = 3, 60_000
    step = torch.tensor([[0.8, 0.1, 0.1], [0.0, 0.5, 0.5], [0.3, 0.3, 0.4]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(num, 4, dtype=torch.int64)
    for i in range(1, 4):
        x[:, i] = torch.multinomial(step[x[:, i - 1]], 1, generator=generator)[:, 0]
    u = torch.rand(num, 3, generator=generator, dtype=torch.float64)
    x_0 = inverse_autoregressive_noise(step[x[:, :-1]], x[:, 1:], u, order=torch.arange(vocab))
    law = torch.bincount(x_0 @ torch.tensor([9, 3, 1]), minlength=27) / num
    assert float((law - 1 / 27).abs().max()) < 5 * (1 / 27 / num) ** 0.5


def test_tokens_that_are_alike_stand_together():
    """Four groups of directions, shuffled: each is one run of the order, and near groups are neighbours."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.tensor([0.0, 0.6, 1.8, 2.4])
    group = torch.arange(4).repeat(16)
    angle = angles[group] + 0.02 * torch.randn(64, generator=generator)
    length = 0.5 + torch.rand(64, generator=generator)  # of no meaning
    order = alike(length[:, None] * torch.stack([angle.cos(), angle.sin()], -1))
    assert sorted(order.tolist()) == list(range(64))
    runs = group[order].unique_consecutive().tolist()
    assert runs in ([0, 1, 2, 3], [3, 2, 1, 0])
