"""SDTT (Deschenaux & Gulcehre 2024, arXiv 2410.21035): self-distillation through time of a masked model.

A round: the student learns to say at once what the teacher says over k steps of size dt. The target of a masked
position is the teacher's log-probability vector *of the step in which the teacher revealed it*, or of its last step
where it did not. Round j has dt = (1 - 1e-5)/1024 k^j; after it the student is the teacher. The loss is an unweighted
mean over all masked positions of the batch. Sampling is MDLM's ancestral step: S steps are S calls, and one more only
where a mask is left.

The released code's teacher times are not t + i dt: see `released_teacher_times`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fsdfm.noise import Noise, Purpose
from fsdfm.peers.mdlm import Ancestral, subs
from fsdfm.peers.transition import draw_tokens

__all__ = [
    "Divergence",
    "Rollout",
    "divergences",
    "released_teacher_times",
    "roll_out",
    "round_step",
    "targets",
    "teacher_times",
]

Divergence = Literal["kl-bwd", "kl-fwd", "mse", "tvd"]
Network = Callable[[Tensor, Tensor], Tensor]
SHORTEST = 1e-5


def round_step(round_index: int, *, k: int = 2, first_steps: int = 1024) -> float:
    """dt of a round, 0 the first: (1 - 1e-5)/first_steps * k^round; the student imitates k dt."""
    return (1 - SHORTEST) / first_steps * float(k**round_index)


def teacher_times(t: Tensor, dt: float, k: int) -> Tensor:
    """Where the teacher takes its k steps, as meant: t + i dt, in our time, at most 1 - 1e-5: float64 [k, B]."""
    offsets = dt * torch.arange(k, dtype=torch.float64, device=t.device)
    return (t.to(torch.float64)[None, :] + offsets[:, None]).clamp(max=1 - SHORTEST)


def released_teacher_times(t: Tensor, dt: float, k: int) -> Tensor:
    """The same as the released code computes it: a slip. With s = 1 - t, s_i = u_i s + (1 - s)(s - k dt).

    u runs from 1 to 0 over the k steps; 1 - s stands where 1 - u_i belongs. For k = 2 the first step is taken at
    s + (1 - s)(s - 2 dt) > s, so it reveals dt over that, about 1/(2 - s) of what it should.
    """
    s = 1 - t.to(torch.float64)
    u = torch.linspace(1, 0, k, dtype=torch.float64, device=t.device) if k > 1 else torch.ones(1, dtype=torch.float64)
    times = u[:, None] * s + (1 - s) * (s - k * dt)
    return 1 - times.clamp(min=SHORTEST)


def targets(log_probs: list[Tensor], states: list[Tensor]) -> Tensor:
    """The distillation target from the teacher's log-probabilities of each step and its states: [B, L, V].

    log_probs   k of them, [B, L, V] each;   states   k + 1 of them, [B, L]; shown positions of the first get 0
    """
    mask = log_probs[0].shape[-1] - 1
    target = torch.where((states[0] == mask)[..., None], log_probs[-1], 0.0)
    for log_p, before, after in zip(log_probs, states[:-1], states[1:], strict=True):
        revealed = (before == mask) & (after != mask)
        target = torch.where(revealed[..., None], log_p, target)
    return target


@dataclass(frozen=True)
class Rollout:
    """The teacher's k steps: its times [k, B], log-probabilities and states, and the target made of them."""

    times: Tensor
    log_probs: list[Tensor]
    states: list[Tensor]

    @property
    def target(self) -> Tensor:
        """log p [B, L, V] at positions masked in x_t; 0 elsewhere."""
        return targets(self.log_probs, self.states)


@torch.no_grad()
def roll_out(teacher: Network, x_t: Tensor, times: Tensor, *, dt: float, noise: Noise, step: int = 0) -> Rollout:
    """Let the teacher, (x, t) -> logits, walk k steps from x_t by the exact draw: k network calls.

    Every step reveals a mask with dt / (1 - t_i), all of them where that reaches 1.
    """
    states, log_probs = [x_t], []
    for i, t in enumerate(times):
        logits = teacher(states[-1], t)
        log_probs.append(subs(logits, states[-1]))
        law = Ancestral().law(logits, states[-1], t=t, t_next=(t + dt).clamp(max=1.0))
        u = noise.uniform(Purpose.DESTINATION, x_t.shape[1], step + i)
        states.append(draw_tokens(law, u).to(x_t.device))
    return Rollout(times, log_probs, states)


def divergences(log_student: Tensor, log_target: Tensor, kind: Divergence = "kl-bwd") -> Tensor:
    """The loss of every masked position, from log-probabilities [N, V] each: [N].

        kl-bwd   sum_y p_student (ln p_student - target)          theirs, published as `kld`
        kl-fwd   sum_y e^target (target - ln p_student)
        mse      mean over y of (ln p_student - target)^2
        tvd      sum_y |ln p_student - target|: a distance of *log*-probabilities, no total variation

    Give `mse` and `tvd` the columns without the mask: its log-probability is a stand-in for -inf (-1e6 in the released
    code, where it takes part with a resolution of 0.06).
    """
    gap = log_student - log_target
    if kind == "kl-bwd":
        return (log_student.exp() * gap).sum(-1)
    if kind == "kl-fwd":
        return -(log_target.exp() * gap).sum(-1)
    if kind == "mse":
        return gap.square().mean(-1)
    if kind == "tvd":
        return gap.abs().sum(-1)
    raise ValueError(f"divergence is {kind!r}; allowed are {', '.join(get_args(Divergence))}")
