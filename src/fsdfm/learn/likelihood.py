"""The likelihood of whole texts, for a model whose positions are joint: what takes the place of the path loss there.

    -log p(x_1 | x_t), an equal part on every position that is scored

This file is all that training knows of joint posteriors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdfm.flow import ChainCRF, MixturePath, transitions_of
from fsdfm.learn.losses import ChunkLoss, chunked_loss, without_token
from fsdfm.learn.objective import TrainableDenoiser

if TYPE_CHECKING:
    from fsdfm.learn.path import NoisedRows

__all__ = ["is_joint", "joint_loss"]

_SAMPLES = 4  # whose logits live at a time


def is_joint(model: TrainableDenoiser) -> bool:
    """Are the positions of this model's posterior drawn together?"""
    return transitions_of(model) is not None


def joint_loss(
    model: TrainableDenoiser, path: MixturePath, features: Tensor, rows: NoisedRows, *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """The summed weighted loss of features [N, C] and that of each row; chunks hold whole samples, `whole` all."""
    parameters = transitions_of(model)
    assert parameters is not None
    return chunked_loss(
        model,
        features,
        rows.weight.flatten(),
        losses=_joint_rows(model, path, rows),
        chunk=None if whole else _SAMPLES * rows.x_1.shape[1],
        parameters=parameters,
    )


def _joint_rows(model: TrainableDenoiser, path: MixturePath, rows: NoisedRows) -> ChunkLoss:
    """-log p(x_1 | x_t) of the chain, an equal part on every position that is scored; chunks hold whole samples."""
    links, length = transitions_of(model), rows.x_1.shape[1]
    assert links is not None
    positions = rows.scorable.sum(1).clamp(min=1)

    def losses(logits: Tensor, part: slice) -> Tensor:
        if path.source.mask_token is not None:
            logits = without_token(logits, path.source.mask_token)
        samples = slice((part.start or 0) // length, None if part.stop is None else part.stop // length)
        x_1, real, free = rows.x_1[samples], rows.real[samples], rows.scorable[samples]
        held = torch.where(free | ~real, -1, x_1)
        chain = ChainCRF.of(logits.view(*x_1.shape, -1), links, held=held, joined=real)
        loss = -chain.log_prob(x_1, scored=real) / positions[samples]
        return loss[:, None].expand_as(x_1).flatten()

    return losses
