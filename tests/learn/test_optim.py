import copy
import math

import pytest
import torch
from networks import MixerNet
from torch import nn

from fsdfm.learn.optim import EMA, OptimConfig, Optimiser, WithoutDropout

CONFIG = OptimConfig(lr=1e-2, warmup=4)


def step(model, optimiser, training_step, *, scale=1.0):
    generator = torch.Generator().manual_seed(training_step)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)
    optimiser.step(training_step)


def test_the_learning_rate_warms_up_and_follows_a_cosine_to_a_tenth():
    optimiser = Optimiser(MixerNet(5), OptimConfig(lr=2.0, warmup=10), steps=110)
    rates = [optimiser.learning_rate(n) for n in range(111)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[60] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[110] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert optimiser.learning_rate(500) == pytest.approx(0.2)
    assert Optimiser(MixerNet(5), OptimConfig(warmup=0), steps=1).learning_rate(0) == 3e-4


def test_only_tensors_of_two_dimensions_decay():
    """A gate's bias starts at 1 and must not be pulled to 0."""
    model = MixerNet(5)
    before = copy.deepcopy(model.state_dict())
    optimiser = Optimiser(model, OptimConfig(lr=1e-2, warmup=0, weight_decay=0.5, final=1.0), steps=10)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step(0)
    for name, value in model.state_dict().items():
        expected = before[name] * (1 - 1e-2 * 0.5) if value.ndim >= 2 else before[name]
        assert torch.allclose(value, expected), name


def test_it_is_adamw():
    model, reference = MixerNet(5), MixerNet(5)
    optimiser = Optimiser(model, OptimConfig(lr=1e-2, warmup=0, weight_decay=0.0, final=1.0), steps=10)
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for n in range(3):
        step(model, optimiser, n)
        generator = torch.Generator().manual_seed(n)
        for p in reference.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        adamw.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_gradients_are_clipped_and_their_norm_returned():
    model = nn.Linear(3, 4, bias=False)
    model.weight.grad = torch.full((4, 3), 2.0)
    optimiser = Optimiser(model, OptimConfig(clip=1.0), steps=1)
    assert optimiser.clip() == pytest.approx(math.sqrt(12) * 2)
    assert float(model.weight.grad.norm()) == pytest.approx(1.0, rel=1e-4)
    model.weight.grad[0, 0] = math.nan
    assert math.isnan(optimiser.clip())


def test_its_state_continues_a_run_bit_for_bit():
    model = MixerNet(5)
    optimiser = Optimiser(model, CONFIG, steps=20)
    for n in range(5):
        step(model, optimiser, n)
    child = copy.deepcopy(model)
    resumed = Optimiser(child, CONFIG, steps=20)
    resumed.load({name: value.clone() for name, value in optimiser.state().items()})
    for n in range(5, 9):
        step(model, optimiser, n)
        step(child, resumed, n)
    for mine, theirs in zip(model.parameters(), child.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_foreign_state_is_an_error():
    model = MixerNet(5)
    optimiser = Optimiser(model, CONFIG, steps=20)
    step(model, optimiser, 0)
    state = optimiser.state()
    with pytest.raises(ValueError, match="lacks"):
        optimiser.load({**state, "exp_avg.other": torch.zeros(1)})
    with pytest.raises(ValueError, match="does not fit"):
        optimiser.load({**state, "exp_avg.head.bias": torch.zeros(1)})
    state.pop("exp_avg.head.bias")
    with pytest.raises(ValueError, match="does not fit"):
        optimiser.load(state)


def test_the_average_warms_up_and_is_a_copy_of_its_own():
    model = MixerNet(5)
    ema = EMA(model, beta=0.9)
    assert not ema.module.training
    assert not any(p.requires_grad for p in ema.module.parameters())
    expected = model.head.bias.detach().clone()
    for n in range(200):
        with torch.no_grad():
            model.head.bias.add_(1.0)
        ema.update(model, n)
        beta = min(0.9, (1 + n) / (10 + n))
        assert ema.beta_at(n) == beta
        expected = beta * expected + (1 - beta) * model.head.bias.detach()
        assert torch.allclose(ema.module.head.bias, expected, rtol=1e-5)
    assert ema.beta_at(0) == 0.1
    assert EMA(model).beta_at(10**6) == 0.9995


def test_the_average_copies_buffers():
    model = nn.BatchNorm1d(3)
    ema = EMA(model)
    model.running_mean.fill_(7.0)
    ema.update(model, 0)
    assert bool((ema.module.running_mean == 7).all())


def test_a_student_that_teaches_itself_does_so_without_dropout():
    class Dropping(MixerNet):
        def trunk(self, x_t, t, h):
            return nn.functional.dropout(super().trunk(x_t, t, h), 0.5, self.training)

    model = Dropping(5).train()
    teacher = WithoutDropout(model)
    inputs = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2), torch.ones(2)
    features = teacher.trunk(*inputs)
    assert bool((features != 0).all())
    assert model.training
    assert torch.equal(teacher.logits_at(features.flatten(0, 1)), model.head(features.flatten(0, 1)))


@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0}, {"lr": -1}, {"clip": 0}, {"beta1": 1}, {"beta2": -0.1}, {"ema": 1}, {"final": 2}, {"warmup": -1}],
    ids=str,
)
def test_bad_values_are_errors(wrong):
    with pytest.raises(ValueError, match="allowed|must"):
        OptimConfig(**wrong)


def test_bad_beta_is_an_error():
    with pytest.raises(ValueError, match="allowed"):
        EMA(MixerNet(5), beta=1.0)
