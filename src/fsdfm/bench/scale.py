"""`fsdfm bench train --processes N`: the training step of N processes against that of one, at the same batch.

Interleaved in one run: the first process takes a step alone while the others wait, then all take one together (`ddp`),
each with its share of the rows. A process has one thread, so N processes use N cores and one process uses one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from fsdfm.bench.train import TrainBench, step_flops
from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.learn import Outcome, PathObjective
from fsdfm.learn.objective import TrainableDenoiser
from fsdfm.model import DiT
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import Runtime, RuntimeConfig, spawn_local

__all__ = ["bench_processes"]


def bench_processes(setting: TrainBench, processes: int) -> dict[str, Any]:
    """`throughput_ratio`: tokens per second of so many processes with one thread each, over those of one."""
    if processes < 2 or setting.batch_size % processes:
        raise ValueError(f"processes is {processes}; allowed are divisors of the {setting.batch_size} rows, from 2 on")
    with spawn_local(processes, _work, setting):
        seconds = _work(setting)
    alone, together = (statistics.median(seconds[name]) for name in ("alone", "together"))
    tokens = setting.batch_size * setting.length
    return {
        "processes": processes,
        "throughput_ratio": alone / together,
        "single_tokens_per_second": tokens / alone,
        "tokens_per_second": tokens / together,
        "single_gflops": step_flops(setting) / alone / 1e9,
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "torch": torch.__version__,
        "setting": asdict(setting),
    }


def _work(setting: TrainBench) -> dict[str, list[float]]:
    """Seconds of a process's steps: those of the first alone, and those of all together."""
    with Runtime(RuntimeConfig(device="cpu", threads=1, strategy="ddp")) as runtime:
        processes = runtime.processes
        alone, together = _stepper(setting, runtime, count=1), _stepper(setting, runtime, count=processes.count)
        seconds: dict[str, list[float]] = {"alone": [], "together": []}
        for step in range(setting.steps + 1):
            processes.mean(0.0)  # the others wait here, asleep, while the first is alone
            if processes.is_rank0:
                seconds["alone"].append(_timed(alone, step))
            processes.mean(0.0)
            seconds["together"].append(_timed(together, step))
        return {name: values[1:] for name, values in seconds.items()}  # the first round warms up


def _timed(job: Callable[[int], None], step: int) -> float:
    started = time.perf_counter()
    job(step)
    return time.perf_counter() - started


def _stepper(setting: TrainBench, runtime: Runtime, *, count: int) -> Callable[[int], None]:
    """A pre-training step of a model of its own, on this process's rows among `count` processes."""
    model = DiT(setting.config())
    student = runtime.student(model) if count > 1 else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    objective = PathObjective(MixturePath(UniformSource(setting.vocab_size)))
    rank = runtime.processes.rank if count > 1 else 0

    def run(step: int) -> None:
        first = step * setting.batch_size
        noise = Noise(0, range(first + rank, first + setting.batch_size, count))
        batch = TrainingBatch(noise.integers(Purpose.DATA, setting.length, setting.vocab_size), processes=count)

        def outcome(network: TrainableDenoiser) -> Outcome:
            return objective(network, batch, noise, training_step=step, ema=network)

        optimiser.zero_grad(set_to_none=True)
        result: Outcome = outcome(model) if student is None else student(outcome)
        result.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return run
