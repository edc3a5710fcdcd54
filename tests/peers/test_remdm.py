"""ReMDM against what the originals computed."""

import json

import pytest
import torch
from peer_vectors import MDLM, needs_golden, peer, same, vectors
from peer_worlds import ALL_MASKS, MASKED, MASKED_STATES, L, V, masked_error, masked_logits

from fsdfm.flow import Grid, sample
from fsdfm.noise import Noise
from fsdfm.peers import mdlm, remdm
from fsdfm.peers.sampling import PEER_RULES, end_law, released_times
from fsdfm.peers.transition import clipped

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
    law, drawn = rule.law(logits, x_t, t=t, t_next=t_next), data[f"{case['tag']}.law_as_drawn"]
    same(law, data[f"{case['tag']}.next_law"], 3e-6)
    same(law[x_t == 39], clipped(drawn)[x_t == 39], 3e-6)


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
    same(1 - released_times(8), data["grid_T8"], 1e-6)


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


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [remdm.Remasking(), remdm.Cap(eta=0.2), remdm.Rescale(eta=0.5)], ids=str)
def test_the_share_of_masks_stays_on_schedule(rule):
    for t, t_next in ((0.0, 0.25), (0.25, 0.5), (0.9, 1.0)):
        reveal, remask = rule.rates(torch.tensor(t).double(), torch.tensor(t_next).double())
        assert float(t * (1 - remask) + (1 - t) * reveal) == pytest.approx(t_next)


def test_confidence_takes_no_part_in_revealing_so_masks_run_ahead():
    rule = remdm.Confidence()
    x_t, confidence = torch.tensor([[0, 1, 2]]), torch.tensor([[-0.9, -0.2, -torch.inf]]).double()
    law = rule.law_given(torch.zeros(1, 3, 3), x_t, 0.5, t_next=0.75, confidence=confidence)
    remasked = law[0, :2, 2]
    assert float(remasked.sum()) == pytest.approx(0.25 / 0.5)  # rho_max over the text
    assert float(remasked[1] / remasked[0]) == pytest.approx(float(torch.tensor(0.7).exp()))  # the less sure, the more
    assert float(law[0, 2, 2]) == pytest.approx(0.5)  # MDLM's share stays masked


def test_the_corrector_by_hand():
    """At t = 1/2, b = 10 (1/4)^(1/4) = 10/sqrt(2); at t = 0 nothing is masked again."""
    t, t_next = torch.tensor([0.0, 0.5]).double(), torch.tensor([0.01, 0.51]).double()
    reveal, remask = remdm.Corrector().rates(t, t_next)
    back = 10 / 2**0.5
    assert reveal.tolist() == pytest.approx([0.01, (back + 1) * 0.02])
    assert remask.tolist() == pytest.approx([0.0, back * 0.02])


@pytest.mark.parametrize("steps", [8, 32])
def test_the_correctors_steps_are_as_long_as_both_rates_allow(steps):
    """Reveal and remask sum to 1 where its step is shorter than 1/T, and to less elsewhere."""
    times = remdm.Corrector().times(steps)
    t, step = times[1:-1], times[2:] - times[1:-1]
    reveal, remask = remdm.Corrector().rates(t, times[2:])
    short = step < 1 / steps - 1e-12
    assert bool(short.any())
    assert torch.allclose((reveal + remask)[short], torch.ones(int(short.sum())).double())
    assert float((reveal + remask)[~short].sum()) <= float((~short).sum())
    assert float(step.max()) <= 1 / steps + 1e-12


def test_what_converges_and_what_does_not():
    """Total variation to the data on the small world; `docs/peers.md` has the table."""
    at = {steps: released_times(steps, stop=0.0) for steps in (16, 64, 256)}
    for rule in (remdm.Cap(eta=0.04), remdm.Rescale(eta=0.3)):
        errors = [masked_error(rule, steps, times=at[steps]) for steps in at]
        assert errors[0] > 1.4 * errors[1] > 1.4**2 * errors[2]
    loops = [masked_error(remdm.Loop(eta=0.2), steps, times=at[steps]) for steps in (64, 256)]
    assert loops[1] == pytest.approx(loops[0], rel=0.12)  # a floor that more steps do not lower
    floors = [masked_error(remdm.Loop(eta=eta), 256, times=at[256]) for eta in (0.02, 0.2)]
    assert floors[0] < floors[1] / 5  # and that is of the order of eta


def test_forward_and_backward_leaves_masks_and_our_rule_does_not():
    times = released_times(8, stop=0.0)
    law = end_law(remdm.ForwardBackward(), masked_logits, ALL_MASKS, times=times, states=MASKED_STATES)
    assert float(law[(MASKED_STATES == V).any(-1)].sum()) > 0.2
    for name in ("forward-backward", "remdm-loop", "dfm-corrector", "remdm-conf", "remdm-cap"):
        x_1 = sample(
            lambda x_t, t, h: MASKED(x_t, torch.full_like(t, 0.5)),
            MASKED.path,
            torch.full((64, L), V),
            grid=Grid.uniform(3),
            noise=Noise(0, range(64)),
            rule=PEER_RULES[name],
        )
        assert not bool((x_1 == V).any())


@pytest.mark.parametrize("bad", [{"eta": 1.5}, {"top_p": 0.0}, {"begin": 0.97}, {"level": 1.0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match="allowed are"):
        remdm.Loop(**bad)
