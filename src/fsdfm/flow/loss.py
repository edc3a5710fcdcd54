"""The path loss: the Bregman divergence between true and learned velocity, a number per token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["generalised_kl", "path_loss"]


def generalised_kl(log_p_1: Tensor, log_p_t: Tensor, shown: Tensor, *, scalar: Tensor) -> Tensor:
    """The path loss of section 3 from the model's log-probabilities of x_1 and of x_t; all arguments broadcast.

        L = -g [ p(x_t) - delta_{x_1}(x_t) + (1 - delta_{x_1}(x_t)) log p(x_1) ]

    `shown` is delta_{x_1}(x_t) as bool, `scalar` g(t) or the mean scalar gbar_{t,h} of section 4.3. In expectation over
    x_1 given x_t it is smallest at p = p_{1|t}.
    """
    return -scalar * (torch.exp(log_p_t) - shown.to(log_p_1.dtype) + torch.where(shown, 0.0, log_p_1))


def path_loss(logits: Tensor, x_1: Tensor, x_t: Tensor, *, scalar: Tensor | float) -> Tensor:
    """`generalised_kl` of logits [B, L, V] at every position: [B, L]; `scalar` is [] or [B]."""
    log_z = torch.logsumexp(logits, -1)
    log_p_1 = logits.gather(-1, x_1[..., None])[..., 0] - log_z
    log_p_t = logits.gather(-1, x_t[..., None])[..., 0] - log_z
    g = torch.as_tensor(scalar, device=logits.device).to(logits.dtype).reshape(-1, 1)
    return generalised_kl(log_p_1, log_p_t, x_1 == x_t, scalar=g)
