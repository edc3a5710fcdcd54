"""What is dropped belongs to the sample: to its seed, its training step and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fsdfm.runtime import Runtime, RuntimeConfig
from fsdfm.runtime.dropout import SampleDropout

CPU = torch.device("cpu")


def masks(samples, *, seed=0, training_step=0, calls=1, shape=(6, 5), p=0.3):
    """What remains of ones, one tensor a call: [calls, B, *shape]."""
    with SampleDropout().of(seed, training_step, samples, device=CPU):
        return torch.stack([F.dropout(torch.ones(len(samples), *shape), p, True) for _ in range(calls)])


@given(samples=st.lists(st.integers(0, 2**50), min_size=1, max_size=6), odd=st.booleans())
def test_a_sample_is_dropped_alike_in_every_batch(samples, odd):
    shape = (3, 5) if odd else (4, 6)
    batch = masks(samples, calls=2, shape=shape)
    for row, sample in enumerate(samples):
        assert torch.equal(batch[:, row], masks([sample], calls=2, shape=shape)[:, 0])


def test_seed_step_sample_and_call_each_change_it():
    found = [
        masks([0], calls=2)[0],
        masks([0], calls=2)[1],
        masks([1])[0],
        masks([0], seed=1)[0],
        masks([0], training_step=1)[0],
    ]
    for first in range(len(found)):
        for second in range(first):
            assert not torch.equal(found[first], found[second])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_p_and_the_mean_stays(p):
    kept = masks(range(8), calls=3, shape=(64, 64), p=p)
    n = kept.numel()
    share = float((kept == 0).float().mean())
    assert abs(share - p) < 4 * (p * (1 - p) / n) ** 0.5 + 2**-16
    assert float(kept.mean()) == pytest.approx(1.0, abs=5 * (p / (1 - p) / n) ** 0.5)
    assert kept.unique().numel() == 2


def test_what_is_dropped_is_not_correlated():
    """Between neighbours, rows, calls and steps: pairs agree as often as independent coins, within 5 sigma."""
    base = masks(range(4), calls=4, shape=(128, 64), p=0.5) == 0
    later = masks(range(4), calls=4, shape=(128, 64), p=0.5, training_step=1) == 0
    pairs = [
        (base[..., 1:], base[..., :-1]),
        (base[..., 2:], base[..., :-2]),
        (base[:, :, 1:], base[:, :, :-1]),
        (base[:, 1:], base[:, :-1]),
        (base[1:], base[:-1]),
        (base, later),
    ]
    for one, two in pairs:
        agreement = float((one == two).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / one.numel() ** 0.5


def test_gradients_are_dropped_as_values_are():
    x = torch.randn(2, 40, requires_grad=True)
    with SampleDropout().of(0, 0, [3, 4], device=CPU):
        y = F.dropout(x, 0.25, True)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.allclose(x.grad * x, y)


def test_evaluation_drops_nothing_and_draws_nothing():
    dropout = SampleDropout()
    x = torch.randn(2, 8)
    with dropout.of(0, 0, [0, 1], device=CPU):
        before = dropout.calls
        assert F.dropout(x, 0.5, False) is x
        assert F.dropout(x, 0.0, True) is x
        assert dropout.calls == before
        inplace = x.clone()
        assert F.dropout(inplace, 0.5, True, True) is inplace
        assert bool((inplace == 0).any())
        with pytest.raises(ValueError, match="3 rows in a batch of 2 samples"):
            F.dropout(torch.ones(3, 4), 0.5, True)


def test_other_functions_are_left_alone_and_the_mode_ends():
    runtime = Runtime(RuntimeConfig(device="cpu"))
    with runtime.dropout(0, 0, [0]):
        assert torch.equal(torch.add(torch.ones(2), 1), torch.full((2,), 2.0))
        first = F.dropout(torch.ones(1, 64), 0.5, True)
    with runtime.dropout(0, 0, [0]):
        assert torch.equal(F.dropout(torch.ones(1, 64), 0.5, True), first)
    torch.manual_seed(0)
    outside = F.dropout(torch.ones(1, 64), 0.5, True)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(torch.ones(1, 64), 0.5, True), outside)  # torch's own generator again


@pytest.mark.slow
def test_a_compiled_network_drops_the_same():
    def network(x):
        return F.dropout(torch.cos(F.dropout(torch.sin(x), 0.2, True)), 0.2, True)

    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    dropout, x = SampleDropout(), torch.randn(3, 10)
    for training_step in range(3):
        results = []
        for function in (network, compiled):
            with dropout.of(0, training_step, [5, 6, 7], device=CPU):
                results.append(function(x))
        assert torch.allclose(*results)
