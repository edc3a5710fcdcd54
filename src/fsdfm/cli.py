"""The `fsdfm` command: a command is a function, its help is the docstring, and its logic is elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fsdfm import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="fsdfm",
    help="Few-step discrete flow matching for language.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Benchmarks; each prints ratios measured in one interleaved run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

console = Console()

OutOption = Annotated[Path, typer.Option("--out", help="Folder to write to; it is made if it is missing.")]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same result.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]


def main() -> None:
    """Run the command line; a `ValueError` is the user's to mend: one sentence, exit code 2, no traceback."""
    try:
        app()
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__)


@bench_app.command("jump")
def bench_jump_command(
    length: Annotated[int, typer.Option(help="Positions.")] = 1024,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 50_257,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """One step of each jump rule against a softmax of the same logits and a float64 multinomial."""
    from fsdfm.bench.jump import RULES, JumpBench, bench_jump

    result = bench_jump(JumpBench(length=length, vocab_size=vocab_size, repeats=repeats))
    table = Table(title=f"one step, logits [1, {length}, {vocab_size}] given")
    for column in ("rule", "/ softmax, t=7/8", "/ softmax, mean of 8", "x multinomial", "peak MiB"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name in RULES:
        row = result[name]
        table.add_row(
            name,
            f"{row['over_softmax']:.2f}",
            f"{row['mean_over_softmax']:.2f}",
            f"{row['speedup_over_multinomial']:.1f}",
            "?" if row["peak_extra_mib"] is None else f"{row['peak_extra_mib']:.0f}",
        )
    console.print(table)
    reference = result["reference"]
    console.print(
        f"softmax {reference['softmax_ms']:.0f} ms, multinomial {reference['multinomial_ms']:.0f} ms, "
        f"logits {reference['logits_mib']:.0f} MiB, {reference['threads']} threads"
    )
    _write_json(result, json_file)


def _write_json(result: dict[str, Any], file: Path | None) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}; choose a file in a folder you may write to") from error
