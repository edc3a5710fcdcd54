"""Our denoisers under the discrete schedulers of diffusers (0.40 or later): one loop, their steps.

docs/guides/ecosystem.md maps their words to ours, with the laws that are equal and those that are not.

Their time grid is uniform in alpha, which is our kappa. Each scheduler takes logits [B, L, V]: independent posteriors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdfm.flow import Denoiser, LogitsFunction, MixturePath, SplitNetwork, posterior_of

__all__ = ["sample_with_scheduler"]


@torch.no_grad()
def sample_with_scheduler(
    denoiser: Denoiser | SplitNetwork | LogitsFunction,
    path: MixturePath,
    x_0: Tensor,
    *,
    scheduler: Any,
    steps: int,
    generator: torch.Generator | None = None,
    frozen: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """x_1 from x_0, int64 [B, L], in so many steps of a scheduler of diffusers.

    scheduler   DiscreteDDIMScheduler(), EntropyBoundScheduler(), BlockRefinementScheduler(); its loop state begins anew
    generator   its randomness, which is torch's: a text then depends on its batch
    frozen      positions that keep their token, bool [B, L]
    options     of its `step`, such as temperature=1.0; diffusers draws greedily unless told
    """
    mask = path.source.mask_token
    size = {"block_length": x_0.shape[1]} if "block_length" in scheduler.config else {}
    scheduler.set_timesteps(steps, device=x_0.device, **size)
    if size and mask is not None:
        options = {"mask_token_id": mask, **options}
    x = x_0
    for index in range(steps):
        kappa = torch.tensor([index / steps, (index + 1) / steps], dtype=torch.float64)
        t, t_next = path.schedule.kappa_inverse(kappa).to(x.device).unbind()
        logits = _logits(denoiser, x, t.expand(len(x)), h=(t_next - t).expand(len(x)))
        if mask is not None:
            logits[..., mask] = -torch.inf
        stepped = scheduler.step(logits, index, x, generator=generator, **options).prev_sample
        x = stepped if frozen is None else torch.where(frozen, x, stepped)
    return x


def _logits(denoiser: Any, x: Tensor, t: Tensor, *, h: Tensor) -> Tensor:
    """Logits at every position: [B, L, V], float32."""
    rows = torch.arange(x.numel(), device=x.device)
    posterior = posterior_of(denoiser, x, t, h=h, rows=rows)
    if posterior.joint:
        raise ValueError(
            "this model has a joint posterior; schedulers of diffusers take logits of independent positions"
        )
    parts = [(tile if own is None else tile[own]).float() for _, tile, own in posterior.marginals(rows)]
    return torch.cat(parts).view(*x.shape, -1)
