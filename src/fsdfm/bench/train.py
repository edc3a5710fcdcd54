"""`fsdfm bench train`: how near a training step is to the machine's matrix products, and what the teacher costs.

One interleaved run of: a matrix product 2048^3, a pre-training step, few-step training steps with RK-2 and RK-4 under
TB-20. Model FLOPs are counted by formula, so recomputation would count against us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fsdfm.bench.measure import in_fresh_process, interleaved_medians, peak_extra_mib
from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.learn import TABLEAUS, FewStepObjective, Objective, PathObjective, ShortcutTeacher
from fsdfm.model import DiT, ModelConfig
from fsdfm.noise import Noise, Purpose

__all__ = ["TrainBench", "bench_train", "step_flops"]

_GEMM = 2048


@dataclass(frozen=True)
class TrainBench:
    """The setting of the benchmark; the default is the tiny preset."""

    width: int = 256
    num_blocks: int = 6
    num_heads: int = 4
    vocab_size: int = 8192
    length: int = 256
    batch_size: int = 16
    steps: int = 30

    def config(self) -> ModelConfig:
        """A step-aware model of this size without dropout, whose cost is not the method's."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            cond_width=64,
            conditioning="step",
            dropout=0.0,
        )


def step_flops(setting: TrainBench) -> float:
    """Floating-point operations of one plain training step: three times (forward, two gradients) the forward's.

    Forward per token: 2 (12 C^2 per block + C V of the head) + 4 L C per block for the attention.
    """
    width, length = setting.width, setting.length
    per_token = setting.num_blocks * (2 * 12 * width**2 + 4 * length * width) + 2 * width * setting.vocab_size
    return 3.0 * per_token * length * setting.batch_size


def bench_train(setting: TrainBench) -> dict[str, Any]:
    """`gemm_fraction`, `fewstep_over_plain` (RK-4), `rk2_over_plain`, `memory_ratio` and what they are made of."""
    a, b = torch.randn(2, _GEMM, _GEMM, generator=torch.Generator().manual_seed(0))
    jobs: dict[str, Callable[[], object]] = {"gemm": lambda: a @ b}
    jobs |= {name: make_step(name, setting) for name in ("plain", "rk4", "rk2")}
    seconds = interleaved_medians(jobs, repeats=setting.steps, title="bench train")
    peak = 2 * _GEMM**3 / seconds["gemm"]
    achieved = step_flops(setting) / seconds["plain"]
    chunked, whole = (in_fresh_process(_peak_of_a_step, name, setting) for name in ("rk4", "rk4 unchunked"))
    return {
        "gemm_fraction": achieved / peak,
        "fewstep_over_plain": seconds["rk4"] / seconds["plain"],
        "rk2_over_plain": seconds["rk2"] / seconds["plain"],
        "memory_ratio": chunked / whole if chunked and whole else None,
        "plain_tokens_per_second": setting.batch_size * setting.length / seconds["plain"],
        "gemm_gflops": peak / 1e9,
        "plain_gflops": achieved / 1e9,
        "peak_extra_mib": {"chunked": chunked, "unchunked": whole},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "setting": asdict(setting),
    }


def make_step(name: str, setting: TrainBench) -> Callable[[], None]:
    """A training step of a model of its own; `name` is plain, rk2, rk4 or rk4 unchunked."""
    path = MixturePath(UniformSource(setting.vocab_size))
    model, ema = DiT(setting.config()), DiT(setting.config()).requires_grad_(False).eval()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    objective = _objective(name, path)
    step = 0

    def run() -> None:
        nonlocal step
        noise = Noise(0, range(step * setting.batch_size, (step + 1) * setting.batch_size))
        batch = TrainingBatch(noise.integers(Purpose.DATA, setting.length, setting.vocab_size))
        optimiser.zero_grad(set_to_none=True)
        objective(model, batch, noise, training_step=step, ema=ema).loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1

    return run


def _objective(name: str, path: MixturePath) -> Objective:
    if name == "plain":
        return PathObjective(path)
    teacher = ShortcutTeacher(TABLEAUS[name.split()[0]])
    objective = FewStepObjective(path, teacher=teacher)
    return replace(objective, chunk=None) if name.endswith("unchunked") else objective


def _peak_of_a_step(name: str, setting: TrainBench) -> float | None:
    make_step(name, replace(setting, batch_size=1))()  # libraries and pools allocate once
    return peak_extra_mib(make_step(name, setting))
