"""ReMDM against what the originals computed."""

import json

import pytest
import torch
from peer_vectors import MDLM, needs_golden, peer, same, vectors

from fsdfm.peers import mdlm, remdm

CASES = json.loads((MDLM / "remdm_samplers.json").read_text()) if MDLM.is_dir() else []


def rule_of(case):
    name, top_p = case["tag"].partition(".")[0], case["nucleus"]
    if name == "remdm-loop":
        phases = {"begin": 1 - case["t_on"], "end": 1 - case["t_off"], "level": case["alpha_on"]}
        return remdm.Loop(top_p, case["eta"], **phases)
    rules = {
        "mdlm": lambda: remdm.Remasking(top_p),
        "remdm-cap": lambda: remdm.Cap(top_p, case["eta"]),
        "remdm-rescale": lambda: remdm.Rescale(top_p, case["eta"]),
        "forward-backward": lambda: remdm.ForwardBackward(top_p),
        "dfm": lambda: remdm.Corrector(top_p),
        "remdm-conf": lambda: remdm.Confidence(top_p),
    }
    return rules[name]()


def logits_at(state):
    data = vectors("remdm_samplers")
    with torch.no_grad():
        return data[state], peer("mdlm_hf.safetensors", "mdlm")(data[state], torch.zeros(2))


@needs_golden
@pytest.mark.parametrize("case", [c for c in CASES if "conf" not in c["tag"]], ids=lambda c: c["tag"])
def test_the_laws(case):
    data, rule = vectors("remdm_samplers"), rule_of(case)
    x_t, logits = logits_at(case["state"])
    t = 1 - case["t"]
    t_next = 1 - case["t_next"] if "t_next" in case else t + case.get("dt", float(data["dt"]))
    same(rule.law(logits, x_t, t, t_next), data[f"{case['tag']}.next_law"], 3e-6)


@needs_golden
@pytest.mark.parametrize("case", [c for c in CASES if "conf" in c["tag"]], ids=lambda c: c["tag"])
def test_confidence(case):
    data, rule = vectors("remdm_samplers"), rule_of(case)
    x_t, logits = logits_at(case["state"])
    tag, t = case["tag"], 1 - case["t"]
    before = data[f"{tag}.conf_in"].double() if f"{tag}.conf_in" in data else rule.start(x_t)
    law = rule.law_given(logits, x_t, t, t_next=t + float(data["dt"]), confidence=before)
    same(law, data[f"{tag}.next_law"], 3e-6)
    after = rule.remember(before, rule.probs(logits, x_t), x_t, x_next=data[f"{tag}.drawn_next"])
    finite = torch.isfinite(data[f"{tag}.conf_out"])
    assert torch.equal(torch.isfinite(after), finite)
    same(after[finite], data[f"{tag}.conf_out"][finite], 3e-6)


@needs_golden
def test_what_the_network_says():
    data = vectors("remdm_samplers")
    x_t, logits = logits_at("x_t")
    same(mdlm.subs(logits, x_t).exp(), data["p_x0"], 3e-6)


@needs_golden
@pytest.mark.parametrize("case", [c for c in CASES if "t_next" in c], ids=lambda c: c["tag"])
def test_the_correctors_steps(case):
    rule = remdm.Corrector()
    t = 1 - case["t"]
    back = rule.strength * (t * (1 - t)) ** 0.25
    step = 1 / case["steps"]
    step = min(step, 1 / ((back + 1) / (1 - t) + back / t)) if t > 0 else step
    assert abs((1 - t - step) - case["t_next"]) < 1e-7


@needs_golden
@pytest.mark.parametrize(("steps", "calls"), [(8, 29), (16, 38), (32, 46), (64, 72), (128, 133), (1024, 1025)])
def test_the_correctors_calls(steps, calls):
    assert len(remdm.Corrector().times(steps)) - 1 == calls
