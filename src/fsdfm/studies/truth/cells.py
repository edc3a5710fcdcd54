"""The cells of the study: every method in every world with every seed, its network trained and its law computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fsdfm.flow import ExactJump, Jump, total_variation
from fsdfm.measure.matching import find_temperature
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.runner import Cell
from fsdfm.studies.truth.joints import (
    FAMILIES,
    JointTables,
    independent_table,
    joint_sampler_law,
    joint_table,
    sweep_law,
    swept_law,
    trained_law,
)
from fsdfm.studies.truth.laws import (
    BUDGETS,
    Tables,
    conditional_total_correlation,
    entropy_bits,
    exact_tables,
    joint_law,
    law_of,
    make_tables,
    quantile_joint_law,
    score,
)
from fsdfm.studies.truth.methods import COUPLED_STATES, FULL, MASK, QUICK, RULES, Method, make_objective
from fsdfm.studies.truth.network import JointDenoiser, TinyDenoiser
from fsdfm.studies.truth.training import DataLaw, Lessons, train
from fsdfm.studies.truth.worlds import World, make_world

__all__ = ["MethodTrial", "TruthSetting", "cells_of", "compute_cell", "methods_of"]

_MATCHED, _TEMPERATURES = 1e-3, (0.05, 20.0)  # bits, and where the temperature of equal entropy is looked for


@dataclass(frozen=True)
class TruthSetting:
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
    small = len(make_world(world).truth) <= COUPLED_STATES
    return tuple(method for method in wanted if small or "quantile" not in method.name)


def cells_of(world: str, seed: int, methods: Sequence[Method]) -> list[Cell]:
    """The cells of one world and seed: they build on each other and run in one process."""
    return [
        Cell(
            f"{world}.{method.name}",
            seed,
            spec=(world, method),
            needs=tuple(f"{world}.{need}.{seed}" for need in method.needs),
            unit=f"{world}.{seed}",
        )
        for method in methods
    ]


def compute_cell(setting: TruthSetting, cell: Cell, folder: StudyFolder) -> dict[str, Any]:
    """One method in one world with one seed."""
    world, method = cell.spec
    value = MethodTrial(folder, world, cell.seed, setting).compute(method)
    return {**value, "world": world, "seed": cell.seed, "method": method.name, "row": asdict(method)}


@dataclass(frozen=True)
class MethodTrial:
    """Trains and judges methods in one world with one seed; networks of earlier cells are read from the folder."""

    folder: StudyFolder
    world_name: str
    seed: int
    setting: TruthSetting

    @cached_property
    def world(self) -> World:
        """The world itself."""
        return make_world(self.world_name)

    def _cell(self, method: str) -> str:
        return f"{self.world_name}.{method}.{self.seed}"

    def compute(self, method: Method) -> dict[str, Any]:
        """The scores of a method, and what else is to be known of it."""
        if method.name == "exact":
            cell = self._judge(exact_tables(self.world))
            cell["truth_entropy"] = float(entropy_bits(self.world.truth))
            cell["conditional_total_correlation"] = conditional_total_correlation(self.world)
            return cell
        if method.family:
            return self._judge_family(method)
        if method.sweeps:
            return self._judge_swept(method.start)
        if method.entropy_of:
            return self._at_entropy_of(method)
        return self._train(method)

    def _judge(self, tables: Tables) -> dict[str, Any]:
        """The scores of a denoiser under every jump rule and budget."""
        rules = {
            name: {str(steps): score(law_of(tables[steps], self.world, rule), self.world) for steps in BUDGETS}
            for name, rule in RULES.items()
        }
        return {"rules": rules}

    def _judge_family(self, method: Method) -> dict[str, Any]:
        """The scores of the exact posterior's projection to a family; only one rule draws positions together."""
        law = sweep_law if method.sweeps else joint_sampler_law
        family = FAMILIES[method.family]
        found = {str(steps): score(law(self.world, steps, family=family), self.world) for steps in BUDGETS}
        return {"rules": {"exact": found}}

    def _judge_joint(self, name: str) -> dict[str, Any]:
        """The scores of a joint head under the exact rule."""
        tables = _joint_tables(self, name)
        found = {str(steps): score(trained_law(self.world, steps, tables), self.world) for steps in BUDGETS}
        return {"rules": {"exact": found}}

    def _judge_swept(self, name: str) -> dict[str, Any]:
        """The scores of a finished method's network under the rule `sweep`."""
        tables = _joint_tables(self, name)
        found = {str(steps): score(swept_law(self.world, steps, tables), self.world) for steps in BUDGETS}
        return {"rules": {"exact": found}}

    def _train(self, method: Method) -> dict[str, Any]:
        lessons = self.setting.lessons(method)
        joint = _coupling(self, method.pairs_from, method.draws) if method.pairs_from else None
        start = self.load(method.start) if method.start else self._fresh()
        curve: dict[str, float] = {}

        def watch(step: int, ema: TinyDenoiser) -> None:
            tables = make_tables(ema, self.world, budgets=(4,))
            curve[str(step)] = total_variation(law_of(tables[4], self.world, ExactJump()), self.world.truth)

        run = partial(
            train,
            objective=make_objective(method, self.world.path, lessons.train_steps),
            data=DataLaw(self.world, joint),
            lessons=lessons,
            seed=crc32(f"{self.world.name} {self.seed} {method.name}".encode()),
            step_aware=bool(method.tableau),
        )
        network: TinyDenoiser | JointDenoiser
        if method.posterior:
            joined = JointDenoiser(start, method.posterior, seed=self.seed)
            network = run(joined, watch=lambda *_: None)  # a law of joint draws takes its time
        else:
            network = run(start, watch=watch)
        self.folder.keep(self._cell(method.name), ".pt", lambda file: torch.save(network.state_dict(), file))
        if isinstance(network, JointDenoiser):
            cell = self._judge_joint(method.name)
        else:
            cell = self._judge(make_tables(network, self.world))
        cell["conditional_total_correlation"] = conditional_total_correlation(self.world, joint)
        cell["tv_at_4_steps_while_training"] = curve
        if isinstance(network, TinyDenoiser) and not method.start:
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

    def load(self, method: str) -> TinyDenoiser:
        """The network of a finished method without a joint head."""
        network = self.finished(method)
        assert isinstance(network, TinyDenoiser)
        return network

    def finished(self, method: str) -> TinyDenoiser | JointDenoiser:
        """The network of any finished method."""
        kind = next(each.posterior for each in FULL if each.name == method)
        network = JointDenoiser(self._fresh(), kind) if kind else self._fresh()
        network.load_state_dict(torch.load(self.folder.file(self._cell(method), ".pt"), weights_only=True))
        return network

    def _at_entropy_of(self, method: Method) -> dict[str, Any]:
        """The start's own network, cooled or heated at each budget until its law has the other method's entropy."""
        tables = make_tables(self.load(method.start), self.world)
        other = self.folder.read(self._cell(method.entropy_of))["rules"]
        temperatures: dict[str, dict[str, float]] = {}
        rules: dict[str, dict[str, Any]] = {}
        for name, rule in RULES.items():
            temperatures[name], rules[name] = {}, {}
            for steps in BUDGETS:
                wanted = other[name][str(steps)]["entropy"]
                temperature, law = _match_entropy(partial(self._tempered_law, tables[steps], rule), wanted)
                temperatures[name][str(steps)] = temperature
                rules[name][str(steps)] = score(law, self.world)
        return {"rules": rules, "temperatures": temperatures}

    def _tempered_law(self, tables: list[Tensor], rule: Jump, temperature: float) -> Tensor:
        return law_of([torch.softmax(torch.log(probs) / temperature, -1) for probs in tables], self.world, rule)


@lru_cache(maxsize=1)  # several methods in a row train on the same pairs; a coupling is large
def _coupling(trial: MethodTrial, method: str, draws: str) -> Tensor:
    """P(x_1 | x_0) of a finished method's pairs."""
    make = quantile_joint_law if draws == "quantile" else joint_law
    return make(trial.load(method), trial.world, steps=trial.setting.pair_steps)


@lru_cache(maxsize=1)  # a network is judged by both rules, one after the other
def _joint_tables(trial: MethodTrial, method: str) -> JointTables:
    """What a finished method's network says, a table a time, all of which stay."""
    network = trial.finished(method)
    if isinstance(network, JointDenoiser):
        return lru_cache(maxsize=max(BUDGETS))(partial(joint_table, network, trial.world))
    return partial(independent_table, network, trial.world)


def _match_entropy(law_at: Callable[[float], Tensor], wanted: float) -> tuple[float, Tensor]:
    """The temperature whose law has the wanted entropy, or the nearest entropy there is, and the law there."""
    found = find_temperature(
        lambda temperature: float(entropy_bits(law_at(temperature))), wanted, tolerance=_MATCHED, ends=_TEMPERATURES
    )
    return found.temperature, law_at(found.temperature)
