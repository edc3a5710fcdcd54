import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from networks import MixerNet
from torch import nn

from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.learn import TABLEAUS, FewStepObjective, Outcome, PathObjective, ShortcutTeacher
from fsdfm.learn.optim import EMA, OptimConfig, Optimiser, WithoutDropout
from fsdfm.learn.report import EntropyAlarm, Tally, own_entropy
from fsdfm.learn.trainer import Every, Hooks, Trainer, TrainerConfig, TrainingState
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import Runtime, RuntimeConfig

VOCAB, LENGTH = 7, 6
PATH = MixturePath(UniformSource(VOCAB))
OBJECTIVES = {
    "path": PathObjective(PATH),
    "fewstep": FewStepObjective(PATH, teacher=ShortcutTeacher(TABLEAUS["rk2"])),
}


class Dropping(MixerNet):
    def trunk(self, x_t, t, h):
        return nn.functional.dropout(super().trunk(x_t, t, h), 0.2, self.training)


def feed_of(size, accumulate=1):
    """Rows that are one token repeated: easy to learn."""

    def feed(start):
        rows = size // accumulate
        while True:
            samples = torch.arange(start, start + rows)
            x_1 = Noise(9, samples).integers(Purpose.DATA, 1, VOCAB).expand(-1, LENGTH)
            start += rows
            yield TrainingBatch(x_1, samples=samples, next_sample=start, size=size)

    return feed


def make(objective="path", *, steps=12, accumulate=1, network=Dropping, runtime=None, **options):
    model = network(VOCAB)
    config = TrainerConfig(steps=steps, batch_size=8, accumulate=accumulate, log_every=3, save_every=4, **options)
    return Trainer(
        model,
        OBJECTIVES[objective],
        feed_of(8, accumulate),
        optimiser=Optimiser(model, OptimConfig(lr=1e-2, warmup=3), steps=12),
        ema=EMA(model),
        runtime=Runtime(runtime or RuntimeConfig(device="cpu")),
        config=config,
    )


def weights(trainer):
    state = {f"raw.{name}": value for name, value in trainer.model.state_dict().items()}
    return {**state, **{f"ema.{name}": value for name, value in trainer.ema.module.state_dict().items()}}


def assert_same(first, second):
    one, two = weights(first), weights(second)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("objective", ["path", "fewstep"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_is_the_same_run(objective, accumulate):
    whole = make(objective, accumulate=accumulate)
    assert whole.fit()
    begun = make(objective, accumulate=accumulate)
    seen = []
    assert not begun.fit(lambda: begun.training_step == 5 or seen.append(0))
    assert begun.training_step == 5
    resumed = make(objective, accumulate=accumulate, network=lambda vocab: Dropping(vocab, seed=77))
    state = copy.deepcopy(begun.state())
    resumed.load(state)
    resumed.ema.module.load_state_dict(begun.ema.module.state_dict())
    torch.manual_seed(1234)  # whatever else happened in the process
    assert resumed.fit()
    assert (resumed.training_step, resumed.next_sample) == (12, 96) == (whole.training_step, whole.next_sample)
    assert_same(whole, resumed)
    assert resumed.alarm.reference == whole.alarm.reference


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_resumed_run_reports_over_all_steps(stop):
    """Sums since the last report are part of the state: the report after a resume is that of the run in one piece."""
    whole, parts = [], []
    trainer = make("fewstep", accumulate=2)
    trainer.hooks = Hooks(report=whole.append)
    trainer.fit()
    begun = make("fewstep", accumulate=2)
    begun.hooks = Hooks(report=parts.append)
    begun.fit(lambda: begun.training_step == stop)
    resumed = make("fewstep", accumulate=2)
    resumed.hooks = Hooks(report=parts.append)
    state = json.loads(json.dumps(begun.state().numbers))
    resumed.load(TrainingState(begun.state().tensors, state))
    resumed.ema.module.load_state_dict(begun.ema.module.state_dict())
    resumed.fit()
    assert [report.averaged for report in parts] == [3, 3, 3, 3] == [report.averaged for report in whole]
    for one, other in zip(whole, parts, strict=True):
        timeless = [r.to_json() | {"tokens_per_second": 0, "seconds_left": 0} for r in (one, other)]
        cells = [r.pop("loss_by_h_t") for r in timeless]
        assert timeless[0] == pytest.approx(timeless[1], rel=1e-9)
        assert cells[0].keys() == cells[1].keys()
        assert all(cells[0][h] == pytest.approx(cells[1][h], rel=1e-9) for h in cells[0])


def test_sums_of_a_state_are_taken_up_once_by_all_processes():
    """Each process adds its own afterwards: what all said together must not be counted by every one of them."""
    record = make("fewstep")
    record.fit(lambda: record.training_step == 5)
    sums = record.state().numbers["since_report"]
    first, second = Tally.from_json(sums), Tally.from_json(sums, whole=False)
    assert first.steps == second.steps == sums["steps"] == 2
    first.take(second)
    assert first.to_json() == sums


@pytest.mark.parametrize("wrong", [[], {}, {"steps": 1}, {"cells": [[1]]}, {"means": [1]}], ids=str)
def test_sums_that_make_no_sense_are_an_error(wrong):
    good = Tally().to_json()
    with pytest.raises(ValueError, match="start a new run"):
        Tally.from_json(good | wrong if wrong and "steps" not in wrong else wrong)


def test_a_state_of_an_earlier_version_has_no_sums():
    trainer = make()
    state = trainer.state()
    del state.numbers["since_report"]
    trainer.load(state)
    assert trainer.fit()


def test_accumulation_changes_no_gradient():
    one, four = make(network=MixerNet), make(accumulate=4, network=MixerNet)
    for trainer in (one, four):
        assert trainer.fit()
    for name, value in weights(one).items():
        assert torch.allclose(value, weights(four)[name], atol=1e-4), name
    assert one.next_sample == four.next_sample == 96


def test_portions_drop_what_the_whole_batch_drops():
    """Dropout belongs to the sample, so that the split of a batch changes neither losses nor gradients."""
    reports = {1: [], 4: []}
    for accumulate, found in reports.items():
        trainer = make("fewstep", accumulate=accumulate, steps=3)
        trainer.config = replace(trainer.config, log_every=1)
        trainer.hooks = Hooks(report=found.append)
        trainer.fit()
    for one, four in zip(*reports.values(), strict=True):
        assert four.loss == pytest.approx(one.loss, abs=1e-5)
        assert four.grad_norm == pytest.approx(one.grad_norm, abs=1e-5)


def test_tallies_of_parts_are_the_tally_of_the_whole():
    trainer = make("fewstep", network=MixerNet)
    portion = next(trainer.feed(0))
    whole, parts = Tally(), [Tally(), Tally()]

    def add(tally, rows):
        noise = Noise(0, portion.samples[rows])
        batch = TrainingBatch(portion.x_1[rows], size=8, processes=2)
        outcome = trainer.objective(trainer.model, batch, noise, training_step=0, ema=trainer.teacher)
        tally.add(outcome, batch.x_1.numel())

    add(whole, slice(None))
    for rank, tally in enumerate(parts):
        add(tally, slice(rank, None, 2))
    parts[0].take(parts[1])
    assert parts[0].tokens == whole.tokens
    assert parts[0].means() == pytest.approx(whole.means(), rel=1e-5)
    for h, row in whole.loss_by_h_t().items():
        assert parts[0].loss_by_h_t()[h] == pytest.approx(row, rel=1e-4)


def test_it_learns():
    reports = []
    trainer = make(steps=150, network=MixerNet)
    trainer.optimiser = Optimiser(trainer.model, OptimConfig(lr=2e-2, warmup=10), steps=150)
    trainer.hooks = Hooks(report=reports.append)
    assert trainer.fit()
    assert reports[-1].loss_by_h_t["-10"]["0.5"] < 0.5 * reports[0].loss_by_h_t["-10"]["0.5"]


def test_reports_say_what_happened():
    reports, asked = [], []
    trainer = make("fewstep", entropy_alarm=0.0)
    trainer.hooks = Hooks(
        report=reports.append,
        save=lambda t: asked.append(("save", t.training_step)),
        others=[Every(5, lambda t: asked.append(("other", t.training_step)))],
    )
    assert trainer.fit()
    assert [report.training_step for report in reports] == [3, 6, 9, 12]
    assert asked == [("save", 4), ("other", 5), ("save", 8), ("other", 10), ("save", 12)]
    report = reports[-1]
    assert report.tokens == 12 * 8 * LENGTH
    assert report.tokens_per_second > 0
    assert report.seconds_left == 0
    assert reports[0].seconds_left > 0
    assert report.learning_rate == trainer.optimiser.learning_rate(11)
    line = report.to_json()
    assert line["averaged_steps"] == report.averaged > 0
    assert {"loss", "grad_norm", "path_loss", "distil_loss", "target_entropy"} <= set(line)
    assert all(-10 <= int(h) <= 0 for h in line["loss_by_h_t"])
    assert all(float(t) in (0, 0.25, 0.5, 0.75) for row in line["loss_by_h_t"].values() for t in row)


class Poisoned:
    """An objective whose loss of one sample is not a number."""

    def __init__(self, sample, *, only_gradient=False):
        self.sample, self.only_gradient, self.teacher = sample, only_gradient, None

    def __call__(self, model, batch, noise, *, training_step, ema):
        good = PathObjective(PATH)(model, batch, noise, training_step=training_step, ema=ema)
        bad = noise.samples == self.sample
        if not bool(bad.any()):
            return good
        if self.only_gradient:
            zero = model.head.bias.sum() * 0
            return Outcome(good.loss + torch.sqrt(zero), good.t, good.h, good.sample_loss, good.logs)
        poisoned = good.sample_loss.masked_fill(bad, math.nan)
        return Outcome(good.loss * math.nan, good.t, good.h, poisoned, {"loss": math.nan})


@pytest.mark.parametrize("only_gradient", [False, True])
def test_nan_stops_the_run_and_names_the_samples(only_gradient):
    trainer, saved = make(), []
    trainer.objective = Poisoned(53, only_gradient=only_gradient)
    trainer.hooks = Hooks(save=lambda t: saved.append(t.training_step))
    healthy = make(steps=6)
    healthy.fit()
    with pytest.raises(ValueError, match="at training step 6") as caught:
        trainer.fit()
    if only_gradient:
        assert "samples 48, 49, 50, 51, 52, 53, 54, 55;" in str(caught.value)
    else:
        assert "the loss is nan" in str(caught.value)
        assert "samples 53;" in str(caught.value)
    assert saved == [4]  # nothing after the break
    assert_same(trainer, healthy)  # and no weight touched by it


def test_the_reference_is_the_students_own_entropy():
    trainer = make("fewstep", network=MixerNet)
    trainer._learn_reference()
    objective = own_entropy(trainer.objective)
    found = []
    for portion, _ in zip(trainer.feed(0), range(4), strict=False):
        noise = Noise(0, portion.samples)
        outcome = objective(trainer.model, portion, noise, training_step=0, ema=trainer.model)
        chosen = outcome.h >= 2.0**-9
        x_t = PATH.sample(PATH.sample_x_0(portion.x_1, noise), portion.x_1, outcome.t, noise=noise)
        probs = torch.softmax(trainer.model(x_t, outcome.t, outcome.h / 2)[chosen], -1)
        if bool(chosen.any()):
            found.append(float(-(probs * probs.log()).sum(-1).mean().detach()))
    assert trainer.alarm.reference == pytest.approx(sum(found) / len(found), rel=1e-5)
    assert own_entropy(PathObjective(PATH)) is None


def test_collapse_sounds_the_alarm():
    alarm = EntropyAlarm(0.8)
    assert alarm.check(0.0) is None  # nothing to compare with yet
    alarm.reference = 2.0
    assert alarm.check(1.7) is None
    assert alarm.check(None) is None
    assert "1.50 nats" in alarm.check(1.5)
    with pytest.raises(ValueError, match="allowed"):
        EntropyAlarm(1.5)
    reports = []
    trainer = make("fewstep")
    trainer.alarm.reference = 100.0
    trainer.hooks = Hooks(report=reports.append)
    trainer.fit()
    assert "collapsing" in reports[0].alarm
    assert "alarm" in reports[0].to_json()


@pytest.mark.parametrize("student", [False, True])
def test_bfloat16_reaches_every_weight(student):
    """A cache of cast weights would lose the head's gradient where the student is its own teacher."""
    trainer = make("fewstep", network=MixerNet, runtime=RuntimeConfig(device="cpu", precision="bfloat16"), steps=1)
    exact = make("fewstep", network=MixerNet, steps=1)
    if student:
        for one in (trainer, exact):
            one.teacher = WithoutDropout(one.model)
    gradients = []
    for one in (trainer, exact):
        outcome = one._outcome(next(one.feed(0)))
        outcome.loss.backward()
        gradients.append({name: p.grad for name, p in one.model.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradients[0][name].dtype == torch.float32
        difference = float((gradients[0][name] - gradient).norm() / gradient.norm())
        assert difference < 0.05, (name, difference)


def test_a_state_of_another_model_is_an_error():
    trainer = make()
    state = trainer.state()
    tensors = {name: value for name, value in state.tensors.items() if name != "model.head.bias"}
    with pytest.raises(ValueError, match=r"head\.bias"):
        trainer.load(TrainingState(tensors, state.numbers))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"accumulate": 3}, {"seed": -1}, {"keep": 0}], ids=str)
def test_bad_values_are_errors(wrong):
    with pytest.raises(ValueError, match="allowed"):
        TrainerConfig(**{"batch_size": 8, **wrong})


@pytest.mark.parametrize("wrong", [{"device": "abacus"}, {"device": "cuda:99"}, {"threads": -1}], ids=str)
def test_a_machine_that_is_not_there_is_an_error(wrong):
    with pytest.raises(ValueError, match="try auto or cpu|allowed"):
        Runtime(RuntimeConfig(**wrong))


def test_precision_and_threads_are_chosen_for_the_machine():
    assert not Runtime(RuntimeConfig(device="cpu")).bfloat16
    assert Runtime(RuntimeConfig(device="cpu", precision="bfloat16")).bfloat16
    threads = torch.get_num_threads()
    Runtime(RuntimeConfig(device="cpu", threads=1))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


def test_the_average_takes_in_the_weights_after_the_step():
    """theta' = beta_0 theta_0 + (1 - beta_0) theta_1 with beta_0 = 1/10."""
    trainer = make(steps=1, network=MixerNet)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.fit()
    for name, average in trainer.ema.module.state_dict().items():
        after = trainer.model.state_dict()[name]
        assert not torch.equal(before[name], after), name
        assert torch.allclose(average, 0.1 * before[name] + 0.9 * after, atol=1e-6), name


def test_tokens_are_counted_over_all_portions():
    whole, portions = make(steps=3), make(steps=3, accumulate=4)
    assert whole.fit()
    assert portions.fit()
    assert portions.tokens == whole.tokens > 0


def test_the_last_loss_is_that_of_all_portions():
    whole, portions = make(steps=1), make(steps=1, accumulate=4)
    assert whole.fit()
    assert portions.fit()
    assert portions.last_loss == pytest.approx(whole.last_loss, rel=1e-5)
