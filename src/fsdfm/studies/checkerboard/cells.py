"""What is measured on the checkerboard: every combination of denoiser, source, rule, steps and schedule is a case.

All cases share their random numbers, so two rules differ by the rules and not by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdfm.flow import (
    RULES,
    Grid,
    InstantJump,
    LiteralJump,
    LogitsFunction,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    Schedule,
    Source,
    Step,
    UniformSource,
    trajectory,
)
from fsdfm.noise import Noise
from fsdfm.studies.checkerboard.board import (
    Board,
    CheckerboardDenoiser,
    CheckerboardNetwork,
    NetworkFit,
    train_network,
)
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.runner import Cell, StudyResults

__all__ = [
    "CaseOutcome",
    "CheckerboardNumbers",
    "CheckerboardSetting",
    "NeverReached",
    "SamplingCase",
    "States",
    "cases_of",
    "cells_of",
    "compute_cell",
    "load_states",
    "numbers_of",
]

SCHEDULES: dict[str, Schedule] = {"t": PolynomialSchedule(1.0), "t^2": PolynomialSchedule(2.0)}
SOURCES = ("uniform", "mask")
SHOWN_RULES = ("exact", "single", "instant", "systematic")  # two tokens have no neighbours to keep apart
BUDGETS = (1, 2, 4, 8)


@dataclass(frozen=True)
class CheckerboardSetting:
    """What all cells share: the board, the seed of everything, how many samples, frames and training steps."""

    board: Board = field(default_factory=Board)
    seed: int = 0
    samples: int = 6000
    frames: int = 100
    train_steps: int = 2000


@dataclass(frozen=True)
class SamplingCase:
    """One way to sample: denoiser "exact" or "network", source "uniform" or "mask", a rule, steps, kappa."""

    denoiser: str
    source: str
    rule: str
    steps: int
    kappa: str = "t"

    @property
    def name(self) -> str:
        """Of its cell."""
        return f"{self.denoiser}.{self.source}.{self.rule}.{self.steps}.{self.kappa}"

    @property
    def learned(self) -> bool:
        """Whether a network states the posterior."""
        return self.denoiser == "network"


@dataclass(frozen=True)
class CaseOutcome:
    """What came of a case: the share of samples on allowed squares, and of tokens that jump in each step."""

    on_allowed: float
    jumps_per_step: tuple[float, ...]

    @property
    def jumps_a_token(self) -> float:
        """The mean number of jumps of a token over the whole trajectory."""
        return sum(self.jumps_per_step)


@dataclass(frozen=True)
class NeverReached:
    """Positions that the literal instantaneous rule leaves without a candidate jump: those still masked at t = 1."""

    kappa: str
    steps: int
    measured: float
    predicted: float  # exp(-sum of h g(t)), which is e^-H_S at kappa = t
    moved_in_first_step: float


States = dict[SamplingCase, Tensor]
"""int64 [K, B, 2]: first and last state of a case, or every state of those shown frame by frame."""


@dataclass(frozen=True)
class CheckerboardNumbers:
    """Everything measured, over `samples` samples of two tokens."""

    board: Board
    seed: int
    samples: int
    frames: int
    outcomes: dict[SamplingCase, CaseOutcome]
    never_reached: tuple[NeverReached, ...]
    training: dict[str, NetworkFit]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values, one flat record per case."""
        cases = [
            {**asdict(case), "jumps_a_token": outcome.jumps_a_token, **asdict(outcome)}
            for case, outcome in self.outcomes.items()
        ]
        return {**asdict(replace(self, outcomes={})), "outcomes": cases}


def cells_of(setting: CheckerboardSetting) -> list[Cell]:
    """Two networks, every way to sample, and the literal rule by schedule and steps."""
    networks = [Cell(f"network.{source}", spec=partial(_fit, source)) for source in SOURCES]
    cases = [
        Cell(case.name, spec=partial(_sample, case), needs=(f"network.{case.source}.0",) if case.learned else ())
        for case in cases_of(setting.frames)
    ]
    literal = [
        Cell(f"never-reached.{kappa}.{steps}", spec=partial(_miss, kappa, steps))
        for kappa in SCHEDULES
        for steps in BUDGETS
    ]
    return [*networks, *cases, *literal]


def compute_cell(setting: CheckerboardSetting, cell: Cell, folder: StudyFolder) -> dict[str, Any]:
    """What a cell's own function says."""
    found: dict[str, Any] = cell.spec(setting, folder)
    return found


def numbers_of(setting: CheckerboardSetting, results: StudyResults) -> CheckerboardNumbers:
    """Everything measured, from the cells."""
    cases = {case: results.values[f"{case.name}.0"] for case in cases_of(setting.frames)}
    fits = {source: results.values[f"network.{source}.0"]["fit"] for source in SOURCES}
    literal = [results.values[cell.name] for cell in results.cells if cell.variant.startswith("never-reached")]
    return CheckerboardNumbers(
        **{name: getattr(setting, name) for name in ("board", "seed", "samples", "frames")},
        outcomes={c: CaseOutcome(v["on_allowed"], tuple(v["jumps_per_step"])) for c, v in cases.items()},
        never_reached=tuple(NeverReached(**value["found"]) for value in literal),
        training={source: NetworkFit(**fit) for source, fit in fits.items()},
        seconds=results.seconds,
    )


def load_states(case: SamplingCase, folder: StudyFolder) -> Tensor:
    """The states of a finished case."""
    states: Tensor = torch.load(folder.file(f"{case.name}.0", ".pt"), weights_only=True)
    return states.to(torch.int64)


def is_filmed(case: SamplingCase, frames: int) -> bool:
    """Whether every state of a case is kept: the paper's figure is the instantaneous rule at kappa = t."""
    return case.rule == "instant" and case.kappa == "t" and case.steps == frames


def cases_of(frames: int) -> list[SamplingCase]:
    """Every way to sample."""
    budgets = (*BUDGETS, frames)
    linear = [
        SamplingCase(denoiser, source, rule, steps)
        for denoiser in ("exact", "network")
        for source in SOURCES
        for rule in SHOWN_RULES
        for steps in budgets
    ]
    quadratic = [
        SamplingCase("exact", source, rule, steps, "t^2")
        for source in SOURCES
        for rule in ("instant", "single")
        for steps in budgets
    ]
    return list(dict.fromkeys(linear + quadratic))  # frames may be one of the budgets


def _path(source: str, kappa: str, board: Board) -> MixturePath:
    origin: Source = UniformSource(board.size) if source == "uniform" else MaskSource(board.size + 1)
    return MixturePath(origin, SCHEDULES[kappa])


def _fit(source: str, setting: CheckerboardSetting, folder: StudyFolder) -> dict[str, Any]:
    path = _path(source, "t", setting.board)
    network, fit = train_network(path, setting.board, seed=setting.seed, steps=setting.train_steps)
    folder.keep(f"network.{source}.0", ".pt", lambda file: torch.save(network.state_dict(), file))
    return {"fit": asdict(fit)}


def _sample(case: SamplingCase, setting: CheckerboardSetting, folder: StudyFolder) -> dict[str, Any]:
    path, noise = _path(case.source, case.kappa, setting.board), Noise(setting.seed, range(setting.samples))
    denoiser = _load_network(case.source, path, folder) if case.learned else CheckerboardDenoiser(path, setting.board)
    grid, rule = Grid.uniform(case.steps), RULES[case.rule]
    steps = trajectory(denoiser, path, path.source.sample(noise, 2), grid=grid, rule=rule, noise=noise)
    outcome, states = _observe(steps, setting.board, every_state=is_filmed(case, setting.frames))
    folder.keep(f"{case.name}.0", ".pt", lambda file: torch.save(states.to(torch.int32), file))
    return {**asdict(case), **asdict(outcome)}


def _load_network(source: str, path: MixturePath, folder: StudyFolder) -> LogitsFunction:
    network = CheckerboardNetwork(path.source.vocab_size)
    network.load_state_dict(torch.load(folder.file(f"network.{source}.0", ".pt"), weights_only=True))
    return network.eval()


def _observe(steps: Iterator[Step], board: Board, *, every_state: bool) -> tuple[CaseOutcome, Tensor]:
    states: list[Tensor] = []
    jumps: list[float] = []
    for step in steps:
        states = [*(states if every_state else states[:1]), step.x_next] if states else [step.x_t, step.x_next]
        jumps.append(_share(step.jumps))
    return CaseOutcome(_share(board.allowed(states[-1])), tuple(jumps)), torch.stack(states)


def _miss(kappa: str, steps: int, setting: CheckerboardSetting, _folder: StudyFolder) -> dict[str, Any]:
    """Positions that the literal instantaneous rule leaves masked."""
    path, grid, jump = _path("mask", kappa, setting.board), Grid.uniform(steps), LiteralJump(InstantJump())
    denoiser, noise = CheckerboardDenoiser(path, setting.board), Noise(setting.seed, range(setting.samples))
    taken = list(trajectory(denoiser, path, path.source.sample(noise, 2), grid=grid, rule=jump, noise=noise))
    expected = jump.redraws(path.schedule, grid.times[:-1], grid.times[1:]).sum()
    still_masked = _share(path.source.movable(taken[-1].x_next))
    return {
        "found": asdict(NeverReached(kappa, steps, still_masked, float(torch.exp(-expected)), _share(taken[0].jumps)))
    }


def _share(flags: Tensor) -> float:
    return float(flags.to(torch.float64).mean())
