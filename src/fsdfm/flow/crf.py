"""A linear-chain CRF as the posterior: neighbours that are drawn in one step know of each other.

A denoiser with independent outputs draws every position of a step as if it were alone. Here p_{1|t} is a conditional
random field over the positions instead (Lafferty et al. 2001),

    p(x) = 1/Z  prod_i e^{u_i(x_i)}  prod_i e^{s(x_i, x_{i+1})},     s(a, b) = <left_a, right_b>,

u_i the network's logits, the *fields*, and s the *transitions*, one number for a pair of neighbours, of low rank. Only
the K likeliest tokens of a position, its *candidates*, have transitions; all others together are one more state, the
*rest*, whose transitions are 0 and inside which u decides. So every text has a probability, and sums over texts cost
L K^2 (forward-backward):

    alpha_1 = u_1,   alpha_{i+1}(b) = u_{i+1}(b) + log sum_a e^{alpha_i(a) + s(a, b)},   log Z = logsumexp alpha_L.

Transitions may depend on where they are: with *gates* g_i [r], functions of the text, the time and the step size,

    s_i(a, b) = sum_k (1 + g_ik) left_ak right_bk,

every component of the pair's number is louder or softer between i and i + 1. Gates of 0 change nothing.

Without transitions the chain is the product of the positions' softmaxes. Low-rank transitions over a beam of candidates
are those of Sun et al. (2019, arXiv 1910.11555) for non-autoregressive translation; relatives in discrete diffusion are
CoDD (2603.00045), tensor-train joints (2607.03788) and Discrete Copula Diffusion (2410.01949). The rest state, which
makes the law of whole texts exact and normalised, and its use along a uniform-source flow are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.flow.categorical import Filter
from fsdfm.flow.posterior import (
    Independent,
    LogitsHook,
    Posterior,
    SplitNetwork,
    Tile,
    independent_posterior,
    rows_of,
)

__all__ = ["CANDIDATES", "Chain", "ChainCRF", "Gates", "Transitions", "crf_posterior", "pmi_transitions"]

Transitions = tuple[Tensor, Tensor]
"""What a token makes of the next: left and right, [V, r] each, with s(a, b) = <left_a, right_b>."""

CANDIDATES = 64  # tokens per position that have transitions
_SAMPLES = 8  # whose texts are drawn together on a GPU
_NEVER = -1e30  # the log of 0, where a gradient passes


def pmi_transitions(counts: Tensor, rank: int, *, strength: float = 0.5, prior: float = 30.0) -> Transitions:
    """Transitions to begin with, from how often token b follows a: sparse counts n [V, V] -> [V, rank] twice.

    The best approximation of that rank to strength * max(0, log[n_ab n / (n_a n_b)]), how much more often than by
    chance b follows a (its positive pointwise mutual information); `prior` pairs a token by chance are counted with
    what was seen. A network knows some of that itself, so the transitions of a trained chain are weaker: hence the
    strength.
    """
    counts = counts.coalesce()
    (first, then), seen = counts.indices(), counts.values().double()
    total, size = seen.sum(), counts.shape[0]
    follows = torch.zeros(size, dtype=torch.float64).index_add_(0, then, seen) / total
    before = torch.zeros(size, dtype=torch.float64).index_add_(0, first, seen)
    ratio = (seen + prior * follows[then]) / ((before[first] + prior) * follows[then])
    gain = strength * torch.log(ratio).clamp(min=0).float()
    table = torch.sparse_coo_tensor(counts.indices(), gain, counts.shape, check_invariants=True)
    rank = min(rank, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, values, v = torch.svd_lowrank(table, min(rank + 16, size), niter=4)
    scale = values[:rank].sqrt()
    return u[:, :rank] * scale, v[:, :rank] * scale


@dataclass(frozen=True)
class Chain:
    """The law of texts [B, L] of a linear-chain CRF: `Chain.of(logits, transitions)`.

    log_p    log softmax of u: [B, L, V]
    tokens   the candidates, int64 [B, L, K]
    states   log weights of the candidates and the rest: [B, L, K+1]
    scores   s between the states of neighbours: [B, L-1, K+1, K+1]
    """

    log_p: Tensor
    tokens: Tensor
    states: Tensor
    scores: Tensor

    @classmethod
    def of(
        cls,
        logits: Tensor,
        transitions: Transitions,
        *,
        held: Tensor | None = None,
        joined: Tensor | None = None,
        gates: Tensor | None = None,
        temperature: float = 1.0,
        candidates: int = CANDIDATES,
    ) -> Chain:
        """The chain of logits [B, L, V], in float32 or finer.

        held          a token where a position is certain, -1 elsewhere: int64 [B, L]; None: nowhere
        joined        positions that are part of the text, bool [B, L]: others have no transitions; None: all are
        gates         of the transitions: [B, L-1, r]; None: 0
        temperature   divides the transitions; the logits have theirs already
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if held is not None:
            certain = torch.full_like(logits, _NEVER).scatter(-1, held.clamp(min=0)[..., None], 0.0)
            logits = torch.where((held >= 0)[..., None], certain, logits)
        log_p = torch.log_softmax(logits, -1).clamp(min=_NEVER)
        count = min(candidates, logits.shape[-1])
        top, tokens = log_p.topk(count, -1)
        rest = torch.logsumexp(log_p.scatter(-1, tokens, _NEVER), -1, keepdim=True)
        with torch.autocast(logits.device.type, enabled=False):
            left, right = (table.to(log_p.dtype) for table in transitions)
            before = left[tokens[:, :-1]]
            if gates is not None:
                before = before * (1 + gates.to(log_p.dtype))[..., None, :]
            scores = before @ right[tokens[:, 1:]].transpose(-1, -2) / temperature
        if joined is not None:
            scores = scores * (joined[:, :-1] & joined[:, 1:])[..., None, None]
        return cls(log_p, tokens, torch.cat([top, rest], -1), F.pad(scores, (0, 1, 0, 1)))

    def log_normaliser(self) -> Tensor:
        """log Z: [B]."""
        *_, last = self._forward()
        return torch.logsumexp(last, -1)

    def log_prob(self, x: Tensor, *, scored: Tensor | None = None) -> Tensor:
        """log p of texts, int64 [B, L] -> [B]; with `scored`, bool [B, L], of these positions, the others unlinked."""
        inside = self.tokens == x[..., None]
        state = torch.where(inside.any(-1), inside.to(torch.uint8).argmax(-1), inside.shape[-1])
        count = self.states.shape[-1]
        pairs = (state[:, :-1] * count + state[:, 1:])[..., None]
        own = self.log_p.gather(-1, x[..., None])[..., 0]
        own = own if scored is None else torch.where(scored, own, 0.0)
        return own.sum(-1) + self.scores.flatten(2).gather(-1, pairs)[..., 0].sum(-1) - self.log_normaliser()

    def log_marginals(self) -> Tensor:
        """log p of every token at every position, whatever stands elsewhere: [B, L, V]."""
        alpha, beta = torch.stack(list(self._forward()), 1), self._backward()
        gain = torch.log_softmax(alpha + beta, -1) - self.states
        change = gain[..., -1:].expand_as(self.log_p).scatter(-1, self.tokens, gain[..., :-1])
        return self.log_p + change

    @torch.no_grad()
    def draw(self, u: Tensor) -> Tensor:
        """One text per row from uniforms in (0, 1), float64 [B, L]: int64 [B, L].

        Backwards the messages; then, for every state of a position at once, the state that u makes of the next, the one
        in whose interval it falls; then forwards along those moves. Where the state is the rest, what is left of u
        picks the token in it.
        """
        weights = self.states + self._backward()
        start = torch.softmax(weights[:, 0], -1)
        first, _ = _pick(start, u[:, 0])
        steps = torch.softmax(self.scores + weights[:, 1:, None], -1)  # p(next state | state)
        moves, _ = _pick(steps, u[:, 1:, None])
        state = _follow(first, moves) if u.device.type == "cpu" else _follow_by_doubling(first, moves)
        came_from = state[:, :-1, None, None].expand(-1, -1, 1, steps.shape[-1])
        rows = torch.cat([start[:, None], steps.gather(2, came_from)[:, :, 0]], 1)
        _, left_over = _pick(rows, u)
        rest = state == self.tokens.shape[-1]
        drawn = self.tokens.gather(-1, state.clamp(max=self.tokens.shape[-1] - 1)[..., None])[..., 0]
        if bool(rest.any()):
            others = torch.softmax(self.log_p[rest].scatter(-1, self.tokens[rest], _NEVER), -1)
            drawn[rest], _ = _pick(others, left_over[rest])
        return drawn

    def _forward(self) -> Iterator[Tensor]:
        """alpha_1, ..., alpha_L, each [B, K+1], in logarithms: e^{s / temperature} is no float32 when it is cold."""
        alpha = self.states[:, 0]
        yield alpha
        for state, score in zip(self.states[:, 1:].unbind(1), self.scores.unbind(1), strict=True):
            alpha = state + torch.logsumexp(alpha[..., None] + score, 1)
            yield alpha

    def _backward(self) -> Tensor:
        """beta_i(a) = log sum_b e^{s(a, b) + u_{i+1}(b) + beta_{i+1}(b)} up to constants, beta_L = 0: [B, L, K+1]."""
        betas = [torch.zeros_like(self.states[:, -1])]
        for state, score in zip(self.states[:, 1:].unbind(1)[::-1], self.scores.unbind(1)[::-1], strict=True):
            beta = torch.logsumexp(score + (state + betas[-1])[:, None], -1)
            betas.append(beta - beta.detach().amax(-1, keepdim=True))
        return torch.stack(betas[::-1], 1)


@dataclass(frozen=True)
class ChainCRF(Posterior):
    """The posterior with these fields and transitions.

    held        the token of every position that is certain, -1 elsewhere: int64 [B, L]
    forbidden   a token that cannot be, such as the mask
    gates       of the transitions, [B, L-1, r]; None: 0

    On a CPU one sample at a time, so that what is drawn does not depend on the rows beside it.
    """

    fields: Independent
    transitions: Transitions
    held: Tensor
    forbidden: int | None = None
    gates: Tensor | None = None
    joint = True

    def marginals(self, rows: Tensor) -> Iterator[Tile]:
        """The log marginals of a sample's rows, sample after sample."""
        samples, counts = torch.unique_consecutive(rows // self.fields.length, return_counts=True)
        start = 0
        for sample, fields, count in zip(samples, self._fields(samples), counts.tolist(), strict=True):
            own = slice(start, start + count)
            chain = Chain.of(
                fields[None], self.transitions, held=self.held[sample][None], gates=self._gates(sample[None])
            )
            yield own, chain.log_marginals()[0][rows[own] % self.fields.length], None
            start = own.stop

    def draw(self, samples: Tensor, u: Tensor, *, filter: Filter | None = None) -> Tensor:
        """Texts drawn from the chain, all positions together. A temperature divides fields and transitions."""
        temperature = 1.0 if filter is None else filter.temperature
        together = 1 if self.held.device.type == "cpu" else _SAMPLES
        fields, texts = self._fields(samples), []
        for own_samples, own_u in zip(
            torch.split(samples, together), torch.split(u.to(self.held.device), together), strict=True
        ):
            own = torch.cat([next(fields) for _ in own_samples])
            own = own if filter is None else filter(own)
            chain = Chain.of(
                own.view(*own_u.shape, -1),
                self.transitions,
                held=self.held[own_samples],
                gates=self._gates(own_samples),
                temperature=temperature,
            )
            texts.append(chain.draw(own_u))
        return torch.cat(texts)

    def log_prob(self, x_1: Tensor) -> Tensor:
        """log p of the chain, normalised over all texts."""
        samples = torch.arange(len(x_1), device=x_1.device)
        chains = (
            Chain.of(fields[None], self.transitions, held=self.held[own], gates=self._gates(own))
            for fields, own in zip(self._fields(samples), torch.split(samples, 1), strict=True)
        )
        return torch.cat([chain.log_prob(x[None]) for chain, x in zip(chains, x_1, strict=True)])

    def given(self, held: Tensor, *, forbidden: int | None = None) -> ChainCRF:
        """What is certain tells its neighbours."""
        return replace(self, held=held, forbidden=forbidden)

    def part(self, first: int, count: int) -> ChainCRF:
        """Their fields."""
        own = slice(first, first + count)
        gates = None if self.gates is None else self.gates[own]
        return replace(self, fields=self.fields.part(first, count), held=self.held[own], gates=gates)

    def changed(self, hook: LogitsHook, x_t: Tensor, *, t: Tensor, t_next: Tensor) -> ChainCRF:
        """The hook changes the fields."""
        return replace(self, fields=self.fields.changed(hook, x_t, t=t, t_next=t_next))

    def _gates(self, samples: Tensor) -> Tensor | None:
        return None if self.gates is None else self.gates[samples]

    def _fields(self, samples: Tensor) -> Iterator[Tensor]:
        """u of one sample after the other, in memory of its own, float32 or finer: [L, V] each."""
        length = self.fields.length
        waiting: list[Tensor] = []
        for _, tile, own in self.fields.marginals(rows_of(samples, length)):
            waiting.append(tile if own is None else tile[own])
            while sum(map(len, waiting)) >= length:
                joined = torch.cat(waiting)
                fields, waiting = joined[:length], [joined[length:]]
                fields = fields.to(torch.float64 if fields.dtype == torch.float64 else torch.float32)
                if self.forbidden is not None:
                    fields[:, self.forbidden] = -torch.inf
                yield fields


Gates = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Gates [B, L-1, r] from features [B, L, C], times and step sizes [B]."""


def crf_posterior(
    network: SplitNetwork,
    transitions: Transitions,
    x_t: Tensor,
    *,
    t: Tensor,
    h: Tensor,
    rows: Tensor | None = None,
    gates: Gates | None = None,
) -> ChainCRF:
    """The chain whose fields are a network's logits; whole texts are asked for where one of their rows is wanted."""
    length, held = x_t.shape[1], torch.full_like(x_t, -1)
    samples = torch.arange(len(x_t), device=x_t.device)
    if rows is not None:
        samples = torch.unique_consecutive(rows // length)
        rows = rows_of(samples, length)
    if gates is None or not len(samples):
        return ChainCRF(independent_posterior(network, x_t, t, h=h, rows=rows), transitions, held)
    features_at = getattr(network, "features_at", None)
    if rows is None or features_at is None:
        features = network.trunk(x_t, t, h)
        fields, own = Independent.of_features(features, network), features[samples]
    else:
        flat = features_at(x_t, t, h, rows=rows)
        fields, own = Independent.of_rows(flat, rows, network, length=length), flat.view(len(samples), length, -1)
    found = torch.zeros(len(x_t), length - 1, transitions[0].shape[1], dtype=own.dtype, device=own.device)
    found[samples] = gates(own, t[samples], h[samples]).to(own.dtype)
    return ChainCRF(fields, transitions, held, gates=found)


def _pick(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The item of weights [..., n] in whose interval u [...] falls, and where in it: int64, float64 in (0, 1)."""
    ends = weights.cumsum(-1, dtype=torch.float64)
    target = torch.minimum(u[..., None] * ends[..., -1:], ends[..., -1:] * (1 - 2**-52))  # so that no weight 0 is hit
    item = (ends <= target).sum(-1, keepdim=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, item).to(torch.float64)
    inside = (target - ends.gather(-1, item) + weight) / weight
    return item[..., 0], inside[..., 0].clamp(2**-53, 1 - 2**-53)


def _follow(first: Tensor, moves: Tensor) -> Tensor:
    """The states from the first on, [B] and [B, L-1, n] -> [B, L], each the move of the one before."""
    texts = []
    for start, rows in zip(first.tolist(), moves.tolist(), strict=True):
        states = [start]
        for row in rows:
            states.append(row[states[-1]])
        texts.append(states)
    return torch.tensor(texts, device=first.device)


def _follow_by_doubling(first: Tensor, moves: Tensor) -> Tensor:
    """`_follow` without a loop over positions: moves are composed, 1, 2, 4, ... of them, until all begin at the first.

    After log2 L rounds moves[i] leads from the first position to i + 1.
    """
    shift = 1
    while shift < moves.shape[1]:
        composed = moves[:, shift:].gather(-1, moves[:, :-shift])
        moves, shift = torch.cat([moves[:, :shift], composed], 1), 2 * shift
    start = first[:, None, None].expand(-1, moves.shape[1], 1)
    return torch.cat([first[:, None], moves.gather(-1, start)[..., 0]], 1)
