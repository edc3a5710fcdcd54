import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from worlds import SCHEDULES

from fsdfm.flow import CosineSchedule, ExponentialSchedule, PolynomialSchedule

every_schedule = pytest.mark.parametrize(
    "schedule", [*SCHEDULES, ExponentialSchedule(-1.5), PolynomialSchedule(3)], ids=str
)
times = st.floats(0, 1)


@every_schedule
def test_ends_are_exact(schedule):
    assert float(schedule.kappa(0.0)) == 0
    assert float(schedule.kappa(1.0)) == 1
    assert float(schedule.survival(0.3, 1.0)) == 0
    assert float(schedule.redraw(0.3, 1.0)) == 1
    assert float(schedule.cumulative_scalar(0.3, 1.0)) == math.inf
    assert float(schedule.scalar(0.0)) == pytest.approx(float(schedule.kappa_dot(0.0)), abs=0)


@every_schedule
@given(t=times)
def test_inverse_and_derivative(schedule, t):
    assert float(schedule.kappa_inverse(schedule.kappa(t))) == pytest.approx(t, abs=1e-6)
    if 1e-3 < t < 1 - 1e-3:
        slope = (schedule.kappa(t + 1e-6) - schedule.kappa(t - 1e-6)) / 2e-6
        assert float(schedule.kappa_dot(t)) == pytest.approx(float(slope), rel=1e-5)


@every_schedule
@given(ends=st.tuples(times, times, times).map(sorted))
def test_cumulative_scalar_is_additive_and_survival_multiplies(schedule, ends):
    a, b, c = ends
    if b >= 1 - 1e-9:
        return
    whole, parts = schedule.survival(a, c), schedule.survival(a, b) * schedule.survival(b, c)
    assert float(whole) == pytest.approx(float(parts), rel=1e-9, abs=1e-12)
    if c < 1 - 1e-6:
        total = schedule.cumulative_scalar(a, b) + schedule.cumulative_scalar(b, c)
        assert float(schedule.cumulative_scalar(a, c)) == pytest.approx(float(total), rel=1e-7, abs=1e-9)


@every_schedule
@pytest.mark.parametrize(("t", "t_next"), [(0.0, 0.125), (0.0, 0.999), (0.3, 0.31), (0.5, 0.95)])
def test_cumulative_scalar_equals_quadrature(schedule, t, t_next):
    integral, _ = quad(lambda s: float(schedule.scalar(s)), t, t_next, epsabs=1e-12, limit=200)
    assert float(schedule.cumulative_scalar(t, t_next)) == pytest.approx(integral, rel=1e-8)
    assert float(schedule.mean_scalar(t, t_next)) == pytest.approx(integral / (t_next - t), rel=1e-8)
    assert float(schedule.redraw(t, t_next)) == pytest.approx(-math.expm1(-integral), rel=1e-8)


@every_schedule
@pytest.mark.parametrize("t", [0.0, 0.3, 0.9])
def test_tiny_steps_keep_their_digits(schedule, t):
    h = 2.0**-30
    g = float(schedule.scalar(t + h / 2))
    for value in (schedule.redraw(t, t + h), schedule.cumulative_scalar(t, t + h)):
        assert float(value) == pytest.approx(g * h, rel=1e-5)


@every_schedule
def test_mean_scalar_tends_to_the_scalar(schedule):
    assert float(schedule.mean_scalar(0.4, 0.4 + 1e-7)) == pytest.approx(float(schedule.scalar(0.4)), rel=1e-5)
    assert float(schedule.mean_scalar(0.4, 0.4)) == float(schedule.scalar(0.4))


def test_the_papers_schedule():
    linear = PolynomialSchedule()
    assert float(linear.scalar(0.75)) == pytest.approx(4)
    assert float(linear.mean_scalar(0.5, 0.75)) == pytest.approx(math.log(2) / 0.25)
    # gbar/g at t = 1 - k h is k ln(k / (k-1))
    assert float(linear.mean_scalar(0, 1 / 8) / linear.scalar(0)) == pytest.approx(8 * math.log(8 / 7))
    assert float(linear.mean_scalar(6 / 8, 7 / 8) / linear.scalar(6 / 8)) == pytest.approx(2 * math.log(2))


def test_convex_families_are_convex():
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    for schedule in (PolynomialSchedule(2), CosineSchedule(), ExponentialSchedule(3)):
        assert bool((schedule.kappa(t).diff().diff() > 0).all())


def test_exponential_tends_to_linear():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert torch.allclose(ExponentialSchedule(1e-6).kappa(t), t, atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: PolynomialSchedule().kappa(1.0000001),
        lambda: PolynomialSchedule().kappa(-0.1),
        lambda: PolynomialSchedule().kappa(float("nan")),
        lambda: PolynomialSchedule().kappa(torch.tensor([0.5, 1.5])),
        lambda: PolynomialSchedule().kappa_inverse(1.5),
        lambda: CosineSchedule().survival(0.5, 1.01),
        lambda: CosineSchedule().survival(0.5, 0.4),
        lambda: CosineSchedule().survival(1.0, 1.0),
        lambda: PolynomialSchedule(0.5),
        lambda: PolynomialSchedule(float("inf")),
        lambda: ExponentialSchedule(0),
        lambda: ExponentialSchedule(1000),
    ],
)
def test_bad_times_and_parameters_are_errors(bad):
    with pytest.raises(ValueError, match="outside|must|allowed"):
        bad()


def test_schedules_are_values():
    assert PolynomialSchedule(2) == PolynomialSchedule(2.0) != PolynomialSchedule(3)
    assert len({CosineSchedule(), CosineSchedule(), PolynomialSchedule()}) == 2
    assert repr(PolynomialSchedule(2)) == "PolynomialSchedule(2)"


@pytest.mark.parametrize("schedule", [CosineSchedule(), ExponentialSchedule(-20.0), PolynomialSchedule(3.0)])
def test_no_share_of_data_has_a_time_beyond_the_end(schedule):
    """4/pi asin(sqrt(1/2)) is 1.0000000000000002 in float64, and a sampler may not start there."""
    shares = torch.cat([torch.linspace(0, 1, 1001, dtype=torch.float64), 1 - 2.0 ** -torch.arange(1.0, 54.0).double()])
    times = schedule.kappa_inverse(shares)
    assert float(times.min()) >= 0
    assert float(times.max()) <= 1
