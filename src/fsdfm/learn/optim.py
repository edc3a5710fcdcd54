"""The optimiser: AdamW with warm-up and cosine, clipping, and the moving average of the weights (appendix C)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdfm.learn.objective import TrainableDenoiser
from fsdfm.runtime import is_sharded, local

__all__ = ["EMA", "OptimConfig", "Optimiser", "WithoutDropout", "without_dropout"]

_JOINT = "joint."  # the names of a joint head's weights begin so
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights follow gradients; the defaults are the paper's pre-training."""

    lr: float = 3e-4  # the peak of the learning rate
    joint_lr: float | None = None  # that of a joint head; None: the same
    warmup: int = 10_000  # training steps from 0 to the peak, linearly
    final: float = 0.1  # the learning rate at the end as a share of the peak, reached along a cosine
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.03  # on tensors of two or more dimensions: biases, gates and norms are left alone
    clip: float = 1.0  # the largest norm of a gradient
    ema: float = 0.9995  # beta of the moving average; the first steps use min(beta, (1 + n) / (10 + n))

    def __post_init__(self) -> None:
        for name, low, high in (("lr", 0, 10), ("clip", 0, math.inf)):
            if not low < getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are {low} < {name} <= {high}")
        if self.joint_lr is not None and not 0 < self.joint_lr <= 10:
            raise ValueError(f"joint_lr is {self.joint_lr}; allowed are 0 < joint_lr <= 10, or none for that of lr")
        for name in ("beta1", "beta2", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are 0 <= {name} < 1")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final is {self.final}; allowed are 0 <= final <= 1, a share of the peak")
        if self.warmup < 0 or self.weight_decay < 0:
            raise ValueError(f"warmup is {self.warmup} and weight_decay {self.weight_decay}; both must be >= 0")


class Optimiser:
    """AdamW over a module's parameters whose learning rate is a function of the training step.

    optimiser = Optimiser(model, OptimConfig(lr=1e-3, warmup=100), steps=1000)
    loss.backward()
    norm = optimiser.clip()
    optimiser.step(training_step=0)
    """

    def __init__(self, model: nn.Module, config: OptimConfig, *, steps: int):
        self.config, self.steps = config, steps
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups = _groups(self.parameters, config)
        self._order = [name for names, _, _ in groups for name in names]
        self._scales = [scale for _, _, scale in groups]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [self.parameters[name] for name in names], "weight_decay": decay}
                for names, decay, _ in groups
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=all(p.device.type in ("cpu", "cuda") for p in self.parameters.values()),
        )

    def learning_rate(self, training_step: int) -> float:
        """lr (n+1)/warmup at first, then lr (final + (1 - final) (1 + cos(pi s)) / 2), s the share of the rest done."""
        config = self.config
        if training_step < config.warmup:
            return config.lr * (training_step + 1) / config.warmup
        share = (training_step - config.warmup) / max(1, self.steps - config.warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, share))) / 2
        return config.lr * (config.final + (1 - config.final) * cosine)

    def clip(self) -> float:
        """Scale the gradients to a norm of at most `clip`; the norm they had, nan or inf where they are broken."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if is_sharded(norm):
            norm = norm.full_tensor()  # type: ignore[attr-defined]  # over the shares of all processes
        nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.clip, norm)
        return float(norm)

    def step(self, training_step: int) -> None:
        """Move the weights, and forget the gradients."""
        for group, scale in zip(self._adamw.param_groups, self._scales, strict=True):
            group["lr"] = self.learning_rate(training_step) * scale
        self._adamw.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The moments of every parameter, by `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME`."""
        moments = {name: self._adamw.state.get(p, {}) for name, p in self.parameters.items()}
        return {f"{kind}.{name}": state[kind] for name, state in moments.items() for kind in _MOMENTS if kind in state}

    def blank(self) -> dict[str, Tensor]:
        """Tensors of the shapes and places of `state` after a step, to be filled and loaded."""
        moments = {
            f"{kind}.{name}": torch.zeros_like(p) for name, p in self.parameters.items() for kind in _MOMENTS[:2]
        }
        return {**moments, **{f"step.{name}": torch.zeros(()) for name in self.parameters}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up the moments that `state` gave."""
        known = {f"{kind}.{name}" for name in self.parameters for kind in _MOMENTS}
        if unexpected := sorted(set(state) - known):
            raise ValueError(f"the optimiser's state has {unexpected[0]!r}, which this model lacks; is it its own?")
        moments: dict[int, dict[str, Tensor]] = {}
        for index, name in enumerate(self._order):
            found = {kind: state[key] for kind in _MOMENTS if (key := f"{kind}.{name}") in state}
            if len(found) not in (0, len(_MOMENTS)) or any(
                value.shape != self.parameters[name].shape for kind, value in found.items() if kind != "step"
            ):
                raise ValueError(f"the optimiser's state of {name!r} does not fit this model; is it its own?")
            if found:
                moments[index] = found
        record: dict[str, Any] = {"state": moments, "param_groups": self._adamw.state_dict()["param_groups"]}
        self._adamw.load_state_dict(record)


def _groups(parameters: Mapping[str, Tensor], config: OptimConfig) -> list[tuple[list[str], float, float]]:
    """Names, weight decay and share of the learning rate: matrices and others, of the network and of its joint head."""
    of_joint = 1.0 if config.joint_lr is None else config.joint_lr / config.lr
    groups = []
    for joint, scale in ((False, 1.0), (True, of_joint)):
        own = {name: p for name, p in parameters.items() if (of_joint != 1 and name.startswith(_JOINT)) is joint}
        groups.append(([name for name, p in own.items() if p.ndim >= 2], config.weight_decay, scale))
        groups.append(([name for name, p in own.items() if p.ndim < 2], 0.0, scale))
    return [group for group in groups if group[0]]


class EMA:
    """The moving average of a module's weights, in a copy of its own: teacher, and what a checkpoint's user gets.

    theta' <- beta_n theta' + (1 - beta_n) theta with beta_n = min(beta, (1 + n) / (10 + n)) at the n-th step, so that
    a short run is not dominated by its start.
    """

    def __init__(self, model: nn.Module, beta: float = 0.9995):
        if not 0 <= beta < 1:
            raise ValueError(f"beta is {beta}; allowed are 0 <= beta < 1, and the paper has 0.9995")
        self.beta = beta
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    def beta_at(self, training_step: int) -> float:
        """beta_n."""
        return min(self.beta, (1 + training_step) / (10 + training_step))

    @torch.no_grad()
    def update(self, model: nn.Module, training_step: int) -> None:
        """Move towards the model's weights; buffers are copied."""
        average = [local(p) for p in self.module.parameters()]
        current = [local(p) for p in model.parameters()]
        torch._foreach_lerp_(average, current, 1 - self.beta_at(training_step))
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


@contextmanager
def without_dropout(model: TrainableDenoiser) -> Iterator[None]:
    """A module in evaluation mode for a while."""
    assert isinstance(model, nn.Module)
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class WithoutDropout:
    """A module as its own teacher: the same weights, asked in evaluation mode."""

    def __init__(self, model: TrainableDenoiser):
        self.model, self.head = model, model.head

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """The module's features without dropout."""
        with without_dropout(self.model):
            return self.model.trunk(x_t, t, h)

    def logits_at(self, rows: Tensor) -> Tensor:
        """The module's head, which has no dropout."""
        return self.model.logits_at(rows)
