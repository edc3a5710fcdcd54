"""Joint posteriors, exactly: what richer families than independent positions can reach, with nothing left to train.

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
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from fsdfm.flow import Grid
from fsdfm.flow.exact import all_states, normalised
from fsdfm.studies.truth.worlds import World

__all__ = ["FAMILIES", "joint_sampler_law", "sweep_law", "whole_posterior"]

Family = Callable[[Tensor], Tensor]
"""Joint laws [N, V, ..., V] -> the nearest ones of a family, in the same shape."""


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
    law, length = world.start, world.length
    movable = world.path.source.movable(all_states(world.p_1.shape[0], length))
    for t, t_next in pairwise(Grid.uniform(steps).times):
        kappa = world.path.schedule.kappa(t).expand(length)
        share = float(world.path.schedule.redraw(t, t_next))
        drawn = family(whole_posterior(world, kappa))
        law = _step(law, drawn, share * movable.to(torch.float64))
    return law


def sweep_law(world: World, steps: int, *, family: Family) -> Tensor:
    """The same under the rule `sweep`: positions round(L s / steps) .. round(L (s + 1) / steps) - 1 turn in step s."""
    law, length = world.start, world.length
    num_states = len(all_states(world.p_1.shape[0], length))
    bounds = [round(length * k / steps) for k in range(steps + 1)]
    for begin, end in pairwise(bounds):
        position = torch.arange(length)
        known = (position < begin).to(torch.float64)  # settled for certain; the rest is noise that knows nothing
        turns = ((position >= begin) & (position < end)).to(torch.float64)
        law = _step(law, family(whole_posterior(world, known)), turns.expand(num_states, length))
    return law


def _step(law: Tensor, drawn: Tensor, share: Tensor) -> Tensor:
    """The next law: from each state, position i takes its part of a draw with probability share[state, i]."""
    vocab, length = drawn.shape[1], drawn.ndim - 1
    stays = torch.nn.functional.one_hot(all_states(vocab, length), vocab).to(drawn)
    for i in range(length):
        w = share[:, i].view(-1, *[1] * length)
        kept = stays[:, i].view(-1, *_axis(i, length, vocab)) * drawn.sum(i + 1, keepdim=True)
        drawn = w * drawn + (1 - w) * kept
    return law @ drawn.flatten(1)
