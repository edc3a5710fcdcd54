"""The `fsdfm bench` commands."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from fsdfm.cli.options import JsonOption, check_writable, console, write_json

__all__ = ["app"]

app = typer.Typer(help="Benchmarks; each prints ratios measured in one interleaved run.", no_args_is_help=True)


@app.command("train")
def bench_train_command(
    steps: Annotated[int, typer.Option(help="Interleaved training steps of each kind; the median counts.")] = 30,
    processes: Annotated[
        int, typer.Option(help="2 or more: that many, one thread each, against one process with one thread.", min=1)
    ] = 1,
    json_file: JsonOption = None,
) -> None:
    """A training step against the machine's matrix products, and few-step training against plain."""
    from fsdfm.bench.scale import bench_processes
    from fsdfm.bench.train import TrainBench, bench_train

    check_writable(json_file)
    if processes > 1:
        result = bench_processes(TrainBench(steps=steps), processes)
        for key in ("throughput_ratio", "single_tokens_per_second", "tokens_per_second"):
            console.print(f"{key:24} {result[key]:.3f}", highlight=False)
        write_json(result, json_file)
        return
    result = bench_train(TrainBench(steps=steps))
    for key in ("gemm_fraction", "fewstep_over_plain", "rk2_over_plain", "memory_ratio", "plain_tokens_per_second"):
        value = result[key]
        console.print(f"{key:24} {'?' if value is None else format(value, '.3f')}", highlight=False)
    write_json(result, json_file)


@app.command("jump")
def bench_jump_command(
    length: Annotated[int, typer.Option(help="Positions.")] = 1024,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 50_257,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """One step of each jump rule against a softmax of the same logits and a float64 multinomial."""
    from fsdfm.bench.jump import JumpBench, bench_jump
    from fsdfm.flow import JUMPS

    check_writable(json_file)
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
    write_json(result, json_file)
