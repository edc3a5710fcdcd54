"""What tells two sets of weights apart."""

from __future__ import annotations

import hashlib

from torch import nn

__all__ = ["weights_sha256"]


def weights_sha256(model: nn.Module) -> str:
    """The SHA-256 of a network's tensors, by name: the same for the same weights, whatever file they came from."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
