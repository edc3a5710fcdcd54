"""SEDD against what the originals computed."""

import pytest
import torch
from peer_vectors import needs_golden, peer, same, vectors
from peer_worlds import ALL_EVEN, DATA, MASKED, MASKED_STATES, STATES, UNIFORM, V, masked_logits, posterior

from fsdfm.flow import PolynomialSchedule, SamplerState
from fsdfm.generate import SamplerConfig
from fsdfm.noise import Noise
from fsdfm.peers import mdlm, sedd
from fsdfm.peers.noising import Geometric, LogLinear
from fsdfm.peers.sampling import UniformSEDDRule, end_law, geometric_grid, released_times
from fsdfm.peers.transition import joint_matrix

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
    t = 1 - data["t"].double()
    same(rule.noising.sigma(t), data["sigma"], 2e-5, relative=True)
    same(rule.noising.rate(t), data["dsigma"], 2e-5, relative=True)
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


# --- closed forms -----------------------------------------------------------------------------------------------------


def known_world(graph, sigma, x_1=1, vocab=4):
    """The exact scores of a known x_1 in every state of one position, and the forward matrix q(z | a)."""
    kept = torch.exp(-torch.as_tensor(sigma, dtype=torch.float64))
    matrix = kept * torch.eye(vocab, dtype=torch.float64)
    if isinstance(graph, sedd.Absorb):
        matrix[:, -1] += 1 - kept
        matrix[-1] = torch.eye(vocab, dtype=torch.float64)[-1]
    else:
        matrix += (1 - kept) / vocab
    return matrix[x_1] / matrix[x_1][:, None], matrix


@pytest.mark.parametrize("graph", [sedd.Absorb(), sedd.Uniform()], ids=str)
def test_the_analytic_step_with_exact_scores_is_the_exact_posterior(graph):
    x_1, high, low = 1, 1.5, 0.6
    scores, far = known_world(graph, high)
    _, near = known_world(graph, low)
    _, between = known_world(graph, high - low)
    states = [3, 1] if isinstance(graph, sedd.Absorb) else [0, 1, 2, 3]
    for x_t in states:
        exact = near[x_1] * between[:, x_t] / far[x_1, x_t]
        ours = graph.analytic(scores[x_t][None, None], torch.tensor([[x_t]]), torch.tensor(high - low))[0, 0]
        assert torch.allclose(ours, exact, atol=1e-14)


def test_euler_and_analytic_are_one_step_under_the_log_linear_schedule():
    head, x_t = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[4, 4, 1], [0, 4, 2]])
    analytic = sedd.Rule().weights(head, x_t, t=0.25, t_next=0.5)
    assert torch.allclose(analytic, sedd.Rule(step="euler").weights(head, x_t, t=0.25, t_next=0.5), atol=1e-12)


@pytest.mark.parametrize("graph", [sedd.Absorb(), sedd.Uniform()], ids=str)
def test_scores_and_posteriors_are_two_names_of_one_thing(graph):
    exact, states = (MASKED, MASKED_STATES) if isinstance(graph, sedd.Absorb) else (UNIFORM, STATES)
    kappa = torch.tensor(0.3, dtype=torch.float64)
    probs, sigma = posterior(exact, states, kappa).exp(), -torch.log(kappa)
    assert torch.allclose(graph.posterior(graph.scores(probs, states, sigma), states, sigma), probs, atol=1e-12)


@pytest.mark.parametrize("graph", [sedd.Absorb(), sedd.Uniform()], ids=str)
def test_score_entropy_is_least_at_the_true_scores(graph):
    exact, states = (MASKED, MASKED_STATES) if isinstance(graph, sedd.Absorb) else (UNIFORM, STATES)
    kappa = torch.tensor(0.4, dtype=torch.float64)
    sigma, probs = -torch.log(kappa), posterior(exact, states, kappa).exp()
    free = torch.log(graph.scores(probs, states, sigma).clamp(min=1e-30)).requires_grad_()
    total = torch.zeros(states.shape, dtype=torch.float64)
    for x in range(V):
        pinned = free.scatter(-1, states[..., None], 0.0)
        loss = graph.score_entropy(pinned, torch.full_like(states, x), states, sigma=sigma)
        total = total + probs[..., x] * loss
    (gradient,) = torch.autograd.grad(total.sum(), free)
    assert float(gradient.abs().max()) < 1e-9
    assert bool((total >= -1e-9).all())


def test_absorbing_scores_that_are_a_posterior_sample_as_mdlm():
    sigma = LogLinear().sigma(0.25)
    probs = mdlm.subs(masked_logits(0), MASKED_STATES).exp()
    head = torch.log(probs) + torch.log(torch.tensor(float(V)))  # scaled by 1/(e^sigma - 1)/(V - 1), V the outputs
    law = sedd.Rule().law(head, MASKED_STATES, t=0.25, t_next=0.6)
    assert float(sigma) > 0
    assert torch.allclose(law, mdlm.Ancestral().law(masked_logits(0), MASKED_STATES, t=0.25, t_next=0.6), atol=1e-9)


def test_the_uniform_graph_converges():
    rule = sedd.Rule.uniform()

    def say(t):
        sigma = rule.noising.sigma(t)
        return torch.log(rule.graph.scores(posterior(UNIFORM, STATES, rule.noising.kappa(t)).exp(), STATES, sigma))

    errors = []
    for steps in (32, 64):
        law = end_law(rule, say, ALL_EVEN, times=released_times(steps), states=STATES)
        law = law @ joint_matrix(rule.last_law(say(1 - 1e-5), STATES, t=1 - 1e-5))
        errors.append(float((law - DATA.flatten()).abs().sum() / 2))
    assert errors[0] < 0.03
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)


@pytest.mark.parametrize("kind", ["analytic", "euler"])
def test_the_rule_of_the_uniform_graph_is_the_originals_step_on_its_grid(kind):
    """On the geometric grid a step of the rule is a step of the sampler, and the last one its last call."""
    original, kappas = sedd.Rule.uniform(kind), geometric_grid(5).times
    times = released_times(4)
    for k, t in enumerate(times.tolist()):
        sigma = original.noising.sigma(t)
        said = posterior(UNIFORM, STATES, original.noising.kappa(t))
        raw = torch.log(original.graph.scores(said.exp(), STATES, sigma))
        theirs = original.last_law(raw, STATES, t) if k == 4 else original.law(raw, STATES, t=t, t_next=times[k + 1])
        now, then = (value.expand(len(STATES)) for value in kappas[k : k + 2])
        state = SamplerState(STATES, now, then, UNIFORM.path, Noise(0, range(len(STATES))))
        ours = UniformSEDDRule(kind=kind).row_law(said.flatten(0, 1), torch.arange(STATES.numel()), state)
        assert torch.allclose(ours, theirs.flatten(0, 1), atol=1e-6)
    assert (kappas[0], kappas[-1]) == (0, 1)


def test_the_rule_of_the_uniform_graph_refuses_what_it_is_not_for():
    t = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="UniformSEDDRule is a step for the uniform source"):
        UniformSEDDRule().plan(SamplerState(MASKED_STATES[:1], t, t + 1, MASKED.path, Noise(0)))
    with pytest.raises(ValueError, match="allowed are analytic and euler"):
        SamplerConfig(jump="sedd-uniform:kind=heun")
    with pytest.raises(ValueError, match="needs at least 2"):
        geometric_grid(1)
    schedule, start = PolynomialSchedule(exponent=2), torch.zeros(1, dtype=torch.float64)
    grid = SamplerConfig(grid="geometric", steps=5).make_grid(start, schedule).times[0]
    assert torch.allclose(schedule.kappa(grid), geometric_grid(5).times)
    assert SamplerConfig(grid="geometric", steps=1).make_grid(start, schedule).times[0].tolist() == [0, 1]


def test_scores_that_are_too_large_give_negative_weights_which_are_cut():
    head = torch.full((1, 1, 4), 8.0)
    rule, x_t = sedd.Rule(), torch.tensor([[3]])
    assert float(rule.weights(head, x_t, t=0.2, t_next=0.9)[0, 0, -1]) < 0
    law = rule.law(head, x_t, t=0.2, t_next=0.9)
    assert float(law[0, 0, -1]) == 0
    assert float(law.sum()) == pytest.approx(1)
