import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdfm.flow import POLICIES, Grid, dyadic_step_sizes
from fsdfm.flow.grid import AnnealedGeometricWeights, BoostedWeights, MirroredWeights


@given(steps=st.integers(1, 3000), start=st.floats(0, 0.999))
def test_uniform_grids_end_at_exactly_one(steps, start):
    grid = Grid.uniform(steps, start)
    assert grid.steps == steps
    assert float(grid.times[0]) == start
    assert float(grid.times[-1]) == 1.0
    assert torch.allclose(grid.h, torch.full((steps,), (1 - start) / steps, dtype=torch.float64), rtol=1e-6)


def test_dyadic_grids_are_exact():
    assert Grid.uniform(8).times.tolist() == [k / 8 for k in range(9)]


def test_rows_may_start_at_different_times():
    grid = Grid.uniform(4, torch.tensor([0.0, 0.5]))
    assert grid.steps == 4
    assert grid.h.tolist() == [[0.25] * 4, [0.125] * 4]


def test_an_error_shows_the_row_that_is_wrong_and_a_grid_keeps_its_times():
    with pytest.raises(ValueError, match="0.7, 0.6"):
        Grid(torch.tensor([[0.0, 0.5, 1.0], [0.7, 0.6, 1.0]]))
    times = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    grid = Grid(times)
    times[1] = 0.9
    assert float(grid.times[1]) == 0.5


def test_arbitrary_times():
    assert Grid([0.2, 0.9, 1.0]).h.tolist() == pytest.approx([0.7, 0.1])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Grid([0.0, 0.5, 0.4, 1.0]),
        lambda: Grid([0.0, 0.5, 0.5, 1.0]),
        lambda: Grid([0.0, 0.5, 0.99999999]),
        lambda: Grid([0.0, 1.0, 1.1]),
        lambda: Grid([-0.1, 1.0]),
        lambda: Grid([1.0]),
        lambda: Grid([0.0, float("nan"), 1.0]),
        lambda: Grid.uniform(0),
        lambda: Grid.uniform(10**9),
        lambda: Grid.uniform(2.5),
        lambda: Grid.uniform(4, 1 - 2**-53),
        lambda: Grid(torch.zeros(0, 3)),
        lambda: BoostedWeights(-5),
        lambda: AnnealedGeometricWeights(0),
        lambda: Grid.uniform(4, 1.0),
        lambda: Grid.uniform(4, -0.5),
        lambda: dyadic_step_sizes(1),
    ],
)
def test_bad_grids_are_errors(bad):
    with pytest.raises(ValueError, match="allowed|must|increase|at least"):
        bad()


def test_policies_weigh_as_the_paper_lists_them():
    h = dyadic_step_sizes()
    assert h.tolist() == [2.0**k for k in range(-10, 1)]
    assert POLICIES["TB-10"](h, 0).tolist() == [10] + [1] * 10
    assert POLICIES["TB-20"](h, 0).tolist() == [20] + [1] * 10
    assert POLICIES["PU"](h, 0).tolist() == [1] * 11
    assert POLICIES["G"](h, 0).tolist() == [2.0**k for k in range(10, -1, -1)]
    # the share of samples that take the path loss
    shares = {name: round(100 * float(policy.probabilities(h)[0])) for name, policy in POLICIES.items()}
    assert shares == {"TB-10": 50, "TB-20": 67, "PU": 9, "G": 50, "AG": 50}


def test_annealing_doubles_every_ten_thousand_steps_up_to_uniform():
    h, policy = dyadic_step_sizes(), POLICIES["AG"]
    assert policy(h, 9_999).tolist() == POLICIES["G"](h, 0).tolist()
    assert policy(h, 10_000).tolist() == [1024.0, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2]
    assert policy(h, 99_999).tolist() == [1024.0] * 10 + [512]
    assert policy(h, 100_000).tolist() == [1024.0] * 11
    assert policy(h, 10**9).tolist() == [1024.0] * 11


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_other_reading_of_the_order_is_expressible(name):
    h = dyadic_step_sizes()
    assert MirroredWeights(POLICIES[name])(h, 30_000).tolist() == POLICIES[name](h, 30_000).flip(0).tolist()


def test_step_sizes_are_drawn_with_their_weights():
    h = dyadic_step_sizes(-2)
    u = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    drawn = POLICIES["TB-10"].sample(h, u)
    assert [int((drawn == size).sum()) for size in h] == [20, 2, 2]
