"""Laws: what a denoiser's sampler generates, computed exactly and fast, and the numbers that judge it.

A step moves the positions independently given the state x, so its kernel is a product over positions. Let
A[x, a] and B[x, b] be the products over the first and the second half of the positions; then

    law_next[(a, b)] = sum_x law[x] A[x, a] B[x, b]

is one small matrix product. It equals `fsdfm.flow.sampler_law` (a test says so) without the [V^L, V^L] matrix.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypedDict

import torch
from torch import Tensor

from fsdfm.flow import ExactDenoiser, ExactJump, Grid, Jump, LogitsFunction, quantile_law, total_variation
from fsdfm.flow.exact import all_states, posterior_table
from fsdfm.studies.truth.worlds import World

__all__ = [
    "BUDGETS",
    "LawScores",
    "Tables",
    "conditional_total_correlation",
    "cross_entropy_bits",
    "entropy_bits",
    "exact_tables",
    "joint_law",
    "law_of",
    "make_tables",
    "quantile_joint_law",
    "score",
    "transition_error",
]

BUDGETS = (1, 2, 4, 8)
_SMOOTHING = 1e-3
_EXACT = ExactJump()
_NOISES = 16  # x_0 whose kernels live at a time

Tables = dict[int, list[Tensor]]
"""Steps of a uniform grid -> the posterior p_{1|t} in every state at each of its times, float64 [V^L, L, V] each."""


class LawScores(TypedDict):
    """What a law is worth: total variation to the truth, error of its transitions, share that can be, entropies."""

    tv: float
    transition: float
    valid: float
    entropy: float
    cross_entropy: float


def entropy_bits(law: Tensor) -> Tensor:
    """-sum p log2 p over the last axis."""
    nats: Tensor = torch.special.entr(law).sum(-1)
    return nats / math.log(2)


def cross_entropy_bits(law: Tensor, truth: Tensor) -> float:
    """-sum law log2 truth, the "perplexity" of what was generated, in bits per sequence.

    A truth with hard constraints gives some sequences no probability at all; so that one of them does not decide
    everything, the truth is mixed with 1/1000 of the uniform law.
    """
    smooth = (1 - _SMOOTHING) * truth + _SMOOTHING / len(truth)
    return float(-(law * torch.log2(smooth)).sum())


def transition_error(law: Tensor, truth: Tensor, *, vocab: int) -> float:
    """How wrong the next token is, given the one before (arXiv 2602.19619), from 0 to 1:

        mean_i sum_a law(x^i = a) TV(law(x^{i+1} | x^i = a), truth(x^{i+1} | x^i = a))

    A token that the truth does not have at a place has no right successor: 1. Of one position there is none: 0.
    """
    length = round(math.log(len(law), vocab))
    cubes = [each.view([vocab] * length) for each in (law, truth)]
    errors = []
    for i in range(length - 1):
        others = [j for j in range(length) if j not in (i, i + 1)]
        ours, theirs = (cube.sum(others) if others else cube for cube in cubes)
        weight, known = ours.sum(1), theirs.sum(1)
        conditionals = [pair / pair.sum(1, keepdim=True).clamp(min=1e-300) for pair in (ours, theirs)]
        distance = (conditionals[0] - conditionals[1]).abs().sum(1) / 2
        errors.append(float((weight * torch.where(known > 0, distance, 1.0)).sum()))
    return sum(errors) / max(1, len(errors))


def score(law: Tensor, world: World) -> LawScores:
    """All numbers of a law."""
    truth = world.truth
    return {
        "tv": total_variation(law, truth),
        "transition": transition_error(law, truth, vocab=world.p_1.shape[0]),
        "valid": float(law[truth > 0].sum()),
        "entropy": float(entropy_bits(law)),
        "cross_entropy": cross_entropy_bits(law, truth),
    }


def make_tables(denoiser: LogitsFunction, world: World, *, budgets: tuple[int, ...] = BUDGETS) -> Tables:
    """The posterior a denoiser states at every time of every budget, told that budget's h."""
    return {
        steps: [
            posterior_table(denoiser, world.path, world.length, t=index / steps, h=1 / steps) for index in range(steps)
        ]
        for steps in budgets
    }


def _kernel(probs: Tensor, world: World, jump: Jump, *, t: float, t_next: float) -> Tensor:
    """The law of every position's next token, given the state: float64 [V^L, L, V]."""
    num_states, length, vocab = probs.shape
    states = all_states(vocab, length)
    redraws = jump.redraws(world.path.schedule, t, t_next).expand(num_states, length)
    stays = torch.nn.functional.one_hot(states, vocab).to(probs)
    kernel = jump.kernel(probs, states, redraws)
    return torch.where(world.path.source.movable(states)[..., None], kernel, stays)


def _halves(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of the module's docstring, from a kernel [..., L, V]."""

    def product(parts: Tensor) -> Tensor:
        result = parts[..., 0, :]
        for i in range(1, parts.shape[-2]):
            result = (result[..., :, None] * parts[..., i, None, :]).flatten(-2)
        return result

    middle = max(1, kernel.shape[-2] // 2)
    rest = kernel[..., middle:, :]
    alone = kernel.new_ones(*kernel.shape[:-2], 1)
    return product(kernel[..., :middle, :]), product(rest) if rest.shape[-2] else alone


def law_of(tables: list[Tensor], world: World, jump: Jump) -> Tensor:
    """The law in which the sampler ends after len(tables) uniform steps: float64 [V^L]."""
    law = world.start
    times = Grid.uniform(len(tables)).times.tolist()
    for probs, (t, t_next) in zip(tables, pairwise(times), strict=True):
        first, second = _halves(_kernel(probs, world, jump, t=t, t_next=t_next))
        law = ((law[:, None] * first).T @ second).flatten()
    return law


def joint_law(denoiser: LogitsFunction, world: World, *, steps: int, jump: Jump = _EXACT) -> Tensor:
    """P(x_1 | x_0) of the sampler, the coupling that reflow trains on: float32 [V^L, V^L], rows sum to 1.

    Multiplied by p_0 it is the joint pi(x_0, x_1). float32 halves the time of the only expensive product of the study.
    """
    joint: Tensor | None = None
    for t, t_next in pairwise(Grid.uniform(steps).times.tolist()):
        probs = posterior_table(denoiser, world.path, world.length, t=t, h=1 / steps)
        first, second = (half.float() for half in _halves(_kernel(probs, world, jump, t=t, t_next=t_next)))
        matrix = (first[:, :, None] * second[:, None, :]).flatten(1)
        joint = matrix if joint is None else joint @ matrix
    assert joint is not None
    return joint / joint.sum(-1, keepdim=True)


def quantile_joint_law(denoiser: LogitsFunction, world: World, *, steps: int) -> Tensor:
    """P(x_1 | x_0) of the sampler with quantile-coupled draws (`fsdfm.flow.coupling`), as `joint_law`.

    A position that still shows its noise has another kernel than one that has moved, so every x_0 has its own.
    """
    states, jump = all_states(world.path.source.vocab_size, world.length), _EXACT
    joint = torch.eye(len(states))
    for t, t_next in pairwise(Grid.uniform(steps).times.tolist()):
        probs = posterior_table(denoiser, world.path, world.length, t=t, h=1 / steps)
        coupled = quantile_law(probs, states, world.path.schedule.kappa(t).expand_as(states))
        moved, fresh = (_kernel(law, world, jump, t=t, t_next=t_next).float() for law in (probs, coupled))
        for some in torch.split(torch.arange(len(states)), _NOISES):
            shows_noise = states == states[some][:, None]
            first, second = _halves(torch.where(shows_noise[..., None], fresh, moved))
            joint[some] = ((joint[some][..., None] * first).mT @ second).flatten(1)
    return joint / joint.sum(-1, keepdim=True)


def conditional_total_correlation(world: World, joint: Tensor | None = None) -> float:
    """The error that independent outputs cannot avoid in the first step, in bits:

        E_{x_0} [ sum_i H(X_1^i | x_0) - H(X_1 | x_0) ]

    for the coupling in use, by enumeration. At t = 0 the state x_t is x_0 itself. Under the independent coupling
    (`joint` None) x_0 says nothing and this is the total correlation of the data; `joint` is P(x_1 | x_0) [V^L, V^L].
    """
    vocab, length = world.p_1.shape[0], world.length
    rows, weights = (world.truth[None], torch.ones(1, dtype=torch.float64)) if joint is None else (joint, world.start)
    total = 0.0
    for begin in range(0, len(rows), 256):
        law, weight = rows[begin : begin + 256].to(torch.float64), weights[begin : begin + 256]
        cube = law.view(-1, *[vocab] * length)
        alone = torch.stack(
            [entropy_bits(cube.sum([j + 1 for j in range(length) if j != i])) for i in range(length)]
        ).sum(0)
        total += float((weight * (alone - entropy_bits(law))).sum())
    return total


def exact_tables(world: World, *, budgets: tuple[int, ...] = BUDGETS) -> Tables:
    """The tables of the true posterior."""
    return make_tables(ExactDenoiser(world.path, p_1=world.p_1), world, budgets=budgets)
