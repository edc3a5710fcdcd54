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


@app.callback(invoke_without_command=True)
def fsdfm(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Few-step discrete flow matching for language."""
    if version:
        console.print(__version__)
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, such as tiny-dfm, or the path of a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to replace: train.steps=100 out=DIR.")] = None,
) -> None:
    """Train what a recipe says; the same command again goes on where it was. Ctrl-C saves first."""
    from fsdfm.run import train as run_recipe

    result = run_recipe(recipe, overrides or [])
    state = "finished" if result.finished else "stopped and saved; the same command goes on"
    console.print(f"{result.folder}: {state}, training step {result.training_step}", highlight=False, soft_wrap=True)


@app.command()
def prepare(
    inputs: Annotated[list[str], typer.Argument(help="Text, .jsonl or .parquet files, hf:NAME, or builtin:pydoc.")],
    out: OutOption,
    tokenizer: Annotated[str, typer.Option(help="bytes, gpt2, bpe:SIZE (trained on the text), or a path.")] = "gpt2",
    separator: Annotated[str | None, typer.Option(help="Stands between the documents of a text file.")] = None,
    field: Annotated[str, typer.Option(help="Holds the document in JSON lines, Parquet and datasets.")] = "text",
    max_documents: Annotated[int | None, typer.Option(help="Stop after so many documents.")] = None,
) -> None:
    """Turn text into a packed corpus of tokens; interrupted, the same command goes on."""
    from fsdfm.config import DataConfig
    from fsdfm.run import prepare_corpus

    config = DataConfig(
        inputs=tuple(inputs), tokenizer=tokenizer, separator=separator, field=field, max_documents=max_documents
    )
    corpus = prepare_corpus(config, out)
    console.print(f"{out}: {len(corpus.starts):,} documents, {len(corpus):,} tokens", highlight=False, soft_wrap=True)


@app.command()
def convert(
    checkpoint: Annotated[str, typer.Argument(help="An autoregressive llama2.c checkpoint, legacy format (.bin).")],
    out: OutOption,
    tokenizer: Annotated[str | None, typer.Option(help="Its tokenizer.bin; else it stands behind the weights.")] = None,
    texts: Annotated[list[str] | None, typer.Option(help="Keep only the tokens that these inputs use.")] = None,
    separator: Annotated[str | None, typer.Option(help="Stands between the documents of a text file.")] = None,
    min_count: Annotated[int, typer.Option(help="How often a token must be used to be kept.")] = 1,
    half: Annotated[bool, typer.Option(help="Store the weights as float16.")] = False,
) -> None:
    """Make a denoiser of an autoregressive model: a checkpoint to train further as model.parent."""
    from fsdfm.config import DataConfig, ModelSection
    from fsdfm.run import convert as run_convert

    section = ModelSection(llama2c=checkpoint, llama2c_tokenizer=tokenizer, min_count=min_count)
    bundle = run_convert(section, DataConfig(inputs=tuple(texts or ()), separator=separator), out, half=half)
    parameters = sum(p.numel() for p in bundle.model.parameters())
    summary = f"{out}: {parameters:,} parameters, {bundle.tokenizer.vocab_size:,} tokens"
    console.print(summary, highlight=False, soft_wrap=True)


@app.command()
def couple(
    parent: Annotated[Path, typer.Argument(help="The checkpoint, or run, whose trajectories are kept.")],
    out: OutOption,
    num: Annotated[int, typer.Option(help="Pairs in all; what is there already counts.", min=1)] = 4096,
    steps: Annotated[int, typer.Option(help="Sampling steps of a pair.", min=1)] = 64,
    length: Annotated[int | None, typer.Option(help="Tokens; the parent's length unless given.", min=1)] = None,
    jump: Annotated[str, typer.Option(help="exact, single, instant or stratified.")] = "exact",
    seed: SeedOption = 0,
    batch_size: Annotated[int, typer.Option(help="Pairs made at a time; it does not change them.", min=1)] = 16,
) -> None:
    """Keep pairs of noise and what a parent makes of it, to train on (discrete reflow); interrupted, it goes on."""
    from fsdfm.run import make_pairs

    count = make_pairs(
        parent, out, num_pairs=num, steps=steps, length=length, jump=jump, seed=seed, batch_size=batch_size
    )
    console.print(f"{out}: {count:,} pairs; train on them with data.pairs={out}", highlight=False, soft_wrap=True)


@app.command()
def checkerboard(
    out: OutOption,
    seed: SeedOption = 0,
    samples: Annotated[int, typer.Option(help="Samples in every panel.")] = 6000,
    frames: Annotated[int, typer.Option(help="Steps of the long trajectories.")] = 100,
    train_steps: Annotated[int, typer.Option(help="Training steps of the small networks.")] = 2000,
) -> None:
    """Draw the paper's checkerboard (appendix B.3) with what is true about it: pictures, GIFs, captions, numbers."""
    from fsdfm.show.checkerboard import run_checkerboard

    numbers = run_checkerboard(out, seed=seed, samples=samples, frames=frames, train_steps=train_steps)
    console.print(f"{len(numbers.outcomes)} settings measured; look at {out}/captions.md and the pictures beside it.")


@app.command()
def truth(
    out: OutOption,
    full: Annotated[bool, typer.Option("--full", help="Every world, method and four seeds: hours, resumable.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds; 2, or 4 with --full.")] = None,
) -> None:
    """Measure what few-step training gains where everything can be computed; the same command again goes on."""
    from fsdfm.truth import run_truth

    run_truth(out, full=full, seeds=seeds)
    console.print(f"look at {out}/truth.md and {out}/truth.png")


@bench_app.command("train")
def bench_train_command(
    steps: Annotated[int, typer.Option(help="Interleaved training steps of each kind; the median counts.")] = 30,
    json_file: JsonOption = None,
) -> None:
    """A training step against the machine's matrix products, and few-step training against plain."""
    from fsdfm.bench.train import TrainBench, bench_train

    _check_json(json_file)
    result = bench_train(TrainBench(steps=steps))
    for key in ("gemm_fraction", "fewstep_over_plain", "rk2_over_plain", "memory_ratio", "plain_tokens_per_second"):
        value = result[key]
        console.print(f"{key:24} {'?' if value is None else format(value, '.3f')}", highlight=False)
    _write_json(result, json_file)


@bench_app.command("jump")
def bench_jump_command(
    length: Annotated[int, typer.Option(help="Positions.")] = 1024,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 50_257,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """One step of each jump rule against a softmax of the same logits and a float64 multinomial."""
    from fsdfm.bench.jump import JumpBench, bench_jump
    from fsdfm.flow import JUMPS

    _check_json(json_file)
    result = bench_jump(JumpBench(length=length, vocab_size=vocab_size, repeats=repeats))
    table = Table(title=f"one step, logits [1, {length}, {vocab_size}] given")
    for column in ("rule", "/ softmax, t=7/8", "/ softmax, mean of 8", "x multinomial", "peak MiB"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name in JUMPS:
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


def _check_json(file: Path | None) -> None:
    """Raise before the work, not after it, where the result could not be written."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ValueError(
            f"cannot write {file}: {error.strerror}; choose a file in a folder you may write to"
        ) from error


def _write_json(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")
