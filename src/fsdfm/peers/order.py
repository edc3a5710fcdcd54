"""Confidence orders of masked decoding: which masked positions are revealed in a call, given a score per position."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdfm.flow.rule import SamplerState

__all__ = ["best_positions", "gumbel_scores", "masked_positions", "put_tokens"]


def masked_positions(state: SamplerState, rule: str) -> Tensor:
    """The masks that may be revealed: bool [B, L]; without a mask there is nothing for such a rule to do."""
    mask = state.path.source.mask_token
    if mask is None:
        raise ValueError(f"the rule {rule} reveals masks, and the source is {state.path.source}; use exact or spaced")
    return (state.x_t == mask) & state.movable()


def best_positions(scores: Tensor, candidates: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [B] best-scored candidates of every row, ties to the left: bool [B, L].

    scores      [B, L], any where there is no candidate
    candidates  bool [B, L]; where a row has fewer than its count, all of them are taken
    """
    known = torch.where(candidates, scores.to(torch.float64).clamp(min=torch.finfo(torch.float64).min), -torch.inf)
    order = known.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, rank)
    return (place < counts[:, None].to(place)) & candidates


def gumbel_scores(scores: Tensor, u: Tensor, temperature: float) -> Tensor:
    """score / T - ln(-ln u): their k best are k draws without replacement with weights softmax(score / T)."""
    return scores.to(torch.float64) / temperature - torch.log(-torch.log(u))


def put_tokens(x_t: Tensor, revealed: Tensor, rows: Tensor, *, tokens: Tensor) -> Tensor:
    """x_t with the tokens [N] of rows b * L + i put in where they are revealed, bool [B, L]."""
    x_next = x_t.flatten().clone()
    chosen = revealed.flatten()[rows]
    x_next[rows[chosen]] = tokens[chosen]
    return x_next.view_as(x_t)
