"""The likelihood of whole texts, for a model whose positions are joint: what takes the place of the path loss there.

    -log p(x_1 | x_t), an equal part on every position that is scored

This file is all that training knows of joint posteriors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdfm.flow import MixturePath
from fsdfm.learn.losses import ChunkLoss, chunked_feature_loss
from fsdfm.learn.objective import TrainableDenoiser
from fsdfm.model import JointHead

if TYPE_CHECKING:
    from fsdfm.learn.path import NoisedRows

__all__ = ["is_joint", "joint_loss"]

_SAMPLES = 4  # whose logits live at a time


def _joint_head(model: TrainableDenoiser) -> JointHead | None:
    return getattr(model, "joint", None)


def is_joint(model: TrainableDenoiser) -> bool:
    """Are the positions of this model's posterior drawn together?"""
    return _joint_head(model) is not None


def joint_loss(
    model: TrainableDenoiser,
    path: MixturePath,
    features: Tensor,
    *,
    rows: NoisedRows,
    t: Tensor,
    h: Tensor,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """The summed weighted loss of features [N, C] and that of each row; chunks hold whole samples, `whole` all."""
    joint = _joint_head(model)
    assert joint is not None
    shared = [p for p in joint.shared(model) if p.requires_grad]
    return chunked_feature_loss(
        features,
        rows.weight.flatten(),
        losses=_joint_rows(model, path, rows, t=t.to(features.device), h=h.to(features.device)),
        chunk=None if whole else _SAMPLES * rows.x_1.shape[1],
        parameters=[*(p for p in (*model.head.parameters(), *joint.parameters()) if p.requires_grad), *shared],
    )


def _joint_rows(model: TrainableDenoiser, path: MixturePath, rows: NoisedRows, *, t: Tensor, h: Tensor) -> ChunkLoss:
    """-log p(x_1 | x_t) of whole texts, an equal part on every position that is scored; chunks hold whole samples."""
    length = rows.x_1.shape[1]
    positions = rows.scorable.sum(1).clamp(min=1)
    joint = _joint_head(model)
    assert joint is not None

    def losses(features: Tensor, part: slice) -> Tensor:
        samples = slice((part.start or 0) // length, None if part.stop is None else part.stop // length)
        x_1, real, free = rows.x_1[samples], rows.real[samples], rows.scorable[samples]
        log_p = joint.log_prob(
            model,
            features.view(*x_1.shape, -1),
            x_1,
            t=t[samples],
            h=h[samples],
            held=torch.where(free | ~real, -1, x_1),
            real=real,
            forbidden=path.source.mask_token,
        )
        return (-log_p / positions[samples])[:, None].expand_as(x_1).flatten()

    return losses
