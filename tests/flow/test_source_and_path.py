import itertools

import pytest
import torch
from worlds import SCHEDULES, SOURCES, world

from fsdfm.flow import (
    ExactDenoiser,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    UniformSource,
    velocity,
)
from fsdfm.flow.exact import all_states, generator
from fsdfm.noise import Noise


@pytest.mark.parametrize(
    "source",
    [UniformSource(5), MaskSource(5), MixtureSource(5, 0.3), MaskSource(5, 2), MixtureSource(5, 0.3, 2)],
    ids=str,
)
def test_samples_follow_the_stated_probabilities(source):
    x_0 = source.sample(Noise(0, range(64)), 1000)
    shares = torch.bincount(x_0.flatten(), minlength=5) / x_0.numel()
    assert torch.allclose(shares.double(), source.probabilities(), atol=0.01)
    assert float(source.probabilities().sum()) == pytest.approx(1)
    assert torch.equal(x_0[7:9], source.sample(Noise(0, [7, 8]), 1000))


def test_only_masked_positions_move_under_the_mask_source():
    x_t = torch.tensor([[0, 4, 2, 4]])
    assert MaskSource(5).movable(x_t).tolist() == [[False, True, False, True]]
    assert torch.equal(MaskSource(5, 1).movable(x_t), x_t == 1)
    assert bool(UniformSource(5).movable(x_t).all())
    assert bool(MixtureSource(5).movable(x_t).all())


@pytest.mark.parametrize(
    "bad",
    [
        lambda: UniformSource(0),
        lambda: MaskSource(1),
        lambda: MaskSource(5, 5),
        lambda: MixtureSource(1),
        lambda: MixtureSource(5, 1.0),
        lambda: MixtureSource(5, 0.0),
    ],
)
def test_impossible_sources_are_errors(bad):
    with pytest.raises(ValueError, match="needs at least|allowed"):
        bad()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_path_shows_data_with_probability_kappa(schedule):
    path, noise = MixturePath(UniformSource(10), schedule), Noise(0, range(50))
    x_1 = torch.full((50, 2000), 3)
    x_0 = torch.full((50, 2000), 7)
    assert torch.equal(path.sample(x_0, x_1, 0.0, noise=noise), x_0)
    assert torch.equal(path.sample(x_0, x_1, 1.0, noise=noise), x_1)
    t = torch.linspace(0, 1, 50)
    shares = (path.sample(x_0, x_1, t, noise=noise) == 3).double().mean(1)
    assert torch.allclose(shares, schedule.kappa(t), atol=0.05)


def test_the_coupling_is_an_argument():
    class Reversed:
        def sample(self, source, x_1, noise):
            return x_1.flip(1)

    x_1 = torch.tensor([[1, 2, 3]])
    assert MixturePath(UniformSource(5), coupling=Reversed()).sample_x_0(x_1, Noise(0)).tolist() == [[3, 2, 1]]
    independent = MixturePath(UniformSource(5))
    assert torch.equal(independent.sample_x_0(x_1, Noise(0)), independent.source.sample(Noise(0), 3))


def test_ends_of_different_shape_are_an_error():
    with pytest.raises(ValueError, match="must agree"):
        MixturePath(UniformSource(5)).sample(torch.zeros(1, 3).long(), torch.zeros(1, 4).long(), 0.5, noise=Noise(0))
    with pytest.raises(ValueError, match="one sample index per row"):
        MixturePath(UniformSource(5)).sample(torch.zeros(3, 4).long(), torch.zeros(3, 4).long(), 0.5, noise=Noise(0))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("t", "t_back"), [(0.7, 0.3), (1.0, 0.5), (0.4, 0.0), (0.0, 0.0)])
def test_renoising_goes_back_to_the_marginal_of_the_earlier_time(source, t, t_back):
    path, p_1 = world(source, PolynomialSchedule(2))
    exact, states = ExactDenoiser(path, p_1=p_1), all_states(path.source.vocab_size, 2)
    rows = 40_000
    now = torch.multinomial(exact.marginal(t), rows, replacement=True, generator=torch.Generator().manual_seed(1))
    back = path.renoise(states[now], t, t_back, noise=Noise(2, range(rows)))
    index = (back * torch.tensor([path.source.vocab_size, 1])).sum(1)
    shares = torch.bincount(index, minlength=len(states)) / rows
    assert float((shares - exact.marginal(t_back)).abs().sum() / 2) < 0.02
    with pytest.raises(ValueError, match="back in time"):
        path.renoise(states[now], 0.2, 0.3, noise=Noise(2, range(rows)))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_generator_satisfies_proposition_a1(source, schedule):
    path, p_1 = world(source, schedule)
    exact = ExactDenoiser(path, p_1=p_1)
    for t in (0.0, 0.3, 0.9):
        u = generator(exact.table(t), schedule.scalar(t))
        off_diagonal = u - torch.diag(u.diag())
        assert float(off_diagonal.min()) >= 0
        assert float(u.diag().max()) <= 0
        assert torch.allclose(u.sum(1), torch.zeros(len(u), dtype=u.dtype), atol=1e-12)


def test_velocity_is_scalar_times_posterior_minus_delta():
    probs = torch.tensor([[[0.2, 0.5, 0.3]]], dtype=torch.float64)
    u = velocity(probs, torch.tensor([[1]]), torch.tensor([4.0]))
    assert u.tolist() == [[pytest.approx([0.8, -2.0, 1.2])]]
    assert torch.equal(velocity(probs, torch.tensor([[1]]), 4.0), u)


def _time_ordered_exponential(exact, start, end, pieces):
    """P(start, end) by fourth-order Magnus steps."""
    schedule = exact.path.schedule
    product = torch.eye(len(exact.marginal(0.0)), dtype=torch.float64)
    share = torch.linspace(0, 1, pieces + 1, dtype=torch.float64)
    edges = (1 - (1 - start) ** (1 - share) * (1 - end) ** share).tolist()  # 1 - t geometric: steps shrink as g grows
    for a, b in itertools.pairwise(edges):
        nodes = [a + (b - a) * (0.5 - 3**0.5 / 6), a + (b - a) * (0.5 + 3**0.5 / 6)]
        first, second = (generator(exact.table(s), schedule.scalar(s)) for s in nodes)
        commutator = first @ second - second @ first
        # row vectors multiply from the left, so the later generator stands on the right
        product = product @ torch.matrix_exp((b - a) / 2 * (first + second) + 3**0.5 / 12 * (b - a) ** 2 * commutator)
    return product


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_velocity_transports_the_path_and_solves_both_kolmogorov_equations(source, schedule):
    path, p_1 = world(source, schedule, vocab=2)
    exact = ExactDenoiser(path, p_1=p_1)

    def rate(t):
        return generator(exact.table(t), schedule.scalar(t))

    # the marginal path is generated: d/dt p_t = p_t u_t
    slope = (exact.marginal(0.4 + 1e-5) - exact.marginal(0.4 - 1e-5)) / 2e-5
    assert torch.allclose(slope, exact.marginal(0.4) @ rate(0.4), atol=1e-8)
    whole = _time_ordered_exponential(exact, 0.0, 0.999, 300)
    assert torch.allclose(exact.marginal(0.0) @ whole, exact.marginal(0.999), atol=1e-6)
    # forward: d/dt P(s, t) = P(s, t) u_t;  backward: d/ds P(s, t) = -u_s P(s, t)
    middle, e = _time_ordered_exponential(exact, 0.2, 0.6, 40), 1e-4
    forward = (middle @ _time_ordered_exponential(exact, 0.6, 0.6 + e, 1) - middle) / e
    assert torch.allclose(forward, middle @ rate(0.6 + e / 2), atol=1e-3)
    backward = (_time_ordered_exponential(exact, 0.2 - e, 0.2, 1) @ middle - middle) / -e
    assert torch.allclose(backward, -rate(0.2 - e / 2) @ middle, atol=1e-3)


def test_what_returns_to_the_source_is_drawn_anew():
    """Renoised to t = 0 a text is noise, and not the noise that it began from."""
    path, noise = MixturePath(UniformSource(100)), Noise(3, range(4))
    x_0 = path.source.sample(noise, 50)
    t = torch.full((4,), 0.9, dtype=torch.float64)
    found = path.renoise(x_0, t, torch.zeros_like(t), noise=noise)
    assert float((found == x_0).double().mean()) < 0.05


def test_noise_is_not_renoised():
    """At t = 0 there is nothing to go back from: every token stays."""
    path, noise = MixturePath(UniformSource(50)), Noise(0, range(4))
    x_0 = path.source.sample(noise, 20)
    assert torch.equal(path.renoise(x_0, 0.0, 0.0, noise=noise), x_0)
