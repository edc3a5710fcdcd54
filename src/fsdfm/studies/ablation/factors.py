"""The factors as data: which variants are compared, what the paper printed of them, and what it claims.

A variant is a training and a way to sample. Trainings start from `base.toml`, which has the paper's choices (RK-4,
cumulative scalar, TB-20, uniform source), and change some of its values; a way to sample that several factors use is
measured once. Numbers of the paper are quoted as printed and never mixed with ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fsdfm.files import did_you_mean

__all__ = [
    "FACTORS",
    "Claim",
    "Factor",
    "FineTuning",
    "Setup",
    "Variant",
    "find_factor",
]

BASE, MASKED = "base", "base+mask"  # what a training may start from beside another training: with one token more

Kind = Literal["quality", "given", "time"]
Origin = Literal["stated", "implied", "reading"]


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning: the values in which it differs from base.toml, and what it starts from.

    start      BASE, MASKED, or another training
    stretch    its length in units of the setting's training steps
    shared     trained once for all seeds, as a start for others
    """

    name: str
    overrides: tuple[str, ...] = ()
    start: FineTuning | str = BASE
    stretch: int = 1
    shared: bool = False


@dataclass(frozen=True)
class Setup:
    """A way to sample, and what is measured of the samples."""

    name: str
    jump: str = "single"
    start: float | None = None
    metrics: str = "perplexity,trajectory,accuracy"
    frontier: bool = False  # also at lower temperatures: what cooling alone does to perplexity and entropy


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    training   None: the base itself
    control    no part of the paper's table, there to say what the others are worth
    extra      only with --full
    """

    label: str
    training: FineTuning | None
    setup: Setup
    control: bool = False
    extra: bool = False


@dataclass(frozen=True)
class Claim:
    """A comparison that the paper makes: `better` has the better `metric` than `worse`, over the budgets 1 .. 8.

    origin   stated: in words or numbers; implied: by what the paper chose to do; reading: our reading of its words
    ratio    better / worse as the paper prints it where its table has no such rows
    """

    text: str
    better: str
    worse: str
    metric: str = "token_perplexity"
    origin: Origin = "stated"
    ratio: float | None = None


@dataclass(frozen=True)
class Factor:
    """One of the paper's tables.

    kind    quality: samples from noise; given: repairs and continuations; time: seconds of a training step
    paper   its numbers: label -> budget -> (perplexity, entropy)
    quote   its numbers that stand in the text
    """

    name: str
    title: str
    where: str
    column: str
    variants: tuple[Variant, ...]
    claims: tuple[Claim, ...]
    kind: Kind = "quality"
    paper: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    quote: str = ""
    figure: tuple[str, str] | None = None  # the two variants of the paper's figure 3
    note: str = ""

    def chosen(self, *, full: bool) -> tuple[Variant, ...]:
        """The variants that run."""
        return tuple(variant for variant in self.variants if full or not variant.extra)

    def variant(self, label: str) -> Variant:
        """The variant of a label."""
        return next(variant for variant in self.variants if variant.label == label)


def find_factor(name: str) -> Factor:
    """The factor of a name; a ValueError names the nearest."""
    if name in FACTORS:
        return FACTORS[name]
    hint = did_you_mean(name, FACTORS, f"there are {', '.join(FACTORS)}")
    raise ValueError(f"there is no factor {name!r}; {hint}")


# --- ways to sample ---------------------------------------------------------------------------------------------------

SINGLE = Setup("single")  # the paper's rule, with the cumulative scalar
INSTANT = Setup("instant", jump="instant")  # the rule before it: the scalar at the beginning of the step
EXACT = Setup("exact", jump="exact")  # the closed form of the step
COOLED = Setup("cooled", frontier=True)
GIVEN = "accuracy,continuation"
FROM_KNOWN = Setup("from-known", metrics=GIVEN)  # t_0 = kappa^-1(share that is known)
FROM_ZERO = Setup("from-zero", start=0.0, metrics=GIVEN)

# --- trainings --------------------------------------------------------------------------------------------------------

RK4 = FineTuning("rk4")
RK2 = FineTuning("rk2", ("objective.teacher.tableau=rk2",))
PATH = FineTuning("path", ("objective.kind=path",))
INSTANT_HOPS = FineTuning("rk4-instant-hops", ("objective.teacher.jump=instant",))
EXACT_HOPS = FineTuning("rk4-exact-hops", ("objective.teacher.jump=exact",))
UNIFORM_PATH = FineTuning("uniform-path", ("objective.kind=path",), stretch=2, shared=True)
MASK_PATH = FineTuning("mask-path", ("objective.kind=path", "flow.source=mask"), MASKED, stretch=2, shared=True)
UNIFORM_RK2 = FineTuning("uniform-rk2", ("objective.teacher.tableau=rk2",), UNIFORM_PATH)
MASK_RK2 = FineTuning("mask-rk2", ("objective.teacher.tableau=rk2", "flow.source=mask"), MASK_PATH)


def _policy(name: str) -> FineTuning:
    return FineTuning(f"rk4-{name.lower()}", (f"objective.weights={name}",))


CONTROL = Variant("the base, untrained", None, COOLED, control=True)
"""Stands in every table of quality: its temperatures say what a loss of entropy alone would have gained."""

# --- the paper's tables -----------------------------------------------------------------------------------------------

_SCALAR = Factor(
    "scalar",
    "The cumulative scalar against the instantaneous one",
    "table 1, sections 4.2 and 5.2",
    "Solver",
    (
        Variant("Scaler", INSTANT_HOPS, INSTANT),
        Variant("Cum. Scalar", RK4, SINGLE),
        Variant("trained with Scaler, sampled with Cum. Scalar", INSTANT_HOPS, SINGLE, control=True),
        Variant("trained with Cum. Scalar, sampled with Scaler", RK4, INSTANT, control=True),
        CONTROL,
    ),
    (
        Claim("the cumulative scalar in training and sampling lowers perplexity", "Cum. Scalar", "Scaler"),
        Claim(
            "so it does in sampling alone",
            "Cum. Scalar",
            "trained with Cum. Scalar, sampled with Scaler",
            origin="implied",
        ),
    ),
    paper={
        "Scaler": {1: (1312.65, 6.45), 2: (462.31, 6.42), 4: (194.29, 6.90), 8: (97.51, 7.16), 1024: (85.61, 7.84)},
        "Cum. Scalar": {1: (514.40, 6.08), 2: (333.07, 6.60), 4: (176.19, 6.97), 8: (90.49, 7.29), 1024: (87.36, 7.91)},
    },
    note=(
        "Scaler is h g(t) in the teacher's hops and in the sampler, Cum. Scalar is G_{t,h} in both. The path loss, "
        "which acts at h = 2^-10 only, is the same in both: there the two scalars are nearly one. At the last step "
        "both rules redraw from p, so with 1 call the sampler has no part in the difference."
    ),
)

_TEACHER = Factor(
    "teacher",
    "RK-2 against RK-4 as the shortcut teacher",
    "figure 3, section 5.2",
    "Teacher",
    (
        Variant("RK-2", RK2, SINGLE),
        Variant("RK-4", RK4, SINGLE),
        Variant("path loss only", PATH, SINGLE, control=True),
        *(
            Variant(
                name,
                FineTuning(name, (f"objective.teacher.tableau={name}", "objective.teacher.average=none")),
                SINGLE,
                extra=True,
            )
            for name in ("chained", "heun", "midpoint", "classical-rk4")
        ),
        Variant(
            "RK-2, probabilities",
            FineTuning(
                "rk2-probabilities", ("objective.teacher.tableau=rk2", "objective.teacher.average=probabilities")
            ),
            SINGLE,
            extra=True,
        ),
        CONTROL,
    ),
    (
        Claim("RK-4 lowers perplexity against RK-2", "RK-4", "RK-2", ratio=0.88),
        Claim("RK-4 has the higher entropy", "RK-4", "RK-2", metric="entropy_bits"),
        Claim("few-step training with RK-4 beats as much of the path loss", "RK-4", "path loss only", origin="implied"),
    ),
    quote=(
        "perplexity ratio RK-4 / RK-2 about 0.88 over calls; medians: perplexity 80 (RK-4) and 84 (RK-2), entropy 7.63 "
        "(RK-4) and 7.50 (RK-2)"
    ),
    figure=("RK-2", "RK-4"),
)

_WEIGHTS = Factor(
    "weights",
    "How often training draws each step size",
    "table 3, appendix D.1",
    "Policy",
    (
        Variant("TB-10", _policy("TB-10"), SINGLE),
        Variant("TB-20", RK4, SINGLE),
        Variant("PU", _policy("PU"), SINGLE),
        Variant("G", _policy("G"), SINGLE),
        Variant("AG", _policy("AG"), SINGLE),
        Variant(
            "TB-20, mirrored", FineTuning("rk4-tb-20-mirrored", ("objective.mirrored=true",)), SINGLE, control=True
        ),
        CONTROL,
    ),
    (
        Claim("TB-20 has a lower perplexity than TB-10", "TB-20", "TB-10"),
        Claim("TB-20 has a lower perplexity than G", "TB-20", "G"),
        Claim("TB-20 has a lower perplexity than AG", "TB-20", "AG"),
        Claim("PU loses entropy against TB-20", "TB-20", "PU", metric="entropy_bits"),
        Claim(
            "the boost on the largest step, as the paper's words have it, keeps less entropy than on the smallest",
            "TB-20",
            "TB-20, mirrored",
            metric="entropy_bits",
            origin="reading",
        ),
    ),
    paper={
        "TB-10": {1: (834.85, 6.51), 2: (325.32, 6.66), 4: (159.59, 6.99), 8: (94.72, 7.19), 1024: (85.13, 7.94)},
        "TB-20": {1: (514.40, 6.08), 2: (333.07, 6.60), 4: (176.19, 6.97), 8: (90.49, 7.29), 1024: (87.36, 7.92)},
        "PU": {1: (3.01, 0.64), 2: (30.81, 1.73), 4: (18.67, 2.31), 8: (21.54, 2.73), 1024: (262.53, 6.96)},
        "G": {1: (1353.99, 7.57), 2: (635.59, 7.71), 4: (250.89, 7.85), 8: (116.99, 7.85), 1024: (96.20, 7.95)},
        "AG": {1: (906.15, 5.82), 2: (439.41, 5.93), 4: (161.82, 6.37), 8: (87.73, 6.63), 1024: (77.83, 7.76)},
    },
    note=(
        "The boost of TB-10 and TB-20 is on the smallest step, the only reading that fits the paper's numbers; "
        "mirrored is the paper's words taken literally."
    ),
)

_SOURCE = Factor(
    "source",
    "A uniform source against a mask source",
    "table 4, appendix D.1",
    "Source",
    (
        Variant("Mask", MASK_RK2, SINGLE),
        Variant("Uniform", UNIFORM_RK2, SINGLE),
        Variant("Mask, path loss only", MASK_PATH, SINGLE, control=True),
        Variant("Uniform, path loss only", UNIFORM_PATH, SINGLE, control=True),
        CONTROL,
    ),
    (
        Claim("the uniform source has the lower perplexity", "Uniform", "Mask"),
        Claim(
            "so it has before few-step training", "Uniform, path loss only", "Mask, path loss only", origin="reading"
        ),
    ),
    paper={
        "Mask": {
            **{1: (4438.49, 8.62), 2: (2844.42, 8.64), 4: (1082.07, 8.48), 8: (413.43, 8.40)},
            **{1024: (364.61, 8.36)},
        },
        "Uniform": {1: (777.02, 6.24), 2: (451.79, 6.54), 4: (211.04, 6.75), 8: (136.60, 7.38), 1024: (93.24, 7.95)},
    },
    note=(
        "RK-2 for both, as in the paper. Both begin with the same path-loss training of the base, for the mask with "
        "one token more; the base knew the uniform source before, so at this scale the mask has the later start. "
        "[MASK] is never emitted and never entered again."
    ),
)

_PLAIN = "plain DFM step"
_TIME = Factor(
    "time",
    "What a shortcut teacher adds to a training step",
    "appendix D.2",
    "Training step",
    (
        Variant(_PLAIN, PATH, SINGLE),
        Variant("RK-2, TB-20", RK2, SINGLE),
        Variant("RK-4, TB-20", RK4, SINGLE),
        Variant(
            "RK-2, teacher on every row",
            FineTuning("rk2-every-row", ("objective.teacher.tableau=rk2", "objective.teacher.from_h=0.0")),
            SINGLE,
        ),
        Variant("RK-4, teacher on every row", FineTuning("rk4-every-row", ("objective.teacher.from_h=0.0",)), SINGLE),
    ),
    (
        Claim("RK-2 adds time to a step (the paper: 33 %)", _PLAIN, "RK-2, TB-20", metric="seconds", ratio=1 / 1.33),
        Claim("RK-4 adds time to a step (the paper: 100 %)", _PLAIN, "RK-4, TB-20", metric="seconds", ratio=1 / 2.0),
        Claim("RK-2 is cheaper than RK-4", "RK-2, TB-20", "RK-4, TB-20", metric="seconds", ratio=1.33 / 2.0),
        Claim(
            "a teacher asked only where it is used costs less than one asked on every row",
            "RK-4, TB-20",
            "RK-4, teacher on every row",
            metric="seconds",
            origin="reading",
        ),
    ),
    kind="time",
    quote="RK-2 adds roughly 33 %, RK-4 about 100 % wall-clock time to a training step",
    note=(
        "Steps are interleaved, one of each kind a round, on one thread; a number is the median over rounds of the "
        "ratio to the plain step of the same round."
    ),
)

_JUMP = Factor(
    "jump",
    "The jump rule of the sampler and of the teacher's hops",
    "section 4.2, appendix B.1",
    "Hops of the teacher, rule of the sampler",
    (
        Variant("single, single", RK4, SINGLE),
        Variant("single, exact", RK4, EXACT),
        Variant("single, instant", RK4, INSTANT),
        Variant("exact, exact", EXACT_HOPS, EXACT),
        Variant("exact, single", EXACT_HOPS, SINGLE),
        Variant("instant, instant", INSTANT_HOPS, INSTANT, extra=True),
        CONTROL,
        Variant("the base, exact", None, EXACT, control=True),
        Variant("the base, instant", None, INSTANT, control=True),
    ),
    (
        Claim("the paper's rule samples better than the instantaneous one", "single, single", "single, instant"),
        Claim("so it does without few-step training", CONTROL.label, "the base, instant", origin="implied"),
        Claim("and better than the exact kernel of the step", "single, single", "single, exact", origin="implied"),
        Claim("in the teacher's hops, too, it is the better one", "single, exact", "exact, exact", origin="implied"),
    ),
    note="single is the paper's rule, instant the one before the cumulative scalar, exact the closed form of the step.",
)

_START = Factor(
    "start",
    "Where repairs and continuations start",
    "section 5.2 (accuracy), table 2 (continuation)",
    "Model, start",
    (
        Variant("few-step, at 0", RK4, FROM_ZERO),
        Variant("few-step, at kappa^-1(known)", RK4, FROM_KNOWN),
        Variant("base, at 0", None, FROM_ZERO),
        Variant("base, at kappa^-1(known)", None, FROM_KNOWN),
    ),
    (
        Claim(
            "repairs should start at 0, as the paper's code starts them, not where training saw such input",
            "few-step, at 0",
            "few-step, at kappa^-1(known)",
            metric="accuracy",
            origin="implied",
        ),
        Claim(
            "so they should without few-step training",
            "base, at 0",
            "base, at kappa^-1(known)",
            metric="accuracy",
            origin="implied",
        ),
        Claim(
            "and so should continuations",
            "few-step, at 0",
            "few-step, at kappa^-1(known)",
            metric="continuation_token_perplexity",
            origin="implied",
        ),
    ),
    kind="given",
    note="Half of a real row is given: its other half is noise at known places (accuracy), or its end (perplexity).",
)

FACTORS: dict[str, Factor] = {
    factor.name: factor for factor in (_SCALAR, _TEACHER, _WEIGHTS, _SOURCE, _TIME, _JUMP, _START)
}
