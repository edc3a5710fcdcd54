"""The path loss: the Bregman divergence between true and learned velocity, a number a token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["path_loss"]


def path_loss(logits: Tensor, x_1: Tensor, x_t: Tensor, scalar: Tensor) -> Tensor:
    """The generalised KL of section 3, a token: [B, L].

        L = -g [ p(x_t) - delta_{x_1}(x_t) + (1 - delta_{x_1}(x_t)) log p(x_1) ]

    `scalar` is g(t), or the mean scalar gbar_{t,h} of section 4.3: [] or [B]. Summed over what x_1 may be given x_t,
    it is smallest at p = p_{1|t}.
    """
    log_z = torch.logsumexp(logits, -1)
    log_p_1 = logits.gather(-1, x_1[..., None])[..., 0] - log_z
    p_t = torch.exp(logits.gather(-1, x_t[..., None])[..., 0] - log_z)
    shown = (x_1 == x_t).to(logits.dtype)
    return -scalar.to(logits.dtype).reshape(-1, 1) * (p_t - shown + (1 - shown) * log_p_1)
