import math

import pytest
import torch
from lessons import BATCH, LENGTH, VOCAB, batch_of
from peer_files import small_network

from fsdfm.flow import CosineSchedule, MaskSource, MixturePath, UniformSource
from fsdfm.learn import OBJECTIVES
from fsdfm.peers import duo, hdlm, mdlm, sedd
from fsdfm.peers.noising import Geometric
from fsdfm.peers.objectives import (
    ConsistencyConfig,
    ConsistencyObjective,
    DuoConfig,
    DuoObjective,
    GammaConfig,
    GammaObjective,
    HybridConfig,
    HybridObjective,
    MdlmObjective,
    RoundConfig,
    RoundObjective,
    ScoreConfig,
    ScoreObjective,
    UniformScoreObjective,
)

MASKED, EVEN = MixturePath(MaskSource(VOCAB + 1)), MixturePath(UniformSource(VOCAB))
EVERY = {
    "mdlm": lambda **o: MdlmObjective(MASKED, **o),
    "sedd-absorb": lambda **o: ScoreObjective(MASKED, **o),
    "sedd-uniform": lambda **o: UniformScoreObjective(EVEN, **o),
    "sedd-absorb geometric": lambda **o: ScoreObjective(MASKED, noise="geometric", **o),
    "sedd-uniform log-linear": lambda **o: UniformScoreObjective(EVEN, noise="log-linear", **o),
    "duo": lambda **o: DuoObjective(EVEN, **o),
    "duo soft": lambda **o: DuoObjective(EVEN, config=DuoConfig(curriculum_steps=9), **o),
    "duo-dcd": lambda **o: ConsistencyObjective(EVEN, config=ConsistencyConfig(step=0.25), **o),
    "duo-dcd fwd": lambda **o: ConsistencyObjective(EVEN, config=ConsistencyConfig(divergence="kl-fwd"), **o),
    "sdtt": lambda **o: RoundObjective(MASKED, config=RoundConfig(step=0.125), **o),
    "sdtt released mse": lambda **o: RoundObjective(
        MASKED, config=RoundConfig(step=0.125, times="released", divergence="mse"), **o
    ),
    "hdlm-epsilon": lambda **o: HybridObjective(MASKED, config=HybridConfig(epsilon=0.2), **o),
    "hdlm-gamma": lambda **o: GammaObjective(MASKED, config=GammaConfig(gamma=0.3), **o),
}


def network_of(objective, seed=0):
    return small_network(seed, vocab_size=objective.path.source.vocab_size, **objective.network)


def ask(objective, model, ema=None, **options):
    batch, noise = batch_of(objective.path, **options)
    return objective(model, batch, noise, training_step=0, ema=ema or model)


@pytest.mark.parametrize("name", EVERY)
def test_chunks_change_nothing_and_gradients_reach_the_network(name):
    grads = []
    for chunk in (None, 7):
        objective = EVERY[name](chunk=chunk)
        model = network_of(objective)
        outcome = ask(objective, model, network_of(objective, 1))
        outcome.loss.backward()
        if not name.startswith("sdtt"):  # whose mean is over the masks of the whole batch
            assert float(outcome.loss.detach()) == pytest.approx(float(outcome.sample_loss.mean()), rel=1e-4)
        grads.append((float(outcome.loss.detach()), model.blocks[0].mlp.into.weight.grad))
    assert grads[0][0] == pytest.approx(grads[1][0], rel=1e-4)
    assert torch.allclose(grads[0][1], grads[1][1], atol=1e-4 * float(grads[0][1].abs().max()))
    assert float(grads[0][1].abs().max()) > 0


@pytest.mark.parametrize("name", EVERY)
def test_given_positions_are_shown_and_not_scored(name):
    objective = EVERY[name]()
    model, seen = network_of(objective), []
    trunk = model.trunk
    model.trunk = lambda x_t, t, h, **o: (seen.append(x_t), trunk(x_t, t, h, **o))[1]
    given = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    given[:, :3] = True
    batch, noise = batch_of(objective.path, given=given)
    objective(model, batch, noise, training_step=0, ema=network_of(objective, 1))
    assert all(torch.equal(x_t[:, :3], batch.x_1[:, :3]) for x_t in seen)


def test_mdlm_is_its_equation():
    objective = MdlmObjective(MASKED, chunk=None)
    model, seen = network_of(objective), []
    trunk = model.trunk
    model.trunk = lambda x_t, t, h: (seen.append((x_t, t)), trunk(x_t, t, h))[1]
    batch, noise = batch_of(MASKED)
    outcome = objective(model, batch, noise, training_step=0, ema=model)
    ((x_t, t),) = seen
    log_p = mdlm.subs(model(x_t, t), x_t).gather(-1, batch.x_1[..., None])[..., 0]
    expected = mdlm.nelbo(log_p, x_t == VOCAB, t).mean()
    assert float((outcome.loss - expected).detach()) == pytest.approx(0, abs=1e-4)
    assert len(set((t * BATCH).floor().tolist())) >= BATCH - 1  # a stratum each


@pytest.mark.parametrize("noise", ["log-linear", "geometric"])
@pytest.mark.parametrize("kind", [ScoreObjective, UniformScoreObjective])
def test_both_graphs_of_sedd_are_their_equations_under_both_schedules(kind, noise):
    masked = kind is ScoreObjective
    objective = kind(MASKED if masked else EVEN, noise=noise, chunk=None)
    model, seen = network_of(objective), []
    trunk = model.trunk
    model.trunk = lambda x_t, t, h: (seen.append((x_t, t)), trunk(x_t, t, h))[1]
    batch, noise_of_batch = batch_of(objective.path)
    outcome = objective(model, batch, noise_of_batch, training_step=0, ema=model)
    ((x_t, kappa),) = seen
    sigma = -torch.log(kappa)
    rate = 0.999 / kappa if noise == "log-linear" else sigma * torch.log(torch.tensor(20 / 1e-4)).double()
    graph = sedd.Absorb() if masked else sedd.Uniform()
    scores = sedd.log_score(model(x_t, kappa), x_t, sigma, scaled=masked)
    losses = graph.score_entropy(scores, batch.x_1, x_t, sigma=sigma) * rate[:, None]
    assert float(outcome.loss.detach()) == pytest.approx(float(losses.mean().detach()), rel=1e-3)
    low, high = (1e-3, 1.0) if noise == "log-linear" else (math.exp(-20), math.exp(-1e-4))
    assert bool(((kappa > low) & (kappa < high)).all())
    assert (float(kappa.min()) < 1e-3) == (noise == "geometric")  # half of its times are nearly all noise
    assert model.config.clock == {"log-linear": "sigma", "geometric": "geometric"}[noise]


@pytest.mark.parametrize("name", ["duo", "sedd-uniform"])
def test_uniform_losses_are_their_equations(name):
    objective = EVERY[name](chunk=None)
    model, seen = network_of(objective), []
    trunk = model.trunk
    model.trunk = lambda x_t, t, h: (seen.append((x_t, t)), trunk(x_t, t, h))[1]
    batch, noise = batch_of(EVEN)
    outcome = objective(model, batch, noise, training_step=0, ema=model)
    ((x_t, kappa),) = seen
    head = model(x_t, kappa)
    if name == "duo":
        log_probs = torch.log_softmax(head, -1)
        losses = duo.nelbo(log_probs, batch.x_1, x_t, kappa=kappa, kappa_dot=torch.ones_like(kappa))
    else:
        sigma = -torch.log(kappa)
        losses = (
            sedd.Uniform().score_entropy(sedd.log_score(head, x_t, sigma, scaled=False), batch.x_1, x_t, sigma=sigma)
            * (sigma * torch.log(torch.tensor(Geometric().largest / Geometric().smallest)))[:, None]
        )
    assert float(outcome.loss.detach()) == pytest.approx(float(losses.mean().detach()), rel=1e-3)


def test_gamma_is_its_equation_and_does_not_train_the_masks_output():
    objective = EVERY["hdlm-gamma"](chunk=None)
    model, seen = network_of(objective), []
    trunk = model.trunk
    model.trunk = lambda x_t, t, h: (seen.append((x_t, t)), trunk(x_t, t, h))[1]
    batch, noise = batch_of(MASKED)
    outcome = objective(model, batch, noise, training_step=0, ema=model)
    ((x_t, t),) = seen
    hybrid = hdlm.GammaHybrid(0.3)
    sigma = -torch.log(0.005 + 0.995 * t)
    scores = hybrid.log_score(model(x_t, t).double(), sigma)
    losses = hybrid.score_entropy(scores, batch.x_1, x_t, sigma=sigma) * (0.995 / (0.005 + 0.995 * t))[:, None]
    assert float(outcome.loss.detach()) == pytest.approx(float(losses.mean().detach()), rel=1e-4)
    shown = x_t != VOCAB
    assert bool(((x_t != batch.x_1) & shown).any())  # some are replaced
    outcome.loss.backward()
    assert float(model.head.weight.grad[-1].abs().max()) == 0
    assert float(model.head.weight.grad[:-1].abs().max()) > 0


@pytest.mark.parametrize("name", ["duo-dcd", "sdtt"])
def test_a_student_that_says_what_its_teacher_says_loses_little(name):
    objective = EVERY[name]()
    model = network_of(objective)
    own, other = ask(objective, model), ask(objective, model, network_of(objective, 1))
    assert float(own.loss.detach()) < 0.5 * float(other.loss.detach())
    assert objective.teacher.network == "parent"
    assert objective.teacher_share == 1
    assert objective.validation.teacher is None
    with pytest.raises(ValueError, match="its own objective"):
        objective.teacher.target(None, MASKED, None, t=None, h=None, noise=None)


def test_sdtt_asks_its_teacher_k_times_and_scores_masks_only():
    objective = RoundObjective(MASKED, config=RoundConfig(step=0.125, k=4))
    teacher, calls = network_of(objective, 1), []
    trunk = teacher.trunk
    teacher.trunk = lambda x_t, t, h: (calls.append(x_t), trunk(x_t, t, h))[1]
    ask(objective, network_of(objective), teacher)
    assert len(calls) == objective.teacher.calls == 4
    masks = [(x_t == VOCAB).sum().item() for x_t in calls]
    assert masks == sorted(masks, reverse=True)
    assert masks[0] > masks[3]


@pytest.mark.parametrize(
    "kind", ["mdlm", "sedd-absorb", "sedd-uniform", "duo", "duo-dcd", "sdtt", "hdlm-epsilon", "hdlm-gamma"]
)
def test_recipes_can_name_them(kind):
    entry = OBJECTIVES.find(kind)
    path = EVEN if kind in ("duo", "duo-dcd", "sedd-uniform") else MASKED
    objective = OBJECTIVES.build(entry.config(), path)
    assert len(objective.step_sizes) == 1
    wrong = MASKED if path is EVEN else EVEN
    with pytest.raises(ValueError, match="set flow.source"):
        OBJECTIVES.build(entry.config(), wrong)
    with pytest.raises(ValueError, match="flow.exponent"):
        OBJECTIVES.build(entry.config(), MixturePath(path.source, CosineSchedule()))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: DuoConfig(temperature=0.0),
        lambda: ConsistencyConfig(step=1.0),
        lambda: RoundConfig(step=0.6),
        lambda: HybridConfig(epsilon=1.0),
        lambda: GammaConfig(gamma=2.0),
        lambda: ScoreConfig(noise="linear"),
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match="allowed are"):
        bad()


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (DuoConfig(curriculum_steps=9), EVEN),
        (ConsistencyConfig(step=0.25), EVEN),
        (RoundConfig(step=0.125), MASKED),
        (HybridConfig(epsilon=0.2), MASKED),
        (GammaConfig(gamma=0.3), MASKED),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_an_objective_has_the_settings_of_its_recipe(config, path):
    assert OBJECTIVES.build(config, path).config == config
