"""What a joint posterior costs: a call with its draw against the bare trunk, a sweep, and an autoregressive model.

    causal call, crf call   one network call and the text that is drawn from it
    causal text             a text by the rule `sweep` with a causal head: as many trunks as steps, one draw in all
    autoregressive          as many tokens by a causal model of the same blocks, with its cache

A causal head draws its positions one after the other: `head_steps` says how many passes of it a text takes, which a
count of network calls does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from fsdfm.flow import RULES, Grid, MixturePath, UniformSource, sample
from fsdfm.model import CausalConfig, CausalHeadConfig, CausalModel, CRFConfig, DiT, JointConfig, ModelConfig
from fsdfm.model.layers import StackConfig
from fsdfm.noise import Noise, Purpose

__all__ = ["HEADS", "autoregressive_job", "joint_jobs", "joint_ratios"]

HEADS: dict[str, JointConfig] = {"causal": CausalHeadConfig(), "crf": CRFConfig(rank=64)}

Job = Callable[[], object]


def joint_jobs(
    name: str, config: ModelConfig, make: Callable[[ModelConfig], DiT], *, length: int, steps: int
) -> dict[str, Job]:
    """A call and its draw by one of `HEADS`; of a causal head also a text by the rule `sweep`."""
    model, noise = make(replace(config, posterior=HEADS[name])), Noise(0)
    path = MixturePath(UniformSource(config.vocab_size))
    x_0, u = path.source.sample(noise, length), noise.uniform(Purpose.DESTINATION, length)
    jobs: dict[str, Job] = {f"{name} call": lambda: _call(model, x_0, u)}
    if name == "causal":
        grid = Grid.uniform(steps)
        jobs["causal text"] = lambda: sample(model, path, x_0, grid=grid, noise=noise, rule=RULES["sweep"])
    return jobs


@torch.no_grad()
def _call(model: DiT, x_0: Tensor, u: Tensor) -> Tensor:
    t = torch.zeros(1, dtype=torch.float64)
    return model.posterior(x_0, t, torch.ones_like(t)).draw(torch.zeros(1, dtype=torch.int64), u)


def autoregressive_job(config: ModelConfig, length: int) -> Job:
    """So many tokens by a causal model of the same blocks; nothing to do for a text of one."""
    shape = {field.name: getattr(config, field.name) for field in fields(StackConfig)}
    model = CausalModel(CausalConfig(**{**shape, "dropout": 0.0}, max_length=length)).eval()
    return lambda: model.generate(torch.zeros(1, 1, dtype=torch.int64), length, Noise(0))


def joint_ratios(seconds: Mapping[str, float], *, steps: int, length: int) -> dict[str, float | None]:
    """A draw over a trunk forward, a text over that of an autoregressive model, and the head's sequential passes."""
    trunk = seconds["trunk"] / steps if "trunk" in seconds else None

    def draw_over_trunk(name: str) -> float | None:
        call = seconds.get(f"{name} call")
        return None if trunk is None or call is None else (call - trunk) / trunk

    text, other = seconds.get("causal text"), seconds.get("autoregressive")
    return {
        "causal_draw_over_trunk": draw_over_trunk("causal"),
        "crf_draw_over_trunk": draw_over_trunk("crf"),
        "causal_text_over_autoregressive": None if text is None or other is None else text / other,
        "head_steps": float(length) if text is not None else None,
    }
