"""SEDD against what the originals computed."""

import pytest
import torch
from peer_vectors import needs_golden, peer, same, vectors

from fsdfm.peers import sedd
from fsdfm.peers.noising import Geometric, LogLinear

both = pytest.mark.parametrize("kind", ["absorb", "uniform"])


def parts(kind):
    model = peer(f"sedd_{kind}_weights.safetensors", f"sedd-{kind}")
    return model, (sedd.Rule() if kind == "absorb" else sedd.Rule.uniform())


@needs_golden
@both
def test_logits_and_scores(kind):
    data, (model, rule) = vectors(f"sedd_{kind}_forward"), parts(kind)
    with torch.no_grad():
        head = model(data["x_t"], data["sigma"])
    same(head, data["head"], 2e-5)
    same(sedd.log_score(head, data["x_t"], data["sigma"], scaled=rule.scaled), data["log_score"], 2e-5)


@needs_golden
@both
def test_the_schedule(kind):
    data, noising = vectors(f"sedd_{kind}_samplers"), LogLinear() if kind == "absorb" else Geometric()
    t = 1 - data["t"].double()
    same(noising.sigma(t), data["sigma"], 2e-5, relative=True)
    same(noising.rate(t), data["dsigma"], 2e-5, relative=True)


@needs_golden
@both
def test_the_loss(kind):
    data, (_, rule) = vectors(f"sedd_{kind}_loss"), parts(kind)
    entropy = rule.graph.score_entropy(data["log_score"], data["x_0"], data["x_t"], sigma=data["sigma"])
    # The originals' float32 subtracts nearly equal numbers under the uniform graph.
    same(entropy, data["score_entropy"], 2e-5 if kind == "absorb" else 2e-4, relative=True)
    loss = (entropy * data["dsigma"].double()[:, None]).sum(-1)
    same(loss, data["loss"], 2e-5 if kind == "absorb" else 1e-4, relative=True)


@needs_golden
@both
@pytest.mark.parametrize("k", [0, 2, 3])
def test_the_steps(kind, k):
    data, (model, rule) = vectors(f"sedd_{kind}_samplers"), parts(kind)
    t = 1 - data["times"].double()[k]
    t_next = t + data["dt"].double()
    x_t, scores = data[f"state_{k}"], data[f"score_{k}"].double()
    with torch.no_grad():
        head = model(x_t, rule.noising.sigma(t).expand(3).float())
    same(rule.scores(head, x_t, t), scores, 5e-5, relative=True)  # their sigma is float32
    change = rule.noising.sigma(t) - rule.noising.sigma(t_next)
    analytic = rule.graph.analytic(scores, x_t, change)
    theirs = data[f"analytic_{k}"].double()
    same(analytic / theirs.abs().max(), theirs / theirs.abs().max(), 2e-5)
    same(rule.graph.euler(scores, x_t, rule.noising.rate(t) * (t_next - t)), data[f"euler_{k}"], 2e-5 * 20)


@needs_golden
@both
def test_the_last_call(kind):
    data, (_, rule) = vectors(f"sedd_{kind}_samplers"), parts(kind)
    t = torch.tensor(1 - 1e-5, dtype=torch.float64)
    weights = rule.graph.analytic(data["score_last"].double(), data["state_last"], rule.noising.sigma(t))
    same(weights[..., :48], data["denoise"], 3e-3)  # the originals' float32 subtracts nearly equal numbers here
