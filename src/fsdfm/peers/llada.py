"""LLaDA's decoder (arXiv 2502.09992): masks are revealed block by block, the surest positions first.

A canvas of a prompt and G masks, seen whole in every call. Blocks of B positions go from left to right, and each of the
S calls belongs to one; a call

    1. reads the logits l at the masked positions of its window, guided if w > 0:  l = l_u + (1 + w) (l_c - l_u),
       where l_u saw the prompt masked too;
    2. proposes a token x at each: argmax l, or a draw from softmax(l / T);
    3. scores it: p(x) under softmax(l), not tempered (`low_confidence`), or a fresh uniform (`random`);
    4. reveals the k best, k = ceil(m / r): m masks in the window, r calls that the window still has.

What is revealed stays. Everything here is a function of logits and noise; the network is the caller's.

Where the published decoder does what cannot be meant, `literal` does it too: a mask in the prompt is revealed at the
cost of one in the block, which stays for ever; the mask itself may be proposed; and with T > 0 `late_eos` forgets the
end-of-text token. Its Gumbel draw is `gumbel_tokens`, exact in float64; in float32 it loses the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter, draw
from fsdfm.noise import Noise, Purpose
from fsdfm.peers.order import best_positions, take_tokens

__all__ = [
    "EOS_ID",
    "EOT_ID",
    "MASK_ID",
    "LLaDAConfig",
    "block_window",
    "confidences",
    "decode",
    "guide",
    "gumbel_tokens",
    "propose",
    "reveal",
    "reveal_counts",
]

MASK_ID, EOS_ID, EOT_ID = 126336, 126081, 126348  # of the published tokenizer
Order = Literal["low_confidence", "random"]
Answer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LLaDAConfig:
    """The decoder's options, under our names; theirs stand behind.

    steps         calls in all
    block_length  B; None: one block
    temperature   T of the proposals; 0: the likeliest token
    guidance      w (`cfg_scale`)
    order         how positions are scored (`remasking`)
    ban_eos       the end of text is never proposed (`logits_eos_inf`)
    late_eos      ends of text and turn come last (`confidence_eos_eot_inf`)
    threshold     reveal whatever is at least so sure instead, at least one position (Fast-dLLM's); calls are then free
    literal       with the published decoder's faults
    """

    steps: int
    block_length: int | None = None
    temperature: float = 0.0
    guidance: float = 0.0
    order: Order = "low_confidence"
    ban_eos: bool = False
    late_eos: bool = False
    threshold: float | None = None
    literal: bool = False
    mask_id: int = MASK_ID
    eos_id: int = EOS_ID
    eot_id: int = EOT_ID

    def __post_init__(self) -> None:
        if self.steps < 1 or (self.block_length is not None and self.block_length < 1):
            raise ValueError(f"steps is {self.steps}, block_length {self.block_length}; allowed are whole numbers >= 1")
        if not 0 <= self.temperature < float("inf") or not 0 <= self.guidance < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, guidance {self.guidance}; allowed are numbers >= 0")
        if self.order not in get_args(Order):
            raise ValueError(f"order is {self.order!r}; allowed are {', '.join(map(repr, get_args(Order)))}")
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; allowed are 0 < threshold <= 1, or None")

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that are never proposed."""
        return (() if self.literal else (self.mask_id,)) + ((self.eos_id,) if self.ban_eos else ())

    @property
    def demoted(self) -> tuple[int, ...]:
        """Tokens that, once proposed, have no confidence."""
        if not self.late_eos:
            return ()
        return (self.eot_id,) if self.literal and self.temperature > 0 else (self.eos_id, self.eot_id)


def reveal_counts(masked: int, steps: int) -> list[int]:
    """How many of `masked` positions each of `steps` calls reveals: as evenly as can be, the larger shares first."""
    return [masked // steps + (call < masked % steps) for call in range(steps)]


def block_window(starts: Tensor, length: int, config: LLaDAConfig, *, call: int) -> tuple[Tensor, Tensor]:
    """Where the window of a call ends, int64 [B], and how many calls it still has, this one included, int64 [B].

    starts   where the generated part of each row begins, int64 [B]

    With n blocks of the part behind the start, call s is about block b = ceil((s + 1) n / S) - 1.
    """
    generated = length - starts
    size = generated if config.block_length is None else torch.full_like(generated, config.block_length)
    blocks = _ceil(generated, size.clamp(min=1)).clamp(min=1)
    done = _ceil((call + 1) * blocks, config.steps)  # blocks that are begun once this call is over
    left = done * config.steps // blocks - call
    return (starts + done * size).clamp(max=length), left


def _ceil(a: Tensor, b: Tensor | int) -> Tensor:
    return -(-a // b)


def guide(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """l_u + (1 + w) (l_c - l_u): the logits with guidance w."""
    return unconditional + (1 + guidance) * (conditional - unconditional)


def gumbel_tokens(logits: Tensor, u: Tensor, temperature: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """argmax_v (l_v - T ln(-ln u_v)), a draw from softmax(l / T) from a uniform per vocabulary entry: [N, V] -> [N].

    In float32, as others compute it, -ln(-ln u) ends at about 17: tokens rarer than 2^-24 beside a likely one are never
    drawn.
    """
    gumbel = -torch.log(-torch.log(u.to(dtype)))
    return (logits.to(dtype) + temperature * gumbel).argmax(-1)


def propose(logits: Tensor, u: Tensor, config: LLaDAConfig) -> Tensor:
    """A token for every row: the likeliest, or x ~ softmax(l / T) by inverse CDF: [N, V], float64 [N] -> int64 [N]."""
    allowed = _without(logits, config.banned)
    if config.temperature == 0:
        return allowed.argmax(-1)
    return draw(allowed, u, filter=Filter(temperature=config.temperature)).tokens


def confidences(logits: Tensor, tokens: Tensor, config: LLaDAConfig) -> Tensor:
    """p(x) under softmax(l) in float32, without what is banned and demoted: [N, V], [N] -> [N]."""
    log_p = torch.log_softmax(_without(logits, config.banned + config.demoted).float(), -1)
    return log_p.gather(-1, tokens[:, None])[:, 0].exp()


def _without(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    if not tokens:
        return logits
    return logits.index_fill(-1, torch.tensor(tokens, device=logits.device), -torch.inf)


def reveal(
    x_t: Tensor,
    logits: Tensor,
    candidates: Tensor,
    *,
    counts: Tensor,
    u: Tensor,
    order_u: Tensor,
    config: LLaDAConfig,
) -> Tensor:
    """x_next of one call.

    logits      at the candidates, row after row: [N, V]
    candidates  masked positions of the window: bool [B, L]
    counts      k per row, int64 [B]; with a threshold only whether there is anything to reveal
    u, order_u  uniforms that draw tokens and, in random order, positions: float64 [B, L]
    """
    rows = candidates.flatten().nonzero()[:, 0]
    tokens = propose(logits, u.flatten()[rows], config)
    scores = order_u
    if config.order == "low_confidence":
        scores = torch.zeros(x_t.shape, device=x_t.device)
        scores.view(-1)[rows] = confidences(logits, tokens, config)
    if config.threshold is None:
        revealed = best_positions(scores, candidates, counts)
    else:
        surest = best_positions(scores, candidates, torch.ones_like(counts))
        revealed = candidates & ((scores >= config.threshold) | surest)
    return take_tokens(x_t, revealed, rows, tokens)


def decode(
    answer: Answer,
    x_0: Tensor,
    config: LLaDAConfig,
    *,
    noise: Noise,
    prompt_length: int,
    order_uniforms: Tensor | None = None,
) -> Iterator[Tensor]:
    """Decode a canvas [B, L] of prompts and masks, and yield it after every call: int64 [B, L].

    answer          logits [B, L, V] of a canvas
    order_uniforms  the uniforms of a random order, [calls, B, L], in place of the noise's
    """
    _check(x_0, config, prompt_length)
    x_t, length = x_0, x_0.shape[1]
    starts = torch.full((len(x_0),), prompt_length, device=x_0.device)
    prompt, position = x_0 != config.mask_id, torch.arange(length, device=x_0.device)
    end, step, call = prompt_length, 0, 0
    while call < config.steps:
        ends, left = block_window(starts, length, config, call=call)
        if int(ends[0]) != end:
            begin, end, first = end, int(ends[0]), call
            inside = (x_t == config.mask_id) & (position < end) & (position >= begin)
            block_counts = [reveal_counts(int(row.sum()), int(left[0])) for row in inside]
        candidates = (x_t == config.mask_id) & (position < ends[:, None])
        counts = _ceil(candidates.sum(-1), left)
        if config.literal:
            counts = torch.tensor([row[call - first] for row in block_counts], device=x_t.device)
        logits = answer(x_t)
        if config.guidance:
            logits = guide(logits, answer(torch.where(prompt, config.mask_id, x_t)), config.guidance)
        order_u = noise.uniform(Purpose.COIN, length, step) if order_uniforms is None else order_uniforms[step]
        x_t = reveal(
            x_t,
            logits[candidates],
            candidates,
            counts=counts,
            u=noise.uniform(Purpose.DESTINATION, length, step),
            order_u=order_u,
            config=config,
        )
        yield x_t
        step += 1
        window = (x_t == config.mask_id) & (position < ends[:, None])
        if config.threshold is None:
            call += 1
        elif not bool(window.any()):
            call += int(left[0])


def _check(x_0: Tensor, config: LLaDAConfig, prompt_length: int) -> None:
    generated = x_0.shape[1] - prompt_length
    size = config.block_length or generated
    if generated < 1 or generated % size or config.steps % (generated // size):
        raise ValueError(
            f"{generated} tokens in blocks of {size} with {config.steps} steps; the blocks must divide the tokens, and "
            "their number the steps"
        )
    if not config.literal and bool((x_0[:, :prompt_length] == config.mask_id).any()):
        raise ValueError(f"the prompt holds the mask token {config.mask_id}; make it part of what is generated")
