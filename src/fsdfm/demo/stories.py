"""The texts of the demonstration: which are made, and making them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fsdfm.generate import LanguageModel
from fsdfm.show.timeline import Timeline

__all__ = ["FEW", "Order", "Programme", "Sampling", "Story", "command_line", "make_stories"]

FEW = 8  # network calls of a few-step story
_SEED = 2  # of what stands side by side: from 0 the parent in 8 calls ends before its first word
_PROMPTS = (
    "Once upon a time, there was a small robot who lived on a farm.",
    "Lily and Ben found a map in the old tree.",
)
# About half of either text is to be written, so that 8 steps from t = 1/2 have the size 1/16.
_GAPS = (
    "Once upon a time, there was a little dog named Max. Max liked to [[8]]. One day, he saw a [[6]] in the garden. "
    'He ran to it and said, "[[10]]" The bird was [[4]]. They [[12]] and then they went home. [[7]].'
)
_WHOLE = (
    "Once upon a time, there was a boy named Tim. Tim had a big red ball. He liked to play with it in the park every "
    "day. One day, the ball fell into the water. Tim was very sad. A kind duck saw him and pushed the ball back to "
    "him. Tim was happy and said thank you to the duck. They became good friends and played together."
)

Sampling = tuple[tuple[str, Any], ...]


def command_line(command: str, *arguments: str, **options: Any) -> str:
    """A line for the shell: `fsdfm COMMAND ARGUMENTS --options`, without those that are None."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
    words = ["fsdfm", command, *arguments, *(str(word) for pair in given.items() for word in pair)]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word for the shell, on one line whatever stands in it: a name of somebody else's may hold an end of a line."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{escaped}'"


@dataclass(frozen=True, kw_only=True)
class Order:
    """A text to be made, in the words of the command line.

    text      what is continued, has gaps or is to be repaired; None: nothing is given
    corrupt   the share of its tokens that is replaced by noise before a repair
    sampling  what else the sampler is told, (("temperature", 0.9),): as the model's quality was measured
    """

    model: str
    steps: int = FEW
    seed: int = 0
    command: Literal["generate", "infill", "repair"] = "generate"
    text: str | None = None
    corrupt: float | None = None
    sampling: Sampling = ()

    @property
    def shell(self) -> str:
        """The command that makes the same text again."""
        options = {"corrupt": self.corrupt, "model": self.model, "steps": self.steps, "seed": self.seed}
        given = [] if self.text is None else [self.text]
        return command_line(self.command, *given, **options, **dict(self.sampling))


@dataclass(frozen=True, kw_only=True)
class Story:
    """A text, how it came about, and how to make it again.

    asked   what was there before, where that is not to be seen in the text: gaps, damage
    notes   what a reader should know about it, in sentences
    """

    model: str
    calls: int
    seconds: float
    seed: int
    shell: str
    timeline: Timeline
    command: str = "generate"
    asked: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Programme:
    """What is made live, section by section."""

    beside: tuple[Order, ...]
    more: tuple[Order, ...]
    mended: tuple[Order, ...]
    fewer: tuple[Order, ...]

    @classmethod
    def of(
        cls, models: Sequence[str], sampling: Callable[[str, int], Sampling], *, long: int, few: int = FEW
    ) -> Programme:
        """The programme of models, the best first, and how each is sampled in how many calls.

        long   calls for the parent's long story
        few    calls in which the best one is at its best
        """

        def order(model: str, *, steps: int = FEW, **rest: Any) -> Order:
            return Order(model=model, steps=steps, sampling=sampling(model, steps), **rest)

        best, parent = partial(order, models[0], steps=few), partial(order, "parent")
        return cls(
            beside=tuple(dict.fromkeys([best(seed=_SEED), parent(seed=_SEED), parent(seed=_SEED, steps=long)])),
            more=(
                *(best(text=prompt) for prompt in _PROMPTS),
                *(best(seed=seed) for seed in (1, 3)),
            ),
            mended=(
                best(command="infill", text=_GAPS),
                best(command="repair", text=_WHOLE, corrupt=0.5),
            ),
            fewer=tuple(best(seed=_SEED, steps=steps) for steps in (8, 4, 2, 1) if steps != few)[-3:],
        )

    @property
    def orders(self) -> list[Order]:
        """All of it, the long story last."""
        return sorted((*self.beside, *self.more, *self.mended, *self.fewer), key=lambda order: order.steps)


def make_stories(
    orders: Sequence[Order], models: Mapping[str, LanguageModel], tick: Callable[[str], None]
) -> dict[Order, Story]:
    """Make the texts, one after the other; `tick` hears of every network call."""
    return {order: _make(order, models[order.model], tick) for order in orders}


def _make(order: Order, lm: LanguageModel, tick: Callable[[str], None]) -> Story:
    asked, corruption = "", None
    if order.command == "infill":
        asked = order.text or ""
        request = lm.encoder.gaps(asked)
    elif order.command == "repair":
        corruption = lm.corrupt(order.text or "", order.corrupt or 0.5, seed=order.seed)
        asked = corruption.text
        request = lm.encoder.damaged(corruption.tokens, corruption.damaged)
    else:
        request = lm.encoder.continuation(order.text, None)
    doing = f"{order.model}: {order.command} in {order.steps:,} calls"
    stream = lm.stream(request, steps=order.steps, seed=order.seed, **dict(order.sampling))
    for state in stream:
        if state.step:
            tick(doing)
    made = stream.result
    notes = list(made.warnings)
    if corruption is not None:
        num = sum(corruption.damaged)
        notes.insert(0, f"{corruption.recovered(made.tokens):.0%} of the {num} damaged tokens came back as they were.")
    return Story(
        model=order.model,
        calls=made.calls,
        seconds=made.seconds,
        seed=order.seed,
        shell=order.shell,
        timeline=Timeline.of(made),
        command=order.command,
        asked=asked,
        notes=tuple(dict.fromkeys(notes)),
    )
