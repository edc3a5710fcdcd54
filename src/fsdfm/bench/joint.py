"""What a joint posterior costs: a call with its draw against the bare trunk, a sweep, and an autoregressive model.

    causal call, crf call   one network call and the text that is drawn from it
    causal text             a text by the rule `sweep` with a causal head: as many trunks as steps, one draw in all
    autoregressive          as many tokens by a causal model of the same blocks, with its cache
    ... of 16               the same of 16 texts, drawn side by side

A causal head draws its positions one after the other: `head_steps` says how many passes of it a text takes, which a
count of network calls does not. Head and autoregressive model go through the same loop (`fsdfm.model.causal_loop`), the
weights of both rounded to float16 as those of models that ship are, which the compiled loop reads as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from fsdfm.flow import RULES, Grid, MixturePath, UniformSource, sample
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.model import CausalConfig, CausalHeadConfig, CausalModel, CRFConfig, DiT, JointConfig, ModelConfig
from fsdfm.model.layers import StackConfig
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import Runtime, RuntimeConfig

__all__ = ["HEADS", "TEXTS", "autoregressive_jobs", "joint_jobs", "joint_ratios"]

HEADS: dict[str, JointConfig] = {"causal": CausalHeadConfig(), "crf": CRFConfig(rank=64)}

TEXTS = 16  # that are drawn side by side

Job = Callable[[], object]


def joint_jobs(
    name: str, config: ModelConfig, make: Callable[[ModelConfig], DiT], *, length: int, steps: int
) -> dict[str, Job]:
    """A call and its draw by one of `HEADS`; of a causal head also some texts at once, and one by the rule `sweep`."""
    model, noise = make(replace(config, posterior=HEADS[name])).half().float(), Noise(0)
    path = MixturePath(UniformSource(config.vocab_size))
    jobs: dict[str, Job] = {f"{name} call": _call_job(model, path, texts=1, length=length)}
    if name == "causal":
        x_0, grid = path.source.sample(noise, length), Grid.uniform(steps)
        jobs[f"causal call of {TEXTS}"] = _call_job(model, path, texts=TEXTS, length=length)
        jobs["causal text"] = lambda: sample(model, path, x_0, grid=grid, noise=noise, rule=RULES["sweep"])
    return jobs


def _call_job(model: DiT, path: MixturePath, *, texts: int, length: int) -> Job:
    """A trunk per text, one after the other as in `fsdfm generate`, and their texts."""
    noise = Noise(0, range(texts))
    x_0, u = path.source.sample(noise, length), noise.uniform(Purpose.DESTINATION, length)
    network = BatchInvariant(model, Runtime(RuntimeConfig(device="cpu", precision="float32")))

    @torch.no_grad()
    def run() -> Tensor:
        t = torch.zeros(texts, dtype=torch.float64)
        return network.posterior(x_0, t, torch.ones_like(t)).draw(torch.arange(texts), u)

    return run


def autoregressive_jobs(config: ModelConfig, length: int) -> dict[str, Job]:
    """So many tokens by a causal model of the same blocks, of one text and of some; nothing to do for one token."""
    shape = {field.name: getattr(config, field.name) for field in fields(StackConfig)}
    model = CausalModel(CausalConfig(**{**shape, "dropout": 0.0}, max_length=length)).half().float().eval()

    def job(texts: int) -> Job:
        return lambda: model.generate(torch.zeros(texts, 1, dtype=torch.int64), length, Noise(0, range(texts)))

    return {"autoregressive": job(1), f"autoregressive of {TEXTS}": job(TEXTS)}


def joint_ratios(seconds: Mapping[str, float], *, steps: int, length: int) -> dict[str, float | None]:
    """A draw over a trunk forward, a text over that of an autoregressive model, and the head's sequential passes."""
    trunk = seconds["trunk"] / steps if "trunk" in seconds else None

    def draw_over_trunk(name: str, texts: int = 1) -> float | None:
        call = seconds.get(name)
        return None if trunk is None or call is None else (call / texts - trunk) / trunk

    def over(name: str, other: str) -> float | None:
        return seconds[name] / seconds[other] if name in seconds and other in seconds else None

    lone = draw_over_trunk("causal call")
    return {
        "causal_draw_over_trunk": lone,
        f"causal_draw_over_trunk_of_{TEXTS}": draw_over_trunk(f"causal call of {TEXTS}", TEXTS),
        "causal_draw_over_trunks_of_a_text": None if lone is None else lone / steps,
        "crf_draw_over_trunk": draw_over_trunk("crf call"),
        "causal_call_over_autoregressive": over("causal call", "autoregressive"),
        f"causal_call_over_autoregressive_of_{TEXTS}": over(f"causal call of {TEXTS}", f"autoregressive of {TEXTS}"),
        "causal_text_over_autoregressive": over("causal text", "autoregressive"),
        "head_steps": float(length) if "causal text" in seconds else None,
    }
