import pytest
import torch
from networks import MixerNet

from fsdfm.flow import ExactDenoiser, Filter, Grid, MaskSource, MixturePath, UniformSource
from fsdfm.learn.reflow import DRAWS, InverseAutoregressive, Perturbed, Reflow, collect_pairs
from fsdfm.model import CRFConfig, ModelConfig, TransitionTables


class Memory:
    def __init__(self):
        self.x_0, self.x_1 = torch.empty(0, 6, dtype=torch.int64), torch.empty(0, 6, dtype=torch.int64)

    @property
    def count(self):
        return len(self.x_0)

    def append(self, x_0, x_1):
        self.x_0, self.x_1 = torch.cat([self.x_0, x_0]), torch.cat([self.x_1, x_1])


def fill(sink, num_pairs, **options):
    batch_size = options.pop("batch_size", 16)
    maker = Reflow(MixerNet(9), MixturePath(UniformSource(9)), 6, Grid.uniform(4), seed=2, **options)
    return list(collect_pairs(maker, sink, num_pairs=num_pairs, batch_size=batch_size))


def test_batches_and_interruptions_do_not_change_the_pairs():
    whole, parts = Memory(), Memory()
    assert fill(whole, 10, batch_size=10) == [10]
    assert fill(parts, 3, batch_size=2) == [2, 3]
    assert fill(parts, 10, batch_size=4) == [7, 10]
    assert torch.equal(whole.x_0, parts.x_0)
    assert torch.equal(whole.x_1, parts.x_1)
    assert fill(parts, 10) == []
    assert not torch.equal(whole.x_0, whole.x_1)


def test_the_first_token_is_given():
    sink = Memory()
    fill(sink, 8, first_token=5)
    assert bool((sink.x_0[:, 0] == 5).all())
    assert bool((sink.x_1[:, 0] == 5).all())


def test_tied_draws_are_not_for_joint_posteriors():
    model = MixerNet(9)
    model.joint = TransitionTables(ModelConfig(vocab_size=9), CRFConfig(rank=1))
    model.joint.initialise(0)
    with pytest.raises(ValueError, match="use free draws, or a parent with independent positions"):
        Reflow(model, MixturePath(UniformSource(9)), 6, Grid.uniform(4), draws=DRAWS["quantile"])
    x_0, x_1 = Reflow(model, MixturePath(UniformSource(9)), 6, Grid.uniform(4)).pairs(range(3))
    assert x_0.shape == x_1.shape == (3, 6)


def test_tied_draws_keep_their_promises():
    free, whole, parts = Memory(), Memory(), Memory()
    fill(free, 10)
    fill(whole, 10, batch_size=10, draws=DRAWS["quantile"])
    fill(parts, 10, batch_size=3, draws=DRAWS["quantile"])
    assert torch.equal(whole.x_1, parts.x_1)
    assert torch.equal(whole.x_0, free.x_0)
    assert not torch.equal(whole.x_1, free.x_1)
    cold = Memory()
    fill(cold, 10, draws=DRAWS["quantile"], filter=Filter(temperature=0.3))
    assert not torch.equal(cold.x_1, whole.x_1)


def test_tied_samples_share_their_coins_so_that_equal_noise_becomes_equal_text():
    path = MixturePath(UniformSource(9))

    def outcomes(draws):
        x_0, x_1 = Reflow(MixerNet(9), path, 1, Grid.uniform(4), draws=draws).pairs(range(90))
        return len(set(x_0[:, 0].tolist())), len(set(zip(x_0[:, 0].tolist(), x_1[:, 0].tolist(), strict=True)))

    tokens, pairs = outcomes(DRAWS["quantile"])
    assert pairs == tokens == 9
    assert outcomes(None)[1] > 18


def test_nothing_to_do_is_an_error():
    with pytest.raises(ValueError, match="1 or more"):
        fill(Memory(), 0)


def test_equal_texts_have_noise_of_their_own():
    text = torch.tensor([[0, 1, 2, 3, 1, 2, 0, 3]])
    maker = InverseAutoregressive(
        lambda samples: text.expand(len(samples), -1),
        lambda x: 9.0 * torch.eye(4)[text[:, 1:].expand(len(x), -1)],
        torch.arange(4),
    )
    x_0, x_1 = maker.pairs(range(6))
    assert len({tuple(row) for row in x_1.tolist()}) == 1
    assert len({tuple(row) for row in x_0.tolist()}) > 1


def test_timed_pairs_begin_on_the_path_at_their_times_and_end_in_the_data():
    """With the exact network (x_t, x_1) has the law of the path: P(x_t = x_1) = kappa + (1 - kappa) p_0."""
    size, count = 3, 4000
    p_1 = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    path = MixturePath(UniformSource(size))
    exact = ExactDenoiser(path, p_1=p_1)
    real = torch.multinomial(p_1, count, replacement=True, generator=torch.Generator().manual_seed(0))[:, None]
    maker = Perturbed(
        *(exact, path, lambda samples: real[list(samples)]),
        *(lambda samples: torch.full((len(samples),), 0.5, dtype=torch.float64), 2),
    )
    x_t, x_1 = maker.pairs(range(count))
    share = x_1[:, 0].bincount(minlength=size) / count
    assert torch.allclose(share.double(), p_1, atol=0.03)
    assert float((x_t == x_1).double().mean()) == pytest.approx(0.5 + 0.5 / 3, abs=0.03)
    again = maker.pairs(range(7, 9))
    assert torch.equal(again[0], x_t[7:9])
    assert torch.equal(again[1], x_1[7:9])


def test_timed_pairs_of_a_mask_source_keep_what_is_shown():
    path = MixturePath(MaskSource(9))
    text = torch.arange(6).expand(20, 6)
    maker = Perturbed(
        *(MixerNet(9), path, lambda samples: text[list(samples)]),
        *(lambda samples: torch.linspace(0.1, 0.9, len(samples), dtype=torch.float64), 3),
        first_token=True,
    )
    x_t, x_1 = maker.pairs(range(20))
    assert bool((x_t[:, 0] == 0).all())
    shown = x_t != 8
    assert torch.equal(x_1[shown], text[shown])
    assert int(shown[10:].sum()) > int(shown[:10].sum())
    assert not bool((x_1 == 8).any())
