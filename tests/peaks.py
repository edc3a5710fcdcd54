"""`python -m peaks KIND`: the measured peak of a small run's memory and what the plan says, in bytes, as JSON."""

import json
import sys

import torch

from fsdfm.bench.measure import peak_extra_mib
from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.learn import TABLEAUS, FewStepObjective, PathObjective, ShortcutTeacher
from fsdfm.learn.optim import EMA, OptimConfig, Optimiser
from fsdfm.learn.trainer import Trainer, TrainerConfig
from fsdfm.model import DiT, ModelConfig
from fsdfm.noise import Noise, Purpose
from fsdfm.plan import Workload, estimate_memory
from fsdfm.runtime import Runtime, RuntimeConfig


def workload(kind, *, width=256, num_blocks=3, vocab_size=4096, length=256):
    model = ModelConfig(
        vocab_size=vocab_size,
        width=width,
        num_blocks=num_blocks,
        num_heads=4,
        cond_width=64,
        conditioning="step" if kind == "fewstep" else "time",
    )
    teacher = {"stages": 4, "teacher_share": 1 / 3} if kind == "fewstep" else {}
    return Workload(model=model, length=length, batch_size=8, accumulate=2 if kind == "portions" else 1, **teacher)


def train(work):
    """Two steps of a run with everything that a run has."""
    path, model = MixturePath(UniformSource(work.model.vocab_size)), DiT(work.model)
    few = FewStepObjective(path, teacher=ShortcutTeacher(TABLEAUS["rk4"]))

    def feed(start):
        rows = work.batch_size // work.accumulate
        while True:
            noise = Noise(0, range(start, start + rows))
            start += rows
            x_1 = noise.integers(Purpose.DATA, work.length, work.model.vocab_size)
            yield TrainingBatch(x_1, samples=noise.samples, next_sample=start, size=work.batch_size)

    trainer = Trainer(
        model,
        few if work.stages else PathObjective(path),
        feed,
        optimiser=Optimiser(model, OptimConfig(), steps=2),
        ema=EMA(model),
        runtime=Runtime(RuntimeConfig(device="cpu", threads=1)),
        config=TrainerConfig(steps=2, batch_size=work.batch_size, accumulate=work.accumulate),
    )
    trainer.alarm.reference = 0.0  # measured once in a run's life; not here
    trainer.fit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(workload(sys.argv[1], width=32, num_blocks=1, vocab_size=64, length=8))  # libraries allocate once
    work = workload(sys.argv[1])
    measured = peak_extra_mib(lambda: train(work))
    json.dump([None if measured is None else measured * 2**20, estimate_memory(work, "single").total], sys.stdout)
