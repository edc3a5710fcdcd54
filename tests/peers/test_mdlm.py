"""MDLM against what the originals computed."""

import pytest
import torch
from peer_vectors import needs_golden, network, peer, same, vectors
from peer_worlds import ALL_MASKS, MASKED, MASKED_STATES, L, V, masked_error, masked_logits

from fsdfm.flow import ExactJump, Grid, SamplerState, generalised_kl, sample
from fsdfm.flow.exact import transition_matrix
from fsdfm.model.layers import Sinusoid
from fsdfm.noise import Noise
from fsdfm.peers import mdlm
from fsdfm.peers.noising import LogLinear
from fsdfm.peers.sampling import PEER_RULES, Cached, LawRule, end_law, released_times
from fsdfm.peers.transition import clipped, joint_matrix

RAW, EMA = ("mdlm_lightning_w64.ckpt", "mdlm", "raw"), ("mdlm_lightning_w64.ckpt", "mdlm", "ema")
NONE = torch.zeros(3)


@needs_golden
@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_logits_and_subs(kind):
    data, model = vectors("mdlm_forward"), peer("mdlm_lightning_w64.ckpt", "mdlm", kind)
    with torch.no_grad():
        logits = model(data["x"], NONE)
        same(logits, data[f"logits_{kind}_sigma0"], 2e-5)
        same(model(data["x"], data["sigma"]), data[f"logits_{kind}_sigma"], 2e-5)
        same(mdlm.subs(logits, data["x"]), data[f"log_p_subs_{kind}"], 2e-5)


@needs_golden
def test_the_hugging_face_file_holds_the_averaged_weights():
    data = vectors("mdlm_forward")
    with torch.no_grad():
        same(network_hf()(data["x"], NONE), data["logits_ema_sigma0"], 2e-5)


def network_hf():
    return peer("mdlm_hf.safetensors", "mdlm")


@needs_golden
@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_a_whole_lightning_file_loads_without_running_it(kind):
    data = vectors("mdlm_lightning_full_w32_forward")
    with torch.no_grad():
        logits = peer("mdlm_lightning_full_w32.ckpt", "mdlm", kind)(data["x"], torch.zeros(2))
    same(logits, data[f"logits_{kind}_sigma0"], 2e-5)


@needs_golden
def test_the_schedule():
    data, noising = vectors("mdlm_forward"), LogLinear()
    t = 1 - data["schedule_t"].double()
    same(noising.sigma(t), data["schedule_sigma"], 2e-5)
    same(noising.rate(t), data["schedule_dsigma"], 2e-5, relative=True)
    some = data["schedule_t"] > 0
    sinusoid, waves = Sinusoid(8), []
    sinusoid.into.register_forward_hook(lambda _, inputs, output: waves.append(inputs[0]))
    sinusoid(torch.cat((torch.zeros(1), data["sigma"])))
    same(waves[0], data["sinusoid_of_0_and_sigma"], 2e-5)
    same((noising.rate(t) / torch.expm1(noising.sigma(t)))[some], data["schedule_weight"][some], 2e-5, relative=True)


@needs_golden
@pytest.mark.parametrize(("tag", "time"), [("", False), ("_time", True), ("_T1000", False)])
def test_the_loss(tag, time):
    data, model = vectors("mdlm_loss"), peer(*RAW)
    rounds = 1000 if tag == "_T1000" else 0
    t = mdlm.stratified_times(data["antithetic_u"], rounds=rounds)
    if not rounds:
        same(1 - t, data["t"], 1e-6)
        same(LogLinear().lost(t)[:, None], data["move_chance"], 2e-6)
        same(LogLinear().sigma(t), data["sigma"], 2e-5, relative=True)
        same(LogLinear().rate(t), data["dsigma"], 2e-5, relative=True)
    with torch.no_grad():
        logits = model(data["x_t"], data["sigma"] if time else torch.zeros(4))
    log_p = mdlm.subs(logits, data["x_t"]).gather(-1, data["x_0"][..., None])[..., 0]
    loss = mdlm.nelbo(log_p, data["x_t"] == 39, t) * data["attention_mask"]
    name = "loss_per_token" + tag
    same(loss[data[name] != 0], data[name][data[name] != 0], 2e-5, relative=True)
    assert bool((loss[data[name] == 0] == 0).all())
    same(loss.sum() / data["attention_mask"].sum(), data["loss" + tag][0], 2e-5, relative=True)


@needs_golden
@pytest.mark.parametrize("name", ["ddpm", "ddpm_cache", "analytic"])
def test_the_laws(name):
    data, model = vectors("mdlm_samplers"), peer(*RAW)
    with torch.no_grad():
        logits = model(data["x_t"], NONE)
    t = 1 - data["t"].double()
    law = mdlm.Ancestral().law(logits, data["x_t"], t=t, t_next=t + data["dt"].double())
    same(law, data[f"{name}_next_law"], 3e-6)
    masked = data["x_t"] == 39
    same(law[masked], clipped(data[f"{name}_law_as_drawn"])[masked], 3e-6)


@needs_golden
def test_the_last_call():
    data, model = vectors("mdlm_samplers"), peer(*RAW)
    with torch.no_grad():
        logits = model(data["x_t"], NONE)
    assert torch.equal(mdlm.greedy(logits, data["x_t"]), data["last_greedy_tokens"])
    drawn = data["analytic_last_law_as_drawn"].double()
    masked = data["x_t"] == 39
    probs = mdlm.subs(logits.double(), data["x_t"]).exp()
    law = drawn[masked] / drawn[masked].sum(-1, keepdim=True)
    same(probs[masked], law, 3e-5)


@needs_golden
def test_the_grid():
    grid = 1 - torch.linspace(1, 1e-5, 5, dtype=torch.float64)
    same(1 - grid, vectors("mdlm_samplers")["grid_T4"], 1e-6)


@needs_golden
def test_network_helper_reads_the_config_beside_the_file():
    assert network("mdlm_hf.safetensors", system="mdlm").config.num_heads == 4


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_the_law_is_our_exact_rule_for_the_mask_source():
    """w = (t_next - t)/(1 - t), a redraw from p: the kernel of the frozen posterior."""
    probs = MASKED.table(0.5)
    expected = transition_matrix(probs, MASKED.path, ExactJump(), t=0.25, t_next=0.6)
    ours = joint_matrix(mdlm.Ancestral().law(masked_logits(0), MASKED_STATES, t=0.25, t_next=0.6))
    assert torch.allclose(ours, expected, atol=1e-12)


def test_the_nelbo_is_the_generalised_kl_at_kappa_t():
    log_p = torch.tensor([[-0.7, -1.3]]).double()
    masked = torch.tensor([[True, False]])
    ours = mdlm.nelbo(log_p, masked, torch.tensor([0.75]))
    gap = generalised_kl(log_p, torch.tensor([[-torch.inf, -1.3]]).double(), ~masked, scalar=torch.tensor(4.0).double())
    assert ours[0, 0] == pytest.approx(float(gap[0, 0]))
    assert ours[0, 1] == 0


def test_it_converges_and_halves_its_error_with_twice_the_calls():
    errors = [masked_error(mdlm.Ancestral(), steps) for steps in (1, 8, 16, 32)]
    assert errors[0] > 0.2
    assert errors[2] == pytest.approx(errors[1] / 2, rel=0.05)
    assert errors[3] == pytest.approx(errors[2] / 2, rel=0.05)


def test_the_last_call_of_the_originals_changes_one_position_in_a_hundred_thousand():
    law = end_law(mdlm.Ancestral(), masked_logits, ALL_MASKS, times=released_times(8), states=MASKED_STATES)
    left = float(law[(MASKED_STATES == V).any(-1)].sum())
    assert left == pytest.approx(L * 1e-5, rel=1e-3)


@pytest.mark.parametrize("steps", [4, 40])
def test_calls_are_counted_as_made(steps):
    network = Cached(lambda x_t, t, h: MASKED(x_t, torch.full_like(t, 0.5)))
    calls = []
    for seed in range(60):
        network.calls = 0
        noise = Noise(seed)
        x_0 = torch.full((1, L), V)
        sample(
            network,
            MASKED.path,
            x_0,
            grid=Grid(released_times(steps, stop=0.0)),
            noise=noise,
            rule=LawRule(mdlm.Ancestral()),
        )
        calls.append(network.calls)
    assert max(calls) <= min(steps, L + 1)
    # One text: the first call and one after every step but the last that changed it.
    expected = mdlm.expected_cached_calls(steps, L)
    assert sum(calls) / 60 == pytest.approx(expected, abs=0.35)


class _Asking(mdlm.Ancestral):
    """The same law, asked for at shown positions, too."""

    keeps_shown = False


def test_nobody_is_asked_about_tokens_that_stay():
    def texts(step):
        def say(x_t, t, h):
            return MASKED(x_t, torch.full_like(t, 0.5))

        x_0, rule = torch.full((40, L), V), LawRule(step)
        return sample(say, MASKED.path, x_0, grid=Grid.uniform(6), noise=Noise(3, range(40)), rule=rule)

    assert torch.equal(texts(mdlm.Ancestral()), texts(_Asking()))
    x_t = torch.tensor([[V, 0, V], [1, 2, 0]])
    state = SamplerState(x_t, torch.full((2,), 0.5), torch.full((2,), 0.75), MASKED.path, Noise(0, range(2)))
    assert LawRule(mdlm.Ancestral()).plan(state).rows.tolist() == [0, 2]
    assert len(LawRule(_Asking()).plan(state).rows) == 6
    assert {name for name, rule in PEER_RULES.items() if rule.keeps_shown} == {"mdlm", "sedd"}


def test_times_are_stratified():
    t = mdlm.stratified_times(torch.full((8,), 0.5))
    assert torch.allclose(1 - t, 1e-3 + 0.999 * (torch.arange(8) + 0.5).double() / 8)
    rounded = mdlm.stratified_times(torch.full((8,), 0.5), rounds=4)
    assert set((1 - rounded).tolist()) == {0.25, 0.5, 0.75, 1.0}
