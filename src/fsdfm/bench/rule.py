"""`fsdfm bench jump`: what a jump rule costs when the logits are already there.

One step of each rule on logits [1, L, V] against (a) a plain softmax of the same tensor and (b) `torch.multinomial` on
its float64 probabilities; at t = 7/8 of 8 steps, where every row draws, and as the mean over the 8 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fsdfm.bench.measure import interleaved_medians, peak_extra_mib
from fsdfm.flow import RULES, Grid, Independent, Jump, MixturePath, SamplerState, StepRule, UniformSource, advance
from fsdfm.noise import Noise

__all__ = ["JumpBench", "bench_jump"]

JUMPS = {name: rule for name, rule in RULES.items() if isinstance(rule, Jump)}  # rules for any source


@dataclass(frozen=True)
class JumpBench:
    """The setting of the benchmark; the default is the paper's."""

    length: int = 1024
    vocab_size: int = 50_257
    steps: int = 8
    repeats: int = 7

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed are whole numbers >= 1")


def bench_jump(setting: JumpBench) -> dict[str, Any]:
    """A rule's `over_softmax` and `speedup_over_multinomial` at the last step, `mean_over_softmax` over all steps."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, setting.length, setting.vocab_size, generator=generator)
    x_t = torch.randint(setting.vocab_size, (1, setting.length), generator=generator)
    probs = torch.softmax(logits[0].double(), -1)
    jobs: dict[str, Callable[[], object]] = {
        "softmax": lambda: torch.softmax(logits, -1),
        "multinomial": lambda: torch.multinomial(probs, 1),
    }
    for name, rule in JUMPS.items():
        jobs[name] = _last_step(rule, x_t, logits, setting=setting)
        jobs[name + " mean"] = _all_steps(rule, x_t, logits, setting=setting)
    seconds = interleaved_medians(jobs, repeats=setting.repeats, title="bench jump")
    memory = {name: peak_extra_mib(job) for name, job in jobs.items() if not name.endswith(" mean")}
    result: dict[str, Any] = {
        name: {
            "over_softmax": seconds[name] / seconds["softmax"],
            "mean_over_softmax": seconds[name + " mean"] / setting.steps / seconds["softmax"],
            "speedup_over_multinomial": seconds["multinomial"] / seconds[name],
            "peak_extra_mib": memory[name],
        }
        for name in JUMPS
    }
    result["reference"] = {
        "softmax_ms": 1000 * seconds["softmax"],
        "multinomial_ms": 1000 * seconds["multinomial"],
        "softmax_peak_extra_mib": memory["softmax"],
        "multinomial_peak_extra_mib": memory["multinomial"],
        "logits_mib": logits.numel() * logits.element_size() / 2**20,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    result["setting"] = asdict(setting)
    return result


def _step(rule: StepRule, x_t: Tensor, logits: Tensor, *, grid: Grid, index: int) -> None:
    path, noise = MixturePath(UniformSource(logits.shape[-1])), Noise(seed=0)
    posterior = Independent.of_logits(logits)
    bounds = path.schedule.redraw(grid.times[:index], grid.times[1 : index + 1])[None]
    times = grid.times[index : index + 1], grid.times[index + 1 : index + 2]
    advance(SamplerState(x_t, *times, path, noise, index=index, memory={"bounds": bounds}), rule, posterior)


def _last_step(rule: StepRule, x_t: Tensor, logits: Tensor, *, setting: JumpBench) -> Callable[[], None]:
    grid = Grid.uniform(setting.steps)
    return lambda: _step(rule, x_t, logits, grid=grid, index=setting.steps - 1)


def _all_steps(rule: StepRule, x_t: Tensor, logits: Tensor, *, setting: JumpBench) -> Callable[[], None]:
    grid = Grid.uniform(setting.steps)

    def run() -> None:
        for index in range(setting.steps):
            _step(rule, x_t, logits, grid=grid, index=index)

    return run
