"""HDLM, both hybrids, against what the originals computed."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from peer_vectors import SEDD, needs_golden, peer, same, vectors
from peer_worlds import MASKED_STATES, PADDED, Hybrid, V, hybrid_likelihood, masked_error, posterior

from fsdfm.model import DiT
from fsdfm.noise import Noise, Purpose
from fsdfm.peers import hdlm, mdlm, sedd
from fsdfm.peers.layouts import open_layout
from fsdfm.peers.network import blended_embedding, run
from fsdfm.peers.sampling import end_law
from fsdfm.peers.transition import clipped, joint_matrix

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
        same(rule.law(data["logits"], data["state"], t=t, t_next=t_next), data[name], 3e-6)


@needs_golden
def test_gamma_logits_and_scores():
    data, hybrid = vectors("hdlm_gamma_forward"), hdlm.GammaHybrid(0.1)
    head = gamma_head(data["x_t"], data["sigma"][:, 0])
    same(head, data["head"], 2e-5)
    same(hybrid.log_score(head, data["sigma"]), data["log_score"], 2e-5)
    ragged = gamma_head(data["x_t"], data["sigma_ragged"])
    same(hybrid.log_score(ragged, data["sigma_ragged"]), data["log_score_ragged"], 2e-5)


@needs_golden
def test_an_imported_gamma_network_says_what_the_original_says(tmp_path):
    """Their layout in a network of ours that blends the mask in itself, asked by our time."""
    data = vectors("hdlm_gamma_forward")
    place = tmp_path / "m"
    place.mkdir()
    shutil.copy(SEDD / "hdlm_gamma_weights.safetensors", place / "model.safetensors")
    shutil.copy(SEDD / "hdlm_gamma_config.json", place / "config.json")
    with open_layout(place) as found:
        assert (found.system, found.about.gamma, found.about.length) == ("hdlm-gamma", 0.1, 16)
        model = DiT(replace(found.config, clock="hybrid", blend=found.about.gamma)).eval()
        model.load_state_dict(dict(found))
    sigma = data["sigma"][:, 0].double()
    t = (torch.exp(-sigma) - 5e-3) / (1 - 5e-3)
    with torch.no_grad():
        head = model(data["x_t"], t)
    same(head, data["head"], 2e-5)


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
    weights = rule.weights(logits, x_t, t=t, t_next=t_next)
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


# --- closed forms -----------------------------------------------------------------------------------------------------


def acs_error(epsilon, eta, steps):
    hybrid = hdlm.EpsilonHybrid(epsilon)
    exact = Hybrid(lambda t: hybrid_likelihood(float(hybrid.masking(t)), epsilon))

    def say(t):
        return posterior(exact, MASKED_STATES, t)

    return masked_error(hdlm.Correction(eta), steps, say=say)


def test_acs_without_replacements_is_mdlm():
    assert acs_error(0.0, 0.1, 8) == pytest.approx(masked_error(mdlm.Ancestral(), 8), abs=1e-9)


def test_acs_does_not_converge_and_more_corrections_make_it_worse():
    """Its network allows for replaced tokens that a sampler from masks never makes; each redraw believes them."""
    few, many = acs_error(0.1, 0.1, 16), acs_error(0.1, 0.1, 128)
    assert many > 1.5 * few
    assert acs_error(0.1, 0.0, 128) > 0.03  # nor does the sampler without corrections


def test_noise_has_the_stated_shares():
    hybrid, n = hdlm.EpsilonHybrid(0.2), 20_000
    noise = Noise(0)
    coins = [noise.uniform(purpose, n) for purpose in (Purpose.COIN, Purpose.PATH)]
    drawn = hybrid.corrupt(
        torch.zeros(1, n, dtype=torch.int64),
        torch.tensor([0.6]),
        mask=9,
        coin_mask=coins[0],
        coin_replace=coins[1],
        tokens=torch.full((1, n), 5),
    )
    assert float(drawn.masked.double().mean()) == pytest.approx(0.6, abs=0.015)
    assert float((drawn.x_t == 5).double().mean()) == pytest.approx(0.4 * 0.2, abs=0.008)
    gamma = hdlm.GammaHybrid(0.3)
    x_t = gamma.corrupt(
        torch.zeros(1, n, dtype=torch.int64),
        torch.tensor([0.8]),
        mask=9,
        coins=(coins[0], coins[1]),
        tokens=torch.full((1, n), 5),
    )
    assert float((x_t == 9).double().mean()) == pytest.approx(1 - math.exp(-0.7 * 0.8), abs=0.015)
    assert float((x_t == 5).double().mean()) == pytest.approx(math.exp(-0.56) * (1 - math.exp(-0.24)), abs=0.01)


def ideal_head(hybrid, probs, states, sigma):
    """What gamma-HDLM's loss is least at: scores of the two pure graphs for the hybrid's posterior."""
    masked = states == probs.shape[-1] - 1
    shown = torch.where(masked, 0, states)
    absorb = sedd.Absorb().scores(probs, states, sigma)
    uniform = torch.cat([sedd.Uniform().scores(probs[..., :-1], shown, sigma), absorb[..., -1:]], -1)
    scores = torch.where(masked[..., None], absorb, uniform).clamp(min=1e-30)
    return torch.log(scores) + torch.log(torch.expm1(sigma)) + math.log(probs.shape[-1] - 1)


@pytest.mark.parametrize(("tokens", "weight"), [(48, 0.02), (2048, -0.001)])
def test_the_own_score_of_the_released_sampler_reveals_masks_far_too_early(tokens, weight):
    """The mask's weight in a step of 1/1024 is 0.02 instead of 0.998, and negative with a larger vocabulary."""
    hybrid, x_t = hdlm.GammaHybrid(0.1), torch.tensor([[tokens]])
    t, t_next = 0.5, 0.5 + 1 / 1024
    probs = torch.full((1, 1, tokens + 1), 1 / tokens).double().index_fill(-1, x_t[0], 0.0)
    head = ideal_head(hybrid, probs, x_t, hybrid.noising.sigma(t))
    assert float(hdlm.GammaRule(hybrid, "one").law(head, x_t, t=t, t_next=t_next)[0, 0, -1]) == pytest.approx(
        0.998, abs=1e-3
    )
    head[..., -1] = 0.0  # nothing trains it
    released = hdlm.GammaRule(hybrid, "network")
    assert float(released.weights(head, x_t, t=t, t_next=t_next)[0, 0, -1]) == pytest.approx(weight, abs=2e-3)
    assert (float(released.law(head, x_t, t=t, t_next=t_next)[0, 0, -1]) == 0) == (weight < 0)


def gamma_error(own, steps):
    hybrid = hdlm.GammaHybrid(0.1)
    rule = hdlm.GammaRule(hybrid, own)

    def shares(t):
        sigma = float(hybrid.noising.sigma(t))
        return hybrid_likelihood(1 - math.exp(-0.9 * sigma), 1 - math.exp(-0.1 * sigma))

    exact = Hybrid(shares)

    def say(t):
        head = ideal_head(hybrid, posterior(exact, MASKED_STATES, t).exp(), MASKED_STATES, hybrid.noising.sigma(t))
        return head if own == "one" else head.scatter(-1, MASKED_STATES[..., None], 0.0)

    times = hdlm.level_times(torch.arange(steps - 1, -1, -1), steps)
    masked = 1 - math.exp(-0.9 * 4)
    place = torch.tensor([(1 - masked) / V] * V + [masked]).double()
    start = torch.einsum("i,j,k->ijk", place, place, place).flatten()
    law = end_law(rule, say, start, times=times, states=MASKED_STATES)
    last = float(times[-1])
    law = law @ joint_matrix(rule.last_law(say(last), MASKED_STATES, t=last, t_next=last + 0.99e-3))
    return float((law - PADDED.flatten()).abs().sum() / 2)


def test_gamma_does_not_converge_even_mended_and_far_less_as_released():
    errors = {own: [gamma_error(own, steps) for steps in (32, 128)] for own in ("one", "network")}
    assert errors["one"][1] > 0.02  # a floor
    assert errors["one"][1] == pytest.approx(errors["one"][0], rel=0.2)
    assert min(errors["network"]) > 0.3


def test_levels_divide_the_noise_evenly():
    noise = 1 - hdlm.level_times(torch.arange(5), 4)
    assert noise.tolist() == pytest.approx([1e-3, 1e-3 + 0.998 / 3, 1e-3 + 2 * 0.998 / 3, 0.999, 0.9999], abs=1e-12)


def test_remask_fills_and_masks_again():
    logits = torch.zeros(1, 2, 4)
    law = hdlm.Remask().law(logits, torch.tensor([[3, 1]]), t=0.5, t_next=0.75)
    assert law[0, 1].tolist() == pytest.approx([0, 0.5, 0, 0.5])
    assert law[0, 0].tolist() == pytest.approx([0.125, 0.125, 0.125, 0.625])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="gamma is 2"):
        hdlm.GammaHybrid(2.0)
    with pytest.raises(ValueError, match="epsilon is 1"):
        hdlm.EpsilonHybrid(1.0)
