"""What comes back: the text, and how it came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, ClassVar

from fsdfm.data import Tokenizer

__all__ = ["Generation", "State", "pieces_of"]


_REPLACED = "\ufffd"  # stands for bytes that are no character
_MASK = "░"  # a token behind the tokenizer's own
_WINDOW, _CONTEXT = 64, 8  # tokens that are decoded together, and those before them that say how they begin


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text of every token; joined they are the text of all of them.

    A token may hold a part of a character, or bytes that mean something only with their neighbours. So token k's piece
    is what of the whole text is settled after k tokens and was not before: b_k = |common prefix of decode(tokens[:k])
    and the text|, made monotone. A character cut in two belongs to the token that completes it.
    """
    text = tokenizer.decode(tokens)
    bounds = [0]
    first = seen = at = 0  # decode(tokens[first:k])[seen:] continues text[:at]
    for k in range(1, len(tokens)):
        window = tokenizer.decode(tokens[first:k])
        bounds.append(max(bounds[-1], at + _common_prefix(window[seen:], text[at : at + len(window)])))
        if k >= first + _WINDOW and text.startswith(window[seen:], at):  # no character is cut here: begin anew
            context = tokenizer.decode(tokens[k - _CONTEXT : k])
            if _REPLACED not in context and text.endswith(context, 0, at + len(window) - seen):
                at, first, seen = at + len(window) - seen, k - _CONTEXT, len(context)
    bounds.append(len(text))
    return tuple(text[begin:end] for begin, end in pairwise(bounds)) if tokens else ()


def _common_prefix(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    return next((k for k in range(min(len(a), len(b))) if a[k] != b[k]), min(len(a), len(b)))


@dataclass(frozen=True)
class State:
    """The text on its way: after `step` of `steps` steps of a block, at time t; step 0 is what the block begins from.

    tokens    of the text up to the end of the block
    changed   which of them this step changed
    given     which of them stand fast
    """

    step: int
    steps: int
    block: int
    t: float
    tokens: tuple[int, ...]
    changed: tuple[bool, ...]
    given: tuple[bool, ...]
    tokenizer: Tokenizer = field(repr=False, compare=False)

    @cached_property
    def text(self) -> str:
        """The text as it stands; a mask shows as ░."""
        return "".join(self.pieces)

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The text of every token; joined they are `text`."""
        found: list[str] = []
        for known, run in groupby(self.tokens, key=lambda token: token < self.tokenizer.vocab_size):
            own = tuple(run)
            found += pieces_of(self.tokenizer, own) if known else [_MASK] * len(own)
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "block": self.block,
            "step": self.step,
            "t": self.t,
            "changes": sum(self.changed),
            "text": self.text,
            "tokens": list(self.tokens),
        }


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A text, and how it came about; everything that is one per token belongs to `tokens`.

    text, tokens, pieces   the text, its tokens, the text of every token; special tokens are no part of them
    given          stood fast: prompt, suffix, what surrounds a gap, intact words of a repair
    marked         said to be damaged, in a repair; in a blind one, found so
    replaced       differs from the text that was to be repaired
    last_changed   the step, 1 .. steps, that changed it last; 0: none did
    changes        tokens changed in step 1, 2, ..., all blocks together
    start          t_0 of the first block; h = (1 - t_0) / steps; 1 where a blind repair found nothing to mend
    calls          network calls: steps x blocks, twice that with guidance; a blind repair has one more per block, which
                   judges it, and no other where nothing is found
    seconds        from the request to its text, the batch it was in included
    seed, copy     what made its noise
    finished       the model ended the text itself
    states         the text at every step, if asked for
    warnings       what should be known about it, in sentences
    """

    text: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    given: tuple[bool, ...]
    marked: tuple[bool, ...]
    replaced: tuple[bool, ...]
    last_changed: tuple[int, ...]
    changes: tuple[int, ...]
    steps: int
    start: float
    blocks: int
    calls: int
    seconds: float
    seed: int
    copy: int
    finished: bool
    states: tuple[State, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()

    html: ClassVar[Callable[[Generation], str] | None] = None  # how a notebook shows one; `fsdfm` says it

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str | None:
        """The timeline, for notebooks; None: they show the words."""
        return None if Generation.html is None else Generation.html(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the states only if they were kept."""
        names = ("text", "steps", "start", "blocks", "calls", "seconds", "seed", "copy", "finished")
        lists = ("tokens", "pieces", "given", "marked", "replaced", "last_changed", "changes")
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        record |= {name: list(getattr(self, name)) for name in lists}
        if self.states:
            record["states"] = [state.to_json() for state in self.states]
        return record
