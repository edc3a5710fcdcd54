"""From a model to text: generate, infill, repair."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fsdfm.cli.completion import complete_models
from fsdfm.cli.output import Format, Output, show_blocks, watch
from fsdfm.cli.sampling import Machine, WritingOptions, takes_groups
from fsdfm.files import read_text, replace_file
from fsdfm.terminal import printable

if TYPE_CHECKING:
    from fsdfm.generate import Corruption, Generation, LanguageModel, Request, SamplerOptions

__all__ = ["generate", "infill", "repair"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The options that all three commands have beside those of sampling."""

    model: Annotated[
        str | None,
        typer.Option(help="A checkpoint, or a run; else the model that ships.", autocompletion=complete_models),
    ] = None
    num: Annotated[int, typer.Option(help="How many texts.")] = 1
    begin: Annotated[
        Literal["document", "anywhere"], typer.Option(help="Whether the text begins where a document begins.")
    ] = "document"
    format: Annotated[Format | None, typer.Option(help="By default as --out ends, else text.")] = None
    out: Annotated[Path | None, typer.Option(help="File to write to, instead of standard output.")] = None
    watch: Annotated[bool, typer.Option("--watch", help="Show the text as it comes.")] = False
    states: Annotated[bool, typer.Option("--states", help="Carry the text at every step; with --format json.")] = False


@takes_groups
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What the text begins with; - reads standard input.")] = None,
    suffix: Annotated[str | None, typer.Option(help="What the text ends with.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in all; the model's length unless said.")] = None,
    *,
    sampling: WritingOptions,
    shared: Shared,
    machine: Machine,
) -> None:
    """Write a text, after a prompt or from nothing, in a handful of network calls; fill in a board."""
    if _is_board_model(shared.model):
        _fill_board(_read(prompt), shared, sampling)
        return
    output, lm = _begin(shared, sampling, machine)
    request = lm.encoder.continuation(_read(prompt), suffix, length=length, begin=shared.begin)
    _answer(lm, request, output, shared=shared, sampling=sampling, command="generate")


@takes_groups
def infill(
    text: Annotated[str, typer.Argument(help=r"[[6]] is a gap of six tokens, \[[ the two characters; - reads input.")],
    *,
    sampling: WritingOptions,
    shared: Shared,
    machine: Machine,
) -> None:
    """Fill the gaps of a text."""
    output, lm = _begin(shared, sampling, machine)
    request = lm.encoder.gaps(_read(text) or "", begin=shared.begin)
    _answer(lm, request, output, shared=shared, sampling=sampling, command="infill")


@takes_groups
def repair(
    *,
    text: Annotated[str, typer.Argument(help="The text to repair; - reads standard input.")],
    damaged: Annotated[list[str] | None, typer.Option(help="Damaged characters, BEGIN:END; may be repeated.")] = None,
    corrupt: Annotated[float | None, typer.Option(help="First replace this share of the tokens by noise.")] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Do not tell the model what was corrupted.")] = False,
    sampling: WritingOptions,
    shared: Shared,
    machine: Machine,
) -> None:
    """Repair a text: at places you name, or blind, where the model is sure that a token is wrong."""
    if corrupt is not None and damaged:
        raise ValueError("--corrupt damages the text itself; leave --damaged out")
    output, lm = _begin(shared, sampling, machine)
    words = _read(text) or ""
    corruption = None if corrupt is None else lm.corrupt(words, corrupt, seed=sampling.seed)
    if corruption is None:
        spans = [_span(each) for each in damaged] if damaged else None
        request = lm.encoder.damaged(words, spans, begin=shared.begin)
    else:
        known = None if blind else corruption.damaged
        request = lm.encoder.damaged(corruption.tokens, known, begin=shared.begin)
    results = _answer(lm, request, output, shared=shared, sampling=sampling, command="repair")
    _report_repair(results, corruption)


def _is_board_model(folder: str | None) -> bool:
    """Whether a folder holds a network of `fsdfm study sudoku`; nothing heavy is imported to find out."""
    try:
        config = json.loads(read_text(Path(folder or "") / "config.json"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("architecture") == "sudoku"


def _fill_board(board: str | None, shared: Shared, sampling: WritingOptions) -> None:
    """Let a network of `fsdfm study sudoku` fill in a board; with --out FILE.png a picture of its steps."""
    from fsdfm.generate import SamplerConfig
    from fsdfm.studies.sudoku.figure import draw_board_steps
    from fsdfm.studies.sudoku.model import load_board_model

    if board is None:
        raise ValueError("this model fills in boards; type one, digits row by row and . for an empty cell")
    options = sampling.options()
    rule, steps = options.pop("jump"), sampling.steps or 8
    used = SamplerConfig(**options)
    if shared.num > 1 or shared.watch or shared.states or sampling.start is not None or sampling.grid != "uniform":
        raise ValueError("a board takes --steps, --seed, --jump, --temperature, --top-k, --top-p and --out; no others")
    output = Output(shared.format, shared.out, num=1, states=False)
    if output.format not in ("text", "png"):
        raise ValueError(f"--format is {output.format}; a board is text, or a picture with --out FILE.png")
    assert shared.model is not None
    model = load_board_model(shared.model)
    answer = model.solve(board, steps=steps, rule=str(rule) if rule else None, seed=sampling.seed, filter=used.filter())
    if output.format == "png":
        assert output.file is not None
        replace_file(output.file, lambda file: draw_board_steps(answer).savefig(file, format="png", dpi=150))
    else:
        output.write_text(answer.text + "\n")
    typer.echo(
        f"{steps} network call{'s' * (steps != 1)}; {'solved' if answer.is_right else 'not a solution'}", err=True
    )


def _begin(shared: Shared, sampling: WritingOptions, machine: Machine) -> tuple[Output, LanguageModel]:
    """Everything that can be wrong before the model is read, then the model."""
    import fsdfm.peers  # noqa: F401  (gives their rules their names)
    from fsdfm.generate import SamplerConfig, load

    SamplerConfig(**sampling.options())
    output = Output(shared.format, shared.out, num=shared.num, states=shared.states)
    if shared.watch and shared.num > 1:
        raise ValueError(f"--watch shows one text and --num is {shared.num}; leave one of them out")
    return output, load(shared.model, device=machine.device, precision=machine.precision, threads=machine.threads)


def _answer(
    lm: LanguageModel, request: Request, output: Output, *, shared: Shared, sampling: WritingOptions, command: str
) -> Sequence[Generation]:
    options: SamplerOptions = {**sampling.options(), "keep_states": shared.states}
    used = lm.sampler_config(request, **options)
    if options.get("steps") == "auto":  # found once: to time a call takes two
        options = {**options, "steps": used.steps, "target": None, "grid": used.grid}
    stream = lm.stream(request, **options)
    streams = output.streams and shared.num == 1 and stream.num_blocks > 1 and not shared.watch
    if shared.watch:
        results = [watch(stream, stream.steps)]
    elif streams:
        results = [output.write_blocks(stream)]
    else:
        with show_blocks() as progress:
            results = lm.run(request.copies(shared.num), progress=progress, **options)
    for sentence in dict.fromkeys([*lm.warnings, *(each for result in results for each in result.warnings)]):
        typer.echo(printable(f"warning: {sentence}"), err=True)
    settings = {**options, "temperature": used.temperature, "jump": used.jump}
    facts = {"command": command, "model": lm.checkpoint.loaded, "settings": settings}
    if not streams:
        output.write(results, facts)
    first, calls = results[0], sum(result.calls for result in results)
    seconds = max(result.seconds for result in results)
    told = f"{calls} network call{'s' * (calls != 1)} in {seconds:.2f} s, from t = {first.start:.3g}, seed {first.seed}"
    typer.echo(told if output.file is None else printable(f"{output.file}: {told}"), err=True)
    return results


def _report_repair(results: Sequence[Generation], corruption: Corruption | None) -> None:
    for result in results:
        told = f"{sum(result.replaced)} of {len(result.tokens)} tokens replaced, {sum(result.marked)} damaged"
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
