"""What is measured on the checkerboard: every combination of denoiser, source, rule, steps and schedule is a setting.

All settings share their random numbers, so two rules differ by the rules and not by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
from fsdfm.studies.checkerboard.board import Board, CheckerboardDenoiser, Training, train_network

__all__ = ["CheckerboardNumbers", "NeverReached", "Outcome", "Setting", "States", "count_work", "measure"]

SCHEDULES: dict[str, Schedule] = {"t": PolynomialSchedule(1.0), "t^2": PolynomialSchedule(2.0)}
SOURCES = ("uniform", "mask")
SHOWN_RULES = ("exact", "single", "instant", "systematic")  # two tokens have no neighbours to keep apart
BUDGETS = (1, 2, 4, 8)

Tick = Callable[[str], None]
"""Told after every unit of work what was being done: a progress bar."""


@dataclass(frozen=True)
class Setting:
    """One way to sample: denoiser "exact" or "network", source "uniform" or "mask", a rule, steps, kappa."""

    denoiser: str
    source: str
    rule: str
    steps: int
    kappa: str = "t"


@dataclass(frozen=True)
class Outcome:
    """What came of a setting: the share of samples on allowed squares, and of tokens that jump in each step."""

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


States = dict[Setting, Tensor]
"""int64 [K, B, 2]: first and last state of a setting, or every state of those shown frame by frame."""


@dataclass(frozen=True)
class CheckerboardNumbers:
    """Everything measured, over `samples` samples of two tokens."""

    board: Board
    seed: int
    samples: int
    frames: int
    outcomes: dict[Setting, Outcome]
    never_reached: tuple[NeverReached, ...]
    training: dict[str, Training]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values, one flat record a setting."""
        settings = [
            {**asdict(setting), "jumps_a_token": outcome.jumps_a_token, **asdict(outcome)}
            for setting, outcome in self.outcomes.items()
        ]
        return {**asdict(replace(self, outcomes={})), "outcomes": settings}


def measure(
    board: Board, *, seed: int, samples: int, frames: int, train_steps: int, tick: Tick
) -> tuple[CheckerboardNumbers, States]:
    """Train both networks, run every setting, and count; `seconds` is left at 0 for the caller to fill in."""
    noise = Noise(seed, range(samples))
    training: dict[str, Training] = {}
    networks: dict[str, LogitsFunction] = {}
    for source in SOURCES:
        networks[source], training[source] = train_network(
            _path(source, "t", board),
            board,
            seed=seed,
            steps=train_steps,
            on_step=partial(tick, f"training, {source} source"),
        )
    outcomes: dict[Setting, Outcome] = {}
    states: States = {}
    for setting in _settings(frames):
        path = _path(setting.source, setting.kappa, board)
        denoiser = networks[setting.source] if setting.denoiser == "network" else CheckerboardDenoiser(path, board)
        steps = _walk(denoiser, path, setting, noise=noise, tick=tick)
        outcomes[setting], states[setting] = _observe(steps, board, every_state=is_filmed(setting, frames))
    never = tuple(_never_reached(board, kappa, steps, noise=noise) for kappa in SCHEDULES for steps in BUDGETS)
    return CheckerboardNumbers(board, seed, samples, frames, outcomes, never, training, 0.0), states


def count_work(frames: int, train_steps: int) -> int:
    """How often `measure` ticks."""
    return len(SOURCES) * train_steps + sum(setting.steps for setting in _settings(frames))


def is_filmed(setting: Setting, frames: int) -> bool:
    """Whether every state of a setting is kept: the paper's figure is the instantaneous rule at kappa = t."""
    return setting.rule == "instant" and setting.kappa == "t" and setting.steps == frames


def _settings(frames: int) -> list[Setting]:
    budgets = (*BUDGETS, frames)
    linear = [
        Setting(denoiser, source, rule, steps)
        for denoiser in ("exact", "network")
        for source in SOURCES
        for rule in SHOWN_RULES
        for steps in budgets
    ]
    quadratic = [
        Setting("exact", source, rule, steps, "t^2")
        for source in SOURCES
        for rule in ("instant", "single")
        for steps in budgets
    ]
    return list(dict.fromkeys(linear + quadratic))  # frames may be one of the budgets


def _path(source: str, kappa: str, board: Board) -> MixturePath:
    origin: Source = UniformSource(board.size) if source == "uniform" else MaskSource(board.size + 1)
    return MixturePath(origin, SCHEDULES[kappa])


def _walk(denoiser: LogitsFunction, path: MixturePath, setting: Setting, *, noise: Noise, tick: Tick) -> Iterator[Step]:
    grid, rule = Grid.uniform(setting.steps), RULES[setting.rule]
    for step in trajectory(denoiser, path, path.source.sample(noise, 2), grid=grid, rule=rule, noise=noise):
        yield step
        tick(f"sampling, {setting.source} source, {setting.denoiser} posterior, {setting.rule} rule")


def _observe(steps: Iterator[Step], board: Board, *, every_state: bool) -> tuple[Outcome, Tensor]:
    states: list[Tensor] = []
    jumps: list[float] = []
    for step in steps:
        states = [*(states if every_state else states[:1]), step.x_next] if states else [step.x_t, step.x_next]
        jumps.append(_share(step.jumps))
    return Outcome(_share(board.allowed(states[-1])), tuple(jumps)), torch.stack(states)


def _never_reached(board: Board, kappa: str, steps: int, *, noise: Noise) -> NeverReached:
    path, grid, jump = _path("mask", kappa, board), Grid.uniform(steps), LiteralJump(InstantJump())
    walk = trajectory(
        CheckerboardDenoiser(path, board), path, path.source.sample(noise, 2), grid=grid, rule=jump, noise=noise
    )
    taken = list(walk)
    expected = jump.redraws(path.schedule, grid.times[:-1], grid.times[1:]).sum()
    still_masked = _share(path.source.movable(taken[-1].x_next))
    return NeverReached(kappa, steps, still_masked, float(torch.exp(-expected)), _share(taken[0].jumps))


def _share(flags: Tensor) -> float:
    return float(flags.to(torch.float64).mean())
