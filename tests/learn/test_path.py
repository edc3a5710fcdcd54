import math

import pytest
import torch
from lessons import BATCH, LENGTH, VOCAB, batch_of, gradients, states
from networks import MixerNet, TableNet
from worlds import SCHEDULES, SOURCES, world

from fsdfm.data import TrainingBatch
from fsdfm.flow import ExactDenoiser, MaskSource, MixturePath, UniformSource, dyadic_step_sizes, path_loss
from fsdfm.flow.exact import all_states
from fsdfm.learn import CrossEntropy, FewStepObjective, FineTimes, GeneralisedKL, MultiplesOfH, PathObjective
from fsdfm.learn import path as path_module
from fsdfm.learn.losses import chunked_loss
from fsdfm.noise import Noise, Purpose


def test_times_are_multiples_of_h_or_fine():
    h = dyadic_step_sizes().repeat_interleave(1000)
    u = Noise(0, range(len(h))).uniform(Purpose.TIME, 1)[:, 0]
    for grid in (MultiplesOfH(), FineTimes()):
        t = grid(h, u)
        assert float(t.min()) >= 0
        assert bool((t + h <= 1).all())
    assert bool((MultiplesOfH()(h, u) % h == 0).all())
    assert float(FineTimes()(h, u)[-3000:-2000].unique().numel()) > 100
    assert MultiplesOfH()(torch.tensor([0.25] * 4), torch.tensor([0.1, 0.3, 0.6, 0.99])).tolist() == [
        0,
        0.25,
        0.5,
        0.75,
    ]


def test_the_path_objective_is_the_mean_path_loss():
    path = MixturePath(UniformSource(VOCAB))
    model = MixerNet(VOCAB)
    batch, noise = batch_of(path)
    outcome = PathObjective(path)(model, batch, noise, training_step=0, ema=model)
    h = torch.full((BATCH,), 2.0**-10, dtype=torch.float64)
    t = MultiplesOfH()(h, noise.uniform(Purpose.TIME, 1)[:, 0])
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, t, noise=noise)
    expected = path_loss(model(x_t, t, h), batch.x_1, x_t, scalar=path.schedule.mean_scalar(t, t + h))
    assert torch.allclose(outcome.loss, expected.mean(), rtol=1e-5)
    assert torch.allclose(outcome.sample_loss, expected.mean(1), rtol=1e-4)
    p_t = torch.softmax(model(x_t, t, h), -1).gather(-1, x_t[..., None])[..., 0]
    exit_rate = (path.schedule.mean_scalar(t, t + h)[:, None] * (1 - p_t)).mean()
    assert outcome.logs["exit_rate"] == pytest.approx(exit_rate.item(), rel=1e-4)


def test_chunked_gradients_are_those_of_plain_autograd():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    _, chunked = gradients(PathObjective(path), model, batch, noise)
    h = torch.full((BATCH,), 2.0**-10, dtype=torch.float64)
    t = MultiplesOfH()(h, noise.uniform(Purpose.TIME, 1)[:, 0])
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, t, noise=noise)
    model.zero_grad()
    path_loss(model(x_t, t, h), batch.x_1, x_t, scalar=path.schedule.mean_scalar(t, t + h)).mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, chunked[name], rtol=1e-4, atol=1e-6), name


def test_given_and_padded_positions_are_left_out():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    plain, noise = batch_of(path, size=4)
    given, real = (torch.zeros(4, LENGTH, dtype=torch.bool) for _ in range(2))
    given[:, 0], real[:, :4] = True, True
    seen = []
    model.trunk = lambda x_t, t, h, trunk=model.trunk: (seen.append(x_t), trunk(x_t, t, h))[1]
    outcome, _ = gradients(PathObjective(path), model, TrainingBatch(plain.x_1, given=given, real=real), noise)
    assert torch.equal(seen[0][:, 0], plain.x_1[:, 0])
    scalar = path.schedule.mean_scalar(outcome.t, outcome.t + outcome.h)
    expected = path_loss(model(seen[0], outcome.t, outcome.h), plain.x_1, seen[0], scalar=scalar)
    assert torch.allclose(outcome.loss, expected[:, 1:4].mean(), rtol=1e-5)  # the mean over the three that are scored
    nothing, _ = gradients(PathObjective(path), model, TrainingBatch(plain.x_1, real=~real & real), noise)
    assert float(nothing.loss.detach()) == 0


def test_the_mask_source_scores_masked_positions_only():
    path, model = MixturePath(MaskSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    late = PathObjective(path, h=2.0**-10, times=lambda h, u: torch.full_like(h, 1 - 2.0**-10))
    outcome = late(model, batch, noise, training_step=0, ema=model)
    assert int((outcome.sample_loss > 0).sum()) <= 2  # at the last time hardly anything is masked


def test_at_the_last_interval_the_scalar_is_finite():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    for h in (2.0**-10, 0.5, 1.0):
        end = PathObjective(path, h=h, times=lambda h, u: 1 - h)
        assert bool(torch.isfinite(end(model, batch, noise, training_step=0, ema=model).loss))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("loss", [GeneralisedKL(), CrossEntropy()], ids=str)
def test_both_losses_are_smallest_at_the_true_posterior(source, schedule, loss):
    """Enumerated expectations over (x_0, x_1, x_t): the gradient at the exact logits is zero."""
    path, p_1 = world(source, schedule, vocab=2)
    exact, vocab, t = ExactDenoiser(path, p_1=p_1), path.source.vocab_size, 0.4
    states, kappa, p_0 = all_states(vocab, 2), float(schedule.kappa(t)), path.source.probabilities()
    x_0, x_1, x_t = (states[i] for i in torch.cartesian_prod(*[torch.arange(len(states))] * 3).T)
    shows = (1 - kappa) * (x_t == x_0).double() + kappa * (x_t == x_1).double()
    weight = p_0[x_0].prod(1) * p_1[x_1[:, 0], x_1[:, 1]] * shows.prod(1)
    model = TableNet(vocab, 2, slots=1)
    with torch.no_grad():
        model.table.copy_(exact.table(t).clamp(min=1e-30).log())
    kept = weight > 0
    x_1, x_t, weight = x_1[kept], x_t[kept], weight[kept]
    movable = path.source.movable(x_t)
    rows = path_module.NoisedRows(x_1, x_t, movable * weight[:, None].float(), movable, torch.ones_like(movable))
    features = model.trunk(x_t, torch.full((len(x_t),), t), torch.full((len(x_t),), 0.1)).flatten(0, 1)
    exits = torch.zeros(x_t.numel())
    losses = path_module._path_rows(path, rows, schedule.scalar(t).expand(len(x_t)), loss=loss, exits=exits)
    total, _ = chunked_loss(model, features, rows.weight.flatten(), losses=losses)
    (gradient,) = torch.autograd.grad(total, model.table)
    assert float(gradient.abs().max()) < 2e-6
    with torch.no_grad():
        model.table.mul_(0.5)
    features = model.trunk(x_t, torch.full((len(x_t),), t), torch.full((len(x_t),), 0.1)).flatten(0, 1)
    total, _ = chunked_loss(model, features, rows.weight.flatten(), losses=losses)
    (elsewhere,) = torch.autograd.grad(total, model.table)
    assert float(elsewhere.abs().max()) > 1e-3


def test_coupled_pairs_bring_their_own_x_0():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path, size=4)
    seen = []
    model.trunk = lambda x_t, t, h, trunk=model.trunk: (seen.append(x_t), trunk(x_t, t, h))[1]
    x_0 = torch.full_like(batch.x_1, 5)
    start = PathObjective(path, times=lambda h, u: torch.zeros_like(h))
    start(model, TrainingBatch(batch.x_1, x_0=x_0), noise, training_step=0, ema=model)
    assert bool((seen[0] == 5).all())


def test_rows_without_noise_of_their_own_draw_it():
    path = MixturePath(UniformSource(VOCAB))
    batch, noise = batch_of(path, size=4)
    x_0 = torch.full_like(batch.x_1, 5)
    x_0[1::2] = -1
    start = PathObjective(path, times=lambda h, u: torch.zeros_like(h))
    shown, _ = states(start, TrainingBatch(batch.x_1, x_0=x_0), noise)
    assert bool((shown[::2] == 5).all())
    assert torch.equal(shown[1::2], path.source.sample(noise, LENGTH)[1::2])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_turns_are_spaced_in_a_share_of_the_rows(share):
    """Spaced rows show x_1 where frac(U + i/phi) < kappa: of any five neighbours one to three at kappa = 0.4."""
    path = MixturePath(UniformSource(VOCAB))
    x_1 = torch.ones(400, 200, dtype=torch.int64)
    noise = Noise(0, range(400))
    batch = TrainingBatch(x_1, x_0=torch.zeros_like(x_1))
    for kind in (PathObjective, FewStepObjective):
        objective = kind(path, times=lambda h, u: torch.full_like(h, 0.4), spaced_share=share)
        shown, _ = states(objective, batch, noise)
        counts = shown.view(400, 40, 5).sum(-1)
        spaced = ((counts >= 1) & (counts <= 3)).all(1)
        assert abs(float(spaced.double().mean()) - share) < 0.08
        assert abs(float(shown.double().mean()) - 0.4) < 0.02


def test_the_scalar_of_the_last_step_is_the_redraws_per_time():
    """gbar is infinite at t + h = 1; w / h with w = 1 takes its place, and everywhere else it is G / h."""
    path = MixturePath(UniformSource(VOCAB))
    h = torch.tensor([0.25, 0.5, 1.0, 0.25], dtype=torch.float64)
    t = torch.tensor([0.75, 0.5, 0.0, 0.5], dtype=torch.float64)
    expected = [4.0, 2.0, 1.0, math.log(0.5 / 0.25) / 0.25]
    assert path_module._path_scalar(path, t, h).tolist() == pytest.approx(expected)


def test_the_mean_is_over_all_scored_positions_not_the_movable_ones():
    """Under the mask source a revealed position costs nothing, but counts: long texts late in time weigh less."""
    path, model = MixturePath(MaskSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    objective = PathObjective(path, loss=CrossEntropy(), times=lambda h, u: torch.full_like(h, 0.5))
    outcome = objective(model, batch, noise, training_step=0, ema=model)
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, outcome.t, noise=noise)
    logits = model(x_t, outcome.t, outcome.h)
    logits[..., path.source.mask_token] = -torch.inf
    nll = -torch.log_softmax(logits, -1).gather(-1, batch.x_1[..., None])[..., 0]
    masked = x_t == path.source.mask_token
    assert bool(masked.any())
    assert not bool(masked.all())
    assert torch.allclose(outcome.loss, torch.where(masked, nll, 0.0).sum(1).mean() / LENGTH, rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"smallest_h": -31}, {"smallest_h": 1}, {"spaced_share": 1.5}], ids=str)
def test_keys_out_of_range_are_errors(wrong):
    with pytest.raises(ValueError, match="allowed are"):
        path_module.PathConfig(**wrong)


def test_a_scaled_loss_has_scaled_gradients():
    """As accumulation divides it: of the trunk and of the head, which the chunks differentiate by hand."""
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    _, plain = gradients(PathObjective(path), model, batch, noise)
    model.zero_grad()
    (PathObjective(path)(model, batch, noise).loss / 4).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(4 * parameter.grad, plain[name], rtol=1e-4, atol=1e-7), name


def test_fine_times_reach_the_last_step():
    h = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
    almost_one = torch.full((3,), 1 - 2.0**-40, dtype=torch.float64)
    assert torch.equal(FineTimes(2.0**-4)(h, almost_one), 1 - h)
    assert torch.equal(FineTimes(2.0**-4)(h, 1 - almost_one), torch.zeros(3, dtype=torch.float64))
