import pytest
import torch
from peer_files import small_network
from peer_worlds import STATES, UNIFORM, V, posterior

from fsdfm.flow import Grid, MixturePath, UniformSource, sample
from fsdfm.flow.reading import READINGS, from_leave_one_out, from_uniform_scores, leave_one_out, uniform_scores
from fsdfm.noise import Noise

KAPPA = torch.tensor(0.35, dtype=torch.float64)


def test_readings_invert_what_the_objectives_teach():
    truth = posterior(UNIFORM, STATES, KAPPA)
    there = leave_one_out(truth, STATES, KAPPA)
    assert float((there - truth).abs().max()) > 0.1
    assert torch.allclose(from_leave_one_out(there, STATES, KAPPA), truth, atol=1e-12)
    scores = uniform_scores(truth.exp(), STATES, KAPPA)
    assert torch.allclose(from_uniform_scores(torch.log(scores), STATES, KAPPA), truth, atol=1e-9)


def test_scores_are_ratios_of_the_marginal():
    """p_t of the text with one token replaced, over p_t of the text."""
    scores = uniform_scores(posterior(UNIFORM, STATES, KAPPA).exp(), STATES, KAPPA)
    law = UNIFORM.marginal(float(KAPPA)).view(V, V, V)
    for state in ((0, 1, 2), (2, 2, 0)):
        n = state[0] * 9 + state[1] * 3 + state[2]
        for y in range(V):
            assert float(scores[n, 1, y]) == pytest.approx(float(law[state[0], y, state[2]] / law[state]))


@pytest.mark.parametrize("says", READINGS)
def test_a_network_that_says_something_else_gives_posteriors(says):
    model = small_network(says=says, clock="sigma")
    x_t, t = torch.arange(12).view(1, 12), torch.tensor([0.4], dtype=torch.float64)
    rows = torch.tensor([1, 7])
    ((_, tile, own),) = model.posterior(x_t, t, t, rows=rows).marginals(rows)
    assert own is None
    with torch.no_grad():
        raw = model(x_t, t)[0, rows].double()
    assert torch.allclose(tile, READINGS[says](raw, x_t[0, rows], t.expand(2)), atol=1e-5)
    assert float(tile.detach().exp().sum(-1)[0]) == pytest.approx(1)
    path, noise = MixturePath(UniformSource(257)), Noise(0)
    x_1 = sample(model, path, path.source.sample(noise, 12), grid=Grid.uniform(2), noise=noise)
    assert x_1.shape == (1, 12)


def test_such_a_network_is_not_trained_as_a_posterior():
    with pytest.raises(ValueError, match="says leave-one-out"):
        small_network(says="leave-one-out").joint.log_prob(None, torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="says is 'nothing'"):
        small_network(says="nothing")
