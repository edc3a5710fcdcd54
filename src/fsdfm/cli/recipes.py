"""Complete runs as files: recipe list, recipe show, recipe copy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.completion import complete_recipes
from fsdfm.cli.options import console
from fsdfm.files import read_text
from fsdfm.terminal import say

__all__ = ["app"]

app = typer.Typer(help="The recipes that ship: list them, show one, copy one to change.", no_args_is_help=True)

NameArgument = Annotated[
    str,
    typer.Argument(
        help="A recipe's name, such as tiny-dfm, or the path of a TOML file.", autocompletion=complete_recipes
    ),
]


@app.command("list")
def list_recipes() -> None:
    """Names of the recipes, and what each is for."""
    from fsdfm.config import find_recipe, recipe_names

    width = max(map(len, recipe_names()))
    for name in recipe_names():
        first = read_text(find_recipe(name)).splitlines()[0]
        say(console, f"{name:<{width}}  {first.lstrip('# ')}")


@app.command()
def show(
    name: NameArgument,
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to replace: train.steps=100.")] = None,
) -> None:
    """A recipe as it stands; with overrides, all values of the run that they would make."""
    from fsdfm.config import find_recipe, load_recipe, to_toml

    text = to_toml(load_recipe(name, overrides)) if overrides else read_text(find_recipe(name))
    typer.echo(text, nl=False)


@app.command()
def copy(
    name: NameArgument,
    file: Annotated[Path | None, typer.Argument(help="Where to; NAME.toml here unless given.")] = None,
) -> None:
    """Copy a recipe, to change it and train it by its path."""
    from fsdfm.config import find_recipe

    source = find_recipe(name)
    place = file or Path(source.name)
    try:
        with place.open("x", encoding="utf-8") as out:
            out.write(read_text(source))
    except OSError as error:
        raise ValueError(f"cannot write {place}: {error.strerror}; choose another file") from error
    say(console, f"{place}: train it with fsdfm train {place}")
