import pytest
import torch
from lessons import BATCH, LENGTH, VOCAB, batch_of, gradients
from networks import MixerNet

from fsdfm.flow import Chain, MaskSource, MixturePath, UniformSource
from fsdfm.learn import CrossEntropy, FewStepObjective, PathObjective
from fsdfm.model import CRFConfig, ModelConfig, TransitionTables


class ChainNet(MixerNet):
    """A network whose positions are a chain."""

    def __init__(self, vocab):
        super().__init__(vocab)
        generator = torch.Generator().manual_seed(9)
        self.joint = TransitionTables(ModelConfig(vocab_size=vocab), CRFConfig(rank=3))
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
    x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, outcome.t, noise=noise)
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
        gradients(FewStepObjective(path, loss=CrossEntropy(), teacher=None, chunk=chunk), model, batch, noise)
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
    with pytest.raises(ValueError, match='which no teacher knows of; set objective.teacher to "none"'):
        FewStepObjective(path, loss=CrossEntropy())(model, batch, noise, training_step=0, ema=model)
    with pytest.raises(ValueError, match='set objective.loss to "cross-entropy"'):
        PathObjective(path)(model, batch, noise, training_step=0, ema=model)
