"""Joint posteriors, exactly: what richer families than independent positions can reach, and what trained heads do.

The whole posterior of a small world is a table,

    p(x_1 | x_t) = p_1(x_1) prod_i K[x_t^i, x_1^i] / Z(x_t),        K the likelihood of showing a token at time t,

and a family's best is a projection of it: `whole` keeps it (what a causal head can say), `chain` keeps the laws of all
neighbouring pairs (what a linear-chain CRF can say), `independent` those of single positions. A step draws x' from it
and gives each position its part of x' with probability w, else leaves it: along axis i

    T <- w T + (1 - w) delta(x_t^i) sum_i T

The rule `sweep` settles positions from left to right: those whose turn it is take their part of x', and what was
settled before is known for certain. With the whole posterior both rules end in the data's law for every number of
steps: (x_t, x') has the law of (x_t, x_1), and a step does with x' what the path does with x_1. So all that few steps
cost is what a family leaves out, and what training does not learn.

A trained head has such a table, too (`joint_table`): a chain's is its weights over all texts, normalised by
enumeration; a causal head's is multiplied out along the tree of all prefixes, p(x_i | x_<i, f_i) at every node. Tests
hold both to the heads' own `log_prob`, and the laws to the sampler's draws.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from fsdfm.flow import Grid
from fsdfm.flow.exact import all_states, normalised, posterior_table
from fsdfm.model import CausalHead
from fsdfm.model.crf_head import TransitionTables
from fsdfm.model.layers import Cache
from fsdfm.studies.truth.network import JointDenoiser, TinyDenoiser
from fsdfm.studies.truth.worlds import World

__all__ = [
    "FAMILIES",
    "JointTables",
    "independent_table",
    "joint_sampler_law",
    "joint_table",
    "sweep_law",
    "swept_law",
    "trained_law",
    "whole_posterior",
]

Family = Callable[[Tensor], Tensor]
"""Joint laws [N, V, ..., V] -> the nearest ones of a family, in the same shape."""

JointTables = Callable[[float], Tensor]
"""A time t -> the joint posterior in every state: float64 [V^L, V, ..., V]."""

_STATES = 64  # whose prefixes live at a time


def whole_posterior(world: World, kappa: Tensor) -> Tensor:
    """p(x_1 | x_t) for every x_t, each position i shown with probability kappa[i]: float64 [V^L, V, ..., V].

    A state that cannot be has no posterior; there the data's own law stands.
    """
    vocab, length = world.p_1.shape[0], world.length
    states, eye = all_states(vocab, length), torch.eye(vocab, dtype=torch.float64)
    source = world.path.source.probabilities()[:, None]
    joint = world.p_1[None].expand(len(states), *world.p_1.shape)
    for i in range(length):
        shows = kappa[i] * eye + (1 - kappa[i]) * source  # K[z, a]
        joint = joint * shows[states[:, i]].view(-1, *_axis(i, length, vocab))
    return normalised(joint.flatten(1), world.truth[None].expand(len(states), -1)).view(-1, *world.p_1.shape)


def _axis(i: int, length: int, size: int) -> list[int]:
    return [size if j == i else 1 for j in range(length)]


def _independent(joint: Tensor) -> Tensor:
    length = joint.ndim - 1
    law = joint.new_ones(len(joint), *[1] * length)
    for i in range(length):
        law = law * _marginal(joint, i)
    return law


def _chain(joint: Tensor) -> Tensor:
    """p(x^1) prod_i p(x^{i+1} | x^i), with the joint's own pairs."""
    law = _marginal(joint, 0)
    for i in range(joint.ndim - 2):
        pair, alone = _marginal(joint, i, i + 1), _marginal(joint, i)
        law = law * torch.where(alone > 0, pair / torch.where(alone > 0, alone, 1.0), 0.0)
    return law


def _marginal(joint: Tensor, *kept: int) -> Tensor:
    others = [j + 1 for j in range(joint.ndim - 1) if j not in kept]
    return joint.sum(others, keepdim=True) if others else joint


FAMILIES: dict[str, Family] = {"independent": _independent, "chain": _chain, "whole": lambda joint: joint}
"""By name."""


def joint_sampler_law(world: World, steps: int, *, family: Family) -> Tensor:
    """The law in which a sampler with joint draws ends after so many uniform steps of the exact rule: float64 [V^L]."""

    def tables(t: float) -> Tensor:
        kappa = world.path.schedule.kappa(torch.tensor(t, dtype=torch.float64)).expand(world.length)
        return family(whole_posterior(world, kappa))

    return trained_law(world, steps, tables)


def trained_law(world: World, steps: int, tables: JointTables) -> Tensor:
    """The same with any joint posterior."""
    law = world.start
    movable = world.path.source.movable(all_states(world.p_1.shape[0], world.length))
    for t, t_next in pairwise(Grid.uniform(steps).times):
        share = float(world.path.schedule.redraw(t, t_next))
        law = _step(law, tables(float(t)), share * movable.to(torch.float64))
    return law


def sweep_law(world: World, steps: int, *, family: Family) -> Tensor:
    """The same under the rule `sweep`: positions round(L s / steps) .. round(L (s + 1) / steps) - 1 turn in step s."""
    law, length = world.start, world.length
    for begin, end in pairwise(_bounds(length, steps)):
        known = (torch.arange(length) < begin).to(torch.float64)  # settled for certain; the rest knows nothing
        law = _step(law, family(whole_posterior(world, known)), _turns(world, begin, end))
    return law


def swept_law(world: World, steps: int, tables: JointTables) -> Tensor:
    """The same with a posterior that is told x_t and t alone; the rule holds what is settled, p(x' | x_t, settled)."""
    law, length = world.start, world.length
    states = all_states(world.p_1.shape[0], length)
    times = Grid.uniform(steps).times.tolist()
    for t, (begin, end) in zip(times, pairwise(_bounds(length, steps)), strict=False):
        agrees = (states[:, None, :begin] == states[None, :, :begin]).all(-1)
        drawn = tables(t)
        held = normalised(torch.where(agrees, drawn.flatten(1), 0.0), world.truth[None].expand(len(states), -1))
        law = _step(law, held.view_as(drawn), _turns(world, begin, end))
    return law


def _bounds(length: int, steps: int) -> list[int]:
    return [round(length * k / steps) for k in range(steps + 1)]


def _turns(world: World, begin: int, end: int) -> Tensor:
    """Which positions turn: [V^L, L]."""
    position = torch.arange(world.length)
    turns = ((position >= begin) & (position < end)).to(torch.float64)
    return turns.expand(len(world.truth), world.length)


def _step(law: Tensor, drawn: Tensor, share: Tensor) -> Tensor:
    """The next law: from each state, position i takes its part of a draw with probability share[state, i]."""
    vocab, length = drawn.shape[1], drawn.ndim - 1
    stays = torch.nn.functional.one_hot(all_states(vocab, length), vocab).to(drawn)
    for i in range(length):
        w = share[:, i].view(-1, *[1] * length)
        kept = stays[:, i].view(-1, *_axis(i, length, vocab)) * drawn.sum(i + 1, keepdim=True)
        drawn = w * drawn + (1 - w) * kept
    return law @ drawn.flatten(1)


# --- trained heads ----------------------------------------------------------------------------------------------------


def independent_table(network: TinyDenoiser, world: World, t: float) -> Tensor:
    """The product of what a network says of each position, in every state: float64 [V^L, V, ..., V]."""
    probs = posterior_table(network, world.path, world.length, t=t, h=1.0)
    table = probs[:, 0]
    for i in range(1, world.length):
        table = (table[..., None] * probs[:, i, None]).flatten(1)
    return table.view(-1, *world.p_1.shape)


@torch.no_grad()
def joint_table(network: JointDenoiser, world: World, t: float) -> Tensor:
    """p(x_1 | x_t) of a trained head in every state at a time t: float64 [V^L, V, ..., V].

    What the source holds fast (a token that is no mask) is given, and nothing becomes a mask.
    """
    states = all_states(world.p_1.shape[0], world.length)
    held = torch.where(world.path.source.movable(states), -1, states)
    head, parts = network.joint, []
    for some in torch.split(torch.arange(len(states)), _STATES):
        times = torch.full((len(some),), t, dtype=torch.float64)
        features = network.trunk(states[some], times, torch.ones_like(times))
        if isinstance(head, CausalHead):
            log_p = _causal_log_probs(
                network, head, features, t=times, held=held[some], mask=world.path.source.mask_token
            )
        else:
            assert isinstance(head, TransitionTables)
            log_p = _chain_log_probs(network, head, features, held=held[some], mask=world.path.source.mask_token)
        parts.append(torch.softmax(log_p.double(), -1))
    return torch.cat(parts).view(-1, *world.p_1.shape)


def _chain_log_probs(
    network: JointDenoiser, head: TransitionTables, features: Tensor, *, held: Tensor, mask: int | None
) -> Tensor:
    """The weights of all texts in logarithms, prefix by prefix: [N, V^L]."""
    scores = head.left @ head.right.T
    vocab = len(scores)
    total = features.new_zeros(len(features), 1)
    for i in range(features.shape[1]):
        own = _allowed(network.logits_at(features[:, i]), held[:, i], mask=mask)
        before = torch.arange(total.shape[1]) % vocab
        pair = scores[before] if i else scores.new_zeros(1, vocab)
        total = (total[..., None] + own[:, None] + pair).flatten(1)
    return total


def _causal_log_probs(
    network: JointDenoiser, head: CausalHead, features: Tensor, *, t: Tensor, held: Tensor, mask: int | None
) -> Tensor:
    """log p of all texts: a level of the tree of prefixes at a time, whose keys and values the next reads: [N, V^L]."""
    inputs, base = head.inputs(features, t, torch.ones_like(t))
    vocab, caches = network.plain.vocab_size, [Cache(features.shape[1]) for _ in head.blocks]
    total = features.new_zeros(len(features), 1)
    for i in range(features.shape[1]):
        count = total.shape[1]
        z = inputs[:, i : i + 1].repeat_interleave(count, 0)
        if i:
            z = z + network.embedding(torch.arange(len(z)) % vocab)[:, None]
            for cache in caches:
                cache.keys, cache.values = (kept.repeat_interleave(vocab, 0) for kept in (cache.keys, cache.values))
        read = base[:, i].repeat_interleave(count, 0) + head.combine(head.stack(z, i, caches))[:, 0]
        own = _allowed(network.logits_at(read), held[:, i].repeat_interleave(count), mask=mask)
        own = torch.log_softmax(own, -1)  # 0 where a token is held
        total = (total[..., None] + own.view(len(features), count, vocab)).flatten(1)
    return total


def _allowed(logits: Tensor, held: Tensor, *, mask: int | None) -> Tensor:
    """Logits [N, V] without the mask and, where a token is held, without all others."""
    token = torch.arange(logits.shape[-1])
    never = (held >= 0)[:, None] & (token != held[:, None])
    if mask is not None:
        never = never | (token == mask)
    return logits.masked_fill(never, -torch.inf)
