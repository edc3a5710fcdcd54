"""A text that resolves in the terminal, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdfm.show.timeline.glyphs import NEWLINE, visible
from fsdfm.show.timeline.record import Timeline
from fsdfm.show.timeline.terminal import text_of
from fsdfm.show.timeline.tokens import bins

__all__ = ["LiveText"]

FRAMES_PER_SECOND = 24  # drawing more often than the eye sees would slow the sampler down


class LiveText:
    """A text that resolves in place in the terminal, every token in the hue of its last change so far.

        with LiveText(console, steps) as live:
            live.show(pieces, changed, step)

    Where the console is no terminal the states are printed one after the other, as in the appendix: all of them up to
    eight steps, else the last of each of the eight bins. `transient` removes the text at the end; `min_seconds` is
    how long a state stays at least.
    """

    def __init__(self, console: Console, steps: int, *, transient: bool = False, min_seconds: float = 0.0):
        self.console, self.steps, self.min_seconds = console, steps, min_seconds
        self._printed = {0, *(each.last for each in bins(steps))}
        self._last_changed: list[int] = []
        self._shown_at = float("-inf")
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=transient)

    def __enter__(self) -> LiveText:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, pieces: Sequence[str], changed: Sequence[bool], step: int) -> None:
        """The state after `step` (0 for the start), with the tokens that this step changed."""
        timeline = self._record(pieces, changed, step)
        status = f"step {step} of {self.steps}, {sum(map(bool, changed))} of {len(timeline.pieces)} tokens changed"
        if self._live:
            self._draw(timeline, status, step)
        elif step in self._printed:
            text = "".join(map(visible, timeline.pieces)).replace(f"{NEWLINE}\n", "\n")
            self.console.print(Text(f"[{status}]\n{text}\n"), soft_wrap=True)

    def _record(self, pieces: Sequence[str], changed: Sequence[bool], step: int) -> Timeline:
        if not 0 <= step <= self.steps:
            raise ValueError(f"step is {step}; it must be 0 (the start) or a step of 1..{self.steps}")
        if len(pieces) != len(changed):
            raise ValueError(f"changed has {len(changed)} entries for {len(pieces)} pieces; give one a piece")
        earlier = [*self._last_changed, *[0] * len(pieces)]  # a longer text begins where the earlier one ended
        self._last_changed = [step if now else before for now, before in zip(changed, earlier, strict=False)]
        return Timeline(pieces, self._last_changed, self.steps)

    def _draw(self, timeline: Timeline, status: str, step: int) -> None:
        elapsed = time.monotonic() - self._shown_at
        if elapsed < self.min_seconds:
            time.sleep(self.min_seconds - elapsed)
        elif elapsed < 1 / FRAMES_PER_SECOND and step < self.steps:
            return
        body = text_of(timeline.tokens, self.console)
        assert self._live is not None
        self._live.update(Group(Text(status, style="bold"), Text(), body), refresh=True)
        self._shown_at = time.monotonic()
