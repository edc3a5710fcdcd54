"""SDTT against what the originals computed."""

import math

import pytest
import torch
from peer_vectors import needs_golden, peer, same, vectors
from peer_worlds import V

from fsdfm.noise import Noise
from fsdfm.peers import mdlm, sdtt
from fsdfm.peers.noising import LogLinear
from fsdfm.peers.transition import clipped


def logits_of(name, x_t):
    with torch.no_grad():
        return peer(f"sdtt_{name}_weights.safetensors", "sdtt")(x_t, torch.zeros(len(x_t)))


@needs_golden
def test_logits():
    data = vectors("sdtt_forward")
    same(logits_of("student", data["x_t"]), data["head"], 2e-5)
    for name in ("student", "teacher"):
        log_p = mdlm.subs(logits_of(name, data["x_t"]), data["x_t"])
        same(log_p, data[f"log_p_{name}"], 2e-5)


@needs_golden
def test_the_teachers_steps_and_times_as_released():
    data = vectors("sdtt_targets_k2")
    dt = float(data["dt"])
    times = sdtt.released_teacher_times(1 - data["t"].double(), dt, 2)
    states = [data["x_t"], data["state_1"], data["state_2"]]
    assert torch.equal(data["x_t"] == 48, data["x_t"] != data["x_0"])
    same(LogLinear().sigma(1 - data["t"].double()), data["sigma"], 2e-5, relative=True)
    for i in range(2):
        masked = states[i] == 48  # a shown token is drawn, too, and then put back
        assert torch.equal(torch.where(masked, data[f"draw_{i}"], states[i]), states[i + 1])
        same(1 - times[i], data[f"time_{i}"], 2e-5)
        logits = logits_of("teacher", states[i])
        same(mdlm.subs(logits, states[i]), data[f"log_p_{i}"], 2e-5)
        theirs = clipped(data[f"unnormalised_{i}"])
        law = mdlm.Ancestral().law(logits, states[i], t=times[i], t_next=(times[i] + dt).clamp(max=1))
        masked = states[i] == 48
        same(law[masked], theirs[masked], 3e-5)


@needs_golden
def test_targets_and_divergences():
    data = vectors("sdtt_targets_k2")
    states = [data["x_t"], data["state_1"], data["state_2"]]
    target = sdtt.targets([data["log_p_0"], data["log_p_1"]], states)
    assert torch.equal(target, data["target"])
    masked = data["x_t"] == 48
    student, target = data["student"][masked].double(), target[masked].double()
    same(mdlm.subs(logits_of("student", data["x_t"]), data["x_t"])[masked], data["student"][masked], 2e-5)
    for kind in ("kl-bwd", "kl-fwd", "mse", "tvd"):
        same(sdtt.divergences(student, target, kind).mean(), data[f"loss_{kind}_64"], 1e-9, relative=True)
        same(sdtt.divergences(student, target, kind).mean(), data[f"loss_{kind}_32"], 2e-5, relative=True)
        same(sdtt.divergences(student, target, kind).mean(), data[f"loss_{kind}"], 2e-5, relative=True)


@needs_golden
@pytest.mark.parametrize("k", [0, 2, 3])
def test_the_samplers(k):
    data = vectors("sdtt_samplers")
    t, x_t = 1 - data["times"].double()[k], data[f"state_{k}"]
    t_next = t + data["dt"].double()
    law = mdlm.Ancestral().law(logits_of("student", x_t), x_t, t=t, t_next=t_next)
    masked = x_t == 48
    same(law[masked], clipped(data[f"ancestral_{k}"])[masked], 3e-5)
    same(law, clipped(data[f"analytic_{k}"]), 3e-5)


@needs_golden
def test_the_last_call():
    data = vectors("sdtt_samplers")
    tokens = mdlm.greedy(logits_of("student", data["state_last"]), data["state_last"])
    assert torch.equal(tokens, data["greedy_last"])


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_the_slip_reveals_about_half_of_what_it_should():
    """The first of two teacher steps, in noise s: dt/s_0 instead of dt/s, s_0 = s + (1 - s)(s - 2 dt)."""
    t, dt = torch.tensor([0.2, 0.5, 0.8]).double(), 1 / 1024
    meant, released = sdtt.teacher_times(t, dt, 2)[0], sdtt.released_teacher_times(t, dt, 2)[0]
    assert torch.allclose(meant, t)
    share = (1 - meant) / (1 - released)
    assert torch.allclose(share, 1 / (2 - (1 - t)), atol=5e-3)


def test_times_as_meant_are_those_a_sampler_visits():
    t = torch.tensor([0.25, 0.9]).double()
    assert torch.allclose(sdtt.teacher_times(t, 0.125, 3)[:, 0], torch.tensor([0.25, 0.375, 0.5]).double())
    assert float(sdtt.teacher_times(t, 0.125, 3).max()) == 1 - 1e-5


def test_a_rollout_asks_k_times_and_remembers_the_step_of_revealing():
    asked = []

    def teacher(x_t, t):
        asked.append(t)
        return torch.full((*x_t.shape, V + 1), float(len(asked))).index_fill(-1, torch.tensor([0]), 0.0)

    x_t = torch.tensor([[V, V, 1]]).expand(200, 3)
    times = sdtt.teacher_times(torch.full((200,), 0.5).double(), 0.25, 2)
    rollout = sdtt.roll_out(teacher, x_t, times, dt=0.25, noise=Noise(0, range(200)))
    assert len(asked) == 2
    first = (rollout.states[1] != V) & (x_t == V)
    target = rollout.target
    assert torch.equal(target[first], rollout.log_probs[0][first])
    later = (rollout.states[1] == V) & (x_t == V)
    assert torch.equal(target[later], rollout.log_probs[1][later])
    assert bool((target[:, 2] == 0).all())
    assert float(first[:, :2].double().mean()) == pytest.approx(0.5, abs=0.1)
    assert not bool((rollout.states[2] == V).any())  # the second step ends at t = 1


def test_rounds_double():
    assert sdtt.round_step(0) == pytest.approx((1 - 1e-5) / 1024)
    assert sdtt.round_step(6) == pytest.approx((1 - 1e-5) / 16)


@pytest.mark.parametrize("kind", ["kl-bwd", "kl-fwd", "mse", "tvd"])
def test_divergences_vanish_where_student_and_target_agree(kind):
    log_p = torch.log_softmax(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).double(), -1)
    other = torch.log_softmax(torch.zeros(5, 7).double(), -1)
    assert float(sdtt.divergences(log_p, log_p, kind).sum()) == pytest.approx(0, abs=1e-12)
    assert float(sdtt.divergences(log_p, other, kind).mean()) > 0.01
    with pytest.raises(ValueError, match="divergence is 'js'"):
        sdtt.divergences(log_p, log_p, "js")


def test_divergences_by_hand():
    """Student (1/2, 1/4, 1/4) and uniform target, then both alike: in multiples of ln 2 and ln 3."""
    student = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]], dtype=torch.float64))
    target = torch.log(torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.2, 0.3, 0.5]], dtype=torch.float64))
    up, down = math.log(3 / 2), math.log(3 / 4)
    expected = {
        "kl-bwd": up / 2 + down / 2,
        "kl-fwd": -(up + 2 * down) / 3,
        "mse": (up**2 + 2 * down**2) / 3,
        "tvd": up - 2 * down,
    }
    for kind, value in expected.items():
        assert sdtt.divergences(student, target, kind).tolist() == pytest.approx([value, 0.0], abs=1e-12)
