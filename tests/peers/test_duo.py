"""Duo, its distillation and the Psi samplers against what the originals computed."""

import json
from copy import deepcopy

import pytest
import torch
from peer_vectors import MDLM, needs_golden, peer, same, vectors

from fsdfm.peers import duo, mdlm
from fsdfm.peers.layouts import ema_order, our_names
from fsdfm.peers.network import Clock, embed_soft, run
from fsdfm.peers.noising import LogLinear

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
        rule = mdlm.Ancestral() if masked else duo.Ancestral(top_p=top_p)
    same(rule.law(logits, x_t, t, t_next), data[f"{tag}.next_law"], 1e-3 if last else 3e-6)
    if not masked:
        same(duo.Ancestral(top_p=top_p).probs(logits), data[f"{tag}.x_theta"], 3e-6)


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
