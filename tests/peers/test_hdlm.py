"""HDLM, both hybrids, against what the originals computed."""

import pytest
import torch
from peer_vectors import needs_golden, peer, same, vectors

from fsdfm.peers import hdlm
from fsdfm.peers.network import blended_embedding, run
from fsdfm.peers.transition import clipped

NONE = torch.zeros(3)


def epsilon():
    return peer("hdlm_epsilon_weights.safetensors", "hdlm-epsilon")


def gamma_head(x_t, sigma):
    model = peer("hdlm_gamma_weights.safetensors", "hdlm-gamma")
    with torch.no_grad():
        return run(model, x_t, sigma, embedded=blended_embedding(model, x_t, sigma, gamma=0.1))


@needs_golden
def test_epsilon_logits():
    data = vectors("hdlm_epsilon_forward")
    with torch.no_grad():
        same(epsilon()(data["x_t"], NONE), data["logits"], 2e-5)
        for hidden, logits in (
            ("attention_hidden", "logits_two_blocks"),
            ("attention_hidden_first", "logits_first_block"),
        ):
            same(run(epsilon(), data["x_t"], NONE, hidden=data[hidden]), data[logits], 2e-5)
    assert torch.equal(hdlm.hidden_positions(8, 16, 16), data["attention_hidden"])
    assert torch.equal(hdlm.hidden_positions(0, 8, 16), data["attention_hidden_first"])


@needs_golden
@pytest.mark.parametrize("tag", ["plain", "one_block", "two_blocks"])
def test_epsilon_loss(tag):
    data, hybrid = vectors("hdlm_epsilon_loss"), hdlm.EpsilonHybrid(0.1, 1.0)
    x_1 = data["x_0"]
    if tag == "plain":
        p, active, hidden = hybrid.masking(1 - data["plain_t"].double()), torch.ones(16, dtype=torch.bool), None
    else:
        width = 16 if tag == "one_block" else 8
        times = 1 - hdlm.BlockSchedule(width, 8).times(16)[int(data[f"{tag}_step"]) - 1]
        same(times, data[f"{tag}_time"], 1e-6)
        p, active = times.expand(3, 16), data[f"{tag}_active"]
        hidden = hdlm.hidden_positions(8, 16, 16, width=8) if tag == "two_blocks" else None
    tokens = torch.zeros_like(x_1)
    coins = data[f"{tag}_coin_mask"], data[f"{tag}_coin_shuffle"]
    drawn = hybrid.corrupt(x_1, p, mask=48, coin_mask=coins[0], coin_replace=coins[1], tokens=tokens)
    if f"{tag}_tokens" in data:
        tokens[drawn.replaced] = data[f"{tag}_tokens"]
    noised = hybrid.corrupt(x_1, p, mask=48, coin_mask=coins[0], coin_replace=coins[1], tokens=tokens)
    assert torch.equal(noised.x_t, data[f"{tag}_x_t"])
    with torch.no_grad():
        logits = run(epsilon(), noised.x_t, NONE, hidden=hidden)
    entropy = -torch.log_softmax(logits, -1).gather(-1, x_1[..., None])[..., 0]
    weights = hybrid.weights(noised, p, scheduled=tag != "plain") * active
    same((weights * entropy).sum() / (3 * active.sum()), data[f"{tag}_loss"], 2e-5, relative=True)


@needs_golden
def test_epsilon_samplers():
    data = vectors("hdlm_epsilon_samplers")
    t, t_next, eta = 1 - float(data["t"]), 1 - float(data["s"]), float(data["eta"])
    for name, rule in (("original", hdlm.Correction(0.0)), ("acs", hdlm.Correction(eta))):
        same(rule.law(data["logits"], data["state"], t, t_next), data[name], 3e-6)


@needs_golden
def test_gamma_logits_and_scores():
    data, hybrid = vectors("hdlm_gamma_forward"), hdlm.GammaHybrid(0.1)
    head = gamma_head(data["x_t"], data["sigma"][:, 0])
    same(head, data["head"], 2e-5)
    same(hybrid.log_score(head, data["sigma"]), data["log_score"], 2e-5)
    ragged = gamma_head(data["x_t"], data["sigma_ragged"])
    same(hybrid.log_score(ragged, data["sigma_ragged"]), data["log_score_ragged"], 2e-5)


@needs_golden
def test_gamma_loss():
    data, hybrid = vectors("hdlm_gamma_loss"), hdlm.GammaHybrid(0.1)
    t = 1 - data["t"].double()
    same(hybrid.noising.sigma(t), data["sigma"], 2e-5)
    same(hybrid.noising.rate(t), data["dsigma"], 2e-5, relative=True)
    entropy = hybrid.score_entropy(data["log_score"], data["x_0"], data["x_t"], sigma=data["sigma"])
    same(entropy, data["score_entropy"], 2e-4, relative=True)


@needs_golden
def test_gamma_loss_in_training():
    data, hybrid = vectors("hdlm_gamma_loss"), hdlm.GammaHybrid(0.1)
    t = hdlm.BlockSchedule(16, 8).times(16)[int(data["train_step"]) - 1].expand(3, 16)
    same(hybrid.noising.sigma(t), data["train_sigma"], 2e-5)
    sigma = data["train_sigma"]
    log_scores = hybrid.log_score(gamma_head(data["train_x_t"], sigma), sigma)
    entropy = hybrid.score_entropy(log_scores, data["x_0"], data["train_x_t"], sigma=sigma)
    loss = (hybrid.noising.rate(t) * entropy).sum(-1)
    same(loss, data["train_diffusion_loss"], 1e-4, relative=True)
    assert bool((data["train_ce_loss"] == 0).all())


@needs_golden
@pytest.mark.parametrize("own", ["network", "one"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_gamma_steps(k, own):
    data, rule = vectors("hdlm_gamma_samplers"), hdlm.GammaRule(hdlm.GammaHybrid(0.1), own)
    t, x_t = 1 - data[f"t_{k}"].double(), data[f"state_{k}"]
    t_next = t + data[f"dt_{k}"].double()
    logits = gamma_head(x_t, rule.hybrid.noising.sigma(t).float())
    theirs = data[f"analytic{'_own_one' if own == 'one' else ''}_{k}"].double()
    weights = rule.weights(logits, x_t, t, t_next)
    if bool(data[f"last_{k}"].all()):
        weights[..., -1] = 0
    same(weights / theirs.abs().max(), theirs / theirs.abs().max(), 5e-5)
    same(clipped(weights), clipped(theirs), 5e-5)


@needs_golden
@pytest.mark.parametrize(("width", "depth"), [(16, 8), (8, 4), (8, 8)])
def test_block_schedules(width, depth):
    data, schedule = vectors("hdlm_schedules"), hdlm.BlockSchedule(width, depth)
    assert torch.equal(schedule.levels(16), data[f"levels_{width}_{depth}"])
    assert torch.equal(schedule.settled(16), data[f"settled_{width}_{depth}"])
    same(1 - schedule.times(16), data[f"times_{width}_{depth}"], 1e-6)
    assert schedule.calls(16) == len(schedule.levels(16))


@needs_golden
def test_the_sliding_schedule():
    data, schedule = vectors("hdlm_schedules"), hdlm.SlidingSchedule(4, 8)
    assert torch.equal(schedule.levels(16), data["levels_slide_4_8"])
    assert torch.equal(schedule.settled(16), data["settled_slide_4_8"])
