"""From a model to text: generate, infill, repair."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from fsdfm.cli.options import FinalTemperatureOption, PrecisionOption, SeedOption
from fsdfm.cli.output import Format, Output, watch
from fsdfm.terminal import printable

if TYPE_CHECKING:
    from fsdfm.generate import Corruption, Generation, LanguageModel, Request, SamplerOptions

__all__ = ["generate", "infill", "repair"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The options that all three commands have."""

    model: Annotated[str | None, typer.Option(help="A checkpoint, or a run; else the model that ships.")] = None
    steps: Annotated[int | None, typer.Option(help="Network calls for a block of text; 8 unless said.")] = None
    num: Annotated[int, typer.Option(help="How many texts.")] = 1
    seed: SeedOption = 0
    temperature: Annotated[
        float | None, typer.Option(help="Below 1: bolder about what is likely. The model's advice, or 1, unless said.")
    ] = None
    final_temperature: FinalTemperatureOption = None
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens.")] = None
    jump: Annotated[
        str | None,
        typer.Option(
            help="exact, single (the paper's), instant, systematic, spaced. The model's advice, or exact, unless said."
        ),
    ] = None
    grid: Annotated[str, typer.Option(help="uniform, kappa, or times such as 0,0.5,0.9,1.")] = "uniform"
    start: Annotated[
        float | None, typer.Option(help="The time to start from; by default it follows from what is given.")
    ] = None
    begin: Annotated[
        Literal["document", "anywhere"], typer.Option(help="Whether the text begins where a document begins.")
    ] = "document"
    format: Annotated[Format | None, typer.Option(help="By default as --out ends, else text.")] = None
    out: Annotated[Path | None, typer.Option(help="File to write to, instead of standard output.")] = None
    watch: Annotated[bool, typer.Option("--watch", help="Show the text as it comes.")] = False
    states: Annotated[bool, typer.Option("--states", help="Carry the text at every step; with --format json.")] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto"
    precision: PrecisionOption = "float32"
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as are free.")] = 0

    def options(self) -> SamplerOptions:
        """What the sampler wants to know."""
        return {
            "steps": self.steps,
            "seed": self.seed,
            "temperature": self.temperature,
            "final_temperature": self.final_temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "jump": self.jump,
            "grid": self.grid,
            "start": self.start,
            "keep_states": self.states,
        }


def shares(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the shared options behind its own; it receives them as one object, `shared`."""
    hints = get_type_hints(Shared, include_extras=True)
    own = [parameter for name, parameter in signature(command, eval_str=True).parameters.items() if name != "shared"]
    others = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(Shared)
    ]

    def run(**values: Any) -> None:
        shared = Shared(**{field.name: values.pop(field.name) for field in fields(Shared)})
        command(**values, shared=shared)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature([*own, *others])  # type: ignore[attr-defined]
    return run


@shares
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What the text begins with; - reads standard input.")] = None,
    suffix: Annotated[str | None, typer.Option(help="What the text ends with.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in all; the model's length unless said.")] = None,
    *,
    shared: Shared,
) -> None:
    """Write a text, after a prompt or from nothing, in a handful of network calls."""
    output, lm = _begin(shared)
    request = lm.encoder.continuation(_read(prompt), suffix, length=length, begin=shared.begin)
    _answer(lm, request, output, shared=shared, command="generate")


@shares
def infill(
    text: Annotated[str, typer.Argument(help=r"[[6]] is a gap of six tokens, \[[ the two characters; - reads input.")],
    *,
    shared: Shared,
) -> None:
    """Fill the gaps of a text."""
    output, lm = _begin(shared)
    _answer(lm, lm.encoder.gaps(_read(text) or "", begin=shared.begin), output, shared=shared, command="infill")


@shares
def repair(
    text: Annotated[str, typer.Argument(help="The text to repair; - reads standard input.")],
    damaged: Annotated[list[str] | None, typer.Option(help="Damaged characters, BEGIN:END; may be repeated.")] = None,
    corrupt: Annotated[float | None, typer.Option(help="First replace this share of the tokens by noise.")] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Do not tell the model what was corrupted.")] = False,
    *,
    shared: Shared,
) -> None:
    """Repair a text: at places you name, or blind, where every token may change."""
    if corrupt is not None and damaged:
        raise ValueError("--corrupt damages the text itself; leave --damaged out")
    output, lm = _begin(shared)
    words = _read(text) or ""
    corruption = None if corrupt is None else lm.corrupt(words, corrupt, seed=shared.seed)
    if corruption is None:
        spans = [_span(each) for each in damaged] if damaged else None
        request = lm.encoder.damaged(words, spans, begin=shared.begin)
    else:
        known = None if blind else corruption.damaged
        request = lm.encoder.damaged(corruption.tokens, known, begin=shared.begin)
    results = _answer(lm, request, output, shared=shared, command="repair")
    _report_repair(results, corruption)


def _begin(shared: Shared) -> tuple[Output, LanguageModel]:
    """Everything that can be wrong before the model is read, then the model."""
    import fsdfm.peers  # noqa: F401  (gives their rules their names)
    from fsdfm.generate import SamplerConfig, load

    SamplerConfig(**shared.options())
    output = Output(shared.format, shared.out, num=shared.num, states=shared.states)
    if shared.watch and shared.num > 1:
        raise ValueError(f"--watch shows one text and --num is {shared.num}; leave one of them out")
    return output, load(shared.model, device=shared.device, precision=shared.precision, threads=shared.threads)


def _answer(
    lm: LanguageModel, request: Request, output: Output, *, shared: Shared, command: str
) -> Sequence[Generation]:
    if shared.watch:
        stream = lm.stream(request, **shared.options())
        results = [watch(stream, stream.steps)]
    else:
        results = lm.run(request.copies(shared.num), **shared.options())
    for sentence in dict.fromkeys(sentence for result in results for sentence in result.warnings):
        typer.echo(printable(f"warning: {sentence}"), err=True)
    used = lm.sampler_config(**shared.options())
    settings = {**shared.options(), "temperature": used.temperature, "jump": used.jump}
    facts = {"command": command, "model": lm.checkpoint.loaded, "settings": settings}
    output.write(results, facts)
    first, calls = results[0], sum(result.calls for result in results)
    seconds = max(result.seconds for result in results)
    told = f"{calls} network calls in {seconds:.2f} s, from t = {first.start:.3g}, seed {first.seed}"
    typer.echo(told if output.file is None else printable(f"{output.file}: {told}"), err=True)
    return results


def _report_repair(results: Sequence[Generation], corruption: Corruption | None) -> None:
    for result in results:
        told = f"{sum(result.replaced)} of {len(result.tokens)} tokens replaced"
        if corruption is not None:
            share = corruption.recovered(result.tokens)
            told += f"; {share:.0%} of the {sum(corruption.damaged)} corrupted tokens recovered"
        typer.echo(told, err=True)


def _read(text: str | None) -> str | None:
    if text != "-":
        return text
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not {error.encoding} text; convert it first") from error


def _span(text: str) -> tuple[int, int]:
    begin, _, end = text.partition(":")
    if not (begin.isdecimal() and end.isdecimal()):
        raise ValueError(f"--damaged is {text!r}; write BEGIN:END, the characters from BEGIN up to but not END")
    return int(begin), int(end)
