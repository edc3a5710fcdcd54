import itertools
import math

import numpy as np
import pytest
import torch
from worlds import SCHEDULES, SOURCES, coupled_data, world

from fsdfm.flow import (
    CosineSchedule,
    ExactDenoiser,
    ExactJump,
    ExponentialSchedule,
    Grid,
    InstantJump,
    LiteralJump,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    SingleJump,
    UniformSource,
    path_loss,
    sampler_law,
    total_variation,
)
from fsdfm.flow.exact import all_states, generator, transition_matrix

every_source = pytest.mark.parametrize("source", SOURCES)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def posterior_by_hand(path, pi, t):
    """Sum over every pair (x_0, x_1): the definition, slow and plain."""
    vocab, length = path.source.vocab_size, round(math.log(len(pi), path.source.vocab_size))
    states = list(itertools.product(range(vocab), repeat=length))
    kappa = float(path.schedule.kappa(t))
    table, marginal = np.zeros((len(states), length, vocab)), np.zeros(len(states))
    for n, z in enumerate(states):
        for (a, x_0), (b, x_1) in itertools.product(enumerate(states), enumerate(states)):
            weight = float(pi[a, b]) * math.prod(
                (1 - kappa) * (z[i] == x_0[i]) + kappa * (z[i] == x_1[i]) for i in range(length)
            )
            marginal[n] += weight
            for i in range(length):
                table[n, i, x_1[i]] += weight
    return table, marginal


def independent_pi(path, p_1):
    p_0 = path.source.probabilities()
    law = p_0
    for _ in range(p_1.ndim - 1):
        law = (law[:, None] * p_0).flatten()
    return law[:, None] * p_1.flatten()


@every_source
@pytest.mark.parametrize("t", [0.0, 0.35, 0.9])
def test_the_posterior_is_the_definition(source, t):
    path, p_1 = world(source, PolynomialSchedule(2), vocab=2)
    exact = ExactDenoiser(path, p_1=p_1)
    table, marginal = posterior_by_hand(path, independent_pi(path, p_1), t)
    assert np.allclose(exact.marginal(t), marginal, atol=1e-14)
    reached = marginal > 0
    assert np.allclose(exact.table(t)[reached], table[reached] / marginal[reached, None, None], atol=1e-12)


def test_the_posterior_of_a_coupling_is_the_definition():
    path = MixturePath(UniformSource(2))
    pi = coupled_data(4, 2, seed=3)
    exact = ExactDenoiser(path, pi=pi)
    for t in (0.2, 0.8):
        table, marginal = posterior_by_hand(path, pi, t)
        assert np.allclose(exact.marginal(t), marginal, atol=1e-14)
        assert np.allclose(exact.table(t), table / marginal[:, None, None], atol=1e-12)


@every_source
def test_an_independent_coupling_given_as_pi_changes_nothing(source):
    path, p_1 = world(source, PolynomialSchedule())
    from_data, from_pi = ExactDenoiser(path, p_1=p_1), ExactDenoiser(path, pi=independent_pi(path, p_1))
    assert torch.allclose(from_data.marginal(0.4), from_pi.marginal(0.4), atol=1e-14)
    reached = from_data.marginal(0.4) > 0
    assert torch.allclose(from_data.table(0.4)[reached], from_pi.table(0.4)[reached], atol=1e-12)


def test_the_marginal_runs_from_source_to_data():
    path, p_1 = world("mixture", PolynomialSchedule(2), length=3)
    exact = ExactDenoiser(path, p_1=p_1)
    p_0 = path.source.probabilities()
    assert torch.allclose(exact.marginal(0.0), torch.einsum("a,b,c->abc", p_0, p_0, p_0).flatten())
    assert torch.allclose(exact.marginal(1.0), p_1.flatten())


def test_calls_look_rows_up_at_their_own_times():
    path, p_1 = world("uniform", PolynomialSchedule())
    exact = ExactDenoiser(path, p_1=p_1)
    x_t = torch.tensor([[0, 1], [2, 2], [1, 0]])
    logits = exact(x_t, torch.tensor([0.2, 0.7, 0.2]))
    assert torch.allclose(logits[1].exp(), exact.table(0.7)[8])
    assert torch.allclose(logits[2].exp(), exact.table(0.2)[3])


@every_source
def test_unreachable_states_still_have_a_distribution(source):
    path, p_1 = world(source, PolynomialSchedule())
    p_1 = torch.where(p_1 > 0.05, p_1, 0.0)
    exact = ExactDenoiser(path, p_1=p_1 / p_1.sum())
    for t in (0.0, 0.5, 1.0):
        table = exact.table(t)
        assert torch.allclose(table.sum(-1), torch.ones(table.shape[:2], dtype=torch.float64))


def test_unreachable_states_are_treated_as_independent_positions():
    """Mask source, data (0,0) or (1,1): the pair (0, 1) cannot be shown; each token stays what it is."""
    path = MixturePath(MaskSource(3))
    p_1 = torch.zeros(3, 3, dtype=torch.float64)
    p_1[0, 0] = p_1[1, 1] = 0.5
    table = ExactDenoiser(path, p_1=p_1).table(0.5)
    assert table[1].tolist() == [[1, 0, 0], [0, 1, 0]]
    uniform = ExactDenoiser(MixturePath(UniformSource(2)), p_1=p_1[:2, :2]).table(1.0)  # at t = 1 noise is impossible
    assert uniform[1].tolist() == [[1, 0], [0, 1]]


def test_a_few_thousand_states():
    path = MixturePath(UniformSource(4))
    p_1 = coupled_data(4, 6)
    exact = ExactDenoiser(path, p_1=p_1)
    law = sampler_law(exact, path, exact.marginal(0.0), grid=Grid.uniform(2), jump=ExactJump())
    assert float(law.sum()) == pytest.approx(1)
    assert total_variation(law, p_1.flatten()) < total_variation(exact.marginal(0.0), p_1.flatten())


def test_laws_need_one_grid_and_a_power_of_the_vocabulary():
    path, p_1 = world("uniform", PolynomialSchedule())
    exact = ExactDenoiser(path, p_1=p_1)
    with pytest.raises(ValueError, match="one grid for all"):
        sampler_law(exact, path, exact.marginal(0.0), grid=Grid.uniform(2, torch.tensor([0.0, 0.1])), jump=ExactJump())
    with pytest.raises(ValueError, match="no power"):
        sampler_law(exact, path, torch.ones(5) / 5, grid=Grid.uniform(2), jump=ExactJump())
    with pytest.raises(ValueError, match="tokens 0"):
        exact(torch.tensor([[0, 7]]), torch.tensor([0.5]))


@pytest.mark.parametrize(
    "bad",
    [
        lambda path: ExactDenoiser(MixturePath(MaskSource(3)), p_1=torch.ones(3, 3) / 9),
        lambda path: ExactDenoiser(path, p_1=torch.tensor(1.0)),
        lambda path: ExactDenoiser(path),
        lambda path: ExactDenoiser(path, p_1=torch.ones(3, 3) / 9, pi=torch.ones(3, 3) / 9),
        lambda path: ExactDenoiser(path, p_1=torch.ones(2, 2) / 4),
        lambda path: ExactDenoiser(path, p_1=torch.ones(3, 3)),
        lambda path: ExactDenoiser(path, pi=torch.ones(4, 4) / 16),
        lambda path: all_states(10, 9),
    ],
)
def test_what_is_no_distribution_is_an_error(bad):
    with pytest.raises(ValueError, match="either|axis|sum to|must|too many"):
        bad(MixturePath(UniformSource(3)))


def errors(path, p_1, jump, steps):
    exact = ExactDenoiser(path, p_1=p_1)
    start, end = exact.marginal(0.0), p_1.flatten()
    return [total_variation(sampler_law(exact, path, start, grid=Grid.uniform(s), jump=jump), end) for s in steps]


def fitted_slope(x, y):
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@every_source
@every_schedule
def test_exact_jump_converges_with_order_one(source, schedule):
    path, p_1 = world(source, schedule)
    steps = [32, 64, 128]
    assert fitted_slope(steps, errors(path, p_1, ExactJump(), steps)) == pytest.approx(-1, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [PolynomialSchedule(1), PolynomialSchedule(2)], ids=str)
def test_single_jump_converges_like_ln_s_over_s(schedule):
    """S * error is constant for 1/S, and grows by the same amount with every doubling of S for ln S / S."""
    path, p_1 = world("uniform", schedule)
    steps = np.array([128, 256, 512, 1024])
    growth = np.diff(steps * errors(path, p_1, SingleJump(), steps))
    assert growth.min() > 0
    assert growth[-1] / growth[-2] == pytest.approx(1, abs=0.2)
    exact = steps * errors(path, p_1, ExactJump(), steps)
    assert np.abs(np.diff(exact)).max() < 0.02 * exact.mean() < 0.1 * growth.min()


@every_source
@pytest.mark.parametrize("jump", [ExactJump(), SingleJump(), InstantJump()], ids=str)
@every_schedule
def test_every_rule_converges_to_the_data(source, jump, schedule):
    path, p_1 = world(source, schedule)
    coarse, fine = errors(path, p_1, jump, [4, 128])
    assert fine < 0.25 * coarse
    assert fine < 0.03


def test_the_literal_forced_last_jump_does_not_converge():
    """Two tokens, one position: the printed rule throws every token off its value at the end."""
    path, p_1 = MixturePath(UniformSource(2)), torch.tensor([0.64, 0.36], dtype=torch.float64)
    forced = errors(path, p_1, LiteralJump(SingleJump()), [8, 64, 512])
    assert forced[-1] == pytest.approx(0.28, abs=0.01)
    assert max(forced[1:]) - min(forced[1:]) < 0.02
    assert errors(path, p_1, SingleJump(), [512])[0] < 0.01


@every_source
@pytest.mark.parametrize("schedule", [PolynomialSchedule(2), CosineSchedule(), ExponentialSchedule(2)], ids=str)
def test_the_sampler_tends_to_the_time_ordered_exponential(source, schedule):
    """On [0, 1-eps] the product of exact steps tends to P(0, 1-eps), entry by entry, with order one."""
    path, p_1 = world(source, schedule, vocab=2)
    exact, end = ExactDenoiser(path, p_1=p_1), 0.9
    identity = torch.eye(p_1.numel(), dtype=torch.float64)

    def product(pieces, make):
        result, edges = identity, torch.linspace(0, end, pieces + 1, dtype=torch.float64).tolist()
        for t, t_next in itertools.pairwise(edges):
            result = result @ make(t, t_next)
        return result

    def magnus(t, t_next):
        middle = (t + t_next) / 2
        return torch.matrix_exp((t_next - t) * generator(exact.table(middle), path.schedule.scalar(middle)))

    def step(t, t_next):
        return transition_matrix(exact.table(t), path, ExactJump(), t=t, t_next=t_next)

    truth = product(250, magnus)  # of order two
    gaps = [float((product(pieces, step) - truth).abs().max()) for pieces in (32, 64, 128)]
    assert fitted_slope([32, 64, 128], gaps) == pytest.approx(-1, abs=0.1)


def test_the_uniform_source_remembers_where_it_came_from():
    """Two tokens, fair data, one position: P(X_1 = x | X_0 = x) = (1 + 1/e)/2, not 1/2."""
    path = MixturePath(UniformSource(2))
    exact = ExactDenoiser(path, p_1=torch.tensor([0.5, 0.5], dtype=torch.float64))
    joint = sampler_law(exact, path, torch.eye(2, dtype=torch.float64), grid=Grid.uniform(500), jump=ExactJump())
    assert float(joint[0, 0]) == pytest.approx((1 + math.exp(-1)) / 2, abs=1e-3)


@every_source
@every_schedule
def test_the_path_loss_is_smallest_at_the_true_posterior(source, schedule):
    """With every expectation enumerated, its gradient at the exact logits is zero."""
    path, p_1 = world(source, schedule, vocab=2)
    exact, pi = ExactDenoiser(path, p_1=p_1), independent_pi(path, p_1)
    vocab, t = path.source.vocab_size, 0.4
    states, kappa = all_states(vocab, 2), float(schedule.kappa(t))
    x_0, x_1, z = (states[i] for i in torch.cartesian_prod(*[torch.arange(len(states))] * 3).T)
    shows = (1 - kappa) * (z == x_0).double() + kappa * (z == x_1).double()
    weight = pi.flatten().repeat_interleave(len(states)) * shows.prod(1)
    kept = weight > 0
    table = exact.table(t).clamp(min=1e-30).log().requires_grad_()
    index = torch.arange(len(states)).repeat(len(states) ** 2)
    losses = path_loss(table[index[kept]], x_1[kept], z[kept], scalar=schedule.scalar(t))
    (gradient,) = torch.autograd.grad((weight[kept, None] * losses).sum(), table)
    assert float(gradient.abs().max()) < 1e-10
    (elsewhere,) = torch.autograd.grad(
        (weight[kept, None] * path_loss(0.5 * table[index[kept]], x_1[kept], z[kept], scalar=schedule.scalar(t))).sum(),
        table,
    )
    assert float(elsewhere.abs().max()) > 1e-4


def test_a_table_in_float32_is_a_distribution_to_the_last_digit():
    path, data = world("uniform", CosineSchedule())
    exact = ExactDenoiser(path, p_1=(data * (1 + 5e-6)).float())
    assert float(exact._weights.sum()) == pytest.approx(1, abs=1e-14)
