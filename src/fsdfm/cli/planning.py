"""What a run will need: plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fsdfm.cli.completion import complete_recipes
from fsdfm.cli.options import JsonOption, check_writable, console, write_json
from fsdfm.terminal import printable

if TYPE_CHECKING:
    from fsdfm.plan import Memory, Workload

__all__ = ["plan"]

_PARTS = ("weights", "average", "moments", "gradients", "gathered", "activations", "loss", "teacher", "total")
_SHORT = ("wght", "avg", "mom", "grad", "gath", "act", "loss", "tchr", "total")  # 80 columns hold them all


def plan(
    *,
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name, such as paper-1700m-dfm, or a TOML file.", autocompletion=complete_recipes
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to replace: train.accumulate=4.")] = None,
    processes: Annotated[str, typer.Option(help="Numbers of processes, such as 1,8,16.")] = "1,2,4,8,16",
    flops: Annotated[
        float, typer.Option(help="Operations a second that one process really does: 40 % of an A100 in bfloat16.")
    ] = 1.25e14,
    speed: Annotated[
        float | None, typer.Option("--tokens-per-second", help="Of one process, measured; in place of --flops.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Memory per process and time of a recipe, by strategy and processes, from formulas; nothing is trained."""
    from fsdfm.config import load_recipe
    from fsdfm.plan import estimate_flops, tokens_per_second
    from fsdfm.run import make_workload

    check_writable(json_file)
    work = make_workload(load_recipe(recipe, overrides or []))
    per_token = estimate_flops(work)
    rate = tokens_per_second(work, flops) if speed is None else speed
    if not 0 < rate < float("inf"):
        raise ValueError(f"tokens-per-second is {rate}; give what one process really does, more than 0")
    rows = _rows(work, processes, rate)
    about_it = (
        f"{recipe}: {work.num_parameters / 1e6:,.1f} M parameters, {work.steps:,} steps of {work.tokens:,} tokens "
        f"({work.batch_size} x {work.length} in {work.accumulate}), "
        f"{'bfloat16' if work.bfloat16 else 'float32'} products, {per_token / 1e9:.2f} GFLOP per token"
    )
    console.print(printable(about_it), markup=False, highlight=False)
    console.print(_table(rows))
    short = ", ".join(f"{name} {part}" for name, part in zip(_SHORT, _PARTS, strict=True) if name != part)
    console.print(f"{short}; parts: portions per step", highlight=False)
    assumed = f"{flops:.3g} FLOP/s per process" if speed is None else "as given"
    console.print(
        f"Time assumes {rate:,.0f} tokens/s per process ({assumed}) and no waiting; memory leaves out what the "
        "allocator wastes (add 10 %) and the libraries' own (about 1 GB on a GPU).",
        highlight=False,
    )
    about = {"recipe": recipe, "num_parameters": work.num_parameters, "flops_per_token": per_token, "rows": rows}
    write_json({**about, "tokens_per_second_per_process": rate}, json_file)


def _rows(work: Workload, processes: str, rate: float) -> list[dict[str, Any]]:
    from fsdfm.plan import estimate_memory

    try:
        counts = [int(count) for count in processes.split(",")]
    except ValueError:
        raise ValueError(f"processes is {processes!r}; give whole numbers with commas, such as 1,8") from None
    rows: list[dict[str, Any]] = []
    for count in counts:
        fitting = [k for k in range(1, work.accumulate + 1) if work.batch_size % (k * count) == 0]
        if not fitting:
            raise ValueError(f"processes is {count}; allowed are divisors of train.batch_size = {work.batch_size}")
        share = replace(work, accumulate=fitting[-1])  # more processes need fewer portions
        seconds = work.steps * work.tokens / (rate * count)
        for strategy in ("single",) if count == 1 else ("ddp", "fsdp"):
            memory: Memory = estimate_memory(share, strategy, count)  # type: ignore[arg-type]
            parts = {part: getattr(memory, part) for part in _PARTS}
            rows.append(
                {
                    "processes": count,
                    "strategy": strategy,
                    "accumulate": share.accumulate,
                    **parts,
                    "seconds": seconds,
                }
            )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    from fsdfm.learn.journal import duration

    columns = ("run", *_SHORT, "parts", "time")
    table = Table(title="GB per process by processes and strategy", box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for row in rows:
        sizes = (_gigabytes(row[part]) for part in _PARTS)
        table.add_row(f"{row['processes']} {row['strategy']}", *sizes, str(row["accumulate"]), duration(row["seconds"]))
    return table


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.2f}" if amount < 1e10 else f"{amount / 1e9:.1f}"
