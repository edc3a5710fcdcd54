"""Duo, its distillation and the Psi samplers against what the originals computed."""

import json
from copy import deepcopy

import pytest
import torch
from peer_vectors import MDLM, needs_golden, peer, same, vectors
from peer_worlds import ALL_EVEN, DATA, STATES, UNIFORM, L, V, posterior

from fsdfm.flow import Independent, SamplerState, advance
from fsdfm.flow.reading import from_leave_one_out, leave_one_out
from fsdfm.noise import Noise
from fsdfm.peers import duo, mdlm, remdm
from fsdfm.peers.layouts import ema_order, our_names
from fsdfm.peers.network import Clock, embed_soft, run
from fsdfm.peers.noising import LogLinear
from fsdfm.peers.sampling import PEER_RULES, DuoRule, end_law, released_times, tail_grid
from fsdfm.peers.transition import clipped, joint_matrix

CASES = json.loads((MDLM / "duo_samplers.json").read_text()) if MDLM.is_dir() else []


def raw():
    return peer("duo_lightning_w64.ckpt", "duo", "raw")


def log_theta(model, x, sigma, soft=None):
    with torch.no_grad():
        embedded = None if soft is None else embed_soft(model, soft)
        return torch.log_softmax(run(model, x, sigma.float(), embedded=embedded), -1)


@needs_golden
def test_logits():
    data = vectors("duo_forward")
    with torch.no_grad():
        logits = raw()(data["x"], data["sigma"])
        same(logits, data["logits"], 2e-5)
        same(torch.log_softmax(logits, -1), data["log_x_theta"], 2e-5)
        same(peer("duo_lightning_w64.ckpt", "duo", "ema")(data["x"], data["sigma"]), data["logits_ema"], 2e-5)
        same(peer("duo_hf.safetensors", "duo")(data["x"], data["sigma"]), data["logits_ema"], 2e-5)
        soft = embed_soft(raw(), torch.softmax(data["soft_input"], -1))
        same(run(raw(), data["x"], data["sigma"], embedded=soft), data["logits_soft"], 2e-5)


@needs_golden
def test_the_schedule_and_the_clock():
    data, noising = vectors("duo_forward"), LogLinear()
    t = 1 - data["schedule_t"].double()
    same(noising.kappa(t), data["schedule_alpha"], 2e-6)
    same(Clock("sigma")(t), data["schedule_sigma"], 2e-5)
    assert torch.allclose(data["schedule_dalpha"], torch.tensor(-0.999))


@needs_golden
def test_the_loss():
    data = vectors("duo_loss")
    log_probs = log_theta(raw(), data["x_t"], data["sigma"])
    t = 1 - data["t"].double()
    kappa, dot = LogLinear().kappa(t), torch.full((4,), 0.999)
    same(kappa, data["alpha_t"], 2e-6)
    same(-dot, data["dalpha_t"], 2e-6)
    loss = duo.nelbo(log_probs, data["x_0"], data["x_t"], kappa=kappa, kappa_dot=dot)
    # The originals' float32 loses digits: 1.2e-4 at values up to 51; the KL of two posteriors over 1e-5 is the judge.
    same(loss, data["loss_per_token"], 2e-5 * 51)
    same(loss.mean(), data["loss"][0], 2e-5, relative=True)
    same(loss, data["kl_over_dt_check"], 3e-4, relative=True)


@needs_golden
def test_the_gaussian_map():
    data = vectors("duo_gaussian_map")
    for vocab, suffix in ((50257, "_published"), (40, "")):
        kappa, slope = duo.gaussian_kappa(data["gamma"], vocab)
        p = (kappa * (vocab - 1) + 1) / vocab
        same(p, data[f"p_argmax_v{vocab}{suffix}"], 1e-6)
        same(slope * (vocab - 1) / vocab, data[f"dp_dgamma_v{vocab}{suffix}"], 1e-5)
    kappa, _ = duo.gaussian_kappa(data["gamma"], 50257)
    p = (kappa * 50256 + 1) / 50257
    same((50258 * p - 1) / 50257, data["alpha_as_used_v50258"], 1e-6)


@needs_golden
@pytest.mark.parametrize("tau", ["1e-3", "1e-1"])
def test_the_curriculum(tau):
    data = vectors("duo_curriculum")
    noise = duo.GaussianNoise(40)
    t = 1 - data["t"].double()
    same(noise.gamma(t), data["gamma_t"], 1e-6)
    kappa, dot = noise.kappa(t)
    same(kappa, data["alpha_exact"], 1e-6)
    same(-dot, data["dalpha_exact"], 2e-5)
    w = duo.diffuse(data["x_0"], data["epsilon"], data["gamma_t"])
    assert torch.equal(w.argmax(-1), data["x_t_argmax"])
    log_probs = log_theta(raw(), data["x_0"], data["sigma"], soft=duo.soft_input(w, float(tau)))
    same(log_probs, data[f"tau{tau}.log_x_theta"], 2e-5)
    loss = duo.nelbo(
        data[f"tau{tau}.log_x_theta"],
        data["x_0"],
        data["x_t_argmax"],
        kappa=data["alpha_t"],
        kappa_dot=-data["dalpha_t"],
    )
    same(loss, data[f"tau{tau}.loss_per_token"], 2e-5, relative=True)


def teacher_state(data):
    named = {theirs: ours for ours, theirs in our_names(2).items()}
    state = {}
    for name in ema_order(2):
        module, _, part = name.rpartition(".")
        ours = "embedding.weight" if part == "embedding" else f"{named[module]}.{part}"
        state[ours] = data[f"teacher.{name}"]
    return state


@needs_golden
@pytest.mark.parametrize("tag", ["round1", "round5", "dt0.25"])
def test_consistency_distillation(tag):
    data = vectors("duo_dcd")
    low, high = data["gamma_min_max"].tolist()
    noise, dt = duo.GaussianNoise(40, low, high), float(data[f"{tag}.dt"])
    noisier = (data["t_before_shift"].double() + dt).clamp(max=1)
    same(noisier, data[f"{tag}.t"], 1e-6)
    states = {}
    for name, t in (("t", 1 - noisier), ("s", 1 - noisier + dt)):
        w = duo.diffuse(data["x_0"], data["epsilon"], noise.gamma(t))
        assert torch.equal(w.argmax(-1), data[f"{tag}.x_{name}"])
        states[name] = -torch.log(noise.kappa(t).kappa)
        same(states[name], data[f"{tag}.sigma_{name}"], 2e-3)  # theirs is read off a table
    teacher = peer("duo_lightning_w64.ckpt", "duo", "raw")
    student = log_theta(teacher, data[f"{tag}.x_t"], data[f"{tag}.sigma_t"])
    same(student, data[f"{tag}.log_student"], 2e-5)
    other = deepcopy(teacher)
    other.load_state_dict(teacher_state(data))
    target = log_theta(other, data[f"{tag}.x_s"], data[f"{tag}.sigma_s"])
    same(target, data[f"{tag}.log_teacher"], 2e-5)
    for kind in ("kl-bwd", "kl-fwd"):
        same(duo.consistency_loss(student, target, kind), data[f"{tag}.{kind}.loss_per_token"], 2e-5)


@needs_golden
def test_sharing_the_noise_needs_only_its_leading_values():
    data = vectors("duo_dcd")
    x_1, epsilon = data["x_0"], data["epsilon"].double()
    own = epsilon.gather(-1, x_1[..., None])[..., 0]
    values, tokens = epsilon.scatter(-1, x_1[..., None], -torch.inf).topk(3, -1)
    leading = duo.Leading(own, values, tokens)
    gamma = torch.tensor([-4.0, -2.5, -2.0, -1.0])
    w = duo.diffuse(x_1, epsilon, gamma)
    assert torch.equal(leading.state(x_1, gamma), w.argmax(-1))
    soft = torch.zeros_like(w).scatter(-1, *leading.weights(x_1, gamma, temperature=1e-3))
    same(soft, duo.soft_input(w, 1e-3), 1e-12)


@needs_golden
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["tag"])
def test_the_laws(case):
    data, tag, masked = vectors("duo_samplers"), case["tag"], case["tag"].startswith("mdlm.")
    x_t = data["mdlm.x_t" if masked else "x_t"]
    model = peer("mdlm_lightning_w64.ckpt", "mdlm", "raw") if masked else raw()
    t = 1 - case["t"]
    sigma = -torch.log1p(-0.999 * torch.full((3,), case["t"]))  # in float32, as the originals
    with torch.no_grad():
        logits = model(x_t, torch.zeros(3) if masked else sigma)
    last, top_p = "dt" not in case, case.get("nucleus", 1.0)
    t_next = 1.0 if last else t + case["dt"]
    if "kappa" in case:
        rule = duo.Psi(case["kappa"], "mask" if masked else "uniform", top_p=top_p)
    else:
        rule = mdlm.Ancestral() if masked else duo.UniformAncestral(top_p=top_p)
    law, moving = rule.law(logits, x_t, t=t, t_next=t_next), (x_t == 39) | (not masked)
    same(law, data[f"{tag}.next_law"], 1e-3 if last else 3e-6)
    same(law[moving], clipped(data[f"{tag}.law_as_drawn"])[moving], 1e-3 if last else 3e-6)
    if not masked:
        same(duo.UniformAncestral(top_p=top_p).probs(logits), data[f"{tag}.x_theta"], 3e-6)


@needs_golden
def test_the_greedy_tail():
    data = vectors("duo_samplers")
    sigma = Clock("sigma")(torch.full((3,), 1 - 1e-5, dtype=torch.float64)).float()
    with torch.no_grad():
        assert torch.equal(raw()(data["x_t"], sigma).argmax(-1), data["last_greedy_tokens"])


PSI = {
    **{
        f"linear_T8.{mode}": (8, {}, (mode,) * 3, (1.0, 0.0))
        for mode in (
            *("constant-0.95", "constant-remdm-0.01", "max-capped-0.01"),
            *("max-rescale-0.05", "pure-pc", "pure-posterior"),
        )
    },
    "loop_T16": (
        16,
        {"level": 0.9, "shares": (0.45, 0.5)},
        ("pure-posterior", "constant-remdm-0.01", "pure-posterior"),
        (0.45, 0.5),
    ),
    "psi_pc_T8": (8, {}, ("pure-posterior", "constant-0.95", "pure-posterior"), (0.5, 0.4)),
}


@needs_golden
@pytest.mark.parametrize("name", PSI)
def test_psi_schedules(name):
    data = vectors("duo_psi_kappas")
    steps, profile, modes, shares = PSI[name]
    times = duo.psi_times(steps, **profile)
    same(1 - times, data[f"{name}.t"], 1e-6)
    same(duo.psi_mixture(times, modes, shares=shares), data[f"{name}.kappa"], 3e-6)


# --- closed forms -----------------------------------------------------------------------------------------------------


def say(t):
    """The ideal network of Duo's objective in every state."""
    kappa = LogLinear().kappa(t)
    return leave_one_out(posterior(UNIFORM, STATES, kappa), STATES, kappa)


def error(rule, steps, last=None):
    law = end_law(rule, say, ALL_EVEN, times=released_times(steps, stop=0.0 if last is None else 1e-5), states=STATES)
    law = law if last is None else law @ joint_matrix(last)
    return float((law - DATA.flatten()).abs().sum() / 2)


def test_the_loss_is_least_at_the_leave_one_out_posterior():
    """Expected over the data given x_t: its gradient vanishes there, and p_{1|t} has a larger loss."""
    kappa = torch.tensor(0.4, dtype=torch.float64)
    truth = posterior(UNIFORM, STATES, kappa)

    def expected(log_probs):
        losses = [
            duo.nelbo(log_probs, torch.full_like(STATES, x), STATES, kappa=kappa, kappa_dot=torch.tensor(1.0))
            for x in range(V)
        ]
        return (torch.stack(losses, -1) * truth.exp()).sum(-1)

    logits = leave_one_out(truth, STATES, kappa).requires_grad_()
    best = expected(torch.log_softmax(logits, -1))
    (gradient,) = torch.autograd.grad(best.sum(), logits)
    assert float(gradient.abs().max()) < 1e-9
    assert bool((expected(truth) >= best - 1e-12).all())
    assert float((expected(truth) - best).detach().max()) > 0.01
    assert torch.allclose(from_leave_one_out(logits, STATES, kappa), truth, atol=1e-10)


@pytest.mark.parametrize("kappa", [0.05, 0.4, 0.95])
def test_the_loss_of_a_network_that_knows_the_text_is_zero(kappa):
    """x_theta = delta(x_1): every term cancels, whether x_t shows the text or not."""
    kappa = torch.tensor(kappa, dtype=torch.float64)
    for x in range(V):
        known = torch.log(torch.eye(V, dtype=torch.float64)[x]).expand(*STATES.shape, V)
        loss = duo.nelbo(known, torch.full_like(STATES, x), STATES, kappa=kappa, kappa_dot=torch.tensor(1.0))
        assert float(loss.abs().max()) < 1e-9


def test_leaving_out_a_token_means_that_it_does_not_matter():
    kappa = torch.tensor(0.3, dtype=torch.float64)
    table = leave_one_out(posterior(UNIFORM, STATES, kappa), STATES, kappa).view([V] * L + [L, V])
    assert torch.allclose(table[0, :, :, 0], table[2, :, :, 0], atol=1e-12)


def test_ancestral_converges_and_the_greedy_tail_does_not():
    errors = [error(duo.UniformAncestral(), steps) for steps in (8, 16, 32)]
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.06)
    assert errors[2] == pytest.approx(errors[1] / 2, rel=0.06)
    greedy = torch.nn.functional.one_hot(say(1 - 1e-5).argmax(-1), V).double()
    assert min(error(duo.UniformAncestral(), steps, greedy) for steps in (8, 32)) > 0.3


def test_ancestral_with_the_plain_posterior_counts_a_token_twice_and_does_not_converge():
    times = released_times(32, stop=0.0)
    law = end_law(
        duo.UniformAncestral(),
        lambda t: posterior(UNIFORM, STATES, LogLinear().kappa(t)),
        ALL_EVEN,
        times=times,
        states=STATES,
    )
    assert float((law - DATA.flatten()).abs().sum() / 2) > 0.2


def test_psi_pays_for_its_corrections_in_few_steps():
    assert error(duo.Psi(0.0), 16) > 1.5 * error(duo.Psi(1.0), 16)
    assert error(duo.Psi(0.95), 64) < 2 * error(duo.Psi(1.0), 64)


def test_psi_for_masks_is_remdm():
    """rho = (1 - mixture)(1 - kappa_next)."""
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    x_t, t, t_next = torch.tensor([[0, 4, 4, 2]]), 0.5, 0.75
    theirs = duo.Psi(0.6, "mask", noising=LogLinear(0.0)).law(logits, x_t, t=t, t_next=t_next)
    rho = 0.4 * 0.25
    assert torch.allclose(theirs, remdm.Cap(eta=rho).law(logits, x_t, t=t, t_next=t_next), atol=1e-12)


def test_the_gaussian_map_is_the_probability_of_the_arg_max():
    gamma = torch.tensor([-3.0, -1.0, 1.0]).double()
    kappa, slope = duo.gaussian_kappa(gamma, 7)
    step = 1e-5
    ahead, behind = duo.gaussian_kappa(gamma + step, 7).kappa, duo.gaussian_kappa(gamma - step, 7).kappa
    assert torch.allclose(slope, (ahead - behind) / (2 * step), atol=1e-8)
    x_1 = torch.zeros(1, 4000, dtype=torch.int64)
    leading = duo.leading_noise(x_1, Noise(5), vocab_size=7)
    for level, expected in zip(gamma, kappa, strict=True):
        x_t = leading.state(x_1, level[None])
        assert float((x_t == 0).double().mean()) == pytest.approx(float(expected + (1 - expected) / 7), abs=0.035)


def test_leading_noise_has_the_law_of_the_largest_of_many():
    x_1 = torch.full((1, 3000), 2)
    leading = duo.leading_noise(x_1, Noise(1), vocab_size=30, k=3)
    assert bool((leading.values.diff(dim=-1) < 0).all())
    assert not bool((leading.tokens == 2).any())
    assert all(len(set(row)) == 3 for row in leading.tokens[0].tolist())
    dense = torch.randn(3000, 29, generator=torch.Generator().manual_seed(0)).double().topk(3, -1).values
    assert torch.allclose(leading.values[0].mean(0), dense.mean(0), atol=0.05)
    shares = torch.bincount(leading.tokens[0, :, 2], minlength=30)
    assert float((shares / 3000 - 1 / 29).abs()[shares > 0].max()) < 0.015
    with pytest.raises(ValueError, match="k is 30"):
        duo.leading_noise(x_1, Noise(1), vocab_size=30, k=30)


@pytest.mark.parametrize("name", ["duo", "duo-greedy", "duo-psi"])
def test_the_rules_draw_from_their_laws(name):
    rule = PEER_RULES[name]
    x_t = torch.tensor([[0, 1, 2]]).expand(3000, 3)
    state = SamplerState(
        x_t, torch.full((3000,), 0.5).double(), torch.full((3000,), 0.75).double(), UNIFORM.path, Noise(2, range(3000))
    )
    said = Independent.of_logits(UNIFORM(x_t, state.t))
    drawn = advance(state, rule, said)
    kappa = torch.tensor(0.5, dtype=torch.float64)
    probs = leave_one_out(UNIFORM(x_t[:1], state.t[:1]), x_t[:1], kappa).exp()
    law = duo.posterior_law(probs, x_t[:1], kappa_t=kappa, kappa_next=torch.tensor(0.75))
    if name == "duo-psi":
        clean = duo.posterior_law(probs, x_t[:1], kappa_t=kappa, kappa_next=torch.tensor(1.0))
        law = 0.95 * law + 0.05 * (0.75 * clean + 0.25 / 3)
    for i in range(3):
        shares = torch.bincount(drawn[:, i], minlength=3) / 3000
        assert float((shares - law[0, i]).abs().max()) < 0.04


def test_the_rules_mixture_is_that_of_psi():
    """DuoRule(mixture) on the plain posterior = Psi(mixture) on the leave-one-out one."""
    t, t_next = torch.full((len(STATES),), 0.5).double(), torch.full((len(STATES),), 0.75).double()
    state = SamplerState(STATES, t, t_next, UNIFORM.path, Noise(0, range(len(STATES))))
    said = UNIFORM(STATES, t)
    law = DuoRule(mixture=0.3).row_law(said.flatten(0, 1), torch.arange(STATES.numel()), state)
    plain = leave_one_out(said, STATES, torch.tensor(0.5).double())
    expected = duo.Psi(0.3, noising=LogLinear(0.0)).law(plain, STATES, t=t, t_next=t_next)
    assert torch.allclose(law.sum(-1), torch.ones(len(law)).double())
    assert torch.allclose(law, expected.flatten(0, 1), atol=1e-9)


def test_a_rule_for_another_source_is_refused():
    state = SamplerState(torch.zeros(1, 3, dtype=torch.int64), *torch.tensor([[0.5], [0.75]]), UNIFORM.path, Noise(0))
    with pytest.raises(ValueError, match="for the mask source"):
        PEER_RULES["remdm-cap"].plan(state)
    with pytest.raises(ValueError, match="a tail needs at least 2"):
        tail_grid(1)
    assert tail_grid(4).steps == 4
    with pytest.raises(ValueError, match="divergence is 'js'"):
        duo.consistency_loss(torch.zeros(1, 2), torch.zeros(1, 2), "js")
    with pytest.raises(ValueError, match="mode is 'often'"):
        duo.psi_mixture(duo.psi_times(4), ("often",) * 3)
    with pytest.raises(ValueError, match="mixture is 2"):
        duo.Psi(2.0)
