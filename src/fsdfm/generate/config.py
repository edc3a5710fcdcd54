"""How a text is sampled: steps, seed, filter, jump rule, grid, start time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fsdfm.checks import require_number, require_whole
from fsdfm.files import did_you_mean
from fsdfm.flow import RULES, Filter, Grid, Schedule, StepRule, find_rule, require_retreat
from fsdfm.generate.budget import BudgetTarget, EntropyCurve
from fsdfm.peers.sampling import geometric_grid, tail_grid

__all__ = ["GRIDS", "MAX_STEPS", "SamplerConfig", "SamplerOptions", "check_advice", "read_advice"]

MAX_STEPS = 8192  # eight times the finest step size that training knows
MAX_SEED = 2**64 - 1
DEFAULT_STEPS = 8
GRIDS = ("uniform", "kappa", "tail", "geometric", "fitted")


_WITH_LAST_CALL: dict[str, Callable[[int], Grid]] = {"tail": tail_grid, "geometric": geometric_grid}


class SamplerOptions(TypedDict, total=False):
    """The keyword arguments of `generate`, `infill`, `repair`, `stream` and `run`: see `SamplerConfig`."""

    steps: int | Literal["auto"] | None
    target: str | None
    seed: int
    temperature: float | None
    final_temperature: float | None
    top_p: float | None
    top_k: int | None
    jump: str | StepRule | None
    grid: str | Grid
    start: float | None
    renoise: float
    cache: str
    keep_states: bool
    curve: EntropyCurve | None


def _says(about: str, **bounds: float) -> dict[str, Any]:
    """What a schema says of an option: a sentence, and the bounds that are checked below."""
    return {"about": about, "bounds": bounds}


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How to sample; the same for every request of a call.

    steps         network calls for a block of text; the model's own advice, 8 where it has none, or the grid's; "auto":
                  as many as the target needs, at the best times for so many (`fsdfm.generate.budget`)
    target        of steps "auto": quality=0.3 (nats per token that independent draws may waste), calls=8, or ms=500
    seed          the same seed gives the same text
    temperature, top_p, top_k   narrow p_{1|t} before anything is drawn; the temperature is the model's own advice for
                  so many steps unless said, 1 where it has none
    final_temperature   that of the last step, where it changes from step to step; None: it does not
    jump          the rule of a step: exact, single, instant, systematic, spaced, sweep; certain, bounded, stop, which
                  adapt (`fsdfm.flow.adaptive`); a peer's, with options if need be (`remdm-cap:eta=0.02`), or a
                  `StepRule`; the model's own advice unless said, exact where it has none
    grid          uniform: equal steps in time; kappa: equal steps in kappa; fitted: the best for the model's entropy
                  curve; tail: equal steps, and a last call where hardly any noise is left, as some peers spend it;
                  geometric: sigma = -ln kappa falls geometrically from 20, and a last call: SEDD's with the uniform
                  graph; "0,0.5,0.9,1": these times; or a `Grid`
    start         t_0: the model is told times from t_0 on, and h = (1 - t_0) / steps. None: kappa^-1(share of the
                  tokens that is given), 0 where nothing is
    renoise       so many steps back before each step but the last: positions return to the source, as many as the path
                  says, and may be written anew (`fsdfm.flow.Sampler`). No further call; 0: none. Not with rules that
                  count what is settled, such as sweep and certain
    cache         off; prompt: the keys and values of what is given are those of the first call of a block, which is
                  faster and not exact; prompt:4: they are renewed in every fourth call (`fsdfm.generate.cache`)
    keep_states   keep the text at every step in the result
    curve         the model's entropy curve, which its advice has
    """

    steps: int | Literal["auto"] | None = field(
        default=None,
        metadata=_says(
            "Network calls for a block of text; auto: as many as the target needs; the model's own advice, or 8, "
            "unless said.",
            ge=1,
            le=MAX_STEPS,
        ),
    )
    target: str | None = field(
        default=None, metadata=_says("Of steps auto: quality=0.3 (nats per token), calls=8 or ms=500.")
    )
    seed: int = field(
        default=0, metadata=_says("The same request with the same seed gives the same text.", ge=0, le=MAX_SEED)
    )
    temperature: float | None = field(
        default=None,
        metadata=_says("Below 1: bolder about what is likely. The model's own advice, or 1, unless said.", gt=0),
    )
    final_temperature: float | None = field(
        default=None, metadata=_says("Go from the temperature in the first call to this in the last, evenly.", gt=0)
    )
    top_p: float | None = field(
        default=None, metadata=_says("Keep the likeliest tokens up to this probability.", gt=0, le=1)
    )
    top_k: int | None = field(default=None, metadata=_says("Keep so many of the likeliest tokens.", ge=1))
    jump: str | StepRule | None = field(
        default=None,
        metadata=_says(
            "exact, single, instant, systematic, spaced or sweep: the model's own advice, or exact, unless said."
        ),
    )
    grid: str | Grid = field(
        default="uniform", metadata=_says("uniform, kappa, tail, geometric, fitted, or times such as 0,0.5,0.9,1.")
    )
    start: float | None = field(
        default=None, metadata=_says("The time to start from; it follows from what is given unless said.", ge=0, lt=1)
    )
    renoise: float = field(
        default=0.0, metadata=_says("Go back by so many steps before each step but the last; 0: never.", ge=0)
    )
    cache: str = field(
        default="off", metadata=_says("off; prompt: keep what is computed of the prompt (not exact); prompt:4: renew.")
    )
    keep_states: bool = field(default=False, metadata=_says("Keep the text at every step in the result."))
    curve: EntropyCurve | None = field(default=None, metadata=_says("The model's entropy curve, which its advice has."))

    def __post_init__(self) -> None:
        if self.steps not in (None, "auto"):
            require_whole("steps", self.steps, 1, high=MAX_STEPS)
        if self.target is not None:
            BudgetTarget.read(self.target)
            if self.steps != "auto":
                raise ValueError(f"target is {self.target!r}, which belongs to steps auto, and steps is {self.steps}")
        require_whole("seed", self.seed, 0, high=MAX_SEED)
        if self.start is not None and not 0 <= require_number("start", self.start, "0 <= start < 1") < 1:
            raise ValueError(f"start is {self.start}; allowed are 0 <= start < 1, from noise to all but finished text")
        if not 0 <= require_number("renoise", self.renoise, "finite numbers >= 0") < math.inf:
            raise ValueError(f"renoise is {self.renoise}; allowed are finite numbers >= 0, steps to go back")
        if not isinstance(self.keep_states, bool):
            raise ValueError(f"keep_states is {self.keep_states!r:.80}; allowed are True and False")
        if self.curve is not None and not isinstance(self.curve, EntropyCurve):
            raise ValueError(f"curve is {self.curve!r:.80}; allowed is an EntropyCurve")
        if not isinstance(self.grid, str | Grid):
            raise ValueError(f"grid is {self.grid!r:.80}; allowed are a name, times such as 0,0.5,0.9,1, and a Grid")
        self.filter()
        rule = self.rule()
        if self.renoise:
            require_retreat(rule)
        self.refresh()
        self._check_grid()

    def filter(self) -> Filter | None:
        """Temperature, top-k, top-p; None where they change nothing."""
        temperature = 1.0 if self.temperature is None else self.temperature
        made = Filter(temperature, self.top_k, self.top_p, self.final_temperature)
        return None if made == Filter() else made

    def rule(self) -> StepRule:
        """The jump rule."""
        jump = "exact" if self.jump is None else self.jump
        return jump if isinstance(jump, StepRule) else find_rule(str(jump))

    def refresh(self) -> int | None:
        """After how many calls the keys of what is given are renewed: 0 never, None: they are not kept."""
        if self.cache == "off":
            return None
        name, _, calls = str(self.cache).partition(":")
        if name != "prompt" or (calls and not calls.isdecimal()):
            raise ValueError(
                f"cache is {self.cache!r:.80}; allowed are off, prompt, and prompt:4 to renew every 4 calls"
            )
        return int(calls or 0)

    def advised(self, advice: Mapping[str, Any] | None) -> SamplerConfig:
        """These settings, and where they say nothing what a model advises: the `sampling` of its config.json.

            {"steps": 1, "jump": "spaced", "temperature": {"1": 0.95, "8": 0.85}}

        The temperature is that of the nearest number of steps.
        """
        if not advice:
            return self
        try:
            following = replace(self, renoise=0.0)._following(advice)
        except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"the model's advice on sampling cannot be used: {error!r:.200}; mend its config"
            ) from error
        return replace(following, renoise=self.renoise)  # which the advised rule may not allow: no fault of the model's

    def _following(self, advice: Mapping[str, Any]) -> SamplerConfig:
        temperature, jump = self.temperature, self.jump
        if self.curve is None and "curve" in advice:
            return replace(self, curve=EntropyCurve(tuple(advice["curve"])))._following(advice)
        if self.steps == "auto":
            return replace(self, jump=self.jump or advice.get("jump"))
        if self.steps is None and self._own_times() is None and "steps" in advice:
            return replace(self, steps=advice["steps"])._following(advice)
        if temperature is None and self.final_temperature is None and advice.get("temperature"):
            known = {int(steps): float(value) for steps, value in advice["temperature"].items()}
            temperature = known[min(known, key=lambda steps: abs(math.log(steps / self.num_steps())))]
        if jump is None and "jump" in advice:
            jump = str(advice["jump"])
        return replace(self, temperature=temperature, jump=jump)

    def budgeted(self, seconds: Callable[[], float], *, share: float = 0.0, in_order: bool = False) -> SamplerConfig:
        """These settings with so many steps as an automatic budget needs; `seconds` tells what a call takes here.

        share, in_order   as in `BudgetTarget.steps`
        """
        if self.steps != "auto":
            return self
        target = BudgetTarget() if self.target is None else BudgetTarget.read(self.target)
        took = seconds() if target.kind == "ms" else None
        steps = target.steps(self.curve, took, share=share, in_order=in_order)
        grid = "fitted" if self.grid == "uniform" and self.curve is not None else self.grid
        return replace(self, steps=steps, target=None, grid=grid)

    def to_json(self) -> dict[str, Any]:
        """What a result file says of the sampler: every option that was chosen or advised, by its name."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("seed", "keep_states", "curve")}
        if self.cache == "off":
            del record["cache"]
        if not self.renoise:
            del record["renoise"]
        named = next((name for name, rule in RULES.items() if rule == self.rule()), repr(self.rule()))
        record["jump"] = self.jump if isinstance(self.jump, str) else named
        if isinstance(self.grid, Grid):
            record["grid"] = ",".join(f"{time:g}" for time in self.grid.times.tolist())
        return {name: value for name, value in record.items() if value is not None}

    def num_steps(self) -> int:
        """S: network calls for a block."""
        times = self._own_times()
        if self.steps == "auto":
            raise ValueError("steps is auto, and how many these are depends on the model; ask lm.sampler_config(...)")
        return (self.steps or DEFAULT_STEPS) if times is None else len(times) - 1

    def make_grid(self, starts: Tensor, schedule: Schedule) -> Grid:
        """The times of every row: the grid's shape over [0, 1], laid over [t_0, 1] for starts t_0 [B]."""
        shape = self._own_times()
        if self.grid == "fitted":
            return self._fitted(starts, schedule)
        if shape is None:
            shape = Grid.uniform(self.num_steps()).times
            if self.num_steps() > 1 and (make := _WITH_LAST_CALL.get(str(self.grid))) is not None:
                shape = make(self.num_steps()).times
            if self.grid in ("kappa", "geometric"):
                shape = schedule.kappa_inverse(shape)
        times = starts[:, None] + (1 - starts[:, None]) * (shape - shape[0]) / (1 - shape[0])
        times[:, -1] = 1.0
        return Grid(times)

    def _fitted(self, starts: Tensor, schedule: Schedule) -> Grid:
        """For every row the best times from its start on."""
        if self.curve is None:
            raise ValueError(
                "grid is fitted, but this model advises no entropy curve; fit one (fsdfm export --fit-curve valid.txt) "
                "or take another grid"
            )
        rows, kept = [], dict[float, Tensor]()
        for start in starts.tolist():
            if start not in kept:
                kappa = float(schedule.kappa(torch.tensor(start, dtype=torch.float64)))
                shares = torch.tensor(self.curve.plan(self.num_steps(), kappa), dtype=torch.float64)
                times = schedule.kappa_inverse(shares.clamp(max=1.0))
                times[0], times[-1] = start, 1.0
                kept[start] = times
            rows.append(kept[start])
        return Grid(torch.stack(rows))

    def fixed_start(self) -> float | None:
        """t_0 where the settings say it: `start`, or the first time of a grid that does not begin at 0."""
        times = self._own_times()
        return self.start if times is None or float(times[0]) == 0 else float(times[0])

    def _own_times(self) -> Tensor | None:
        """The times that the settings spell out; None for a named grid."""
        if isinstance(self.grid, Grid):
            return self.grid.times
        if self.grid in GRIDS:
            return None
        try:
            times = [float(part) for part in self.grid.split(",")]
        except ValueError:
            allowed = f"{', '.join(GRIDS)}, or times such as 0,0.5,0.9,1"
            raise ValueError(f"grid is {self.grid!r}; allowed are {allowed}") from None
        return Grid(times).times

    def _check_grid(self) -> None:
        times = self._own_times()
        if times is None:
            return
        if times.ndim != 1 or not 2 <= len(times) <= MAX_STEPS + 1 or not bool(torch.isfinite(times).all()):
            raise ValueError(
                f"the grid has shape {tuple(times.shape)}; one row of 2 to {MAX_STEPS + 1} times is needed"
            )
        if self.steps is not None and self.steps != len(times) - 1:
            raise ValueError(f"steps is {self.steps}, but the grid has {len(times) - 1}; leave steps out")
        if self.start is not None and float(times[0]) != 0:
            raise ValueError(f"start is {self.start}, but the grid begins at {float(times[0])}; leave one of them out")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for the name of an option that there is not, with the one that may be meant."""
    known = [field.name for field in fields(SamplerConfig)]
    for name in options:
        if name not in known:
            raise ValueError(f"there is no option {name!r:.80}; {did_you_mean(name, known)}")


# --- a model's advice -------------------------------------------------------------------------------------------------

_ADVISED = ("steps", "jump", "temperature", "curve")


def check_advice(advice: Mapping[str, Any]) -> None:
    """Raise where the `sampling` of a config.json could not be followed: an unknown key, rule, budget, temperature."""
    for name in advice:
        if name not in _ADVISED:
            raise ValueError(f"the advice on sampling names {name!r:.80}; allowed are {', '.join(_ADVISED)}")
    if "jump" in advice:
        SamplerConfig(jump=str(advice["jump"]))
    if "steps" in advice:
        SamplerConfig(steps=advice["steps"])
    if "curve" in advice:
        EntropyCurve(tuple(advice["curve"]))
    temperatures = advice.get("temperature", {})
    if not isinstance(temperatures, Mapping) or ("temperature" in advice and not temperatures):
        raise ValueError(f"the advised temperature is {temperatures!r:.80}; give one for every budget: 1:0.9,8:0.85")
    for steps, value in temperatures.items():
        SamplerConfig(steps=int(steps), temperature=value)


def read_advice(words: Sequence[str]) -> dict[str, Any]:
    """The advice that `fsdfm export --sampling` spells: steps=1, jump=spaced, temperature=1:0.9,8:0.85; none: none."""
    if list(words) == ["none"]:
        return {}
    advice: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or name in advice:
            raise ValueError(
                f"--sampling is {word!r:.80}; write each name once, NAME=VALUE: jump=spaced, temperature=1:0.9,8:0.85"
            )
        advice[name] = _read_advised(name, value)
    check_advice(advice)
    return advice


def _read_advised(name: str, text: str) -> Any:
    if name == "temperature":
        return _read_temperatures(text)
    if name == "curve":
        return _read_curve(text)
    if name != "steps":
        return text
    if not text.isdecimal():
        raise ValueError(f"the advised steps are {text!r:.80}; write a whole number such as steps=1")
    return int(text)


def _read_curve(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"the advised curve is {text!r:.80}; write nats at equal shares: 5.9,4.6,3.2,1.4,0.1"
        ) from None


def _read_temperatures(text: str) -> dict[str, float]:
    """{"1": 0.9, "8": 0.85} of 1:0.9,8:0.85; one number alone holds at every budget."""
    try:
        if ":" not in text:
            return {str(DEFAULT_STEPS): float(text)}
        pairs = [part.split(":") for part in text.split(",")]
        return {str(int(steps)): float(value) for steps, value in pairs}
    except ValueError:
        raise ValueError(
            f"the advised temperature is {text!r:.80}; write steps:temperature, 1:0.9,8:0.85, or one number for all"
        ) from None
