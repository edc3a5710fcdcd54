"""Going back before each step: what it keeps, what it costs with the true posterior, and what it repairs without."""

import pytest
import torch
from scipy.stats import chisquare
from worlds import SCHEDULES, SOURCES, world

import fsdfm.peers  # noqa: F401  (gives their rules their names)
from fsdfm.flow import (
    RULES,
    ExactDenoiser,
    ExactJump,
    Grid,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    Sampler,
    UniformSource,
    posterior_of,
    sample,
    sampler_law,
    total_variation,
    trajectory,
)
from fsdfm.flow.exact import posterior_table, renoise_matrix, transition_matrix
from fsdfm.noise import Noise

BACK = ["exact", "single", "instant", "systematic", "spaced", "mdlm", "remdm-cap"]
NOT_BACK = ["sweep", "certain", "bounded", "stop", "llada", "dream", "remdm-conf", "remdm-loop"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_going_back_is_exact_by_enumeration(source, schedule):
    path, p_1 = world(source, schedule)
    exact = ExactDenoiser(path, p_1=p_1)
    for t, t_back in ((0.7, 0.3), (1.0, 0.5), (0.4, 0.0), (0.0, 0.0), (0.6, 0.6)):
        back = exact.marginal(t) @ renoise_matrix(path, 2, t=t, t_back=t_back)
        torch.testing.assert_close(back, exact.marginal(t_back), rtol=0, atol=1e-12)


@pytest.mark.parametrize("source", SOURCES)
def test_where_others_are_given_positions_go_back_to_what_they_showed_then(source):
    """Noise alone at t_0, the data at 1: in between the data with probability (kappa - kappa_0) / (1 - kappa_0)."""
    path, _ = world(source, PolynomialSchedule(2))
    origin, t, t_back, rows = 0.4, 0.9, 0.6, 40_000
    k_0, k, k_back = (float(path.schedule.kappa(time)) for time in (origin, t, t_back))
    noise = Noise(3, range(rows))
    x_0, x_1 = path.source.sample(noise, 1), torch.full((rows, 1), 2)
    shows = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0)) < (k - k_0) / (1 - k_0)
    found = path.renoise(torch.where(shows, x_1, x_0), t, t_back, noise=noise, origin=origin)
    share = (k_back - k_0) / (1 - k_0)
    law = share * torch.eye(path.source.vocab_size, dtype=torch.float64)[2] + (1 - share) * path.source.probabilities()
    counts = torch.bincount(found[:, 0], minlength=path.source.vocab_size).double()
    assert float(counts[law == 0].sum()) == 0
    assert chisquare(counts[law > 0], law[law > 0] * rows).pvalue > 1e-4
    with pytest.raises(ValueError, match="nothing but noise"):
        path.renoise(x_1, t, 0.3, noise=noise, origin=origin)


@pytest.mark.parametrize("source", SOURCES)
def test_samples_follow_the_computed_law(source):
    path, p_1 = world(source, PolynomialSchedule(2))
    exact, rows, grid = ExactDenoiser(path, p_1=p_1), 20_000, Grid.uniform(4)
    noise = Noise(0, range(rows))
    x_1 = sample(exact, path, path.source.sample(noise, 2), grid=grid, noise=noise, renoise=0.7)
    counts = torch.bincount(x_1[:, 0] * path.source.vocab_size + x_1[:, 1], minlength=p_1.numel()).double()
    law = sampler_law(exact, path, exact.marginal(0.0), grid=grid, jump=ExactJump(), renoise=0.7)
    possible = law > 1e-12
    assert float(counts[~possible].sum()) == 0
    assert chisquare(counts[possible], law[possible] / law[possible].sum() * rows).pvalue > 1e-4


def _ends(source, steps, renoise):
    path, p_1 = world(source, PolynomialSchedule(1), length=3)
    exact = ExactDenoiser(path, p_1=p_1)
    law = sampler_law(exact, path, exact.marginal(0.0), grid=Grid.uniform(steps), jump=ExactJump(), renoise=renoise)
    return total_variation(law, p_1.flatten())


@pytest.mark.parametrize("source", SOURCES)
def test_with_the_true_posterior_it_converges_but_costs_longer_steps(source):
    """There is nothing to correct: as many calls end further from the data, and both distances halve with the step."""
    plain, renoised = ([_ends(source, steps, renoise) for steps in (16, 32)] for renoise in (0.0, 1.0))
    assert all(a < b < 2.1 * a for a, b in zip(plain, renoised, strict=True))
    for coarse, fine in (plain, renoised):
        assert fine / coarse == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("source", ["uniform", "mixture"])
def test_it_corrects_a_wrong_state(source):
    """Half of the way was taken by somebody who knows no neighbours; the true posterior goes on from there."""
    path, p_1 = world(source, PolynomialSchedule(1), length=3)
    exact = ExactDenoiser(path, p_1=p_1)
    alone = [p_1.sum([j for j in range(3) if j != i]) for i in range(3)]
    wrong = ExactDenoiser(path, p_1=torch.einsum("a,b,c->abc", *alone)).marginal(0.5)
    grid = Grid.uniform(40, 0.5)

    def end(renoise):
        law = sampler_law(exact, path, wrong, grid=grid, jump=ExactJump(), renoise=renoise)
        return total_variation(law, p_1.flatten())

    assert end(1.0) < 0.7 * end(0.0)


@pytest.mark.parametrize("source", SOURCES)
def test_going_back_and_forth_draws_laws_together(source):
    path, p_1 = world(source, PolynomialSchedule(1))
    exact, t, t_back = ExactDenoiser(path, p_1=p_1), 0.5, 0.4
    forth = transition_matrix(posterior_table(exact, path, 2, t=t_back, h=0.1), path, ExactJump(), t=t_back, t_next=t)
    both = renoise_matrix(path, 2, t=t, t_back=t_back) @ forth
    right = exact.marginal(t)
    wrong = torch.flip(right, [0]) if path.source.mask_token is None else exact.marginal(0.3)
    left = 1 - (1 - t_back / t) ** 2
    assert total_variation(wrong @ both, right @ both) <= left * total_variation(wrong, right) + 1e-12
    assert total_variation(right @ both, right) < 0.02  # of the size of a step's error


class _Blind:
    """Knows nothing: every token is as likely."""

    def __init__(self, vocab):
        self.vocab, self.calls = vocab, 0

    def __call__(self, x_t, t, h):
        self.calls += 1
        return torch.zeros(*x_t.shape, self.vocab)


def test_masks_stay_on_schedule_where_a_part_is_given():
    path, rows, length = MixturePath(MaskSource(9)), 50, 40
    noise = Noise(1, range(rows))
    frozen = torch.arange(length).expand(rows, -1) < 20
    x_0 = torch.where(frozen, 3, path.source.sample(noise, length))
    start = torch.full((rows,), 0.5, dtype=torch.float64)
    sampler = Sampler(path, x_0, grid=Grid.uniform(8, start), noise=noise, frozen=frozen, renoise=3.0, origin=start)
    while not sampler.done:
        asked = sampler.question()
        assert bool((asked.x_t[frozen] == 3).all())
        assert bool((asked.t >= 0.5).all())
        masked = float((asked.x_t[~frozen] == 8).double().mean())
        assert masked == pytest.approx(1 - (float(asked.t[0]) - 0.5) / 0.5, abs=0.06)
        step = sampler.answer(posterior_of(_Blind(9), asked.x_t, asked.t, h=asked.h, rows=asked.rows))
    assert bool((step.x_next != 8).all())
    assert sampler.calls.tolist() == [8] * rows


def test_every_step_but_the_last_goes_back_and_none_costs_a_call():
    path, noise, blind = MixturePath(UniformSource(11)), Noise(0, range(3)), _Blind(11)
    x_0 = path.source.sample(noise, 20)
    steps = list(trajectory(blind, path, x_0, grid=Grid.uniform(4), noise=noise, renoise=0.5))
    assert [float(step.t[0]) for step in steps] == [0.0, 0.125, 0.375, 0.75]
    assert blind.calls == 4
    assert torch.equal(steps[-1].x_t, steps[-2].x_next)
    once = list(trajectory(blind, path, x_0, grid=Grid.uniform(1), noise=noise, renoise=5.0))
    assert torch.equal(once[0].x_next, sample(blind, path, x_0, grid=Grid.uniform(1), noise=noise))


@pytest.mark.parametrize("name", BACK)
def test_rules_that_look_at_the_time_alone_go_back(name):
    masked = name in ("mdlm", "remdm-cap")
    path, noise = MixturePath(MaskSource(11) if masked else UniformSource(11)), Noise(0, range(3))
    x_0 = path.source.sample(noise, 20)
    options = {"grid": Grid.uniform(5), "rule": RULES[name], "renoise": 1.5}
    together = sample(_Blind(11), path, x_0, noise=noise, **options)
    assert torch.equal(sample(_Blind(11), path, x_0[[2]], noise=noise[[2]], **options), together[[2]])
    assert not masked or bool((together != 10).all())


@pytest.mark.parametrize("name", NOT_BACK)
def test_rules_that_keep_count_do_not(name):
    path, noise = MixturePath(MaskSource(11)), Noise(0, [0])
    x_0 = path.source.sample(noise, 20)
    with pytest.raises(ValueError, match=f"the rule {name} cannot.*leave renoise out"):
        trajectory(_Blind(11), path, x_0, grid=Grid.uniform(5), noise=noise, rule=RULES[name], renoise=1.0).__next__()
    Sampler(path, x_0, grid=Grid.uniform(5), noise=noise, rule=RULES[name])
