"""The `fsdfm` command: a command is a function, its help is the docstring, and its logic is elsewhere.

A module here holds one group of commands; this one lists them, in the order in which the help shows them.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from fsdfm import __version__
from fsdfm.cli import bench, demo, evaluating, planning, recipes, reporting, serve, sharing, study, training, writing
from fsdfm.cli.options import console, is_echo, require_one_process
from fsdfm.plugins import import_plugin
from fsdfm.terminal import say

__all__ = ["app", "main"]

app = typer.Typer(
    name="fsdfm",
    help="Few-step discrete flow matching for language.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; a `ValueError` is the user's to mend: one sentence, exit code 2, no traceback."""
    try:
        app()
    except ValueError as error:
        if is_echo(error):
            sys.exit(2)
        say(Console(stderr=True), f"error: {error}")
        sys.exit(2)


@app.callback(invoke_without_command=True)
def fsdfm(
    context: typer.Context,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="First import a module of yours that registers networks, rules, objectives or rewards: a file such as "
            "own_network.py, or a name; this runs its code. May be repeated.",
            envvar="FSDFM_PLUGINS",
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Few-step discrete flow matching for language."""
    require_one_process(context.invoked_subcommand)
    if version:
        console.print(__version__)
        raise typer.Exit
    for name in plugin or ():
        import_plugin(name)


for command in (
    writing.generate,
    writing.infill,
    writing.repair,
    serve.serve,
    training.train,
    training.prepare,
    training.export,
    sharing.push,
    training.reflow,
    planning.plan,
    evaluating.evaluate,
    reporting.report,
    reporting.results,
    demo.demo,
    demo.card,
):
    app.command()(command)
app.command("import")(training.import_weights)
app.add_typer(recipes.app, name="recipe")
app.add_typer(study.app, name="study")
app.add_typer(bench.app, name="bench")
