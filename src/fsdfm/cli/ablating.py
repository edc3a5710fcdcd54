"""The paper's ablations, run again: ablate."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdfm.cli.options import OutOption

__all__ = ["ablate"]


def ablate(
    factor: Annotated[
        str, typer.Argument(help="scalar, teacher, weights, source, time, jump or start: one of the paper's tables.")
    ],
    out: OutOption,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values of the fine-tuning to replace: optim.lr=1e-4 data.length=64.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text to fine-tune on; give it again for more.")] = None,
    held_out: Annotated[str | None, typer.Option(help="Real text that is not trained on.")] = None,
    base: Annotated[
        str | None, typer.Option(help="The model to fine-tune: a checkpoint or a run; else the embedded parent.")
    ] = None,
    judge: Annotated[str, typer.Option(help="Who scores text, as for fsdfm evaluate.")] = "smollm2",
    seeds: Annotated[int, typer.Option(help="How often everything is done anew: what intervals are over.")] = 3,
    steps: Annotated[str, typer.Option(help="Budgets: 1,2,4,8 or, for powers of two, 1..1024.")] = "1,2,4,8",
    train_steps: Annotated[int | None, typer.Option(help="Training steps of a fine-tuning. [default: 150]")] = None,
    num: Annotated[int, typer.Option(help="Samples a budget and seed.")] = 32,
    full: Annotated[bool, typer.Option("--full", help="Also the rows that the paper does not have.")] = False,
    separator: Annotated[str, typer.Option(help="Stands between the documents of a text file.")] = "<|endoftext|>",
    field: Annotated[str, typer.Option(help="Holds the document in JSON lines, Parquet and datasets.")] = "text",
    workers: Annotated[
        int | None, typer.Option(help="Processes, a thread each; a core each, at most two, unless said.", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
) -> None:
    """Run one of the paper's ablations on a small scale, with a verdict; the same command again goes on."""
    given = dict(locals())
    from fsdfm.studies.ablation import Ask, run_ablation

    for option in ("text", "overrides"):
        given[option] = tuple(given[option] or ())
    outcome = run_ablation(Ask(**given))
    if not outcome.finished:
        typer.echo(f"stopped; what is finished stands in {out}, the same command goes on", err=True)
        raise typer.Exit(130)
    typer.echo(outcome.markdown)
    typer.echo(f"this and its numbers: {outcome.report}, ablation.json beside it", err=True)
