"""How generated texts leave the command line: text, JSON, and the timeline in the terminal, as HTML or as a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from fsdfm import __version__
from fsdfm.cli.options import check_writable, console
from fsdfm.files import replace_file, write_text
from fsdfm.terminal import printable

if TYPE_CHECKING:
    from fsdfm.generate import Generation, Stream
    from fsdfm.show.timeline import Timeline

__all__ = ["Format", "Output", "show_blocks", "watch"]

Format = Literal["text", "json", "html", "png", "timeline"]
_BY_ENDING: dict[str, Format] = {".json": "json", ".html": "html", ".htm": "html", ".png": "png"}
_OTHER_PICTURES = (".gif", ".jpeg", ".jpg", ".pdf", ".svg", ".webp")


class Output:
    """Where texts go and how; what cannot be written is an error before the work, not after it."""

    def __init__(self, format: Format | None, file: Path | None, *, num: int, states: bool):
        self.file = file
        self.format: Format = format or (_BY_ENDING.get(file.suffix.lower(), "text") if file else "text")
        if format is None and file is not None and file.suffix.lower() in _OTHER_PICTURES:
            raise ValueError(f"--out is {file}; pictures are written as .png, pages as .html: name the file so")
        if self.format == "png" and (file is None or num > 1):
            raise ValueError("a picture needs a file and holds one text; give --out FILE.png and --num 1")
        if self.format == "timeline" and file is not None:
            raise ValueError("--format timeline is for the terminal; use html or png with --out")
        if states and self.format != "json":
            raise ValueError(f"--states goes with --format json, not {self.format}")
        if self.format == "png":
            from fsdfm.show.plots import require_plots

            require_plots()
        check_writable(file)

    def write(self, generations: Sequence[Generation], facts: Mapping[str, Any]) -> None:
        """Write the texts; only they go to standard output."""
        writers: dict[Format, Callable[[], str]] = {
            "text": lambda: "\n---\n".join(generation.text for generation in generations) + "\n",
            "json": lambda: _json(generations, facts),
            "html": lambda: _html(generations, facts),
        }
        if self.format == "png":
            assert self.file is not None
            replace_file(self.file, _timeline(generations[0]).save_png)
        elif self.format == "timeline":
            for generation in generations:
                console.print(_timeline(generation).to_rich())
        else:
            self.write_text(writers[self.format]())

    @property
    def streams(self) -> bool:
        """Whether a text may be written bit by bit."""
        return self.format == "text" and self.file is None

    def write_blocks(self, stream: Stream) -> Generation:
        """Write a text block by block, each as soon as it is done."""
        for text in stream.blocks():
            self.write_text(text)
            sys.stdout.flush()
        self.write_text("\n")
        return stream.result

    def write_text(self, text: str) -> None:
        """Write a text to the file, or to standard output."""
        if self.file is None:
            typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)  # a pipe gets every byte as it is
        else:
            write_text(self.file, text)


@contextmanager
def show_blocks() -> Iterator[Callable[[int, int], None] | None]:
    """Says in the terminal which block of a long text is written; elsewhere nothing."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield None
        return
    with terminal.status("") as status:

        def show(block: int, blocks: int) -> None:
            if blocks > 1:
                status.update(f"block {block} of {blocks}")

        yield show


def watch(stream: Stream, steps: int) -> Generation:
    """Show a text in the terminal as it comes, and give it back when it has come."""
    from fsdfm.show.timeline import LiveText

    with LiveText(Console(stderr=True), steps, transient=sys.stdout.isatty()) as live:
        for state in stream:
            live.show(state.pieces, state.changed, state.step)
    return stream.result


def _timeline(generation: Generation) -> Timeline:
    from fsdfm.show.timeline import Timeline

    return Timeline.of(generation)


def _json(generations: Sequence[Generation], facts: Mapping[str, Any]) -> str:
    from fsdfm.runtime import commit

    record = {"fsdfm": __version__, "commit": commit(), **facts}
    record["generations"] = [generation.to_json() for generation in generations]
    return json.dumps(record, ensure_ascii=False) + "\n"


def _html(generations: Sequence[Generation], facts: Mapping[str, Any]) -> str:
    from fsdfm.show.timeline import page

    return page([_timeline(generation) for generation in generations], title=f"fsdfm {facts['command']}")
