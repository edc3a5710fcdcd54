"""What the outputs of a network mean, where they are not the logits of p_{1|t}.

Two ways of training on a uniform source teach a network something else, from which the posterior follows exactly.
With z = x_t and K(z | v) = kappa [v = z] + (1 - kappa)/V the likelihood of showing z:

    leave-one-out    what the *other* positions know of a token: p_{1|t}(v) / K(z | v), normalised; Duo's NELBO
    uniform-scores   log-ratios ln p_t(y)/p_t(z) of replacing one token, 0 at the own one; SEDD's uniform graph

A reading turns them into log p_{1|t} [n, V]; kappa_t = t, the linear schedule, is what such networks are trained on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsdfm.flow.posterior import LogitsHook, Rows

__all__ = ["READINGS", "from_leave_one_out", "from_uniform_scores", "leave_one_out", "reading_hook", "uniform_scores"]


def leave_one_out(log_posterior: Tensor, x_t: Tensor, kappa: Tensor) -> Tensor:
    """log of p_{1|t}(v) / K(x_t | v), normalised: [..., V] from log p_{1|t} [..., V]; kappa broadcasts against x_t."""
    return torch.log_softmax(log_posterior - _own_evidence(log_posterior, x_t, kappa), -1)


def from_leave_one_out(logits: Tensor, x_t: Tensor, kappa: Tensor) -> Tensor:
    """log p_{1|t} from leave-one-out logits: the evidence of the position's own token is put back."""
    return torch.log_softmax(logits + _own_evidence(logits, x_t, kappa), -1)


def _own_evidence(like: Tensor, x_t: Tensor, kappa: Tensor) -> Tensor:
    """ln K(x_t | v) but for a constant: ln(1 + V kappa/(1-kappa)) at the shown token, 0 elsewhere."""
    own = torch.log1p(like.shape[-1] * kappa / (1 - kappa)).expand_as(x_t)[..., None]
    return torch.zeros_like(like).scatter(-1, x_t[..., None], own.to(like))


def _own_ratio(kappa: Tensor, vocab: int) -> Tensor:
    """rho = K(y | x)/K(x | x) for y != x: (1-kappa)/(1 - kappa + V kappa)."""
    return (1 - kappa) / (1 - kappa + vocab * kappa)


def uniform_scores(probs: Tensor, x_t: Tensor, kappa: Tensor) -> Tensor:
    """The scores p_t(y)/p_t(x_t) that belong to a posterior: 1 + p(y)(1/rho - 1) - p(x_t)(1 - rho), 1 at x_t."""
    rho = _own_ratio(kappa, probs.shape[-1])[..., None].to(probs)
    own = probs.gather(-1, x_t[..., None])
    return (1 + probs * (1 / rho - 1) - own * (1 - rho)).scatter(-1, x_t[..., None], 1.0)


def from_uniform_scores(log_scores: Tensor, x_t: Tensor, kappa: Tensor) -> Tensor:
    """log p_{1|t} from log-scores: the sum over y != x_t gives p(x_t), then each p(y); negative ones are cut."""
    vocab = log_scores.shape[-1]
    scores = log_scores.exp()
    rho = _own_ratio(kappa, vocab)[..., None].to(scores)
    gain, loss = 1 / rho - 1, 1 - rho
    others = scores.scatter(-1, x_t[..., None], 0.0).sum(-1, keepdim=True)
    # At kappa = 0 nothing is known of p: gain = loss = 0, and every posterior has these scores.
    own = (vocab - 1 + gain - others) / (gain + (vocab - 1) * loss).clamp(min=1e-12)
    probs = ((scores - 1 + own * loss) / gain.clamp(min=1e-12)).scatter(-1, x_t[..., None], own).clamp(min=0)
    return torch.log(probs / probs.sum(-1, keepdim=True))


READINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "leave-one-out": from_leave_one_out,
    "uniform-scores": from_uniform_scores,
}
"""(outputs [n, V], x_t [n], kappa [n]) -> log p_{1|t} [n, V], by name."""


def reading_hook(name: str) -> LogitsHook:
    """A reading as a hook over the logits of a posterior."""
    read = READINGS[name]

    def hook(logits: Tensor, rows: Rows) -> Tensor:
        x_t = rows.x_t[rows.sample, rows.position]
        kappa = rows.t[rows.sample.to(rows.t.device)].to(logits.device)
        return read(logits.to(torch.float64), x_t, kappa)

    return hook
