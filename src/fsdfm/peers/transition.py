"""What the peers' samplers share: transition probabilities, the draw from them, and the float32 draw of the originals.

A sampler here is its *law*: P(x_next | x_t) of every position, float64 [B, L, V], as a function of what the network
says. Laws are compared, enumerated and drawn from; nothing else is random.

    masked position:  token v with reveal * p(v),  mask with 1 - reveal
    shown position:   mask with remask,            its token with 1 - remask

is the law of MDLM, ReMDM, SDTT, SEDD's absorbing graph and the masked DFM corrector; they differ in the two numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsdfm.flow.categorical import draw

__all__ = [
    "clipped",
    "draw_float32",
    "draw_tokens",
    "float32_survival",
    "joint_matrix",
    "masked_law",
    "nucleus",
    "strict_nucleus",
]


def clipped(weights: Tensor) -> Tensor:
    """Weights [..., V] as probabilities: negative ones 0, then normalised; what an arg-max draw from them means."""
    positive = weights.to(torch.float64).clamp(min=0)
    return positive / positive.sum(-1, keepdim=True)


def masked_law(probs: Tensor, x_t: Tensor, *, reveal: Tensor, remask: Tensor) -> Tensor:
    """The law of revealing and remasking: [B, L, V]; the mask is the last token, and p(mask) = 0.

    reveal, remask   broadcast against x_t [B, L]; values outside [0, 1] are cut, as clipping and normalising does
    """
    masked = (x_t == probs.shape[-1] - 1)[..., None]
    reveal, remask = (value.to(probs).clamp(0, 1).expand_as(x_t)[..., None] for value in (reveal, remask))
    stays = torch.nn.functional.one_hot(x_t, probs.shape[-1]).to(probs) * torch.where(masked, 1 - reveal, 1 - remask)
    moves = torch.where(masked, reveal * probs, 0.0)
    moves[..., -1] += torch.where(masked, 0.0, remask)[..., 0]
    return stays + moves


def nucleus(probs: Tensor, mass: float) -> Tensor:
    """The likeliest tokens, each kept while the mass before it is <= `mass`, renormalised: Duo's and everybody's."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = (ordered.cumsum(-1) - ordered) <= mass
    return _restored(torch.where(kept, ordered, 0.0), order)


def strict_nucleus(probs: Tensor, mass: float) -> Tensor:
    """The likeliest tokens whose mass *with* them is <= `mass`, and always the first, renormalised: ReMDM's.

    The token that crosses the mass is dropped: colder than `nucleus` at the same number.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) <= mass
    kept[..., 0] = True
    return _restored(torch.where(kept, ordered, 0.0), order)


def _restored(ordered: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(ordered).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def draw_tokens(law: Tensor, u: Tensor) -> Tensor:
    """Tokens [B, L] from a law [B, L, V] (weights are clipped), one float64 uniform per position: the exact draw."""
    log_law = torch.log(clipped(law)).flatten(0, -2)
    return draw(log_law, u.flatten().to(torch.float64)).tokens.view_as(u)


def draw_float32(law: Tensor, u: Tensor) -> Tensor:
    """The originals' draw: argmax_v q_v / (1e-10 - ln(u_v + 1e-10)) with u [..., V] in float32.

    A float32 uniform never exceeds 1 - 2^-24, so the exponential is never below 6e-8 and rare tokens cannot win
    (`float32_survival`). For measuring that; `draw_tokens` is the draw.
    """
    exponential = 1e-10 - (u.to(torch.float32) + 1e-10).log()
    return (law.to(torch.float32) / exponential).argmax(-1)


def float32_survival(probs: Tensor, reveal: Tensor | float) -> Tensor:
    """By which factor float32 multiplies the chance of a token at a masked position: 1 / (a (e^(1/a) - 1)).

    a = 2^24 q / q_m is the token's weight against the mask's, in units of the smallest float32 exponential; q = reveal
    * p and q_m = 1 - reveal.
    """
    share = torch.as_tensor(reveal, dtype=torch.float64)
    a = 2.0**24 * probs.to(torch.float64) * share / (1 - share)
    return torch.where(a > 0, 1 / (a * torch.expm1(1 / a.clamp(min=1e-300))), 0.0)


def joint_matrix(laws: Tensor) -> Tensor:
    """Transition probabilities between all states of a small world from the law of each position: [N, L, V] -> [N, N].

    Positions move independently given the state; states are numbered as `fsdfm.flow.exact.all_states` does.
    """
    matrix = laws[:, 0]
    for i in range(1, laws.shape[1]):
        matrix = (matrix[:, :, None] * laws[:, i, None, :]).flatten(1)
    if not math.isclose(float(matrix.sum()), len(matrix), rel_tol=1e-6):
        raise ValueError(f"the rows of a transition sum to {float(matrix.sum()) / len(matrix)} on average, not to 1")
    return matrix
