"""The options of sampling, declared once: every command that samples takes these, with these defaults and helps.

`WritingOptions` has the fields of `fsdfm.generate.SamplerConfig` that a command line can say (a test compares the two;
it is declared here so that help need not import torch). `takes_groups` turns a parameter of a group's type into the
options of the group:

    @takes_groups
    def generate(prompt: ..., *, sampling: SamplingOptions, machine: Machine) -> None: ...

An option that the command has a parameter of its own for, such as the budgets of `evaluate`, is left out of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fsdfm.cli.completion import complete_rules
from fsdfm.cli.options import PrecisionOption, SeedOption

if TYPE_CHECKING:
    from fsdfm.generate import SamplerOptions

__all__ = ["Machine", "NoiseSamplingOptions", "SamplingOptions", "WritingOptions", "takes_groups"]


def _read_steps(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.removeprefix("-").isdecimal():
        raise typer.BadParameter(f"{text!r} is not a whole number or auto")
    return int(text)


StepsOption = Annotated[
    Any | None,
    typer.Option(parser=_read_steps, metavar="INTEGER|auto", help="Network calls for a block of text; 8 unless said."),
]


@dataclass(frozen=True, kw_only=True)
class NoiseSamplingOptions:
    """How texts are sampled that begin with nothing but noise."""

    steps: StepsOption = None
    seed: SeedOption = 0
    temperature: Annotated[
        float | None, typer.Option(help="Below 1: bolder about what is likely. The model's advice, or 1, unless said.")
    ] = None
    final_temperature: Annotated[
        float | None, typer.Option(help="Go from --temperature in the first call to this in the last, evenly.")
    ] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens.")] = None
    jump: Annotated[
        str | None,
        typer.Option(
            help="exact, single (the paper's), instant, systematic, spaced, sweep; certain, bounded, stop adapt. The "
            "model's advice, or exact, unless said.",
            autocompletion=complete_rules,
        ),
    ] = None
    grid: Annotated[
        str, typer.Option(help="uniform, kappa, tail, geometric, fitted, or times such as 0,0.5,0.9,1.")
    ] = "uniform"

    def options(self) -> SamplerOptions:
        """What the sampler wants to know."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(NoiseSamplingOptions):
    """How texts are sampled."""

    start: Annotated[
        float | None, typer.Option(help="The time to start from; by default it follows from what is given.")
    ] = None
    renoise: Annotated[
        float, typer.Option(help="Before each step but the last go back by so many, and write anew; 0: never.")
    ] = 0.0
    cache: Annotated[
        str, typer.Option(help="off; prompt: keep what is computed of the prompt (faster, not exact); prompt:4: renew.")
    ] = "off"


@dataclass(frozen=True, kw_only=True)
class WritingOptions(SamplingOptions):
    """How texts are sampled that somebody waits for: the number of calls may be left to the sampler."""

    target: Annotated[
        str | None, typer.Option(help="With --steps auto: quality=0.3 (nats per token), calls=8 or ms=500.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a model runs."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto"
    precision: PrecisionOption = "float32"
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as are free.", min=0)] = 0


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of its groups behind its own; it receives each group as one object."""
    parameters = signature(command, eval_str=True).parameters
    groups = {name: p.annotation for name, p in parameters.items() if hasattr(p.annotation, "__dataclass_fields__")}
    own = [parameter for name, parameter in parameters.items() if name not in groups]
    names = {
        group: [field.name for field in fields(kind) if field.name not in parameters] for group, kind in groups.items()
    }
    others = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=get_type_hints(kind, include_extras=True)[field.name],
        )
        for group, kind in groups.items()
        for field in fields(kind)
        if field.name in names[group]
    ]

    def run(**values: Any) -> None:
        made = {group: kind(**{name: values.pop(name) for name in names[group]}) for group, kind in groups.items()}
        command(**values, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature([*own, *others])  # type: ignore[attr-defined]
    return run
