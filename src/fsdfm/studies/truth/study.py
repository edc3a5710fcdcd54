"""The study: every method on every world and seed, a cell each; a finished cell is a file and never computed again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fsdfm.files import replace_file, write_json
from fsdfm.flow import ExactJump, Jump, total_variation
from fsdfm.studies.truth.laws import (
    BUDGETS,
    Tables,
    conditional_total_correlation,
    entropy_bits,
    exact_tables,
    joint_law,
    law_of,
    make_tables,
    score,
    tied_joint_law,
)
from fsdfm.studies.truth.methods import FULL, MASK, QUICK, RULES, TIED_STATES, Method, make_objective
from fsdfm.studies.truth.network import TinyDenoiser
from fsdfm.studies.truth.training import DataLaw, Lessons, train
from fsdfm.studies.truth.worlds import World, make_world

__all__ = ["Cell", "Setting", "Study", "methods_of"]

_GRID, _BISECTIONS = 12, 12

Cell = dict[str, Any]
"""What one (world, seed, method) gave; JSON."""


@dataclass(frozen=True)
class Setting:
    """How long the networks train and in how many steps reflow draws its pairs; a folder holds cells of one setting."""

    parent_steps: int
    child_steps: int
    batch_size: int = 512
    pair_steps: int = 64

    def lessons(self, method: Method) -> Lessons:
        """The training of one method."""
        steps = self.child_steps * method.lessons if method.start else self.parent_steps
        return Lessons(steps, self.batch_size)


def methods_of(world: str, *, full: bool) -> tuple[Method, ...]:
    """The rows of a world: all or the headline ones, and under the mask source those that mean something there."""
    wanted = FULL if full else QUICK
    if world.endswith("-mask"):
        return tuple(method for method in wanted if method in MASK)
    small = len(make_world(world).truth) <= TIED_STATES
    return tuple(method for method in wanted if small or "tied" not in method.name)


class Study:
    """The cells of one world and one seed, in the folder of a run."""

    def __init__(self, folder: FilePath, world: str, seed: int, *, setting: Setting):
        self.folder, self.seed, self.setting = folder, seed, setting
        self.world: World = make_world(world)
        self._joints: dict[tuple[str, str], Tensor] = {}  # the last one only: they are large

    @staticmethod
    def cell_name(world: str, seed: int, method: str) -> str:
        """The name of a cell's file."""
        return f"{world}.{seed}.{method.replace('/', '~')}.json"

    def cell_file(self, method: str) -> FilePath:
        """Where a method's cell stands."""
        return self.folder / self.cell_name(self.world.name, self.seed, method)

    def _weights_file(self, method: str) -> FilePath:
        return self.cell_file(method).with_suffix(".pt")

    def run(self, methods: Sequence[Method], *, tick: Callable[[], None] = lambda: None) -> None:
        """Compute what is missing, in the order given; `tick` after each cell."""
        for method in methods:
            if not self.cell_file(method.name).exists():
                start = time.perf_counter()
                cell = {**self._compute(method), "seconds": time.perf_counter() - start}
                cell |= {"world": self.world.name, "seed": self.seed, "method": method.name, "row": asdict(method)}
                write_json(self.cell_file(method.name), cell)
            tick()

    def _compute(self, method: Method) -> Cell:
        if method.name == "exact":
            cell = self._judge(exact_tables(self.world))
            cell["truth_entropy"] = float(entropy_bits(self.world.truth))
            cell["conditional_total_correlation"] = conditional_total_correlation(self.world)
            return cell
        if method.entropy_of:
            return self._at_entropy_of(method)
        return self._train(method)

    def _judge(self, tables: Tables) -> Cell:
        """The scores of a denoiser under every jump rule and budget."""
        truth = self.world.truth
        rules = {
            name: {str(steps): score(law_of(tables[steps], self.world, rule), truth) for steps in BUDGETS}
            for name, rule in RULES.items()
        }
        return {"rules": rules}

    def _train(self, method: Method) -> Cell:
        lessons = self.setting.lessons(method)
        joint = self._joint(method.pairs_from, method.draws) if method.pairs_from else None
        start = self._load(method.start) if method.start else self._fresh()
        curve: dict[str, float] = {}

        def watch(step: int, ema: TinyDenoiser) -> None:
            tables = make_tables(ema, self.world, budgets=(4,))
            curve[str(step)] = total_variation(law_of(tables[4], self.world, ExactJump()), self.world.truth)

        network = train(
            start,
            make_objective(method, self.world.path, lessons.train_steps),
            DataLaw(self.world, joint),
            lessons=lessons,
            seed=crc32(f"{self.world.name} {self.seed} {method.name}".encode()),
            step_aware=bool(method.tableau),
            watch=watch,
        )
        replace_file(self._weights_file(method.name), lambda file: torch.save(network.state_dict(), file))
        cell = self._judge(make_tables(network, self.world))
        cell["conditional_total_correlation"] = conditional_total_correlation(self.world, joint)
        cell["tv_at_4_steps_while_training"] = curve
        if not method.start:
            cell["tv_to_exact_posterior"] = self._gap(network)
            cell["tv_of_pairs"] = self._error_of_pairs(network)
        return cell

    def _gap(self, network: TinyDenoiser) -> dict[str, float]:
        """How far the parent's law is from the one the exact posterior gives: what training left undone."""
        ours, exact = make_tables(network, self.world), exact_tables(self.world)
        return {
            str(steps): total_variation(*(law_of(tables[steps], self.world, ExactJump()) for tables in (ours, exact)))
            for steps in BUDGETS
        }

    def _error_of_pairs(self, network: TinyDenoiser) -> float:
        """Total variation to the truth after as many steps as reflow draws its pairs in: no student gets below it."""
        steps = self.setting.pair_steps
        tables = make_tables(network, self.world, budgets=(steps,))[steps]
        return total_variation(law_of(tables, self.world, ExactJump()), self.world.truth)

    def _fresh(self) -> TinyDenoiser:
        return TinyDenoiser(self.world.path.source.vocab_size, self.world.length, seed=self.seed)

    def _load(self, method: str) -> TinyDenoiser:
        network = self._fresh()
        network.load_state_dict(torch.load(self._weights_file(method), weights_only=True))
        return network

    def _joint(self, method: str, draws: str) -> Tensor:
        if (method, draws) not in self._joints:
            self._joints.clear()
            make = tied_joint_law if draws == "tied" else joint_law
            self._joints[method, draws] = make(self._load(method), self.world, steps=self.setting.pair_steps)
        return self._joints[method, draws]

    def _at_entropy_of(self, method: Method) -> Cell:
        """The start's own network, cooled or heated at each budget until its law has the other method's entropy."""
        tables = make_tables(self._load(method.start), self.world)
        other = json.loads(self.cell_file(method.entropy_of).read_text())["rules"]
        temperatures: dict[str, dict[str, float]] = {}
        rules: dict[str, dict[str, Any]] = {}
        for name, rule in RULES.items():
            temperatures[name], rules[name] = {}, {}
            for steps in BUDGETS:
                wanted = other[name][str(steps)]["entropy"]
                temperature, law = _match_entropy(partial(self._tempered_law, tables[steps], rule), wanted)
                temperatures[name][str(steps)] = temperature
                rules[name][str(steps)] = score(law, self.world.truth)
        return {"rules": rules, "temperatures": temperatures}

    def _tempered_law(self, tables: list[Tensor], rule: Jump, temperature: float) -> Tensor:
        return law_of([torch.softmax(torch.log(probs) / temperature, -1) for probs in tables], self.world, rule)


def _match_entropy(law_at: Callable[[float], Tensor], wanted: float) -> tuple[float, Tensor]:
    """The temperature in [1/20, 20], nearest to 1, whose law has the wanted entropy, or the nearest entropy there is.

    Entropy need not grow with the temperature, nor reach every value: a grid finds a crossing, bisection its place.
    """

    def excess(log_temperature: float) -> float:
        return float(entropy_bits(law_at(math.exp(log_temperature)))) - wanted

    places = [math.log(20) * n / _GRID for n in range(-_GRID, _GRID + 1)]
    found = [excess(place) for place in places]
    crossings = [n for n in range(len(places) - 1) if found[n] * found[n + 1] <= 0]
    if not crossings:
        best = min(range(len(places)), key=lambda n: abs(found[n]))
        return math.exp(places[best]), law_at(math.exp(places[best]))
    n = min(crossings, key=lambda n: abs(places[n] + places[n + 1]))
    low, high, rises = places[n], places[n + 1], found[n] <= 0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if (excess(middle) <= 0) == rises else (low, middle)
    return math.exp((low + high) / 2), law_at(math.exp((low + high) / 2))
