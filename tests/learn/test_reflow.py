import pytest
import torch
from networks import MixerNet

from fsdfm.flow import Filter, Grid, MixturePath, UniformSource
from fsdfm.learn.reflow import DRAWS, InverseAutoregressive, Reflow, couple
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
    return list(couple(maker, sink, num_pairs=num_pairs, batch_size=batch_size))


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
        Reflow(model, MixturePath(UniformSource(9)), 6, Grid.uniform(4), draws=DRAWS["tied"])
    x_0, x_1 = Reflow(model, MixturePath(UniformSource(9)), 6, Grid.uniform(4)).pairs(range(3))
    assert x_0.shape == x_1.shape == (3, 6)


def test_tied_draws_keep_their_promises():
    free, whole, parts = Memory(), Memory(), Memory()
    fill(free, 10)
    fill(whole, 10, batch_size=10, draws=DRAWS["tied"])
    fill(parts, 10, batch_size=3, draws=DRAWS["tied"])
    assert torch.equal(whole.x_1, parts.x_1)
    assert torch.equal(whole.x_0, free.x_0)
    assert not torch.equal(whole.x_1, free.x_1)
    cold = Memory()
    fill(cold, 10, draws=DRAWS["tied"], filter=Filter(temperature=0.3))
    assert not torch.equal(cold.x_1, whole.x_1)


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
