from dataclasses import replace

import pytest
import torch
from lessons import BATCH, LENGTH, VOCAB, batch_of, gradients, states
from networks import MixerNet

from fsdfm.data import TrainingBatch
from fsdfm.flow import POLICIES, MaskSource, MixturePath, UniformSource, dyadic_step_sizes
from fsdfm.learn import TABLEAUS, FewStepObjective, PathObjective, ShortcutTeacher
from fsdfm.learn.path import settled
from fsdfm.noise import Noise


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


def test_distillation_is_the_forward_kl_to_the_teacher():
    path, model, ema = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB), MixerNet(VOCAB, seed=1)
    batch, noise = batch_of(path, size=8)
    teacher = ShortcutTeacher(TABLEAUS["rk2"], temperature=2.0)
    sizes = torch.tensor([0.5], dtype=torch.float64)
    objective = FewStepObjective(path, teacher=teacher, step_sizes=sizes)
    outcome = objective(model, batch, noise, training_step=0, ema=ema)
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, outcome.t, noise=noise)
    target = teacher.target(ema, path, x_t, t=outcome.t, h=outcome.h, noise=noise)
    log_p = target.log_probs(slice(None), forbidden=None)
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
    half = TrainingBatch(batch.x_1[6:], size=12)
    second = objective(model, half, noise[6:], training_step=3, ema=model)
    assert torch.equal(second.h, whole.h[6:])
    assert torch.allclose(second.sample_loss, whole.sample_loss[6:], rtol=1e-4, atol=1e-6)


def test_large_steps_take_the_pairs_that_are_made_for_them():
    """Rows of h >= 1/4 show one set of pairs, those of h = 1 another; neither prompts nor padding of the text count."""
    path = MixturePath(UniformSource(VOCAB))
    text, noise = batch_of(path)
    pairs = [(h, torch.full_like(text.x_1, k), torch.full_like(text.x_1, k)) for h, k in ((0.25, 7), (1.0, 8))]
    given = torch.zeros_like(text.x_1, dtype=torch.bool)
    given[:, :3] = True
    real = torch.ones_like(given)
    real[:, 5:] = False
    batch = TrainingBatch(
        torch.full_like(text.x_1, 2), x_0=torch.full_like(text.x_1, 2), given=given, real=real, larger=tuple(pairs)
    )
    objective = FewStepObjective(path, weights=POLICIES["PU"], teacher=None)
    shown, h = states(objective, batch, noise)
    expected = torch.where(h >= 1, 8, torch.where(h >= 0.25, 7, 2))
    assert set(expected.tolist()) == {2, 7, 8}
    assert torch.equal(shown, expected[:, None].expand_as(shown))
    rows = settled(path, batch, noise, h=h)
    large = h >= 0.25
    assert bool(rows.given[large, 0].all())
    assert not bool(rows.given[large, 1:].any())
    assert bool(rows.real[large].all())
    assert torch.equal(rows.given[~large], given[~large])
    assert torch.equal(rows.real[~large], real[~large])


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
        part = TrainingBatch(whole.x_1[rows], size=BATCH, processes=2)
        outcome = objective(model, part, noise[rows], training_step=0, ema=teacher)
        assert len(asked) == 4
        assert asked[0] == max(1, int((outcome.h >= 2.0**-9).sum()))
        total += outcome.logs["loss"] * len(part.x_1) / BATCH
    expected = objective(model, TrainingBatch(whole.x_1, size=BATCH), noise, training_step=0, ema=teacher)
    assert total == pytest.approx(expected.logs["loss"], rel=1e-6)
    asked.clear()
    objective(model, TrainingBatch(whole.x_1[:8], size=BATCH), noise[:8], training_step=0, ema=teacher)
    assert not asked  # one process asks only for what it needs


def test_the_strata_move_from_step_to_step():
    """One row per batch takes every step size as often as the policy says, over the training steps."""
    objective = FewStepObjective(MixturePath(UniformSource(VOCAB)), weights=POLICIES["PU"])
    drawn = torch.cat([objective.draw_step_sizes(Noise(0, [0]), step, 1) for step in range(1100)])
    counts = torch.stack([(drawn == h).sum() for h in objective.step_sizes])
    assert float(counts.min()) > 60  # of 100 expected
    assert float(counts.max()) < 140


def test_the_teachers_own_steps_leave_alone_what_is_given():
    path, model, seen = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB), []

    class Watched(MixerNet):
        def trunk(self, x_t, t, h):
            seen.append(x_t)
            return super().trunk(x_t, t, h)

    given = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    given[:, ::2] = True
    batch, noise = batch_of(path, given=given)
    sizes = torch.tensor([0.5], dtype=torch.float64)
    objective = FewStepObjective(path, step_sizes=sizes)
    objective(model, batch, noise, training_step=0, ema=Watched(VOCAB, seed=1))
    assert len(seen) == 4
    assert all(torch.equal(state[given], batch.x_1[given]) for state in seen)
    assert not torch.equal(seen[0], seen[1]), "what is not given has moved"


def test_without_a_teacher_every_step_size_takes_the_path_loss_and_nobody_is_asked():
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    batch, noise = batch_of(path)
    objective = FewStepObjective(path, weights=POLICIES["PU"], teacher=None)
    outcome = objective(model, replace(batch, processes=2), noise, training_step=0, ema=None)
    assert set(outcome.logs) == {"loss", "path_loss", "exit_rate"}
    assert len(set(outcome.h.tolist())) == 11
    assert (objective.teacher_share, FewStepObjective(path).teacher_share) == (0.0, pytest.approx(1 / 3))
