"""The objective of canvas models."""

import pytest
import torch

from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.learn import CanvasConfig, CrossEntropy, PathObjective, make_canvas_objective
from fsdfm.model import DiT, ModelConfig
from fsdfm.noise import Noise

PATH = MixturePath(UniformSource(7))


def network(canvas=4):
    sizes = {"vocab_size": 7, "width": 16, "num_blocks": 2, "num_heads": 2, "cond_width": 8, "dropout": 0.0}
    model = DiT(ModelConfig(**sizes, canvas=canvas))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model


def test_one_canvas_is_the_path_loss_without_context():
    objective = make_canvas_objective(CanvasConfig(canvas=8, loss="cross-entropy"), PATH)
    batch, noise = (
        TrainingBatch(torch.randint(7, (3, 8), generator=torch.Generator().manual_seed(0))),
        Noise(0, range(3)),
    )
    model = network(8)
    found = objective(model, batch, noise, training_step=0, ema=model)
    plain = PathObjective(PATH, loss=CrossEntropy())(model, batch, noise, training_step=0, ema=model)
    torch.testing.assert_close(found.loss, plain.loss)
    assert objective.network == {"canvas": 8, "window": None}


@pytest.mark.slow
def test_a_canvas_learns_to_copy_the_one_before():
    """Rows that repeat one canvas: with context the loss falls below what a canvas alone can know."""
    torch.manual_seed(0)
    objective = make_canvas_objective(CanvasConfig(canvas=4, loss="cross-entropy", smallest_h=-2), PATH)
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        noise = Noise(3, range(step * 32, step * 32 + 32))
        once = torch.randint(7, (32, 4))
        batch = TrainingBatch(once.repeat(1, 3))
        optimiser.zero_grad()
        outcome = objective(model, batch, noise, training_step=step, ema=model)
        outcome.loss.backward()
        optimiser.step()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "head" not in name)
    assert outcome.logs["loss"] < 0.75  # the first of three canvases alone costs about a third of what all would


def test_rows_must_be_whole_canvases():
    objective = make_canvas_objective(CanvasConfig(canvas=4), PATH)
    with pytest.raises(ValueError, match="multiple of objective.canvas"):
        objective(network(), TrainingBatch(torch.zeros(2, 6).long()), Noise(0, range(2)), training_step=0, ema=None)
    with pytest.raises(ValueError, match="window 6"):
        CanvasConfig(canvas=4, window=6)
