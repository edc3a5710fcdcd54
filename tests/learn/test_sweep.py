"""Settled beginnings: the states, their loss by hand, and a small world in which it is smallest at the truth."""

from dataclasses import replace

import pytest
import torch
from lessons import gradients
from torch import Tensor, nn
from worlds import coupled_data

from fsdfm.data import TrainingBatch
from fsdfm.flow import MaskSource, MixturePath, PolynomialSchedule, UniformSource, dyadic_step_sizes
from fsdfm.flow.exact import total_variation
from fsdfm.learn import AutoregressiveTeacher, SweepConfig, SweepObjective
from fsdfm.learn.optim import OptimConfig, Optimiser
from fsdfm.model import CausalHeadConfig, DiT, ModelConfig
from fsdfm.noise import Noise

STEPS = 240
V, L = 3, 4  # the first of the four is given
ASKED = AutoregressiveTeacher("somewhere.bin")
SHAPE = {"width": 24, "num_blocks": 1, "num_heads": 2, "cond_width": 8, "dropout": 0.0, "style": "llama"}


def network(vocab: int = V) -> DiT:
    config = CausalHeadConfig(cond_width=8)
    return DiT(ModelConfig(vocab_size=vocab, conditioning="step", posterior=config, **SHAPE), seed=3)


class KnownLaw(nn.Module):
    """The exact p(x^i | x^{<i}) of a law over three positions behind a given token, in the shape of a causal model."""

    def __init__(self, data: Tensor):
        super().__init__()
        conditionals = [data.sum((1, 2)), data.sum(2), data]
        self.tables = [c / c.sum(-1, keepdim=True) for c in conditionals]
        self.head = nn.Identity()

    def trunk(self, tokens: Tensor) -> Tensor:
        found = []
        for i in range(tokens.shape[1]):
            before = tokens[:, 1 : i + 1]
            found.append(self.tables[i][tuple(before.T)].expand(len(tokens), V))
        return torch.log(torch.stack(found, 1)).float()


def texts(data: Tensor, count: int, seed: int = 0) -> Tensor:
    """Draws from the law, behind the token 0."""
    flat = torch.multinomial(data.flatten(), count, replacement=True, generator=torch.Generator().manual_seed(seed))
    free = torch.stack([flat // V**2, flat // V % V, flat % V], 1)
    return torch.cat([torch.zeros(count, 1, dtype=torch.int64), free], 1)


def rows(x_1: Tensor, **options) -> TrainingBatch:
    given = torch.zeros_like(x_1, dtype=torch.bool)
    given[:, 0] = True
    return TrainingBatch(x_1, given=given, **options)


def objective(path: MixturePath | None = None, **changes) -> SweepObjective:
    path = path or MixturePath(UniformSource(V))
    return SweepObjective(path, step_sizes=dyadic_step_sizes(-2), **changes)


class Spy:
    """A network that remembers what its trunk was shown."""

    def __init__(self, model: DiT):
        self.model, self.head, self.joint, self.shown = model, model.head, model.joint, []

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        self.shown.append((x_t, t, h))
        return self.model.trunk(x_t, t, h)

    def logits_at(self, features: Tensor) -> Tensor:
        return self.model.logits_at(features)


def test_a_prefix_shows_the_text_and_then_noise():
    data, size = coupled_data(V, 3), 64
    batch, spy = rows(texts(data, size)), Spy(network())
    outcome = objective(prefix_share=1.0, start_share=0.5)(spy, batch, Noise(0, range(size)), training_step=0, ema=None)
    ((x_t, t, h),) = spy.shown
    assert len(x_t) == size // 2 + 1  # all that start show the same noise
    known = torch.round(outcome.t * L).long()
    assert bool((known[: size // 2] == 0).all())
    assert set(known[size // 2 :].tolist()) == {1, 2, 3}
    assert bool((outcome.t + outcome.h <= 1 + 1e-9).all())
    assert bool((x_t[:, 0] == 0).all())
    for row in range(size // 2, size):
        seen = x_t[(t == outcome.t[row]) & (h == outcome.h[row])][:, : known[row]]
        assert bool((seen == batch.x_1[row, : known[row]]).all(1).any())


def test_shares_of_rows():
    size = 20
    outcome = objective(prefix_share=0.6, start_share=0.5)(
        network(), rows(texts(coupled_data(V, 3), size)), Noise(0, range(size)), training_step=3, ema=None
    )
    assert outcome.counts == {"path_loss": 8, "prefix_loss": 6, "start_loss": 6}
    assert outcome.logs["loss"] == pytest.approx(float(outcome.sample_loss.mean()), rel=1e-5)


@pytest.mark.parametrize("asked", [ASKED, None], ids=["law", "labels"])
def test_the_loss_by_hand(asked):
    """-sum_i w_i sum_v q(v | x^{<i}) log p(v | x^{<i}, x_t), one text at a time; q is the text itself without a law."""
    data = coupled_data(V, 3)
    model, law = network().eval(), KnownLaw(data)
    nn.init.normal_(model.joint.combine.weight, generator=torch.Generator().manual_seed(1))
    whole, seen = objective(prefix_share=1.0, start_share=0.0, asked=asked), set()
    for sample in range(12):
        batch, spy = rows(texts(data, 1, seed=sample), samples=torch.tensor([sample])), Spy(model)
        outcome = whole(spy, batch, Noise(0, [sample]), training_step=0, ema=law)
        ((x_t, t, h),) = spy.shown
        known = round(float(t) * L)
        # steps of 1/4, 1/2 and 1 that fit: behind one position two do, behind three only the smallest
        weight = {1: [1, 1 / 2, 1 / 2], 2: [1, 1 / 2], 3: [1]}[known]
        log_p = torch.log_softmax(model.logits_at(_read(model, x_t, batch.x_1, t=t, h=h)), -1).detach()
        q = torch.softmax(law.trunk(batch.x_1[:, :-1]), -1)[0]
        if asked is None:
            q = nn.functional.one_hot(batch.x_1[0, 1:], V).float()
        of = [-float((q[i - 1] * log_p[i]).sum()) for i in range(known, L)]
        expected = sum(w * loss for w, loss in zip(weight, of, strict=True)) / sum(weight)
        assert float(outcome.loss.detach()) == pytest.approx(expected, rel=1e-4)
        seen.add(known)
    assert seen == {1, 2, 3}


def _read(model: DiT, x_t: Tensor, x_1: Tensor, *, t: Tensor, h: Tensor) -> Tensor:
    return model.joint.read(model, model.trunk(x_t, t, h), x_1, t=t, h=h)[0]


@pytest.mark.parametrize("source", [UniformSource(V), MaskSource(V + 1)], ids=str)
def test_chunks_change_nothing(source):
    data, path = coupled_data(V, 3), MixturePath(source)
    model, batch = network(source.vocab_size), rows(texts(data, 8))
    results = [
        gradients(objective(path, asked=ASKED, chunk=chunk), model, batch, Noise(0, range(8)), ema=KnownLaw(data))
        for chunk in (None, 3)
    ]
    (whole, expected), (parts, actual) = results
    assert torch.allclose(whole.loss, parts.loss, rtol=1e-5)
    for name, gradient in expected.items():
        assert torch.allclose(gradient, actual[name], rtol=1e-4, atol=1e-6), name


def test_a_row_does_not_depend_on_the_rows_beside_it():
    data, model = coupled_data(V, 3), network().eval()
    batch, whole = rows(texts(data, 8), size=8), objective(asked=ASKED)
    together = whole(model, batch, Noise(0, range(8)), training_step=5, ema=KnownLaw(data))
    half = rows(batch.x_1[1::2], size=8, samples=torch.arange(8)[1::2])
    alone = whole(model, half, Noise(0, range(8)[1::2]), training_step=5, ema=KnownLaw(data))
    assert torch.allclose(together.sample_loss[1::2], alone.sample_loss, rtol=1e-5)
    assert torch.equal(together.t[1::2], alone.t)
    assert torch.equal(together.h[1::2], alone.h)


@pytest.mark.slow
def test_it_is_smallest_at_the_posterior():
    """In a world where all is known, the head's law at m = 0 and behind a beginning comes near the truth."""
    data, size = coupled_data(V, 3), 64
    model, law = network().train(), KnownLaw(data)
    whole = objective(asked=ASKED, prefix_share=1.0)
    optimiser = Optimiser(model, OptimConfig(lr=5e-3, warmup=5), steps=STEPS)
    before = _distances(model, data)
    for step in range(STEPS):
        batch = rows(texts(data, size, seed=step), size=size)
        noise = Noise(1, range(step * size, step * size + size))
        whole(model, batch, noise, training_step=step, ema=law).loss.backward()
        optimiser.step(step)
    after = _distances(model, data)
    assert all(later < earlier / 2 for earlier, later in zip(before, after, strict=True))


@torch.no_grad()
def _distances(model: DiT, data: Tensor) -> tuple[float, float]:
    """Total variation at m = 0, and behind the first free position with its likeliest token."""
    model.eval()
    first = int(data.sum((1, 2)).argmax())
    count = V**3
    index = torch.arange(count)
    every = torch.cat([torch.zeros(count, 1).long(), torch.stack([index // 9, index // 3 % 3, index % 3], 1)], 1)
    x_0 = torch.tensor([[0, 2, 1, 0]]).expand(count, L)
    found = []
    for known, truth in ((0, data.flatten()), (2, (data[first] / data[first].sum()).flatten())):
        own = every if not known else every[every[:, 1] == first]
        x_t = torch.where(torch.arange(L) < max(known, 1), own, x_0[: len(own)])
        t = torch.full((len(own),), known / L, dtype=torch.float64)
        held = torch.where(torch.arange(L) < max(known, 1), x_t, -1)
        p = model.posterior(x_t, t, torch.full_like(t, 0.5)).given(held).log_prob(own).exp().double()
        found.append(float(total_variation(p, truth)))
    model.train()
    return found[0], found[1]


class Listening(KnownLaw):
    """A law that remembers the texts it was asked about."""

    def __init__(self, data: Tensor):
        super().__init__(data)
        self.asked: list[Tensor] = []

    def trunk(self, tokens: Tensor) -> Tensor:
        self.asked.append(tokens)
        return super().trunk(tokens)


def test_own_texts_are_draws_of_the_model_and_judged_by_the_law():
    data, size = coupled_data(V, 3), 4096
    model, law = network().eval(), Listening(data)
    nn.init.normal_(model.joint.combine.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    whole = objective(asked=ASKED, prefix_share=1.0, start_share=1.0, own_share=0.5)
    batch = rows(torch.zeros(size, L, dtype=torch.int64))
    outcome = whole(model, batch, Noise(0, range(size)), training_step=0, ema=law)
    assert outcome.counts == {"start_loss": size // 2, "own_loss": size // 2}
    assert bool((batch.x_1 == 0).all()), "the batch itself is left alone"
    (shown,) = law.asked
    assert bool((shown[size // 2 :] == 0).all()), "the other half is the text of the batch"
    written = shown[: size // 2, 1:]  # without the last position
    counts = torch.bincount(written[:, 0] * V + written[:, 1], minlength=V * V)
    every = torch.cat([torch.zeros(V**3, 1).long(), torch.cartesian_prod(*[torch.arange(V)] * 3)], 1)
    x_0 = UniformSource(V).sample(Noise(0, [0]), L, step=1).expand(len(every), L).clone()
    x_0[:, 0] = 0
    t, h = torch.zeros(len(every), dtype=torch.float64), outcome.h[0].expand(len(every))
    held = torch.tensor([[0, -1, -1, -1]]).expand(len(every), L)
    with torch.no_grad():
        p = model.posterior(x_0, t, h).given(held).log_prob(every).exp().view(V * V, V).sum(1).double()
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert float(total_variation(counts / counts.sum(), p)) < 0.05
    assert float(total_variation(torch.full_like(p, 1 / V**2), p)) > 0.1, "or the test could not tell"


def test_own_texts_do_not_depend_on_the_rows_beside_them():
    data, model = coupled_data(V, 3), network().eval()
    nn.init.normal_(model.joint.combine.weight, generator=torch.Generator().manual_seed(1))
    batch, whole = rows(texts(data, 8), size=8), objective(asked=ASKED, start_share=1.0, own_share=0.8)
    together = whole(model, batch, Noise(0, range(8)), training_step=5, ema=KnownLaw(data))
    half = rows(batch.x_1[1::2], size=8, samples=torch.arange(8)[1::2])
    alone = whole(model, half, Noise(0, range(8)[1::2]), training_step=5, ema=KnownLaw(data))
    assert torch.allclose(together.sample_loss[1::2], alone.sample_loss, rtol=1e-5)
    assert "own_loss" in together.logs
    assert "own_loss" not in whole.validation(model, batch, Noise(0, range(8)), training_step=5, ema=None).logs


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_trunk_has_no_gradients(frozen):
    data = coupled_data(V, 3)
    model = network()
    for weight in (model.joint.combine.weight, model.joint.project.weight, model.head.weight):
        nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    whole = objective(asked=ASKED, frozen_trunk=frozen)
    _, found = gradients(whole, model, rows(texts(data, 8)), Noise(0, range(8)), ema=KnownLaw(data))
    learnt = {name.split(".")[0] for name, gradient in found.items() if gradient is not None and bool(gradient.any())}
    assert ("blocks" in learnt) is not frozen
    assert {"joint", "head", "embedding"} <= learnt


@pytest.mark.slow
def test_own_texts_alone_lead_to_the_law():
    """No text of the world is ever shown: what the model writes, and what should have followed, are enough."""
    data, size = coupled_data(V, 3), 64
    model, law = network().train(), KnownLaw(data)
    whole = objective(asked=ASKED, prefix_share=1.0, start_share=1.0, own_share=1.0)
    optimiser = Optimiser(model, OptimConfig(lr=1e-2, warmup=5), steps=2 * STEPS)
    (before, _), nothing = _distances(model, data), torch.zeros(size, L, dtype=torch.int64)
    for step in range(2 * STEPS):
        noise = Noise(1, range(step * size, step * size + size))
        whole(model, rows(nothing, size=size), noise, training_step=step, ema=law).loss.backward()
        optimiser.step(step)
    assert _distances(model, data)[0] < before / 4


def test_what_cannot_be():
    with pytest.raises(ValueError, match="nobody says what should follow"):
        SweepConfig(own_share=0.5)
    with pytest.raises(ValueError, match="prefix_share is 1.5; allowed are"):
        SweepConfig(prefix_share=1.5)
    batch = replace(rows(texts(coupled_data(V, 3), 4)), given=None)
    with pytest.raises(ValueError, match="needs a token before it"):
        objective(asked=ASKED, prefix_share=1.0)(
            network(), batch, Noise(0, range(4)), training_step=0, ema=KnownLaw(coupled_data(V, 3))
        )
    plain = DiT(ModelConfig(vocab_size=V, conditioning="step", **SHAPE))
    with pytest.raises(ValueError, match="causal head"):
        objective()(plain, rows(texts(coupled_data(V, 3), 8)), Noise(0, range(8)), training_step=0, ema=None)


def test_a_prefix_has_the_time_at_which_so_much_is_known():
    """kappa_t is the share that is settled, whatever the schedule."""
    path, size = MixturePath(UniformSource(V), PolynomialSchedule(2)), 32
    batch = rows(texts(coupled_data(V, 3), size))
    found = objective(path, prefix_share=1.0, start_share=0.0)(
        network(), batch, Noise(0, range(size)), training_step=0, ema=None
    )
    settled = path.schedule.kappa(found.t) * L
    assert torch.allclose(settled, settled.round())
    assert set(settled.round().int().tolist()) == {1, 2, 3}
