"""The likelihood of whole texts, for a model whose positions are joint: what takes the place of the path loss there.

    -log p(x_1 | x_t), an equal part on every position that is scored

This file is all that training knows of joint posteriors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from fsdfm.flow import MixturePath
from fsdfm.learn.losses import ChunkLoss, chunked_loss, without_token
from fsdfm.learn.objective import TrainableDenoiser

if TYPE_CHECKING:
    from fsdfm.learn.path import NoisedRows

__all__ = ["JointHead", "is_joint", "joint_loss"]

_SAMPLES = 4  # whose logits live at a time


class JointHead(Protocol):
    """The part of a model, a module, that makes its positions depend on each other."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights."""
        ...

    def log_prob(self, logits: Tensor, x_1: Tensor, *, held: Tensor, real: Tensor) -> Tensor:
        """log p(x_1 | x_t) of texts, [B, L, V] and int64 [B, L] -> [B].

        held   the token of every position that is certain, -1 elsewhere: int64 [B, L]
        real   positions that are part of the text: bool [B, L]
        """
        ...


def _joint_head(model: TrainableDenoiser) -> JointHead | None:
    return getattr(model, "joint", None)


def is_joint(model: TrainableDenoiser) -> bool:
    """Are the positions of this model's posterior drawn together?"""
    return _joint_head(model) is not None


def joint_loss(
    model: TrainableDenoiser, path: MixturePath, features: Tensor, rows: NoisedRows, *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """The summed weighted loss of features [N, C] and that of each row; chunks hold whole samples, `whole` all."""
    joint = _joint_head(model)
    assert joint is not None
    return chunked_loss(
        model,
        features,
        rows.weight.flatten(),
        losses=_joint_rows(path, rows, joint),
        chunk=None if whole else _SAMPLES * rows.x_1.shape[1],
        parameters=tuple(joint.parameters()),
    )


def _joint_rows(path: MixturePath, rows: NoisedRows, joint: JointHead) -> ChunkLoss:
    """-log p(x_1 | x_t) of whole texts, an equal part on every position that is scored; chunks hold whole samples."""
    length = rows.x_1.shape[1]
    positions = rows.scorable.sum(1).clamp(min=1)

    def losses(logits: Tensor, part: slice) -> Tensor:
        if path.source.mask_token is not None:
            logits = without_token(logits, path.source.mask_token)
        samples = slice((part.start or 0) // length, None if part.stop is None else part.stop // length)
        x_1, real, free = rows.x_1[samples], rows.real[samples], rows.scorable[samples]
        held = torch.where(free | ~real, -1, x_1)
        loss = -joint.log_prob(logits.view(*x_1.shape, -1), x_1, held=held, real=real) / positions[samples]
        return loss[:, None].expand_as(x_1).flatten()

    return losses
