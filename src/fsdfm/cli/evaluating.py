"""Measuring a model: evaluate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from fsdfm.cli.completion import complete_models
from fsdfm.cli.options import check_writable, console, write_json
from fsdfm.cli.sampling import Machine, SamplingOptions, takes_groups

__all__ = ["evaluate"]


@takes_groups
def evaluate(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint, or a run; else the model that ships.", autocompletion=complete_models),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="Who scores text: gpt2-large or any name of the hub, a folder, *.gguf, smollm2, *.bin."),
    ] = None,
    second_judge: Annotated[
        str | None, typer.Option(help="Another judge, best of another family: gemma3 beside smollm2.")
    ] = None,
    alternative: Annotated[
        list[str] | None,
        typer.Option(
            help="An autoregressive model beside it: a folder of a causal model, stories15m:FILE; again for more."
        ),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(help="Take over real text, controls and autoregressive models from this result file."),
    ] = None,
    held_out: Annotated[str | None, typer.Option(help="Real text that the model was not trained on.")] = None,
    training: Annotated[
        list[str] | None, typer.Option(help="Training text, or a prepared corpus: how much is copied from it.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Budgets: 1,2,4,8 or, for powers of two, 1..1024; none: only what is measured beside a model. "
            "[default: 1..64]"
        ),
    ] = None,
    num: Annotated[int | None, typer.Option(help="Samples per budget. [default: 256]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sample; the model's length unless said.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Some of perplexity, diversity, distances, trajectory, copying, mauve, accuracy, continuation, "
            "brier, bound; entropy and distinct-n come with all. [default: all that is possible]"
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Result file, written after every row; the same command again resumes.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Also write tables and figures into this folder: the frontier, latency, claims.", metavar="DIR"
        ),
    ] = None,
    samples: Annotated[Path | None, typer.Option(help="Keep what is sampled in this file (JSON lines).")] = None,
    from_samples: Annotated[
        Path | None, typer.Option(help="Measure the samples of such a file; MODEL is left out.")
    ] = None,
    matched: Annotated[
        list[str] | None,
        typer.Option(help="Also at the temperature of equal entropy: data, a number of bits, or FILE:STEPS."),
    ] = None,
    frontier: Annotated[
        str | None,
        typer.Option(
            help="Also at these temperatures: 0.7,0.8,0.9; none: at no other. [default: 0.8,0.9 with a judge]"
        ),
    ] = None,
    alternative_frontier: Annotated[
        str | None,
        typer.Option(help="The autoregressive models at these temperatures, too: 0.8,0.9,1.1. [default: at 1 alone]"),
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Measure text without sense, too: what fools a metric.")
    ] = True,
    mauve: Annotated[
        str | None, typer.Option(help="Measure MAUVE with these features: minilm, or a causal model of the hub.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Distances also on hidden states: judge, trunk (of the parent) or trunk:MODEL; a,b for two."),
    ] = None,
    begin: Annotated[
        Literal["document", "anywhere"], typer.Option(help="Where rows of held-out text begin.")
    ] = "document",
    separator: Annotated[str, typer.Option(help="Stands between the documents of a text file.")] = "<|endoftext|>",
    field: Annotated[str, typer.Option(help="Holds the document in JSON lines, Parquet and datasets.")] = "text",
    name: Annotated[str | None, typer.Option(help="What tables call the model; its folder unless said.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples made at a time; it changes no number.", min=1)] = 16,
    processes: Annotated[int, typer.Option(help="That share the work; it changes no number.", min=1)] = 1,
    tasks: Annotated[
        str | None,
        typer.Option(help="Instead, tasks of the lm-evaluation-harness: lambada_openai,arc_easy. Then also:"),
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="--tasks: where task files of your own are.")] = None,
    limit: Annotated[int | None, typer.Option(help="--tasks: questions of each; all unless said.", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="--tasks: examples before a question.", min=0)] = None,
    likelihood: Annotated[
        str | None, typer.Option(help="--tasks: bound (of the flow), one-call (of a joint posterior) or auto.")
    ] = None,
    sampling: SamplingOptions,
    machine: Machine,
) -> None:
    """Measure a model at several budgets: every number with its interval, real text beside it. Ctrl-C keeps rows.

    With --tasks: the questions of the lm-evaluation-harness instead, with the errors of our likelihoods.
    """
    given = dict(locals())
    groups = {**given.pop("sampling").options(), **asdict(given.pop("machine"))}
    report_folder = given.pop("report")
    own = {name: given.pop(name) for name in ("tasks", "task_folder", "limit", "num_fewshot", "likelihood")}
    if own["tasks"] is not None:
        if report_folder is not None:
            raise ValueError("--report is not used with --tasks; leave it out")
        return _run_tasks(own, given, sampling=sampling, machine=machine)
    if lonely := next((name for name, value in own.items() if value is not None), None):
        raise ValueError(f"--{lonely.replace('_', '-')} goes with --tasks; name some, or leave it out")
    given = {**groups, **given}  # its own --steps, which are budgets, last
    import fsdfm.peers  # noqa: F401  (gives their rules their names)
    from fsdfm.measure.evaluation import EvaluationRequest, count, run_evaluation
    from fsdfm.show.plots import require_plots
    from fsdfm.show.quality.comparison import Comparison
    from fsdfm.show.quality.report import write_comparison
    from fsdfm.show.quality.terminal import print_tables

    if report_folder is not None:
        require_plots()  # now, not after the measuring
    for option in ("training", "matched", "alternative"):
        given[option] = tuple(given[option] or ())
    outcome = run_evaluation(EvaluationRequest(**given))
    if not outcome.speaks:  # another process does
        raise typer.Exit(0 if outcome.finished else 130)
    if outcome.evaluation is not None:
        wide = console if console.is_terminal else Console(width=160)
        print_tables(outcome.evaluation, wide)
        if report_folder is not None:
            write_comparison(Comparison((outcome.evaluation.name,), (outcome.evaluation,)), report_folder)
    if not outcome.finished:
        rows = 0 if outcome.evaluation is None else len(outcome.evaluation.rows) + len(outcome.evaluation.frontier)
        kept = "nothing is kept: give --json FILE" if json is None else f"in {json}; the same command resumes"
        typer.echo(f"stopped with {count(rows, 'finished row')}, {kept}", err=True)
        raise typer.Exit(130)


_WITH_TASKS = ("model", "json", "steps")  # what both kinds of evaluation take


def _run_tasks(own: dict[str, Any], others: dict[str, Any], *, sampling: SamplingOptions, machine: Machine) -> None:
    """`fsdfm evaluate MODEL --tasks ...`."""
    usual = {"controls": True, "begin": "document", "separator": "<|endoftext|>", "field": "text"}
    usual |= {"batch_size": 16, "processes": 1}
    for name, value in others.items():
        if name not in _WITH_TASKS and value not in (None, usual.get(name)):
            raise ValueError(f"--{name.replace('_', '-')} is not used with --tasks; leave it out")
    check_writable(others["json"])
    try:
        from fsdfm.adapters.lm_eval import LikelihoodConfig, evaluate_tasks
    except ImportError as error:
        raise ValueError("--tasks needs the lm-evaluation-harness: pip install 'fsdfm[tasks]'") from error
    import fsdfm.peers  # noqa: F401  (gives their rules their names)
    from fsdfm.generate import load

    options = {name: value for name, value in sampling.options().items() if value is not None}
    if others["steps"] is not None:
        if not others["steps"].isdecimal():
            raise ValueError(f"--steps is {others['steps']!r}; with --tasks one whole number is allowed")
        options["steps"] = int(others["steps"])
    found, table = evaluate_tasks(
        load(others["model"], device=machine.device, precision=machine.precision, threads=machine.threads),
        [name.strip() for name in own["tasks"].split(",")],
        folder=None if own["task_folder"] is None else str(own["task_folder"]),
        limit=own["limit"],
        num_fewshot=own["num_fewshot"],
        likelihood=LikelihoodConfig(kind=own["likelihood"] or "auto"),
        **options,
    )
    write_json(found, others["json"])
    told = found["likelihood"]
    typer.echo(table)
    typer.echo(
        f"log-likelihoods: {told['kind']}, {told['repeats']} estimates each; standard error of one, median "
        f"{told['median_error']:.3g} and at most {told['largest_error']:.3g} nats; {told['within_two_errors']:.0%} of "
        f"{told['questions']} questions are decided by less than two of them"
    )
