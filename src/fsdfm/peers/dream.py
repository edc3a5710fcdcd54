"""Dream's decoder (arXiv 2508.15487): masks are revealed at times 1 = t_0 > ... > t_S = eps, at random or by a score.

The network is shifted like an autoregressive one (`next_token`). Call i reads the logits at the masked positions,
tempers and filters them to p, proposes a token x ~ p (the likeliest at T = 0), and reveals with w_i = 1 - t_{i+1} / t_i

    origin          each masked position with probability w_i
    maskgit_plus    the k = floor(m w_i) best of m masked positions by p(x)
    topk_margin     by p_(1) - p_(2), the two likeliest tokens
    entropy         by sum_v p_v ln(p_v + 1e-10)

the last call all that are left. With `alg_temp` > 0 the k positions are drawn without replacement with weights
softmax(score / alg_temp). `origin` under the mask source is our `ExactJump` with kappa = 1 - t.

Times are float32, as published: floor(m w_i) depends on their rounding. The published code takes m as the mean over the
batch, so rows with unequal numbers of masks lose known tokens or keep masks; here every row has its own m, and
`batch_mean` shows the other. Top-p at T = 0 makes exact ties (a token above p alone has confidence 1); they go to the
left here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fsdfm.flow.categorical import draw
from fsdfm.noise import Noise, Purpose
from fsdfm.peers.order import best_positions, gumbel_scores, take_tokens

__all__ = [
    "EOS_ID",
    "MASK_ID",
    "DreamConfig",
    "decode",
    "filter_logits",
    "reveal",
    "reveal_count",
    "reveal_share",
    "scores",
]

MASK_ID, EOS_ID = 151666, 151643  # of the published tokenizer
Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]
Answer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DreamConfig:
    """The decoder's options, under the published names where there is one.

    steps        calls in all
    alg          how positions are chosen
    eps          the last time
    temperature  T of the proposals and of the scores; 0: the likeliest token
    top_p        drop a token when the mass before it exceeds this
    top_k        then drop logits below the k-th largest
    alg_temp     temperature of the order; None or 0: the best
    batch_mean   with the published fault: one m for all rows
    """

    steps: int
    alg: Algorithm = "origin"
    eps: float = 1e-3
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    batch_mean: bool = False
    mask_id: int = MASK_ID

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.eps < 1:
            raise ValueError(f"steps is {self.steps}, eps {self.eps}; allowed are steps >= 1 and 0 < eps < 1")
        if self.alg not in get_args(Algorithm):
            raise ValueError(f"alg is {self.alg!r}; allowed are {', '.join(map(repr, get_args(Algorithm)))}")
        if not 0 <= self.temperature < float("inf") or not 0 <= (self.alg_temp or 0) < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, alg_temp {self.alg_temp}; allowed are numbers >= 0")
        if (self.top_p is not None and not 0 < self.top_p <= 1) or (self.top_k is not None and self.top_k < 1):
            raise ValueError(f"top_p is {self.top_p}, top_k {self.top_k}; allowed are 0 < top_p <= 1, top_k >= 1")


def reveal_share(config: DreamConfig, call: int) -> Tensor:
    """w_i = 1 - t_{i+1} / t_i in float32, 1 in the last call: []."""
    times = torch.linspace(1, config.eps, config.steps + 1, dtype=torch.float32)
    return 1 - times[call + 1] / times[call] if call < config.steps - 1 else torch.tensor(1.0)


def reveal_count(masked: Tensor, config: DreamConfig, call: int) -> Tensor:
    """k = floor(m w_i) of m masked positions, in float32 as published: [B] -> int64 [B]."""
    known = masked.to(torch.float32)
    if config.batch_mean:
        known = known.mean().expand_as(known)
    return (known * reveal_share(config, call).to(known.device)).to(torch.int64)


def filter_logits(logits: Tensor, config: DreamConfig) -> Tensor:
    """l / T, without the tokens that top-p and top-k drop (-inf): [N, V] -> [N, V]."""
    if config.temperature > 0:
        logits = logits / config.temperature
    if config.top_p is not None and config.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = torch.softmax(ordered, -1).cumsum(-1)
        dropped = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), -1) > config.top_p
        logits = logits.masked_fill(torch.empty_like(dropped).scatter_(-1, order, dropped), -torch.inf)
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        least = logits.topk(config.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def scores(filtered: Tensor, tokens: Tensor, alg: Algorithm) -> Tensor:
    """How sure the network is of a position: filtered logits [N, V] and the proposed tokens [N] -> [N]."""
    probs = torch.softmax(filtered.float(), -1)
    if alg == "topk_margin":
        best = probs.topk(2, -1).values
        return best[:, 0] - best[:, 1]
    if alg == "entropy":
        return (probs * torch.log(probs + 1e-10)).sum(-1)
    return probs.gather(-1, tokens[:, None])[:, 0]


def reveal(
    x_t: Tensor,
    logits: Tensor,
    candidates: Tensor,
    *,
    call: int,
    u: Tensor,
    order_u: Tensor,
    config: DreamConfig,
) -> Tensor:
    """x_next of call number `call`.

    logits      at the candidates, row after row, shifted: [N, V]
    candidates  masked positions: bool [B, L]
    u, order_u  uniforms that draw tokens, and positions where they are drawn: float64 [B, L]
    """
    rows = candidates.flatten().nonzero()[:, 0]
    filtered = filter_logits(logits.float(), config)
    tokens = filtered.argmax(-1) if config.temperature == 0 else draw(filtered, u.flatten()[rows]).tokens
    if config.alg == "origin":
        return take_tokens(x_t, candidates & (order_u < reveal_share(config, call)), rows, tokens)
    sure = torch.zeros(x_t.shape, dtype=torch.float64, device=x_t.device)
    sure.view(-1)[rows] = scores(filtered, tokens, config.alg).double()
    if config.alg_temp:
        sure = gumbel_scores(sure, order_u, config.alg_temp)
    counts = reveal_count(candidates.sum(-1), config, call)
    x_next = take_tokens(x_t, best_positions(sure, candidates, counts), rows, tokens)
    if not config.batch_mean:
        return x_next
    too_many = best_positions(torch.zeros_like(sure), ~candidates, (counts - candidates.sum(-1)).clamp(min=0))
    return torch.where(too_many, config.mask_id, x_next)  # a row with fewer masks than the mean loses known tokens


def decode(
    answer: Answer,
    x_0: Tensor,
    config: DreamConfig,
    *,
    noise: Noise,
    order_uniforms: Tensor | None = None,
) -> Iterator[Tensor]:
    """Decode a canvas [B, L] of prompts and masks, and yield it after every call: int64 [B, L].

    answer          shifted logits [B, L, V] of a canvas; the mask is never proposed
    order_uniforms  uniforms per call and position, [calls, B, L], in place of the noise's
    """
    x_t, length = x_0, x_0.shape[1]
    for call in range(config.steps):
        candidates = x_t == config.mask_id
        logits = answer(x_t)[candidates].index_fill(-1, torch.tensor(config.mask_id, device=x_t.device), -torch.inf)
        order_u = noise.uniform(Purpose.COIN, length, call) if order_uniforms is None else order_uniforms[call]
        destinations = noise.uniform(Purpose.DESTINATION, length, call)
        x_t = reveal(x_t, logits, candidates, call=call, u=destinations, order_u=order_u, config=config)
        yield x_t
