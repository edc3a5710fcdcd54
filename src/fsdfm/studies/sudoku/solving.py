"""Boards for the sampler: tokens of puzzles, boards that a network fills in, and how many are right.

filled = fill_boards(network, path, givens, steps=8, rule=RULES["exact"], noise=noise)
score_boards(filled, puzzles)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.flow import Filter, Grid, MixturePath, Sampler, StepRule, posterior_of
from fsdfm.flow.posterior import Posterior
from fsdfm.flow.rule import Plan, SamplerState
from fsdfm.flow.sampler import Step, trajectory
from fsdfm.noise import Noise, Purpose
from fsdfm.studies.sudoku.board import DIFFICULTIES, Difficulty, Puzzle, make_puzzle, make_solutions
from fsdfm.studies.sudoku.network import BoardNetwork

__all__ = [
    "ConfidentRule",
    "fill_boards",
    "fill_counting",
    "given_tokens",
    "make_puzzles",
    "score_boards",
    "walk_boards",
]

Boards = npt.NDArray[np.int64]
_CLUES = {2: (0, 6, 8), 3: (0, 28, 34, 40)}  # givens that puzzles are made with, to have all difficulties
_MOST_TRIED = 40  # puzzles made for one that is kept


def given_tokens(givens: Tensor, num_digits: int) -> tuple[Tensor, Tensor]:
    """Boards with empty cells (0) -> the tokens of what is given, 0 elsewhere, and where it is: [B, n^2] each."""
    frozen = givens > 0
    return torch.where(frozen, givens - 1 + num_digits, 0), frozen


def make_puzzles(box: int, count: int, *, seed: int) -> dict[Difficulty, list[Puzzle]]:
    """`count` puzzles of every difficulty that a board of this size has."""
    found: dict[Difficulty, list[Puzzle]] = {name: [] for name in DIFFICULTIES}
    clues = _CLUES.get(box, (0,))
    for k in range(_MOST_TRIED * count):
        if all(len(puzzles) == count for puzzles in found.values()):
            break
        puzzle = make_puzzle(box, noise=Noise(seed, [k]), num_givens=clues[k % len(clues)])
        if len(found[puzzle.difficulty]) < count:
            found[puzzle.difficulty].append(puzzle)
    return {name: puzzles for name, puzzles in found.items() if len(puzzles) == count}


def walk_boards(
    network: BoardNetwork,
    path: MixturePath,
    givens: Tensor,
    *,
    steps: int,
    rule: StepRule,
    noise: Noise,
    filter: Filter | None = None,
) -> list[Step]:
    """The trajectory of boards [B, n^2] whose givens are frozen."""
    tokens, frozen = given_tokens(givens, network.num_digits)
    x_0 = torch.where(frozen, tokens, path.source.sample(noise, givens.shape[1]))
    with torch.inference_mode():
        return list(
            trajectory(
                network, path, x_0, grid=Grid.uniform(steps), noise=noise, rule=rule, frozen=frozen, filter=filter
            )
        )


def fill_boards(
    network: BoardNetwork, path: MixturePath, givens: Tensor, *, steps: int, rule: StepRule, noise: Noise
) -> Tensor:
    """Boards filled in with `steps` calls: digits 1 .. n, [B, n^2]."""
    last = walk_boards(network, path, givens, steps=steps, rule=rule, noise=noise)[-1].x_next
    return last % network.num_digits + 1


def fill_counting(
    network: BoardNetwork, path: MixturePath, givens: Tensor, *, steps: int, rule: StepRule, noise: Noise
) -> tuple[Tensor, Tensor]:
    """As `fill_boards`, by a rule that may be done before, and the calls that each board took: [B]."""
    tokens, frozen = given_tokens(givens, network.num_digits)
    x_0 = torch.where(frozen, tokens, path.source.sample(noise, givens.shape[1]))
    sampler = Sampler(path, x_0, grid=Grid.uniform(steps), noise=noise, rule=rule, frozen=frozen)
    with torch.inference_mode():
        while not sampler.done:
            asked = sampler.question()
            sampler.answer(posterior_of(network, asked.x_t, asked.t, h=asked.h, rows=asked.rows))
    return sampler.x % network.num_digits + 1, sampler.calls


def score_boards(filled: Tensor, puzzles: Sequence[Puzzle]) -> tuple[Tensor, Tensor, Tensor]:
    """Which boards are solved, and of each how many empty cells are right, and how many there are: [B] each."""
    solution = torch.from_numpy(np.array([puzzle.solution for puzzle in puzzles]))
    empty = torch.from_numpy(np.array([puzzle.givens == 0 for puzzle in puzzles]))
    right = (filled == solution) & empty
    return (filled == solution).all(1), right.sum(1), empty.sum(1)


@dataclass(frozen=True)
class ConfidentRule(StepRule):
    """The mask source's order of confidence: every masked cell is drawn, and the surest ones keep what was drawn.

    Of M masked cells those k with the highest probability of their draw are shown, k = round(M w) and w the share that
    the schedule shows in this step: (kappa_{t+h} - kappa_t) / (1 - kappa_t).
    """

    def plan(self, state: SamplerState) -> Plan:
        """Every cell that may move."""
        if state.path.source.mask_token is None:
            raise ValueError("an order of confidence needs the mask source: elsewhere every cell shows something")
        return Plan(state.movable().flatten().nonzero()[:, 0])

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """Show the surest."""
        rows, (batch, length) = plan.rows, state.x_t.shape
        logits = torch.cat([tile if own is None else tile[own] for _, tile, own in posterior.marginals(rows)]).double()
        logits[:, state.path.source.mask_token] = -torch.inf
        u = state.noise.uniform(Purpose.DESTINATION, length, state.index).flatten()[rows]
        probs = torch.softmax(logits, -1)
        cdf = probs.cumsum(-1)
        tokens = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None])[:, 0]
        sure = torch.full((batch * length,), -1.0, dtype=torch.float64)
        sure[rows] = probs.gather(-1, tokens[:, None])[:, 0]
        drawn = state.x_t.flatten().clone()
        drawn[rows] = tokens
        masked = state.movable()
        count = torch.round(masked.sum(1) * state.path.schedule.redraw(state.t, state.t_next)).long()
        rank = sure.view(batch, length).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return torch.where(masked & (rank < count[:, None]), drawn.view(batch, length), state.x_t)


def make_training_boards(box: int, noise: Noise, *, shares: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Solved boards as tokens, and which cells are given: a share of them, uniform between two, for each board."""
    n = box * box
    boards = torch.from_numpy(make_solutions(box, noise)) - 1
    low, high = shares
    share = low + (high - low) * noise.uniform(Purpose.CONTROL, 1, step=8)
    given = noise.uniform(Purpose.CONTROL, n * n, step=9) < share
    return torch.where(given, boards + n, boards), given
