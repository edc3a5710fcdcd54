import pytest
import torch
from networks import MixerNet, TableNet
from worlds import SCHEDULES, SOURCES, world

from fsdfm.flow import (
    POLICIES,
    Chain,
    ExactDenoiser,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    UniformSource,
    dyadic_step_sizes,
    path_loss,
)
from fsdfm.flow.exact import all_states
from fsdfm.learn import objective as module
from fsdfm.learn.losses import chunked_loss
from fsdfm.learn.objective import (
    Batch,
    CrossEntropy,
    FewStepObjective,
    FineTimes,
    GeneralisedKL,
    MultiplesOfH,
    PathObjective,
)
from fsdfm.learn.teacher import TABLEAUS, ShortcutTeacher
from fsdfm.model import ModelConfig
from fsdfm.model.dit import TransitionTables
from fsdfm.noise import Noise, Purpose

VOCAB, LENGTH, BATCH = 11, 6, 32


def batch_of(path, *, size=BATCH, first=0, **options):
    noise = Noise(4, range(first, first + size))
    vocab = path.source.vocab_size - (path.source.mask_token is not None)
    return Batch(noise.integers(Purpose.DATA, LENGTH, vocab), **options), noise


def gradients(objective, model, batch, noise, *, training_step=0, ema=None):
    model.zero_grad()
    outcome = objective(model, batch, noise, training_step=training_step, ema=ema or model)
    outcome.loss.backward()
    return outcome, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, t, noise)
    expected = path_loss(model(x_t, t, h), batch.x_1, x_t, path.schedule.mean_scalar(t, t + h))
    assert torch.allclose(outcome.loss, expected.mean(), rtol=1e-5)
    assert torch.allclose(outcome.sample_loss, expected.mean(1), rtol=1e-4)
    p_t = torch.softmax(model(x_t, t, h), -1).gather(-1, x_t[..., None])[..., 0]
    exit_rate = (path.schedule.mean_scalar(t, t + h)[:, None] * (1 - p_t)).mean()
    assert outcome.logs["exit_rate"] == pytest.approx(exit_rate.item(), rel=1e-4)


@pytest.mark.parametrize("source", [UniformSource(VOCAB), MaskSource(VOCAB)], ids=str)
@pytest.mark.parametrize("teacher", ["rk2", "rk4", "chained"])
def test_chunks_change_neither_loss_nor_gradient(source, teacher):
    path, model, ema = MixturePath(source), MixerNet(VOCAB), MixerNet(VOCAB, seed=1)
    batch, noise = batch_of(path)
    whole, parts = (
        FewStepObjective(path, teacher=ShortcutTeacher(TABLEAUS[teacher]), weights=POLICIES["TB-10"], chunk=chunk)
        for chunk in (None, 7)
    )
    whole, expected = gradients(whole, model, batch, noise, ema=ema)
    parts, actual = gradients(parts, model, batch, noise, ema=ema)
    assert torch.allclose(whole.loss, parts.loss, rtol=1e-5)
    for name, gradient in expected.items():
        assert torch.allclose(gradient, actual[name], rtol=1e-4, atol=1e-6), name


def test_chunked_gradients_are_those_of_plain_autograd():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    _, chunked = gradients(PathObjective(path), model, batch, noise)
    h = torch.full((BATCH,), 2.0**-10, dtype=torch.float64)
    t = MultiplesOfH()(h, noise.uniform(Purpose.TIME, 1)[:, 0])
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, t, noise)
    model.zero_grad()
    path_loss(model(x_t, t, h), batch.x_1, x_t, path.schedule.mean_scalar(t, t + h)).mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, chunked[name], rtol=1e-4, atol=1e-6), name


def test_distillation_is_the_forward_kl_to_the_teacher():
    path, model, ema = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB), MixerNet(VOCAB, seed=1)
    batch, noise = batch_of(path, size=8)
    teacher = ShortcutTeacher(TABLEAUS["rk2"])
    sizes = torch.tensor([0.5], dtype=torch.float64)
    objective = FewStepObjective(path, teacher=teacher, step_sizes=sizes, temperature=2.0)
    outcome = objective(model, batch, noise, training_step=0, ema=ema)
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, outcome.t, noise)
    target = teacher.target(ema, path, x_t, t=outcome.t, h=outcome.h, noise=noise)
    log_p = target.log_probs(slice(None), temperature=2.0, forbidden=None)
    log_q = torch.log_softmax(model(x_t, outcome.t, outcome.h) / 2.0, -1).flatten(0, 1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert torch.allclose(outcome.loss, kl.mean(), rtol=1e-4)
    assert outcome.logs["target_entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum(-1).mean()), rel=1e-4)
    same = objective(model, batch, noise, training_step=0, ema=model)
    assert bool(same.loss < outcome.loss)  # a student is closer to its own shortcut than to a stranger's


def test_rows_blend_by_their_step_size_and_only_those_ask_the_teacher():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    asked = []

    class Watched(ShortcutTeacher):
        def target(self, model, path, x_t, **options):
            asked.append(len(x_t))
            return super().target(model, path, x_t, **options)

    batch, noise = batch_of(path, size=30)
    objective = FewStepObjective(path, teacher=Watched(TABLEAUS["rk2"]))
    outcome = objective(model, batch, noise, training_step=0, ema=model)
    assert asked == [int((outcome.h >= 2.0**-9).sum())] == [10]  # TB-20: a third of the rows
    assert outcome.logs["loss"] == pytest.approx(
        outcome.logs["path_loss"] * 20 / 30 + outcome.logs["distil_loss"] * 10 / 30
    )
    assert float(outcome.sample_loss.mean()) == pytest.approx(float(outcome.loss.detach()), rel=1e-5)


def test_strict_threshold():
    """tau = 2^-9: h = 2^-10 takes the path loss, h = 2^-9 the teacher."""
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path, size=2)
    for size, name in [(2.0**-10, "path_loss"), (2.0**-9, "distil_loss")]:
        sizes = torch.tensor([size], dtype=torch.float64)
        logs = FewStepObjective(path, step_sizes=sizes)(model, batch, noise, training_step=0, ema=model).logs
        assert name in logs
        assert len({"path_loss", "distil_loss"} & set(logs)) == 1


def test_step_sizes_are_stratified_and_follow_the_policy():
    path = MixturePath(UniformSource(VOCAB))
    h = FewStepObjective(path).draw_step_sizes(Noise(0, range(300, 600)), 1, 300)
    counts = [int((h == size).sum()) for size in dyadic_step_sizes()]
    assert counts[0] == 200
    assert all(count == 10 for count in counts[1:])
    annealed = FewStepObjective(path, weights=POLICIES["AG"]).draw_step_sizes(Noise(0, range(110)), 10**6, 110)
    assert [int((annealed == size).sum()) for size in dyadic_step_sizes()] == [10] * 11


@pytest.mark.parametrize("kind", ["path", "few"])
def test_a_sample_has_the_same_loss_in_every_batch(kind):
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    objective = PathObjective(path) if kind == "path" else FewStepObjective(path)
    batch, noise = batch_of(path, size=12)
    whole = objective(model, batch, noise, training_step=3, ema=model)
    half = Batch(batch.x_1[6:], size=12)
    second = objective(model, half, noise[6:], training_step=3, ema=model)
    assert torch.equal(second.h, whole.h[6:])
    assert torch.allclose(second.sample_loss, whole.sample_loss[6:], rtol=1e-4, atol=1e-6)


def test_given_and_padded_positions_are_left_out():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    plain, noise = batch_of(path, size=4)
    given, real = (torch.zeros(4, LENGTH, dtype=torch.bool) for _ in range(2))
    given[:, 0], real[:, :4] = True, True
    seen = []
    model.trunk = lambda x_t, t, h, trunk=model.trunk: (seen.append(x_t), trunk(x_t, t, h))[1]
    outcome, _ = gradients(PathObjective(path), model, Batch(plain.x_1, given=given, real=real), noise)
    assert torch.equal(seen[0][:, 0], plain.x_1[:, 0])
    assert float(outcome.loss.detach()) > 0
    nothing, _ = gradients(PathObjective(path), model, Batch(plain.x_1, real=~real & real), noise)
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
    rows = module._Rows(x_1, x_t, movable * weight[:, None].float(), movable, torch.ones_like(movable))
    features = model.trunk(x_t, torch.full((len(x_t),), t), torch.full((len(x_t),), 0.1)).flatten(0, 1)
    exits = torch.zeros(x_t.numel())
    losses = module._path_rows(path, rows, schedule.scalar(t).expand(len(x_t)), loss=loss, exits=exits)
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
    start(model, Batch(batch.x_1, x_0=x_0), noise, training_step=0, ema=model)
    assert bool((seen[0] == 5).all())


def states(objective, batch, noise, training_step=0):
    """What the network is shown, and the step sizes."""
    model, seen = MixerNet(VOCAB), []
    model.trunk = lambda x_t, t, h, trunk=model.trunk: (seen.append(x_t), trunk(x_t, t, h))[1]
    outcome = objective(model, batch, noise, training_step=training_step, ema=model)
    return seen[0], outcome.h


def test_rows_without_noise_of_their_own_draw_it():
    path = MixturePath(UniformSource(VOCAB))
    batch, noise = batch_of(path, size=4)
    x_0 = torch.full_like(batch.x_1, 5)
    x_0[1::2] = -1
    start = PathObjective(path, times=lambda h, u: torch.zeros_like(h))
    shown, _ = states(start, Batch(batch.x_1, x_0=x_0), noise)
    assert bool((shown[::2] == 5).all())
    assert torch.equal(shown[1::2], path.source.sample(noise, LENGTH)[1::2])


def test_large_steps_take_the_pairs_that_are_made_for_them():
    """Rows of h >= 1/4 show one set of pairs, those of h = 1 another; neither prompts nor padding of the text count."""
    path = MixturePath(UniformSource(VOCAB))
    text, noise = batch_of(path)
    pairs = [(h, torch.full_like(text.x_1, k), torch.full_like(text.x_1, k)) for h, k in ((0.25, 7), (1.0, 8))]
    given = torch.zeros_like(text.x_1, dtype=torch.bool)
    given[:, :3] = True
    real = torch.ones_like(given)
    real[:, 5:] = False
    batch = Batch(
        torch.full_like(text.x_1, 2), x_0=torch.full_like(text.x_1, 2), given=given, real=real, larger=tuple(pairs)
    )
    objective = FewStepObjective(path, weights=POLICIES["PU"], path_below_h=2.0)
    shown, h = states(objective, batch, noise)
    expected = torch.where(h >= 1, 8, torch.where(h >= 0.25, 7, 2))
    assert set(expected.tolist()) == {2, 7, 8}
    assert torch.equal(shown, expected[:, None].expand_as(shown))
    settled = module._settled(path, batch, noise, h)
    large = h >= 0.25
    assert bool(settled.given[large, 0].all())
    assert not bool(settled.given[large, 1:].any())
    assert bool(settled.real[large].all())
    assert torch.equal(settled.given[~large], given[~large])
    assert torch.equal(settled.real[~large], real[~large])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_turns_are_spaced_in_a_share_of_the_rows(share):
    """Spaced rows show x_1 where frac(U + i/phi) < kappa: of any five neighbours one to three at kappa = 0.4."""
    path = MixturePath(UniformSource(VOCAB))
    x_1 = torch.ones(400, 200, dtype=torch.int64)
    noise = Noise(0, range(400))
    batch = Batch(x_1, x_0=torch.zeros_like(x_1))
    for kind in (PathObjective, FewStepObjective):
        objective = kind(path, times=lambda h, u: torch.full_like(h, 0.4), spaced_share=share)
        shown, _ = states(objective, batch, noise)
        counts = shown.view(400, 40, 5).sum(-1)
        spaced = ((counts >= 1) & (counts <= 3)).all(1)
        assert abs(float(spaced.double().mean()) - share) < 0.08
        assert abs(float(shown.double().mean()) - 0.4) < 0.02


def test_bad_temperature_is_an_error():
    with pytest.raises(ValueError, match="allowed"):
        FewStepObjective(MixturePath(UniformSource(3), PolynomialSchedule()), temperature=0)


def test_processes_ask_a_teacher_together_or_not_at_all():
    """A rank without rows for the teacher still asks it, as often as the others: its weights may be shared out."""
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    objective = FewStepObjective(path, teacher=ShortcutTeacher(TABLEAUS["rk4"]))
    whole, noise = batch_of(path)
    asked = []

    class Teacher(MixerNet):
        def trunk(self, x_t, t, h):
            asked.append(len(x_t))
            return super().trunk(x_t, t, h)

    teacher, total = Teacher(VOCAB, seed=1), 0.0
    for rows in (slice(0, 8), slice(8, 32)):  # the first rows take the smallest step, and with it the path loss
        asked.clear()
        part = Batch(whole.x_1[rows], size=BATCH, processes=2)
        outcome = objective(model, part, noise[rows], training_step=0, ema=teacher)
        assert len(asked) == 4
        assert asked[0] == max(1, int((outcome.h >= 2.0**-9).sum()))
        total += outcome.logs["loss"] * len(part.x_1) / BATCH
    expected = objective(model, Batch(whole.x_1, size=BATCH), noise, training_step=0, ema=teacher)
    assert total == pytest.approx(expected.logs["loss"], rel=1e-6)
    asked.clear()
    objective(model, Batch(whole.x_1[:8], size=BATCH), noise[:8], training_step=0, ema=teacher)
    assert not asked  # one process asks only for what it needs


# --- positions that depend on each other ------------------------------------------------------------------------------


class ChainNet(MixerNet):
    """A network whose positions are a chain."""

    def __init__(self, vocab):
        super().__init__(vocab)
        generator = torch.Generator().manual_seed(9)
        self.joint = TransitionTables(ModelConfig(vocab_size=vocab, transition_rank=3))
        self.joint.left, self.joint.right = (
            torch.nn.Parameter(torch.randn(vocab, 3, generator=generator) * 0.5) for _ in range(2)
        )


def test_a_chain_learns_the_likelihood_of_its_chain():
    path, model = MixturePath(UniformSource(VOCAB)), ChainNet(VOCAB)
    given, real = torch.zeros(2, BATCH, LENGTH, dtype=torch.bool)
    given[:, 0], real[:] = True, True
    real[::2, -2:] = False
    batch, noise = batch_of(path, given=given, real=real)
    objective = PathObjective(path, loss=CrossEntropy())
    outcome = objective(model, batch, noise, training_step=0, ema=model)
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, outcome.t, noise)
    x_t[:, 0] = batch.x_1[:, 0]
    u = model(x_t, outcome.t, outcome.h)
    for row, length in ((0, LENGTH - 2), (1, LENGTH)):
        held = torch.full((1, length), -1)
        held[0, 0] = batch.x_1[row, 0]
        chain = Chain.of(u[row : row + 1, :length], (model.joint.left, model.joint.right), held=held)
        expected = -chain.log_prob(batch.x_1[row : row + 1, :length]) / (length - 1)
        assert torch.allclose(outcome.sample_loss[row], expected[0], rtol=1e-5)
    assert torch.allclose(outcome.loss, outcome.sample_loss.mean(), rtol=1e-5)


@pytest.mark.parametrize("source", [UniformSource(VOCAB), MaskSource(VOCAB)], ids=str)
def test_chunks_change_nothing_of_a_chain(source):
    path, model = MixturePath(source), ChainNet(VOCAB)
    batch, noise = batch_of(path)
    results = [
        gradients(FewStepObjective(path, loss=CrossEntropy(), path_below_h=2.0, chunk=chunk), model, batch, noise)
        for chunk in (None, 7)
    ]
    (whole, expected), (parts, actual) = results
    assert torch.allclose(whole.loss, parts.loss, rtol=1e-5)
    assert {"joint.left", "joint.right"} <= set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(gradient, actual[name], rtol=1e-4, atol=1e-6), name


def test_a_chain_knows_no_teacher_and_no_other_loss():
    path, model = MixturePath(UniformSource(VOCAB)), ChainNet(VOCAB)
    batch, noise = batch_of(path)
    with pytest.raises(ValueError, match="which no teacher knows of; set objective.path_below_h to 2"):
        FewStepObjective(path, loss=CrossEntropy())(model, batch, noise, training_step=0, ema=model)
    with pytest.raises(ValueError, match='set objective.loss to "cross-entropy"'):
        PathObjective(path)(model, batch, noise, training_step=0, ema=model)
