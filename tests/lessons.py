"""Batches to try objectives on, and what they say about them."""

from networks import MixerNet

from fsdfm.data import TrainingBatch
from fsdfm.noise import Noise, Purpose

VOCAB, LENGTH, BATCH = 11, 6, 32


def batch_of(path, *, size=BATCH, first=0, **options):
    noise = Noise(4, range(first, first + size))
    vocab = path.source.vocab_size - (path.source.mask_token is not None)
    return TrainingBatch(noise.integers(Purpose.DATA, LENGTH, vocab), **options), noise


def gradients(objective, model, batch, noise, *, training_step=0, ema=None):
    model.zero_grad()
    outcome = objective(model, batch, noise, training_step=training_step, ema=ema or model)
    outcome.loss.backward()
    return outcome, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def states(objective, batch, noise, training_step=0):
    """What the network is shown, and the step sizes."""
    model, seen = MixerNet(VOCAB), []
    model.trunk = lambda x_t, t, h, trunk=model.trunk: (seen.append(x_t), trunk(x_t, t, h))[1]
    outcome = objective(model, batch, noise, training_step=training_step, ema=model)
    return seen[0], outcome.h
