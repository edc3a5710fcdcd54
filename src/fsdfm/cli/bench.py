"""The `fsdfm bench` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fsdfm.cli.completion import complete_models
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
    *,
    length: Annotated[int, typer.Option(help="Positions.")] = 1024,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 50_257,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """One step of each jump rule against a softmax of the same logits and a float64 multinomial."""
    from fsdfm.bench.rule import JUMPS, JumpBench, bench_jump

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


@app.command("serve")
def bench_serve_command(
    *,
    model: Annotated[str, typer.Option(help="The model that is served.", autocompletion=complete_models)] = "fewstep",
    seconds: Annotated[float, typer.Option(help="How long the crowd asks.", min=1)] = 60.0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of lone and shared texts.", min=1)] = 5,
    running: Annotated[int, typer.Option(help="Texts on their way at a time.", min=1)] = 4,
    waiting: Annotated[int, typer.Option(help="Texts that may wait.", min=0)] = 8,
    threads: Annotated[int, typer.Option(help="CPU threads of the server.", min=1)] = 1,
    json_file: JsonOption = None,
) -> None:
    """A server on loopback: a lone request, texts together, and a crowd of which some read slowly, leave or lie."""
    from fsdfm.bench.serve import ServeBench, bench_serve

    check_writable(json_file)
    setting = ServeBench(model=model, seconds=seconds, rounds=rounds, running=running, waiting=waiting, threads=threads)
    result = bench_serve(setting, on_progress=lambda words: console.print(words, highlight=False))
    for key, value in result.items():
        if key not in ("setting", "versions"):
            console.print(f"{key:26} {format(value, '.3f') if isinstance(value, float) else value}", highlight=False)
    write_json(result, json_file)


@app.command("generate")
def bench_generate_command(
    *,
    preset: Annotated[
        str, typer.Option(help="The model: tiny, stories, 170m, 1300m, 1700m; its weights are random.")
    ] = "170m",
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 1024,
    steps: Annotated[int, typer.Option(help="Network calls for a text.")] = 8,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 3,
    compare: Annotated[
        str,
        typer.Option(help="With what: all, none, or some of gemm,trunk,textbook,1024,int8,bf16,causal,crf,ar,gpt2."),
    ] = "all",
    batch: Annotated[str, typer.Option(help="Also the throughput at these batch sizes: 1,4,16.")] = "",
    lengths: Annotated[str, typer.Option(help="Also the cost at these lengths: 256,512,1024.")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: torch's own choice.", min=0)] = 0,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: seconds computed, fair on a busy machine; with one thread.")
    ] = "wall",
    json_file: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result to this file.")] = None,
) -> None:
    """A text in a few steps against the machine's matrix products, the textbook sampler, 1,024 steps and GPT-2."""
    import torch

    from fsdfm.bench.figure import draw_generate, require_picture
    from fsdfm.bench.generate import COMPARISONS, GenerateBench, bench_generate

    names = {"all": COMPARISONS, "none": ()}.get(compare, tuple(name.strip() for name in compare.split(",")))
    setting = GenerateBench(
        preset,
        length,
        steps,
        repeats,
        compare=names,
        batch=_counts(batch, "batch"),
        lengths=_counts(lengths, "lengths"),
        clock=clock,
    )
    if clock == "cpu" and threads != 1:
        raise ValueError(
            f"--clock is cpu with --threads {threads}; allowed is 1: threads that wait for others count, too"
        )
    check_writable(json_file)
    check_writable(plot)
    require_picture(plot)
    if threads:
        torch.set_num_threads(threads)
    result = bench_generate(setting)
    _print_generate(result)
    write_json(result, json_file)
    if plot is not None:
        draw_generate(result).savefig(plot, dpi=150)


def _counts(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(
            f"--{name} is {text!r}; write whole numbers with commas between them, such as 1,4,16"
        ) from None


_TABLE = (
    ("trunk_gemm_fraction", "the trunk's speed / that of its matrix products alone", "at least", 0.80),
    ("over_trunk", "a text / its bare trunk forwards", "at most", 1.15),
    ("speedup_over_textbook", "the textbook sampler / a text", "at least", 2.5),
    ("memory_over_textbook", "peak memory / the textbook sampler's", "at most", 0.6),
    ("speedup_over_gpt2", "GPT-2 small with its cache / a text", "at least", 3.5),
    ("speedup_over_1024_steps", "1,024 steps / a text", "at least", 120.0),
    ("int8_speedup", "a text in float32 / in int8", "at least", 1.35),
    ("bf16_speedup", "a text in float32 / in bfloat16, where the CPU has it", "", None),
    ("causal_draw_over_trunk", "a causal head's draw of a text / a trunk forward", "at most", 0.25),
    ("causal_draw_over_trunk_of_16", "the same of 16 texts, drawn side by side", "at most", 0.25),
    (
        "causal_draw_over_trunks_of_a_text",
        "a causal head's draw of a text / the trunk forwards of its steps",
        "at most",
        0.25,
    ),
    ("crf_draw_over_trunk", "a chain's draw of a text / a trunk forward", "at most", 0.25),
    (
        "causal_call_over_autoregressive",
        "a text by one call / an autoregressive model's, with its cache",
        "at most",
        0.5,
    ),
    ("causal_call_over_autoregressive_of_16", "the same of 16 texts, each side by side", "at most", 0.5),
    ("causal_text_over_autoregressive", "a text by sweep / an autoregressive model's, with its cache", "at most", 0.5),
    ("head_steps", "passes of a causal head a text, one after the other", "", None),
)


def _print_generate(result: dict[str, Any]) -> None:
    setting, seconds = result["setting"], result["seconds"]
    if seconds:
        is_papers = (setting["preset"], setting["length"], setting["steps"]) == ("170m", 1024, 8)
        about = f"{setting['preset']}, {setting['length']} tokens, {setting['steps']} steps"
        seconds_of = "" if setting["clock"] == "wall" else ", CPU seconds"
        table = Table(title=f"{about}, threads: {result['threads']}{seconds_of}")
        for column in ("key", "what", "measured", "wanted"):
            table.add_column(column, justify="right" if column in ("measured", "wanted") else "left")
        for key, what, side, reach in _TABLE:
            value = result[key]
            wanted = f"{side} {reach:g}" if is_papers and reach is not None else ""
            table.add_row(key, what, "?" if value is None else f"{value:.2f}", wanted)
        console.print(table)
        _print_parts(result)
    for name, rows in result["sweeps"].items():
        for row in rows:
            console.print(
                f"{name:8} batch {row['batch']:3}, length {row['length']:5}: {row['seconds']:8.2f} s, "
                f"{row['tokens_per_second']:8.1f} tokens per second",
                highlight=False,
            )


def _print_parts(result: dict[str, Any]) -> None:
    parts = Table()
    for column in ("measured", "seconds", "peak RSS, MiB"):
        parts.add_column(column, justify="left" if column == "measured" else "right")
    for name, taken in result["seconds"].items():
        peak = result["peak_mib"].get(name)
        parts.add_row(name, f"{taken:.3f}", "" if peak is None else f"{peak:.0f}")
    console.print(parts)
    share = result["textbook_over_forwards"]
    if share is not None:
        told = "outside 1.4-2.3: the row is void" if result["textbook_is_void"] else "within 1.4-2.3"
        console.print(f"the textbook sampler takes {share:.2f} times its own full forwards ({told})", highlight=False)
