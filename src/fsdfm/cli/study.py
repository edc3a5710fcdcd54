"""Studies: what few-step training gains where laws are known, one factor at a time, and the toy of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from fsdfm.cli.options import OutOption, SeedOption

__all__ = ["app"]

app = typer.Typer(
    help="Run a study: cells on several cores, resumed by the same command, with intervals and a report.",
    no_args_is_help=True,
)

WorkersOption = Annotated[
    int | None, typer.Option(help="Processes, a thread each; a core each, at most two, unless said.", min=1)
]


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM are no error: exit code 130 and what to do next."""
    from fsdfm.studies.runner import StoppedError

    try:
        yield
    except StoppedError:
        typer.echo(f"stopped; what is finished stands in {out}, the same command resumes", err=True)
        raise typer.Exit(130) from None


@app.command()
def truth(
    *,
    out: OutOption,
    full: Annotated[bool, typer.Option("--full", help="Every world, method and four seeds: hours, resumable.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds; 2, or 4 with --full.")] = None,
    world: Annotated[list[str] | None, typer.Option(help="Only this world: topics; again for more.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this method and what it builds on: rk2, causal/sweep; again for more."),
    ] = None,
    workers: WorkersOption = None,
) -> None:
    """Measure what few-step training gains where everything can be computed; the same command resumes."""
    from fsdfm.studies.truth import run_truth
    from fsdfm.studies.truth.summary import verdicts

    with _stoppable(out):
        numbers = run_truth(out, full=full, seeds=seeds, worlds=world, methods=method, workers=workers)
    for line in verdicts(numbers):
        typer.echo(f"- {line}")
    typer.echo(f"this and its numbers: {out}/truth.md, truth.json and truth.png beside it", err=True)


@app.command()
def checkerboard(
    *,
    out: OutOption,
    seed: SeedOption = 0,
    samples: Annotated[int, typer.Option(help="Samples in every panel.")] = 6000,
    frames: Annotated[int, typer.Option(help="Steps of the long trajectories.")] = 100,
    train_steps: Annotated[int, typer.Option(help="Training steps of the small networks.")] = 2000,
    workers: WorkersOption = None,
) -> None:
    """Draw the paper's checkerboard (appendix B.3) with what is true about it: pictures, GIFs, captions, numbers."""
    from fsdfm.studies.checkerboard import run_checkerboard

    with _stoppable(out):
        numbers = run_checkerboard(
            out, seed=seed, samples=samples, frames=frames, train_steps=train_steps, workers=workers
        )
    typer.echo(f"{len(numbers.outcomes)} ways to sample; look at {out}/checkerboard.md and the pictures beside it")


@app.command()
def sudoku(
    *,
    out: OutOption,
    quick: Annotated[bool, typer.Option("--quick", help="4 x 4 boards and little training: minutes.")] = False,
    seeds: Annotated[int, typer.Option(help="How often everything is trained anew: what intervals are over.")] = 3,
    method: Annotated[
        list[str] | None,
        typer.Option(help="dfm, mask, path-only, paper, rk2, crf, causal or mask+crf; again for more."),
    ] = None,
    box: Annotated[int | None, typer.Option(help="Side of a box: 2 is 4 x 4, 3 is 9 x 9. [default: 3]")] = None,
    train_steps: Annotated[int | None, typer.Option(help="Training steps of a parent. [default: 3000]", min=4)] = None,
    puzzles: Annotated[int | None, typer.Option(help="Puzzles of every difficulty. [default: 50]", min=1)] = None,
    workers: WorkersOption = None,
) -> None:
    """Solve boards whose answers are right or wrong, at several budgets; the same command resumes."""
    from dataclasses import replace

    from fsdfm.studies.sudoku import BoardSetting, run_sudoku

    size = BoardSetting.quick() if quick else BoardSetting.small() if box == 2 else BoardSetting()
    size = replace(
        size,
        box=box or size.box,
        train_steps=train_steps or size.train_steps,
        puzzles=puzzles or size.puzzles,
    )
    with _stoppable(out):
        run_sudoku(out, seeds=seeds, methods=tuple(method or ()), setting=size, workers=workers)
    typer.echo((out / "sudoku.md").read_text(encoding="utf-8"))
    typer.echo(f"this and its numbers: {out}/sudoku.md, sudoku.json, sudoku.png and board.png", err=True)


@app.command()
def defects(
    *,
    out: OutOption,
    held_out: Annotated[str, typer.Option(help="Real text that is damaged.")],
    training: Annotated[str, typer.Option(help="Training text, for copies.")],
    judge: Annotated[str | None, typer.Option(help="Also the perplexity under this judge.")] = None,
    minilm: Annotated[bool, typer.Option("--minilm", help="Also MAUVE and distances of sentence features.")] = False,
    features: Annotated[
        str, typer.Option(help="Also distances of hidden states: judge, trunk (of the parent) or trunk:MODEL; a,b.")
    ] = "",
    num: Annotated[int, typer.Option(help="Texts that are damaged, and as many to compare with.", min=4)] = 128,
    separator: Annotated[str, typer.Option(help="Stands between the documents of a text file.")] = "<|endoftext|>",
    workers: WorkersOption = None,
) -> None:
    """Damage real text in known ways and ask every metric whether it sees it; the same command resumes."""
    from fsdfm.studies.defects import run_defects

    with _stoppable(out):
        run_defects(
            out,
            held_out=held_out,
            training=training,
            judge=judge,
            minilm=minilm,
            features=features,
            num=num,
            separator=separator,
            workers=workers,
        )
    typer.echo((out / "defects.md").read_text(encoding="utf-8"))


@app.command()
def faults(
    out: OutOption,
    *,
    full: Annotated[bool, typer.Option("--full", help="Up to 1,024 steps.")] = False,
    workers: WorkersOption = None,
) -> None:
    """Compute which of the peers' samplers reach the data, and what the originals' faults cost: a minute."""
    from fsdfm.studies.faults import run_faults

    with _stoppable(out):
        run_faults(out, full=full, workers=workers)
    typer.echo((out / "faults.md").read_text(encoding="utf-8"))
    typer.echo(f"this and its numbers: {out}/faults.md and faults.json", err=True)


@app.command()
def compare(
    out: OutOption,
    *,
    text: Annotated[list[str] | None, typer.Option(help="Text to train on; give it again for more.")] = None,
    held_out: Annotated[str | None, typer.Option(help="Real text that is not trained on.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Little of everything: 20 minutes of two cores.")] = False,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="SYSTEM=FOLDER, imported weights: only what is named is measured, nothing is trained."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A row of the tables; give it again for more.")] = None,
    judge: Annotated[str, typer.Option(help="Who scores text, as for fsdfm evaluate.")] = "smollm2",
    steps: Annotated[str | None, typer.Option(help="Network calls; 1,2,4,8,16,32 unless said.")] = None,
    train_steps: Annotated[int | None, typer.Option(help="Training steps of every system.")] = None,
    num: Annotated[int | None, typer.Option(help="Samples per budget and temperature.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a text.")] = None,
    seed: SeedOption = 0,
    separator: Annotated[str, typer.Option(help="Stands between the documents of a text file.")] = "<|endoftext|>",
    workers: WorkersOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Of all trainings and samples; bfloat16 where the machine multiplies it quickly."),
    ] = "float32",
) -> None:
    """Compare with the peers at equal calls: same base, text and tokens for all; the same command resumes."""
    given = dict(locals())
    from fsdfm.studies.compare import CompareRequest, run_compare

    for option in ("text", "weights", "only"):
        given[option] = tuple(given[option] or ())
    with _stoppable(out):
        run_compare(CompareRequest(**given))
    typer.echo((out / "compare.md").read_text(encoding="utf-8"))
    typer.echo(f"this and its numbers: {out}/compare.md and compare.json", err=True)


@app.command()
def ablate(
    *,
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
    num: Annotated[int, typer.Option(help="Samples per budget and seed.")] = 32,
    full: Annotated[bool, typer.Option("--full", help="Also the rows that the paper does not have.")] = False,
    separator: Annotated[str, typer.Option(help="Stands between the documents of a text file.")] = "<|endoftext|>",
    field: Annotated[str, typer.Option(help="Holds the document in JSON lines, Parquet and datasets.")] = "text",
    workers: WorkersOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
) -> None:
    """Run one of the paper's ablations on a small scale, with a verdict; the same command resumes."""
    given = dict(locals())
    from fsdfm.studies.ablation import AblationRequest, run_ablation

    for option in ("text", "overrides"):
        given[option] = tuple(given[option] or ())
    with _stoppable(out):
        outcome = run_ablation(AblationRequest(**given))
    typer.echo(outcome.markdown)
    typer.echo(f"this and its numbers: {outcome.report}, ablation.json beside it", err=True)
