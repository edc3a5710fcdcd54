"""The likelihood bound: equal to -log p for the mask source, never below it for others, known for uniform data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from networks import MixerNet
from torch import Tensor
from worlds import SCHEDULES, world

from fsdfm.flow import ExactDenoiser, MaskSource, MixturePath, PolynomialSchedule, Schedule, Source, UniformSource
from fsdfm.flow.exact import all_states
from fsdfm.measure.nll_bound import nll_bound
from fsdfm.noise import Noise
from tiny_models import random_bundle


@dataclass(frozen=True)
class Posterior:
    """p_{1|t} of independent uniform data under the uniform source, in closed form; any length, any times."""

    vocab: int
    schedule: Schedule

    def __call__(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        kappa = self.schedule.kappa(t)[:, None, None]
        shown = torch.nn.functional.one_hot(x_t, self.vocab).double()
        return torch.log(kappa * shown + (1 - kappa) / self.vocab)


@dataclass(frozen=True)
class Tabulated:
    """A world's own posterior at times rounded to a fine grid, so that few tables are made."""

    exact: ExactDenoiser
    slots: int

    def __call__(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return self.exact(x_t, (torch.floor(t * self.slots) + 0.5) / self.slots)


def repeat(state: Tensor, rows: int) -> Tensor:
    return state[None].expand(rows, -1).contiguous()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_mask_source_has_the_exact_likelihood(schedule: Schedule) -> None:
    # Its posterior does not depend on t, so one table is exact for all times.
    path, p_1 = world("mask", schedule, vocab=3, length=3)
    denoiser = Tabulated(ExactDenoiser(path, p_1=p_1), 1)
    states = all_states(4, 3)
    for index in (int(p_1.flatten().argmax()), int(p_1.flatten().topk(9).indices[-1])):
        x_1 = repeat(states[index], 4000)
        bound = nll_bound(denoiser, path, x_1, t_end=1.0, draws=4, batch_size=4000)
        expected = -math.log(float(p_1.flatten()[index])) / 3
        assert bound.standard_error < 0.02
        assert bound.nats_per_token == pytest.approx(expected, abs=4 * bound.standard_error)


@pytest.mark.parametrize("schedule", [PolynomialSchedule(1), PolynomialSchedule(2)], ids=str)
@pytest.mark.parametrize("vocab", [2, 7])
def test_uniform_data_under_the_uniform_source(vocab: int, schedule: Schedule) -> None:
    path = MixturePath(UniformSource(vocab), schedule)
    x_1 = path.source.sample(Noise(99, range(2000)), 8)
    bound = nll_bound(Posterior(vocab, schedule), path, x_1, t_end=1.0, batch_size=2000)
    expected = (vocab - 1) / vocab * (1 + math.log(vocab))
    assert bound.nats_per_token == pytest.approx(expected, abs=4 * bound.standard_error)
    assert bound.standard_error < 0.02
    assert expected > math.log(vocab)


@pytest.mark.parametrize("source", ["uniform", "mixture"])
@pytest.mark.parametrize("t_end", [1.0, 1 - 2.0**-4])
def test_other_sources_are_never_below_the_truth(source: str, t_end: float) -> None:
    path, p_1 = world(source, PolynomialSchedule(1), vocab=3, length=2)
    denoiser = Tabulated(ExactDenoiser(path, p_1=p_1), 256)
    states, law = all_states(path.source.vocab_size, 2), p_1.flatten()
    data = states[law.multinomial(3000, replacement=True, generator=torch.Generator().manual_seed(0))]
    bound = nll_bound(denoiser, path, data, t_end=t_end, batch_size=3000)
    entropy = -float(torch.where(law > 0, law * law.log(), 0.0).sum()) / 2
    assert bound.nats_per_token - 3 * bound.standard_error > entropy


def test_one_redraw_from_the_noise_is_the_product_of_the_marginals() -> None:
    """As t_end -> 0 nothing flows and every position is drawn on its own: -log p is known for any source."""
    path, p_1 = world("uniform", PolynomialSchedule(1), vocab=3, length=2)
    x_1 = repeat(torch.tensor([0, 2]), 50)
    bound = nll_bound(ExactDenoiser(path, p_1=p_1), path, x_1, t_end=1e-12, draws=1)
    expected = -math.log(float(p_1.sum(1)[0] * p_1.sum(0)[2])) / 2
    assert bound.nats_per_token == pytest.approx(expected, abs=1e-5)


def test_an_unsure_network_has_a_finite_bound_at_the_last_step() -> None:
    path = MixturePath(UniformSource(11))
    x_1 = path.source.sample(Noise(1, range(64)), 12)
    network = MixerNet(11).eval()
    finite = nll_bound(network, path, x_1, draws=8)
    assert finite.nats_per_token > math.log(11)
    assert math.isfinite(finite.perplexity)
    assert finite.bits_per_token == pytest.approx(finite.nats_per_token / math.log(2))
    near_the_end = nll_bound(network, path, x_1, draws=8, t_end=1 - 2.0**-20)
    assert near_the_end.nats_per_token > finite.nats_per_token + 2  # ln(2^10) times an exit rate of about 1


def test_the_batch_changes_nothing_and_nothing_is_changed() -> None:
    path = MixturePath(UniformSource(11))
    x_1 = path.source.sample(Noise(1, range(10)), 12)
    network = MixerNet(11)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    whole = nll_bound(network, path, x_1, batch_size=10)
    parts = nll_bound(network, path, x_1, batch_size=3)
    dense = nll_bound(lambda x, t, h: network(x, t, h), path, x_1, batch_size=10)
    torch.testing.assert_close(parts.rows, whole.rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dense.rows, whole.rows, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not torch.equal(nll_bound(network, path, x_1, seed=1).rows, whole.rows)


@pytest.mark.parametrize("source", [UniformSource(3), MaskSource(4)], ids=str)
def test_given_positions_are_shown_and_cost_nothing(source: Source) -> None:
    path, p_1 = world("uniform" if source.mask_token is None else "mask", PolynomialSchedule(1), vocab=3, length=2)
    given = torch.tensor([[True, False]]).expand(200, -1)
    x_1 = repeat(torch.tensor([1, 2]), 200)
    seen = []

    def watch(x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        seen.append(x_t[:, 0])
        return ExactDenoiser(path, p_1=p_1)(x_t, torch.full_like(t, 0.5))

    bound = nll_bound(watch, path, x_1, given=given, draws=2, batch_size=200)
    assert all(bool((first == 1).all()) for first in seen)
    assert bound.rows.shape == (200,)
    if source.mask_token is not None:  # then it is -log p(x^2 = 2 | x^1 = 1), but for the time given to the redraw
        expected = -math.log(float(p_1[1, 2] / p_1[1].sum()))
        assert bound.nats_per_token == pytest.approx(expected, abs=4 * bound.standard_error + 1e-3)


@torch.no_grad()
def test_that_no_position_is_given_says_nothing() -> None:
    """Masks are not certain, whoever asks: a chain over them would know its neighbours."""
    bundle = random_bundle(source="mask", length=8, transition_rank=2)
    x_1 = torch.randint(0, 256, (3, 8), generator=torch.Generator().manual_seed(0))
    nothing = nll_bound(bundle.model, bundle.path, x_1, given=torch.zeros_like(x_1, dtype=torch.bool), draws=2)
    torch.testing.assert_close(nothing.rows, nll_bound(bundle.model, bundle.path, x_1, draws=2).rows)


def test_bad_requests() -> None:
    path, p_1 = world("uniform", PolynomialSchedule(1))
    exact, x_1 = ExactDenoiser(path, p_1=p_1), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="t_end is 0"):
        nll_bound(exact, path, x_1, t_end=0)
    with pytest.raises(ValueError, match="draws >= 1"):
        nll_bound(exact, path, x_1, draws=0)
    with pytest.raises(ValueError, match="position to score"):
        nll_bound(exact, path, x_1, given=torch.ones(2, 2, dtype=torch.bool))


def test_halves_are_read_in_single_precision() -> None:
    """A network in bfloat16 gives logits of three digits; their normaliser has seven."""
    path = MixturePath(UniformSource(50))
    x_1 = torch.randint(0, 50, (3, 4), generator=torch.Generator().manual_seed(1))
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = [
        nll_bound(lambda x_t, t, h, w=width: table[x_t].to(w), path, x_1, draws=2)
        for width in (torch.bfloat16, torch.float32)
    ]
    assert torch.equal(found[0].rows, found[1].rows)
