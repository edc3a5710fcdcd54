"""Methods: what is compared, as rows of data: what a method starts from, what it trains on and with which teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdfm.flow import (
    POLICIES,
    ExactJump,
    InstantJump,
    Jump,
    MixturePath,
    SingleJump,
    StepSizeWeights,
    dyadic_step_sizes,
)
from fsdfm.flow.grid import AnnealedGeometricWeights, MirroredWeights
from fsdfm.learn import (
    TABLEAUS,
    CrossEntropy,
    FewStepObjective,
    GeneralisedKL,
    Objective,
    PathLoss,
    PathObjective,
    ShortcutTeacher,
    SweepObjective,
)
from fsdfm.learn.path import FineTimes
from fsdfm.learn.teacher import Average

__all__ = ["COUPLED_STATES", "FULL", "MASK", "QUICK", "RULES", "TEMPERED", "Method", "make_objective"]

RULES: dict[str, Jump] = {"exact": ExactJump(), "single": SingleJump(), "instant": InstantJump()}
TEMPERED = ("rk2", "rk4", "chained", "reflow-2", "reflow-2+rk2", "quantile-1", "quantile-2+rk2")
"""Methods whose controls are the parent at the temperature of equal entropy."""

_CHUNK = 4096
"""Rows of logits at a time: the vocabularies are tiny, so a whole batch."""

LOSSES: dict[str, PathLoss] = {"cross-entropy": CrossEntropy(), "generalised-kl": GeneralisedKL()}


@dataclass(frozen=True)
class Method:
    """One row of the study.

    start       the method whose network it starts from; "": none, it is the exact posterior or the parent
    pairs_from  the method whose 64-step pairs (x_0, x_1) it trains on; "": the independent coupling
    draws       whether those pairs were drawn freely or by a quantile coupling (`quantile` in names)
    tableau     the teacher of its large steps; "": the path loss alone
    average     what the teacher averages; None: what the tableau says
    jump        the rule of the teacher's hops
    policy      how often each step size is drawn
    loss        the path loss of its small steps
    lessons     training steps, as a multiple of the setting's
    entropy_of  a control: no training, `start` at the temperature that gives it this method's entropy at each budget
    family      no training: the exact posterior's projection to "independent", "chain" or "whole" joint laws
    sweeps      whether positions settle from left to right (the rule `sweep`) instead of by the exact rule; without a
                family no training either, it is the network of `start`
    posterior   a joint head over the start's network, "crf" or "causal", trained on the likelihood of whole texts
    prefixes    whether it trains on states with a settled beginning, too, as the rule `sweep` shows them
    """

    name: str
    start: str = "dfm"
    pairs_from: str = ""
    draws: Literal["free", "quantile"] = "free"
    tableau: str = ""
    average: Average | None = None
    jump: str = "exact"
    policy: str = "TB-20"
    loss: str = "cross-entropy"
    lessons: int = 1
    entropy_of: str = ""
    family: str = ""
    sweeps: bool = False
    posterior: str = ""
    prefixes: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The methods that must have run before."""
        return tuple(name for name in (self.start, self.pairs_from, self.entropy_of) if name)


def make_objective(method: Method, path: MixturePath, train_steps: int) -> Objective:
    """What a method minimises; the period of the annealed policy is scaled to reach PU when training ends."""
    loss = LOSSES[method.loss]
    if method.prefixes:
        return SweepObjective(path, step_sizes=dyadic_step_sizes(-3), times=FineTimes(), chunk=None)
    if method.posterior:
        return PathObjective(path, loss=loss, chunk=None)
    if not method.tableau:
        return PathObjective(path, loss=loss, chunk=_CHUNK)
    policies: dict[str, StepSizeWeights] = {
        **POLICIES,
        "AG": AnnealedGeometricWeights(period=max(1, train_steps // 11)),
        "TB-20-mirrored": MirroredWeights(POLICIES["TB-20"]),
    }
    teacher = ShortcutTeacher(TABLEAUS[method.tableau], jump=RULES[method.jump], average=method.average)
    return FewStepObjective(path, teacher=teacher, weights=policies[method.policy], loss=loss, chunk=_CHUNK)


_EXACT = Method("exact", start="")
_PARENT = Method("dfm", start="")
_FAMILIES = [
    Method("exact/chain", start="", family="chain"),
    Method("exact/whole", start="", family="whole"),
    Method("exact/sweep", start="", family="independent", sweeps=True),
    Method("exact/chain-sweep", start="", family="chain", sweeps=True),
    Method("exact/whole-sweep", start="", family="whole", sweeps=True),
]
_PATH_ONLY = Method("path-only")
_PATH_ONLY_SWEPT = Method("path-only/sweep", start="path-only", sweeps=True)
_TEACHERS = [Method(name, tableau=name) for name in TABLEAUS]
_OTHER_AVERAGES = [
    *[
        Method(f"{n}/probabilities", tableau=n, average="probabilities")
        for n in ("rk2", "rk4", "classical-rk4", "heun")
    ],
    Method("chained/logits", tableau="chained", average="logits"),
]
_POLICIES = [Method(f"rk2/{name}", tableau="rk2", policy=name) for name in ("TB-10", "PU", "G", "AG", "TB-20-mirrored")]
_TEACHER_RULES = [Method(f"rk2/{rule}-hops", tableau="rk2", jump=rule) for rule in ("single", "instant")]
_PAPER = Method("paper", tableau="rk4", jump="single", loss="generalised-kl")
_REFLOWS = [
    Method("reflow-1", start="dfm", pairs_from="dfm"),
    Method("reflow-1+rk2", start="reflow-1", pairs_from="dfm", tableau="rk2"),
    Method("reflow-2", start="reflow-1", pairs_from="reflow-1"),
    Method("reflow-2+rk2", start="reflow-2", pairs_from="reflow-1", tableau="rk2"),
    Method("reflow-2+chained", start="reflow-2", pairs_from="reflow-1", tableau="chained"),
    Method("reflow-2+rk4", start="reflow-2", pairs_from="reflow-1", tableau="rk4"),
    Method("reflow-3", start="reflow-2", pairs_from="reflow-2"),
    Method("reflow-3+rk2", start="reflow-3", pairs_from="reflow-2", tableau="rk2"),
]
_TIED = [
    Method("quantile-1", start="dfm", pairs_from="dfm", draws="quantile"),
    Method("quantile-1+rk2", start="quantile-1", pairs_from="dfm", draws="quantile", tableau="rk2"),
    Method("quantile-2", start="quantile-1", pairs_from="quantile-1", draws="quantile"),
    Method("quantile-2+rk2", start="quantile-2", pairs_from="quantile-1", draws="quantile", tableau="rk2"),
]
_JOINT = [
    Method("crf", posterior="crf"),
    Method("causal", posterior="causal"),
    Method("causal-prefixes", posterior="causal", prefixes=True),
]
_POSTERIORS = [each for m in _JOINT for each in (m, Method(f"{m.name}/sweep", start=m.name, sweeps=True))]
_LONG_PATH_ONLY = Method("path-only/x3", lessons=3)
_CONTROLS = [Method(f"dfm/entropy-of-{n}", entropy_of=n) for n in TEMPERED]

FULL: tuple[Method, ...] = (
    *(
        _EXACT,
        *_FAMILIES,
        _PARENT,
        _PATH_ONLY,
        _PATH_ONLY_SWEPT,
        *_TEACHERS,
        *_OTHER_AVERAGES,
        *_POLICIES,
        *_TEACHER_RULES,
        _PAPER,
    ),
    *(*_REFLOWS, *_TIED, *_POSTERIORS, _LONG_PATH_ONLY, *_CONTROLS),
)
"""Everything, for the uniform source."""

MASK: tuple[Method, ...] = tuple(
    method
    for method in FULL
    if not method.pairs_from
    and method.name
    in {
        "exact",
        "exact/chain",
        "exact/whole",
        "exact/sweep",
        "exact/chain-sweep",
        "exact/whole-sweep",
        "dfm",
        "path-only",
        "dfm/entropy-of-rk2",
        "dfm/entropy-of-rk4",
        "dfm/entropy-of-chained",
        *(method.name for method in (_PATH_ONLY_SWEPT, *_POSTERIORS)),
    }
    | {*TABLEAUS, "rk2/probabilities", "rk4/probabilities"}
)
"""What has a meaning under the mask source, where x_0 is constant and there is nothing to couple."""

COUPLED_STATES = 1024
"""The most states of a world in which coupled pairs are enumerated: every x_0 has a kernel of its own there."""

_IN_QUICK = {
    *("exact", *(method.name for method in _FAMILIES)),
    *(method.name for method in (_PATH_ONLY_SWEPT, *_POSTERIORS)),
    *("dfm", "path-only", "rk2", "rk4", "chained", "rk2/probabilities", "reflow-1", "reflow-2"),
    *("reflow-2+rk2", "quantile-1", "dfm/entropy-of-rk2", "dfm/entropy-of-rk4", "dfm/entropy-of-reflow-2+rk2"),
}
QUICK: tuple[Method, ...] = tuple(method for method in FULL if method.name in _IN_QUICK)
"""The headline rows, for a first answer in minutes."""
