"""Quantile coupling, draws that follow the noise: what a position becomes is read off the token it starts from.

A sampler adds randomness of its own in every step, and nobody can predict it: a child that shall do in one step what
its parent did in 64 must guess. But under the uniform source x_0 is full of randomness that nobody uses. Let position i
not have changed yet, so that it shows k = x_0^i, uniform on the V tokens. With kappa = kappa_t Bayes' rule splits its
posterior into "what is shown is data" and what the *other* positions say:

    p(y | x_t) = a_k delta(y, k) + (1 - a_k) p(y | x_t^{-i}),      a_k = kappa p(k | .) / [(1-kappa)/V + kappa p(k | .)]

The first part is kept. For the second, k is used in place of a fresh random number: among the positions that do not
keep their token, k has the law (1 - a_k)/Z with Z = sum_k (1 - a_k), so that its place in that law,

    [G(k-1), G(k))     with G(k) = sum_{j <= k} (1 - a_j)/Z,

is an interval of [0, 1) which a uniform number falls into with just that probability, and y is what the inverse of
F(y) = sum_{z <= y} p(z | x_t^{-i}) makes of it. Hence the law, given k:

    r_k(y) = a_k delta(y, k) + Z |[F(y-1), F(y)) n [G(k-1), G(k))|

Its mean over k is the mean of p(. | x_t) over k, exactly: on average over the noise nothing has changed (a test says
so), while x_1 has become a much more certain function of x_0. What is not exact: what other positions have become may
already depend on k, which then is not quite uniform; the error is small where a random token rarely fits by chance.

Nothing here depends on the order of the tokens, but a student does: if tokens that are alike stand side by side, k says
roughly what the position becomes whatever the context is (`order` below, `alike` makes one).

The same idea gives a *text* its noise (`inverse_autoregressive_noise`). Let an autoregressive model give
p(. | what precedes) at each position, with F its sum in that order. A uniform point v of [F(x-1), F(x)) is uniform on
[0, 1) and independent of what precedes if x follows that law, so that token number floor(V v) is a fair draw of the
uniform source from which the model, reading its random numbers off it, would write just this text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter
from fsdfm.flow.path import MixturePath
from fsdfm.flow.posterior import LogitsHook, Rows
from fsdfm.flow.source import UniformSource

__all__ = ["alike", "inverse_autoregressive_noise", "quantile_draws", "quantile_law"]


def quantile_law(probs: Tensor, shown: Tensor, kappa: Tensor) -> Tensor:
    """r_k of the module's docstring: posteriors [..., V], tokens k [...] and kappa_t [...] -> float64 [..., V]."""
    probs, k, kappa = probs.to(torch.float64), shown[..., None], kappa.to(probs.device, torch.float64)[..., None]
    noise = (1 - kappa) / probs.shape[-1]
    others = probs / noise
    others.scatter_(-1, k, probs.gather(-1, k) / (noise + kappa))
    others /= others.sum(-1, keepdim=True)
    keep = kappa * others / (noise + kappa * others)
    leave = (1 - keep).cumsum(-1)
    total = leave[..., -1:].clone()
    end = leave.gather(-1, k)
    begin = end - (1 - keep).gather(-1, k)
    place = others.cumsum(-1)
    place *= total / place[..., -1:]
    law = torch.minimum(place, end)
    law -= torch.maximum(place - others * total, begin)
    law.clamp_(min=0)
    return law.scatter_add_(-1, k, keep.gather(-1, k))


def quantile_draws(
    path: MixturePath, x_0: Tensor, *, filter: Filter | None = None, order: Tensor | None = None
) -> LogitsHook:
    """A hook that ties the draw of every position that still shows its noise to that noise; x_0 int64 [B, L].

        x_1 = sample(denoiser, path, x_0, grid=grid, noise=noise, hook=quantile_draws(path, x_0))

    filter   temperature, top-k and top-p, which belong before the tie: give them here and not to the sampler
    order    the tokens as F and G sum them, int64 [V], a permutation; as they are numbered unless said
    """
    if not isinstance(path.source, UniformSource):
        raise ValueError(f"the source is {path.source}; a quantile coupling needs the uniform source")
    order = torch.arange(path.source.vocab_size) if order is None else order
    order = order.to(x_0.device)
    rank = torch.argsort(order)

    def hook(logits: Tensor, rows: Rows) -> Tensor:
        logits = logits.to(torch.float32)
        if filter is not None:
            logits = filter(logits)
        noise = x_0[rows.sample, rows.position]
        fresh = (rows.x_t[rows.sample, rows.position] == noise).nonzero()[:, 0]
        kappa = path.schedule.kappa(rows.t).to(logits.device)[rows.sample[fresh]]
        law = quantile_law(torch.softmax(logits[fresh][:, order], -1), rank[noise[fresh]], kappa)[:, rank]
        return logits.index_copy(0, fresh, torch.log(law).to(logits.dtype))

    return hook


def inverse_autoregressive_noise(probs: Tensor, x_1: Tensor, u: Tensor, *, order: Tensor) -> Tensor:
    """x_0 that p(. | what precedes) turns into x_1: probs [..., V], tokens and uniforms [...] -> int64 [...].

    order   the tokens as F sums them, int64 [V], a permutation
    """
    vocab_size = probs.shape[-1]
    k = torch.argsort(order)[x_1][..., None]
    probs = probs[..., order].to(torch.float64)
    places = probs.cumsum(-1)
    v = (places.gather(-1, k) - u.to(torch.float64)[..., None] * probs.gather(-1, k)) / places[..., -1:]
    return order[(v[..., 0] * vocab_size).to(torch.int64).clamp(0, vocab_size - 1)]


def alike(embedding: Tensor) -> Tensor:
    """An order in which tokens of like meaning stand side by side: embedding [V, C] -> int64 [V], a permutation.

    The directions of the rows are cut in two equal halves along the axis on which they differ most, each half again,
    and so on; an axis points as that above it does, so that neighbours across a cut are near each other, too.
    """
    rows = torch.nn.functional.normalize(embedding.detach().to("cpu", torch.float64), dim=-1)

    def cut(tokens: Tensor, above: Tensor) -> list[Tensor]:
        if len(tokens) == 1:
            return [tokens]
        centred = rows[tokens] - rows[tokens].mean(0)
        axis = torch.linalg.svd(centred, full_matrices=False).Vh[0]
        axis = axis if axis @ above >= 0 else -axis
        halves = tokens[torch.argsort(centred @ axis, stable=True)].tensor_split(2)
        return cut(halves[0], axis) + cut(halves[1], axis)

    return torch.cat(cut(torch.arange(len(rows)), rows.new_ones(rows.shape[1])))
