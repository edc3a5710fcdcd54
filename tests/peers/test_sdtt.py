"""SDTT against what the originals computed."""

import pytest
import torch
from peer_vectors import needs_golden, peer, same, vectors

from fsdfm.peers import mdlm, sdtt
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
    for i in range(2):
        same(1 - times[i], data[f"time_{i}"], 2e-5)
        logits = logits_of("teacher", states[i])
        same(mdlm.subs(logits, states[i]), data[f"log_p_{i}"], 2e-5)
        theirs = clipped(data[f"unnormalised_{i}"])
        law = mdlm.Ancestral().law(logits, states[i], times[i], (times[i] + dt).clamp(max=1))
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
        same(sdtt.divergence(student, target, kind), data[f"loss_{kind}_64"], 1e-9, relative=True)
        same(sdtt.divergence(student, target, kind), data[f"loss_{kind}_32"], 2e-5, relative=True)
        same(sdtt.divergence(student, target, kind), data[f"loss_{kind}"], 2e-5, relative=True)


@needs_golden
@pytest.mark.parametrize("k", [0, 2, 3])
def test_the_samplers(k):
    data = vectors("sdtt_samplers")
    t, x_t = 1 - data["times"].double()[k], data[f"state_{k}"]
    t_next = t + data["dt"].double()
    law = mdlm.Ancestral().law(logits_of("student", x_t), x_t, t, t_next)
    masked = x_t == 48
    same(law[masked], clipped(data[f"ancestral_{k}"])[masked], 3e-5)
    same(law, clipped(data[f"analytic_{k}"]), 3e-5)


@needs_golden
def test_the_last_call():
    data = vectors("sdtt_samplers")
    tokens = mdlm.greedy(logits_of("student", data["state_last"]), data["state_last"])
    assert torch.equal(tokens, data["greedy_last"])
