import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from worlds import SCHEDULES, SOURCES, world

from fsdfm.flow import (
    ExactDenoiser,
    ExactJump,
    Filter,
    Grid,
    Independent,
    InstantJump,
    LiteralJump,
    LowDiscrepancyJump,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    SamplerState,
    SingleJump,
    SystematicJump,
    UniformSource,
    advance,
    sample,
    total_variation,
    transition_log_prob,
    velocity,
)
from fsdfm.noise import Noise, Purpose

RULES = [ExactJump(), SingleJump(), InstantJump()]
every_rule = pytest.mark.parametrize("jump", RULES, ids=str)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def random_probs(vocab, seed=0):
    p = torch.rand(vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 3
    return p / p.sum()


def kernel_matrix(jump, p, schedule, t, t_next):
    states = torch.arange(len(p))
    return jump.kernel(p.expand(len(p), -1), states, jump.redraws(schedule, t, t_next).expand(len(p)))


@every_schedule
@pytest.mark.parametrize(("t", "t_next"), [(0.0, 0.1), (0.3, 0.9), (0.5, 0.999), (0.0, 0.5)])
def test_exact_jump_is_the_matrix_exponential_of_the_frozen_generator(schedule, t, t_next):
    p = random_probs(6)
    frozen = schedule.cumulative_scalar(t, t_next) * (p.expand(6, 6) - torch.eye(6, dtype=torch.float64))
    assert torch.allclose(
        kernel_matrix(ExactJump(), p, schedule, t, t_next), torch.matrix_exp(frozen), atol=1e-10, rtol=0
    )


@pytest.mark.parametrize(("t", "t_next"), [(0.0, 0.125), (0.5, 0.75), (0.875, 1.0)])
def test_at_the_linear_schedule_the_euler_step_is_exact_jump(t, t_next):
    schedule, p = PolynomialSchedule(1), random_probs(5)
    states = torch.arange(5)[:, None]
    u = velocity(p.expand(5, 1, 5), states, schedule.scalar(t))[:, 0]
    euler = torch.eye(5, dtype=torch.float64) + (t_next - t) * u
    assert torch.allclose(kernel_matrix(ExactJump(), p, schedule, t, t_next), euler, atol=1e-14)


@every_rule
@every_schedule
def test_kernels_are_laws_and_redraw_at_the_end(jump, schedule):
    p = random_probs(5)
    for t, t_next in [(0.0, 0.5), (0.5, 0.99)]:
        kernel = kernel_matrix(jump, p, schedule, t, t_next)
        assert torch.allclose(kernel.sum(1), torch.ones(5, dtype=torch.float64), atol=1e-14)
        assert float(kernel.min()) >= 0
    assert torch.allclose(kernel_matrix(jump, p, schedule, 0.5, 1.0), p.expand(5, 5), atol=1e-14)


@every_schedule
@given(q=st.floats(0.001, 0.999), ends=st.tuples(st.floats(0, 0.98), st.floats(0, 0.98)).map(sorted))
def test_the_papers_rule_leaves_more_often_than_the_exact_one_and_never_more_than_a_redraw(schedule, q, ends):
    t, t_next = ends[0], min(ends[1] + 0.01, 0.99)
    log_p, w = torch.tensor(math.log1p(-q), dtype=torch.float64), float(schedule.redraw(t, t_next))
    exact, single = (
        float(rule.leave(log_p, rule.redraws(schedule, t, t_next))) for rule in (ExactJump(), SingleJump())
    )
    assert exact == pytest.approx(w * q, rel=1e-9, abs=1e-14)
    assert single == pytest.approx(1 - (1 - w) ** q, rel=1e-9, abs=1e-14)
    assert exact <= single * (1 + 1e-12) <= w * (1 + 2e-12)


def test_instant_jump_uses_the_rate_at_the_start_of_the_step():
    schedule = PolynomialSchedule(2)
    leave = InstantJump().leave(torch.tensor(math.log(0.3)).double(), InstantJump().redraws(schedule, 0.5, 0.75))
    assert float(leave) == pytest.approx(1 - math.exp(-0.25 * float(schedule.scalar(0.5)) * 0.7))
    assert float(InstantJump().redraws(schedule, 0.0, 0.25)) == 0  # at kappa = t^2 its first step moves nothing


def test_the_literal_rule_forces_every_uncertain_token_to_leave_at_the_end():
    p = torch.tensor([0.99, 0.01, 0.0], dtype=torch.float64)
    literal = kernel_matrix(LiteralJump(SingleJump()), p, PolynomialSchedule(), 0.5, 1.0)
    assert float(literal[0, 0]) == 0
    certain = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert float(kernel_matrix(LiteralJump(SingleJump()), certain, PolynomialSchedule(), 0.5, 1.0)[0, 0]) == 1


@every_rule
@pytest.mark.parametrize("redraws", [1e-6, 0.1, 1.0, 30.0, math.inf])
@pytest.mark.parametrize("gap", [1.0, 30.0, 36.0, 40.0, 300.0, 900.0])
def test_kernels_stay_laws_when_the_posterior_is_nearly_certain(jump, redraws, gap):
    p = torch.softmax(torch.tensor([20.0, 20.0 - gap, 20.0 - gap], dtype=torch.float64), -1)
    expected = torch.full((3,), redraws, dtype=torch.float64)
    kernel = jump.kernel(p.expand(3, 3), torch.arange(3), expected)
    assert float(kernel.min()) >= 0
    assert torch.allclose(kernel.sum(1), torch.ones(3, dtype=torch.float64), atol=1e-12)
    assert float(kernel[0, 1]) == pytest.approx(float(kernel[0, 2]), rel=1e-12, abs=0)
    ratio = 1.0 if math.isinf(redraws) else redraws if not isinstance(jump, ExactJump) else -math.expm1(-redraws)
    if gap >= 30:  # leave/q has its limit: w for Exact, E for the others
        assert float(kernel[0, 1]) == pytest.approx(ratio * float(p[1]), rel=1e-9, abs=0)


@every_rule
@pytest.mark.parametrize("gap", [5.0, 25.0, 36.0, 60.0, 900.0])
def test_log_probabilities_keep_their_digits_when_the_posterior_is_nearly_certain(jump, gap):
    path = MixturePath(UniformSource(2))
    logits = torch.tensor([[[20.0, 20.0 - gap]]], dtype=torch.float64, requires_grad=True)
    redraws = jump.redraws(path.schedule, 0.25, 0.25 + 2.0**-10)
    log_prob = transition_log_prob(
        logits, torch.tensor([[0]]), torch.tensor([[1]]), redraws=redraws, jump=jump, path=path
    )
    (gradient,) = torch.autograd.grad(log_prob.sum(), logits)
    ratio = float(jump.leave_ratio(torch.tensor(math.exp(-gap) / (1 + math.exp(-gap))).double(), redraws))
    assert log_prob.item() == pytest.approx(math.log(ratio) - gap - math.log1p(math.exp(-gap)), rel=1e-12)
    assert gradient.flatten().tolist() == pytest.approx([-1, 1], abs=0.01)


@every_rule
def test_staying_and_leaving_are_one(jump):
    log_p = torch.log(torch.tensor([0.0, 1e-9, 0.3, 0.999999], dtype=torch.float64))
    for redraws in (0.0, 0.01, 2.0, math.inf):
        expected = torch.full((4,), redraws, dtype=torch.float64)
        total = jump.leave(log_p, expected) + jump.log_stay(log_p, expected).exp()
        assert torch.allclose(total, torch.ones(4, dtype=torch.float64), atol=1e-14)


def one_position_step(jump, p, *, t, t_next, x=1, rows=60_000, path=None, step=0, filter=None):
    path = path or MixturePath(UniformSource(len(p)))
    logits = p.log().float().expand(rows, 1, -1)
    times = (torch.full((rows,), time, dtype=torch.float64) for time in (t, t_next))
    state = SamplerState(torch.full((rows, 1), x), *times, path, Noise(5, range(rows)), index=step, filter=filter)
    return advance(state, jump, Independent.of_logits(logits))


@pytest.mark.parametrize("jump", [*RULES, LiteralJump(InstantJump()), LiteralJump(SingleJump())], ids=str)
@pytest.mark.parametrize(("t", "t_next"), [(0.0, 0.3), (0.5, 0.9), (0.7, 1.0)])
def test_steps_follow_the_kernel(jump, t, t_next):
    p = random_probs(6)
    outcome = one_position_step(jump, p, t=t, t_next=t_next)
    counts = torch.bincount(outcome[:, 0], minlength=6).double()
    expected = kernel_matrix(jump, p, PolynomialSchedule(), t, t_next)[1] * 60_000
    assert bool((counts[expected == 0] == 0).all())
    assert chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_thinning_has_the_law_of_the_plain_rule():
    """SingleJump tossed the plain way, coin < 1-(1-w)^q with p known first, against the thinned step."""
    p, w = random_probs(6), 0.8
    outcome = one_position_step(SingleJump(), p, t=0.5, t_next=0.9)
    share = float((outcome != 1).double().mean())
    assert share == pytest.approx(1 - (1 - w) ** (1 - float(p[1])), abs=4 * 0.5 / 60_000**0.5)
    candidates = float((Noise(5, range(60_000)).uniform(Purpose.COIN, 1) < w).double().mean())
    assert share < candidates


def test_a_filter_acts_on_staying_and_moving_alike():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    kept = torch.tensor([5 / 8, 3 / 8, 0, 0], dtype=torch.float64)
    outcome = one_position_step(SingleJump(), p, t=0.2, t_next=0.6, filter=Filter(top_k=2))
    counts = torch.bincount(outcome[:, 0], minlength=4).double() / 60_000
    expected = kernel_matrix(SingleJump(), kept, PolynomialSchedule(), 0.2, 0.6)[1]
    assert torch.allclose(counts, expected, atol=0.01)


def test_what_cannot_be_stepped_is_an_error():
    path, x_t = MixturePath(UniformSource(3)), torch.zeros(2, 4, dtype=torch.int64)
    redraws = ExactJump().redraws(path.schedule, 0.25, 0.5)
    times = torch.tensor([0.25, 0.25], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    state, wide = SamplerState(x_t, *times, path, Noise(0, range(2))), Independent.of_logits(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match="5 tokens and the source 3"):
        advance(state, ExactJump(), wide)
    with pytest.raises(ValueError, match="one sample index per row"):
        advance(SamplerState(x_t, *times, path, Noise(0)), ExactJump(), wide)
    with pytest.raises(ValueError, match="mask token included"):
        transition_log_prob(
            torch.zeros(2, 4, 2), x_t, x_t, redraws=redraws, jump=ExactJump(), path=MixturePath(MaskSource(3))
        )
    with pytest.raises(ValueError, match="allowed"):
        LiteralJump(SystematicJump())


def test_the_head_is_asked_only_for_candidates():
    asked = []

    def tiles(rows):
        asked.append(len(rows))
        yield slice(0, len(rows)), torch.zeros(len(rows), 7), None

    path, noise, grid = MixturePath(UniformSource(7)), Noise(0, range(4)), Grid.uniform(8)
    x_t = torch.zeros(4, 1000, dtype=torch.int64)
    for step, (t, t_next) in enumerate(zip(grid.times[:-1], grid.times[1:], strict=True)):
        state = SamplerState(x_t, t.expand(4), t_next.expand(4), path, noise, index=step)
        advance(state, ExactJump(), Independent(tiles, 1000))
    assert sum(asked) / 32_000 == pytest.approx(sum(1 / k for k in range(1, 9)) / 8, abs=0.01)  # about a third


class TestStratified:
    grid = Grid.uniform(16)
    schedule = PolynomialSchedule()

    def candidates(self, rows=200, length=100):
        jump, noise = SystematicJump(ExactJump()), Noise(0, range(rows))
        bounds = -torch.expm1(-jump.redraws(self.schedule, self.grid.times[:-1], self.grid.times[1:]))
        table = bounds.expand(rows, -1)
        coins = [jump.coins(noise, length, step, bounds=table[:, : step + 1]) for step in range(16)]
        return torch.stack([coin < bounds[step] for step, coin in enumerate(coins)]), bounds, coins

    def test_every_step_keeps_its_probability(self):
        candidates, bounds, _ = self.candidates()
        shares = candidates.double().mean((1, 2))
        assert bool(((shares - bounds).abs() <= 4.5 * (bounds * (1 - bounds) / 20_000).sqrt() + 1e-12).all())

    def test_the_count_loses_its_variance(self):
        candidates, bounds, _ = self.candidates()
        counts, total = candidates.sum(0).double(), float(bounds.sum())
        assert set(counts.flatten().tolist()) <= {math.floor(total), math.ceil(total)}
        assert float(counts.mean()) == pytest.approx(total, abs=0.02)
        assert float(counts.var()) < 0.26 < 0.5 * float((bounds * (1 - bounds)).sum())

    def test_coins_of_candidates_are_uniform_below_the_bound(self):
        candidates, bounds, coins = self.candidates()
        for step in (3, 10, 15):
            scaled = coins[step][candidates[step]] / bounds[step]
            assert float(scaled.mean()) == pytest.approx(0.5, abs=0.03)

    def test_a_step_follows_the_law_of_its_rule(self):
        p = random_probs(6)
        outcome = one_position_step(SystematicJump(SingleJump()), p, t=0.3, t_next=0.8)
        counts = torch.bincount(outcome[:, 0], minlength=6).double()
        assert (
            chisquare(counts, kernel_matrix(SingleJump(), p, PolynomialSchedule(), 0.3, 0.8)[1] * 60_000).pvalue > 1e-4
        )

    def test_it_says_that_it_has_no_transition_probability(self):
        path, x = MixturePath(UniformSource(3)), torch.zeros(1, 1, dtype=torch.int64)
        redraws = SystematicJump().redraws(path.schedule, torch.tensor([0.1]), torch.tensor([0.2]))
        with pytest.raises(ValueError, match="not Markov"):
            transition_log_prob(torch.zeros(1, 1, 3), x, x, redraws=redraws, jump=SystematicJump(), path=path)
        with pytest.raises(ValueError, match="not Markov"):
            SystematicJump().kernel(torch.ones(1, 3) / 3, x[0], redraws)


class TestSpaced:
    grid = Grid.uniform(8)

    def candidates(self, rows=3000, length=40, schedule=None):
        jump, noise, schedule = LowDiscrepancyJump(), Noise(0, range(rows)), schedule or PolynomialSchedule()
        bounds = -torch.expm1(-jump.redraws(schedule, self.grid.times[:-1], self.grid.times[1:]))
        table = bounds.expand(rows, -1)
        coins = [jump.coins(noise, length, step, bounds=table[:, : step + 1]) for step in range(8)]
        return torch.stack([coin < bounds[step] for step, coin in enumerate(coins)]), bounds

    @pytest.mark.parametrize("schedule", [PolynomialSchedule(), PolynomialSchedule(2)])
    def test_a_position_alone_cannot_tell(self, schedule):
        """Its first turn comes when kappa says so, and later ones are as likely as ever."""
        candidates, bounds = self.candidates(schedule=schedule)
        first = candidates.int().argmax(0)
        assert bool(candidates.any(0).all())
        kappa = schedule.kappa(self.grid.times)
        for step in range(8):
            turns = (first == step).double()
            assert float(turns.mean()) == pytest.approx(float(kappa[step + 1] - kappa[step]), abs=5e-3)
            assert float(turns.mean(0).std()) < 0.02, "at every position"
            later = candidates[step][first < step].double()
            assert not len(later) or float(later.mean()) == pytest.approx(float(bounds[step]), abs=0.01)

    def test_those_of_one_step_are_far_apart(self):
        candidates, _ = self.candidates(rows=50, length=500)
        first = candidates.int().argmax(0)
        for row in first:
            for step in range(8):
                gaps = (row == step).nonzero()[:, 0].diff()
                assert int(gaps.min()) >= 5
                assert int(gaps.max()) <= 13

    def test_the_law_of_the_data_is_kept(self):
        """Not Markov, so not exact: what is lost with the true posterior in many steps is little."""
        path, p_1 = world("uniform", PolynomialSchedule(), vocab=3, length=3)
        noise = Noise(0, range(6_000))
        x_0 = path.source.sample(noise, 3)
        x_1 = sample(
            ExactDenoiser(path, p_1=p_1), path, x_0, grid=Grid.uniform(24), noise=noise, rule=LowDiscrepancyJump()
        )
        counts = torch.bincount((x_1 * torch.tensor([9, 3, 1])).sum(1), minlength=27).double()
        assert total_variation(counts / counts.sum(), p_1.flatten()) < 0.05


@every_rule
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("t", "t_next"), [(0.25, 0.5), (0.75, 1.0)])
def test_log_probabilities_are_the_log_of_the_kernel(jump, source, t, t_next):
    path, _ = world(source, PolynomialSchedule(2))
    vocab = path.source.vocab_size
    p = random_probs(vocab)
    allowed = p.clone()
    if path.source.mask_token is not None:
        allowed[path.source.mask_token] = 0
        allowed /= allowed.sum()
    redraws = jump.redraws(path.schedule, t, t_next).expand(vocab * vocab)
    x_t, x_next = (x[:, None] for x in torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab)).T)
    log_prob = transition_log_prob(
        p.log().expand(vocab * vocab, 1, -1), x_t, x_next, redraws=redraws, jump=jump, path=path
    )
    kernel = kernel_matrix(jump, allowed, path.schedule, t, t_next)
    if isinstance(path.source, MaskSource):  # revealed positions stay for certain
        kernel[:-1] = torch.eye(vocab, dtype=torch.float64)[:-1]
    assert torch.allclose(log_prob.exp().view(vocab, vocab), kernel, atol=1e-12)


def test_log_probabilities_know_filters_and_frozen_positions():
    path, p = MixturePath(UniformSource(4)), torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    kept = torch.tensor([5 / 8, 3 / 8, 0, 0], dtype=torch.float64)
    x_t, x_next = (x[:, None] for x in torch.cartesian_prod(torch.arange(4), torch.arange(4)).T)
    redraws = SingleJump().redraws(path.schedule, 0.2, 0.6)
    options = {"jump": SingleJump(), "path": path}
    logits = p.log().expand(16, 1, -1)
    log_prob = transition_log_prob(logits, x_t, x_next, redraws=redraws, filter=Filter(top_k=2), **options)
    kernel = kernel_matrix(SingleJump(), kept, path.schedule, 0.2, 0.6)
    assert torch.allclose(log_prob.exp().view(4, 4), kernel, atol=1e-12)
    frozen = torch.ones(16, 1, dtype=torch.bool)
    held = transition_log_prob(logits, x_t, x_next, redraws=redraws, frozen=frozen, **options)
    assert torch.equal(held.exp().view(4, 4), torch.eye(4, dtype=torch.float64))


def test_log_probabilities_of_the_issue():
    path, p, w = MixturePath(UniformSource(3)), torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), 0.5
    stay, move = torch.tensor([[0]]), torch.tensor([[1]])

    def log_prob(jump, x_next):
        redraws = jump.redraws(path.schedule, torch.tensor([0.5]), torch.tensor([0.75]))
        return float(transition_log_prob(p.log()[None, None], stay, x_next, redraws=redraws, jump=jump, path=path))

    assert log_prob(ExactJump(), stay) == pytest.approx(math.log((1 - w) + w * 0.7))
    assert log_prob(ExactJump(), move) == pytest.approx(math.log(w * 0.2))
    q = 0.3
    assert log_prob(SingleJump(), stay) == pytest.approx(q * math.log(1 - w))
    assert log_prob(SingleJump(), move) == pytest.approx(math.log(1 - (1 - w) ** q) + math.log(0.2) - math.log(q))


@every_rule
@pytest.mark.parametrize("source", [UniformSource(4), MaskSource(4)], ids=str)
@pytest.mark.parametrize("t_next", [0.5, 1.0])
@pytest.mark.parametrize("certain", [False, True])
def test_log_probabilities_have_finite_gradients(jump, source, t_next, certain):
    path, logits = MixturePath(source), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    if certain:
        logits[0] = torch.tensor([800.0, 0.0, 0.0, 0.0])  # p(0) = 1 in float64
    logits.requires_grad_()
    x_t = torch.tensor([[0, 3, 3], [3, 0, 3]])
    x_next = torch.tensor([[0, 0, 3], [3, 0, 1]])
    redraws = jump.redraws(path.schedule, torch.full((2,), 0.25), torch.full((2,), t_next))
    log_prob = transition_log_prob(logits, x_t, x_next, redraws=redraws, jump=jump, path=path)
    assert not bool(torch.isnan(log_prob).any())
    possible = torch.isfinite(log_prob)
    assert int(possible.sum()) >= 2
    (gradient,) = torch.autograd.grad(log_prob[possible].sum(), logits)
    assert bool(torch.isfinite(gradient).all())
    if not certain:
        assert float(gradient.abs().sum()) > 0
