"""MDLM (Sahoo et al. 2024, arXiv 2406.07524): masked diffusion whose network is not told the time.

Objective, a position:  l = -log p(x_1 | x_t) / (1 - t) where x_t is the mask, else 0: the generalised KL of the mask
source at kappa = t, whatever the schedule's epsilon. Samplers:

    ancestral   a masked position becomes v with p(v) w, w = (t_next - t)/(1 - t): our `ExactJump` for the mask source
    cached      the same law; the network is asked only after a token of the batch changed (`Cached`)
    analytic    SEDD's form; for this schedule the same law again
    last call   at t = 1 - 1e-5 the arg-max of p at what is still masked: T steps are T + 1 calls
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fsdfm.flow.schedule import Time
from fsdfm.peers.noising import column
from fsdfm.peers.transition import masked_law

__all__ = ["Ancestral", "expected_cached_calls", "greedy", "nelbo", "stratified_times", "subs"]


def subs(logits: Tensor, x_t: Tensor) -> Tensor:
    """log p(x_1 | x_t): softmax over every token but the mask (the last); shown tokens are certain. [B, L, V]."""
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    forbidden[-1] = True
    log_p = torch.log_softmax(logits.masked_fill(forbidden, -torch.inf), -1)
    certain = torch.where(torch.nn.functional.one_hot(x_t, logits.shape[-1]).bool(), 0.0, -torch.inf).to(log_p)
    return torch.where((x_t == logits.shape[-1] - 1)[..., None], log_p, certain)


def nelbo(log_p_1: Tensor, masked: Tensor, t: Time) -> Tensor:
    """-log p(x_1 | x_t) / (1 - t) at masked positions, 0 elsewhere: [B, L]; `log_p_1` is log p at the data's tokens."""
    weight = 1 / (1 - column(t))
    return torch.where(masked, -log_p_1 * weight.to(log_p_1), 0.0)


def stratified_times(u: Tensor, *, shortest: float = 1e-3, rounds: int = 0) -> Tensor:
    """Times of a batch from one uniform per row, row i in the i-th of B strata: float64 [B].

    1 - t = shortest + (1 - shortest) ((u_i + i)/B mod 1). With `rounds` T > 0 the noise is rounded up to the next
    multiple of 1/T, their discrete-time loss.
    """
    strata = (u.to(torch.float64) + torch.arange(len(u), device=u.device)) / len(u)
    noise = shortest + (1 - shortest) * torch.frac(strata)
    return 1 - ((noise * rounds).floor() + 1) / rounds if rounds else 1 - noise


@dataclass(frozen=True)
class Ancestral:
    """A masked position is revealed with (t_next - t)/(1 - t); the step that ends at t = 1 reveals everything."""

    keeps_shown: ClassVar[bool] = True

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): float64 [B, L, V]."""
        probs = subs(logits.to(torch.float64), x_t).exp()
        now, then = column(t), column(t_next)
        return masked_law(probs, x_t, reveal=(then - now) / (1 - now), remask=torch.zeros(()))


def greedy(logits: Tensor, x_t: Tensor) -> Tensor:
    """The last call: the likeliest token at what is still masked: int64 [B, L]."""
    return subs(logits, x_t).argmax(-1)


def expected_cached_calls(steps: int, length: int) -> float:
    """Calls of the cached sampler for one text: 1 + (T - 1)(1 - (1 - 1/T)^L); the originals' last call is one more.

    The first step asks; a later one only if the step before it changed a token, which it does not with (1 - 1/T)^L.
    """
    return 1 + (steps - 1) * (1 - (1 - 1 / steps) ** length)
