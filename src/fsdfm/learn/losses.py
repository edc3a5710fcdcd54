"""Losses on the vocabulary, computed a few rows at a time with the gradient written out.

The logits of a training batch are its largest tensor by far. `chunked_loss` runs the head on some rows, takes the loss
and its gradient while those logits are alive, and lets them go: nothing of size [N, V] outlives its chunk and nothing
is computed twice. The two functions below it have one pass over the vocabulary in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdfm.learn.objective import TrainableDenoiser

__all__ = ["CHUNK", "ChunkLoss", "chunked_feature_loss", "chunked_loss", "log_probs_at", "soft_cross_entropy"]

CHUNK = 256  # rows of logits that live at a time

ChunkLoss = Callable[[Tensor, slice], Tensor]
"""Logits of some rows [n, V], float32, or their features, and which rows they are -> the loss of each row [n]."""


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and the log of their normaliser, from one exponential: the largest p is never small."""
    probs = torch.softmax(logits, -1)
    return probs, logits.amax(-1, keepdim=True) - torch.log(probs.amax(-1, keepdim=True))


class _LogProbsAt(torch.autograd.Function):
    """log softmax(logits)[tokens]; d logits = d scattered at the tokens - p * sum d."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        probs, log_z = _softmax(logits)
        ctx.save_for_backward(probs, tokens)
        return logits.gather(-1, tokens) - log_z

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor) -> tuple[Tensor, None]:
        probs, tokens = ctx.saved_tensors
        return (probs * -d_log_probs.sum(-1, keepdim=True)).scatter_add_(-1, tokens, d_log_probs), None


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum target * log softmax(logits); d logits = (p - target) d, for targets that sum to 1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        probs, log_z = _softmax(logits)
        # where the target is 0 a logit of -inf is no obstacle
        expected = (target * logits.masked_fill(target == 0, 0.0)).sum(-1)
        ctx.save_for_backward(probs.sub_(target))
        return log_z[:, 0] - expected

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * d_loss[:, None], None


def log_probs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at chosen tokens: [n, V], int64 [n, k] -> [n, k]."""
    apply: Callable[..., Tensor] = _LogProbsAt.apply
    return apply(logits, tokens)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of softmax(logits) under target probabilities: [n, V] each -> [n]."""
    apply: Callable[..., Tensor] = _SoftCrossEntropy.apply
    return apply(logits, target)


class _ChunkedLoss(torch.autograd.Function):
    """sum over rows of weight * loss(features), with its gradient taken in the forward pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd gives everything by position)
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        losses: ChunkLoss,
        chunk: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total = features.new_zeros((), dtype=torch.float32)
        d_features = torch.zeros_like(features)
        d_parameters = [torch.zeros_like(p) for p in parameters]
        per_row = torch.zeros_like(weight)
        for start in range(0, len(features), chunk):
            rows = slice(start, start + chunk)
            if not bool((weight[rows] != 0).any()):
                continue
            with torch.enable_grad():
                inputs = features[rows].detach().requires_grad_()
                loss = losses(inputs, rows)
                weighted = (weight[rows] * loss).sum()
            grads = torch.autograd.grad(weighted, [inputs, *parameters], allow_unused=True)
            d_features[rows] = grads[0]
            for total_grad, grad in zip(d_parameters, grads[1:], strict=True):
                if grad is not None:
                    total_grad += grad
            per_row[rows] = loss.detach()
            total += weighted.detach()
        ctx.save_for_backward(d_features, *d_parameters)
        ctx.mark_non_differentiable(per_row)
        return total, per_row

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_features, *d_parameters = ctx.saved_tensors
        return (d_features * d_total, None, None, None, *[d * d_total for d in d_parameters])


def chunked_loss(
    model: TrainableDenoiser,
    features: Tensor,
    weight: Tensor,
    *,
    losses: ChunkLoss,
    chunk: int | None = CHUNK,
    parameters: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Summed weighted loss and the loss of each row, for features [N, C] and weights [N].

    chunk        rows of logits that live at a time; None keeps them all, in plain autograd: the reference for tests
                 and benchmarks
    parameters   what the losses depend on beside the head
    """

    def of_features(some: Tensor, rows: slice) -> Tensor:
        return losses(model.logits_at(some).float(), rows)

    return chunked_feature_loss(
        features, weight, losses=of_features, chunk=chunk, parameters=[*model.head.parameters(), *parameters]
    )


def chunked_feature_loss(
    features: Tensor, weight: Tensor, *, losses: ChunkLoss, chunk: int | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same where `losses` takes the features themselves; `parameters` is all that they depend on besides."""
    if chunk is None:
        per_row = losses(features, slice(None))
        return (weight * per_row).sum(), per_row.detach()
    if not torch.is_grad_enabled():
        parts = [slice(start, start + chunk) for start in range(0, len(features), chunk)]
        per_row = torch.cat([losses(features[rows], rows) for rows in parts])
        return (weight * per_row).sum(), per_row
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLoss.apply
    return apply(features, weight, losses, chunk, *parameters)
