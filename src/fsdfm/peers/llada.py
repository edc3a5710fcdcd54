"""LLaDA's decoder (arXiv 2502.09992): masks are revealed block by block, the surest positions first.

A canvas of a prompt and G masks, seen whole in every call. Blocks of B positions go from left to right, and each of the
S calls belongs to one; a call

    1. reads the logits l at the masked positions of its window, guided if w > 0 (`Guided`):
       l = l_u + (1 + w) (l_c - l_u), where l_u saw the prompt masked too;
    2. proposes a token x at each: argmax l, or a draw from softmax(l / T);
    3. scores it: p(x) under softmax(l), not tempered (`low_confidence`), or a fresh uniform (`random`);
    4. reveals the k best, k = ceil(m / r): m masks in the window, r calls that the window still has.

What is revealed stays. The FS-DFM paper's setting, blocks of max(512/S, 32) at T = 0, is one call per block for
S <= 16: every block is its positionwise argmax and the order never acts.

Where the published decoder does what cannot be meant, `literal` does it too: a mask in the prompt is revealed at the
cost of one in the block, which stays for ever; the mask itself may be proposed; and with T > 0 `late_eos` forgets the
end-of-text token. Its Gumbel draw is `gumbel_tokens`, exact in float64; in float32 it loses the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter, draw
from fsdfm.flow.posterior import Independent, Posterior, SplitNetwork
from fsdfm.flow.rule import RULES, Plan, SamplerState, StepRule
from fsdfm.noise import Purpose
from fsdfm.peers.order import best_positions, masked_positions, put_tokens

__all__ = ["Guided", "LLaDARule", "block_window", "confidences", "guide", "gumbel_tokens", "reveal_counts"]

Order = Literal["low_confidence", "random"]


def _require_guidance(guidance: float) -> None:
    if not 0 <= guidance < float("inf"):
        raise ValueError(f"guidance is {guidance}; allowed are finite numbers >= 0")


@dataclass(frozen=True)
class LLaDARule(StepRule):
    """The decoder's step, its options under our names; theirs stand behind.

    block_length  B; None: one block
    block_calls   calls per block in the place of B: 1 is the FS-DFM paper's setting, a block for every call
    temperature   T of the proposals; 0: the likeliest token. The sampler's own filter, if it has one, stands before it
    order         how positions are scored (`remasking`)
    ban_eos       the end of text is never proposed (`logits_eos_inf`)
    late_eos      ends of text and turn come last (`confidence_eos_eot_inf`)
    threshold     reveal whatever is at least so sure instead, at least one position (Fast-dLLM's); a block then takes
                  the calls it needs, and those left over ask for nothing
    begin         where the first block begins; None: at the first mask
    literal       with the published decoder's faults
    eos_id, eot_id   the two tokens that the flags are about: 126081 and 126348 of the published tokenizer
    guidance      w of `Guided`, which whoever asks the network puts around it; every call is then two
    """

    goes_back = False

    block_length: int | None = None
    temperature: float = 0.0
    order: Order = "low_confidence"
    ban_eos: bool = False
    late_eos: bool = False
    threshold: float | None = None
    begin: int | None = None
    literal: bool = False
    eos_id: int | None = None
    eot_id: int | None = None
    block_calls: int | None = None
    guidance: float = 0.0

    def __post_init__(self) -> None:
        _require_guidance(self.guidance)
        if self.block_length is not None and self.block_length < 1:
            raise ValueError(f"block_length is {self.block_length}; allowed are whole numbers >= 1, or None for one")
        if self.block_calls is not None and (self.block_calls < 1 or self.block_length is not None):
            raise ValueError(
                f"block_calls is {self.block_calls} and block_length {self.block_length}; allowed is one of them, a "
                "whole number >= 1"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; allowed are finite numbers >= 0")
        if self.order not in get_args(Order):
            raise ValueError(f"order is {self.order!r}; allowed are {', '.join(map(repr, get_args(Order)))}")
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; allowed are 0 < threshold <= 1, or None")
        if (self.ban_eos or self.late_eos) and self.eos_id is None:
            raise ValueError("eos_id is None, but ban_eos or late_eos is set; say which token ends a text")

    def plan(self, state: SamplerState) -> Plan:
        """The masks of the call's window."""
        return Plan((masked_positions(state, "llada") & self._window(state)).flatten().nonzero()[:, 0])

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """The surest of the window are revealed."""
        state.memory.setdefault("begin", self._begin(state))
        shape, device = state.x_t.shape, state.x_t.device
        u = state.noise.uniform(Purpose.DESTINATION, shape[1], state.index).to(device).flatten()[plan.rows]
        tokens = torch.zeros(len(plan.rows), dtype=torch.int64, device=device)
        sure = torch.zeros(len(plan.rows), dtype=torch.float64, device=device)
        for part, tile, own in posterior.marginals(plan.rows):
            logits = _without(tile if own is None else tile[own], self._banned(state))
            tokens[part] = self._propose(logits, u[part], state.filter)
            sure[part] = confidences(logits, tokens[part], self._demoted()).double()
        candidates = torch.zeros(shape, dtype=torch.bool, device=device).flatten().index_fill_(0, plan.rows, True)
        scores = torch.zeros(candidates.shape, dtype=torch.float64, device=device).index_copy_(0, plan.rows, sure)
        if self.order == "random":
            scores = state.noise.uniform(Purpose.COIN, shape[1], state.index).to(device).flatten()
        chosen = self._choose(state, scores.view(shape), candidates.view(shape))
        return put_tokens(state.x_t, chosen, plan.rows, tokens=tokens)

    def _choose(self, state: SamplerState, scores: Tensor, candidates: Tensor) -> Tensor:
        if self.threshold is None or state.index == state.steps - 1:
            return best_positions(scores, candidates, self._counts(state, candidates))
        surest = best_positions(scores, candidates, torch.ones_like(scores[:, 0]))
        return candidates & ((scores >= self.threshold) | surest)

    def _counts(self, state: SamplerState, candidates: Tensor) -> Tensor:
        """k per row; the literal decoder has counted the masks of the block at its beginning."""
        left = block_window(self._begin(state), state, self._size(state))[1]
        masks = candidates.sum(-1)
        if not self.literal:
            return _ceil(masks, left)
        end, last = self._end(state), state.memory.get("end", self._begin(state))
        if not torch.equal(end, last):
            position = torch.arange(state.x_t.shape[1], device=end.device)
            state.memory["masks"] = (candidates & (position >= last[:, None])).sum(-1)
            state.memory["calls"], state.memory["end"] = left, end
        return _share(state.memory["masks"], state.memory["calls"], state.memory["calls"] - left)

    def _begin(self, state: SamplerState) -> Tensor:
        """Where the blocks of each row begin: int64 [B]."""
        if "begin" in state.memory:
            return state.memory["begin"]
        first = masked_positions(state, "llada").to(torch.int8).argmax(-1)
        return first if self.begin is None else torch.full_like(first, self.begin)

    def _end(self, state: SamplerState) -> Tensor:
        """Where the window ends: with a threshold behind the first block that has masks left, else by the calls."""
        begin = self._begin(state)
        if self.threshold is None or state.index == state.steps - 1:
            return block_window(begin, state, self._size(state))[0]
        length = state.x_t.shape[1]
        first = masked_positions(state, "llada").to(torch.int8).argmax(-1)
        size = self._size(state) or length
        return (begin + size * ((first - begin).clamp(min=0) // size + 1)).clamp(max=length)

    def _size(self, state: SamplerState) -> int | None:
        """B: as it is given, or as long as a block of so many calls is in the row with most to write."""
        if self.block_calls is None:
            return self.block_length
        longest = state.x_t.shape[1] - int(self._begin(state).min())
        return -(-longest * self.block_calls // state.steps)

    def _window(self, state: SamplerState) -> Tensor:
        return torch.arange(state.x_t.shape[1], device=state.x_t.device) < self._end(state)[:, None]

    def _propose(self, logits: Tensor, u: Tensor, filter: Filter | None) -> Tensor:
        if filter is None and self.temperature == 0:
            return logits.argmax(-1)
        return draw(logits, u, filter=filter or Filter(temperature=self.temperature)).tokens

    def _banned(self, state: SamplerState) -> tuple[int | None, ...]:
        """Tokens that are never proposed."""
        mask = None if self.literal else state.path.source.mask_token
        return (mask, self.eos_id if self.ban_eos else None)

    def _demoted(self) -> tuple[int | None, ...]:
        """Tokens that, once proposed, have no confidence."""
        forgotten = self.literal and self.temperature > 0
        return (None if forgotten else self.eos_id, self.eot_id) if self.late_eos else ()


RULES["llada"] = LLaDARule()
RULES["llada-random"] = LLaDARule(order="random", temperature=1.0)


def reveal_counts(masked: int, steps: int) -> list[int]:
    """How many of `masked` positions each of `steps` calls reveals: as evenly as can be, the larger shares first."""
    calls = torch.arange(steps)
    return _share(torch.tensor(masked), torch.tensor(steps), calls).tolist()


def _share(masks: Tensor, calls: Tensor, call: Tensor) -> Tensor:
    return masks // calls + (call < masks % calls)


def block_window(begin: Tensor, state: SamplerState, block_length: int | None) -> tuple[Tensor, Tensor]:
    """Where the window of a call ends, int64 [B], and how many calls it still has, this one included, int64 [B].

    begin   where the generated part of each row begins, int64 [B]

    With n blocks behind the beginning, call s of S is about block b = ceil((s + 1) n / S) - 1.
    """
    length = state.x_t.shape[1]
    generated = (length - begin).clamp(min=1)
    size = generated if block_length is None else torch.full_like(generated, block_length)
    blocks = _ceil(generated, size)
    done = _ceil((state.index + 1) * blocks, state.steps)  # blocks that are begun once this call is over
    return (begin + done * size).clamp(max=length), done * state.steps // blocks - state.index


def _ceil(a: Tensor, b: Tensor | int) -> Tensor:
    return -(-a // b)


def confidences(logits: Tensor, tokens: Tensor, demoted: tuple[int | None, ...] = ()) -> Tensor:
    """p(x) under softmax(l) in float32, 0 for what is demoted: [N, V], [N] -> [N]."""
    log_p = torch.log_softmax(_without(logits, demoted).float(), -1)
    return log_p.gather(-1, tokens[:, None])[:, 0].exp()


def _without(logits: Tensor, tokens: tuple[int | None, ...]) -> Tensor:
    found = [token for token in tokens if token is not None]
    return logits.index_fill(-1, torch.tensor(found, device=logits.device), -torch.inf) if found else logits


def gumbel_tokens(logits: Tensor, u: Tensor, temperature: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """argmax_v (l_v - T ln(-ln u_v)), a draw from softmax(l / T) from a uniform per vocabulary entry: [N, V] -> [N].

    In float32, as others compute it, -ln(-ln u) ends at about 17: a token rarer than that beside a likely one is never
    drawn. `fsdfm.flow.draw` needs one uniform per row.
    """
    gumbel = -torch.log(-torch.log(u.to(dtype)))
    return (logits.to(dtype) + temperature * gumbel).argmax(-1)


def guide(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """l_u + (1 + w) (l_c - l_u): the logits with guidance w."""
    return unconditional + (1 + guidance) * (conditional - unconditional)


class Guided:
    """A network under classifier-free guidance: what it says, less what it says where the prompt is masked.

    known      the prompt: bool [B, L]
    guidance   w > 0; every call of the sampler is two of the network

    Heads are linear here, so the features are guided and the head runs once.
    """

    def __init__(self, network: SplitNetwork, known: Tensor, *, guidance: float, mask_token: int):
        _require_guidance(guidance)
        self.network, self.known, self.guidance, self.mask_token = network, known, guidance, mask_token

    @property
    def samples_apart(self) -> bool:
        """Whether the head is asked about one sample at a time, as the network's own is."""
        return bool(getattr(self.network, "samples_apart", False))

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Guided features [B, L, C]."""
        unknown = torch.where(self.known, self.mask_token, x_t)
        return guide(self.network.trunk(x_t, t, h), self.network.trunk(unknown, t, h), self.guidance)

    def logits_at(self, features: Tensor) -> Tensor:
        """The head at chosen rows."""
        return self.network.logits_at(features)

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """p_{1|t}(. | x_t), guided."""
        del rows  # both passes are over the whole canvas
        return Independent.of_features(self.trunk(x_t, t, h), self)
