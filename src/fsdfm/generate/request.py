"""What is asked: a row of tokens, and which of them are given. Prompts, infills and repairs differ in nothing else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

from fsdfm.checks import require_whole
from fsdfm.data import Tokenizer
from fsdfm.generate.result import pieces_of

__all__ = ["Begin", "Damage", "PromptEncoder", "Request", "longest_text"]

Begin = Literal["document", "anywhere"]
Damage = Sequence[bool] | Sequence[int] | Sequence[tuple[int, int]]
"""Damaged places: a bool per token, or token positions, or spans (begin, end) of characters."""

MAX_COPIES = 1 << 20
MAX_BLOCKS = 1 << 8
MAX_CANVASES = 1 << 12
_WORDS = ("the", "a", "and", "to", "of", "in", "was", "def", "return")
_GAP = re.compile(r"\\\[\[|\[\[(\d+)\]\]|\[\[")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A row of tokens to be completed.

    tokens   the row; where it is not frozen, the token is ignored, or it is a draft
    frozen   stands fast: the `frozen` of the sampler
    damaged  said to be damaged
    num_bos  1 where the first token begins the document and is no part of the text, else 0
    ends     whether the text may end early, at the end of a document; else that token is not written
    draft    whether the tokens that are not frozen are a draft to set out from, not gaps to fill
    blind    whether the model first finds which of the tokens that are not frozen are wrong: blind repair
    copy     numbers several texts of one request
    """

    tokens: tuple[int, ...]
    frozen: tuple[bool, ...]
    damaged: tuple[bool, ...] = ()
    num_bos: int = 0
    ends: bool = False
    draft: bool = False
    blind: bool = False
    copy: int = 0

    def copies(self, num: int) -> list[Request]:
        """The same request `num` times, with noise of their own."""
        return [replace(self, copy=copy) for copy in range(require_whole("num", num, 1, high=MAX_COPIES))]

    def sample_index(self, block: int) -> int:
        """Which sample of the noise a block of this request is: a function of what is asked, not of the batch.

        28 bits of a hash of what is given (0 where nothing is), 20 bits of the copy, 8 bits of the block; of every
        further 256 canvases the hash is another one.
        """
        known = self.draft or self.blind
        fixed = [(i, self.tokens[i]) for i in range(self.num_bos, len(self.tokens)) if self.frozen[i] or known]
        above, low = divmod(block, MAX_BLOCKS)
        what = repr(fixed) if not above else f"{above} {fixed!r}"
        digest = hashlib.sha256(what.encode()).digest() if fixed or above else bytes(4)
        return (int.from_bytes(digest[:4], "big") >> 4) << 28 | self.copy << 8 | low


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_place(value: object) -> bool:
    """Whether this can be a mark, a position or a span."""
    return isinstance(value, int) or (
        isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_whole, value))
    )


class PromptEncoder:
    """Turns what a user types into requests.

    canvas   tokens that the model writes at a time after what stands before; None: it knows no canvases
    """

    def __init__(
        self, tokenizer: Tokenizer, bos_id: int | None, *, needs_bos: bool, length: int, canvas: int | None = None
    ):
        self.tokenizer, self.bos_id, self.needs_bos, self.length = tokenizer, bos_id, needs_bos, length
        self.canvas = canvas
        # A BPE's tokens bring the space before them along: typed before a gap, it would be doubled by what fills it.
        space = tokenizer.encode("x ")
        self._space_leads = any(tokenizer.encode(f"x {word}")[: len(space)] != space for word in _WORDS)

    def continuation(
        self, prompt: str | None, suffix: str | None, *, length: int | None = None, begin: Begin = "document"
    ) -> Request:
        """The prompt, then what is to be written, then the suffix: `length` tokens in all."""
        length = self.length if length is None else length
        length = require_whole("length", length, 1)
        self._require_room(length)
        bos = self._bos(begin)
        ahead = [] if prompt is None else self._encode(prompt, "the prompt", opening=True)
        behind = [] if suffix is None else self._encode(suffix, "the suffix", opening=False)
        free = length - len(bos) - len(ahead) - len(behind)
        if free < 1:
            fixed = len(bos) + len(ahead) + len(behind)
            longer = "" if length >= self.length else f", up to {self.length} without a loss"
            raise ValueError(
                f"what is given has {fixed} tokens and leaves no room in a length of {length}; "
                f"shorten it, or ask for a greater length{longer}"
            )
        tokens = [*bos, *ahead, *[0] * free, *behind]
        frozen = [True] * (len(bos) + len(ahead)) + [False] * free + [True] * len(behind)
        return Request(tokens=tuple(tokens), frozen=tuple(frozen), num_bos=len(bos), ends=suffix is None)

    def gaps(self, text: str, *, begin: Begin = "document") -> Request:
        r"""A text with gaps: `[[6]]` stands for six tokens, `\[[` for the two characters."""
        bos = self._bos(begin)
        tokens, frozen = list(bos), [True] * len(bos)
        self._require_short(_require_text(text), "the text")
        parts = _split_gaps(text)
        self._require_room(sum(part for part in parts if isinstance(part, int)))
        for index, part in enumerate(parts):
            if isinstance(part, int):
                tokens += [0] * part
                frozen += [False] * part
                continue
            before_gap = index + 1 < len(parts)
            shown = part.removesuffix(" ") if before_gap and self._space_leads else part
            ids = self._encode(shown, "the text", opening=index == 0) if shown else []
            tokens += ids
            frozen += [True] * len(ids)
        if all(frozen):
            raise ValueError("the text has no gap; write [[6]] where six tokens are missing")
        return Request(tokens=tuple(tokens), frozen=tuple(frozen), num_bos=len(bos))

    def damaged(
        self, text: str | Sequence[int], damaged: Damage | None = None, *, begin: Begin = "document"
    ) -> Request:
        """A text to repair: at the damaged places, or blind, where the model finds them itself."""
        bos = self._bos(begin)
        tokens = self._encode(text, "the text", opening=True) if isinstance(text, str) else self._check(text)
        if damaged is None:
            marked = [False] * len(tokens)
            frozen = [True] * len(bos) + [False] * len(tokens)
        else:
            marked = self._mark(tokens, damaged)
            frozen = [True] * len(bos) + [not mark for mark in marked]
        return Request(
            tokens=(*bos, *tokens),
            frozen=tuple(frozen),
            damaged=(*[False] * len(bos), *marked),
            num_bos=len(bos),
            blind=damaged is None,
        )

    def _bos(self, begin: Begin) -> list[int]:
        """What stands at position 0: BOS, as in training, or the end of the document before."""
        if begin not in get_args(Begin):
            raise ValueError(f"begin is {begin!r}; allowed are {', '.join(get_args(Begin))}")
        if begin == "anywhere" and self.needs_bos:
            raise ValueError("begin is 'anywhere', but this model always has its first token given; leave it out")
        if begin == "anywhere":
            return []
        return [self.tokenizer.eos_id if self.bos_id is None else self.bos_id]

    def _encode(self, text: str, what: str, *, opening: bool) -> list[int]:
        self._require_short(_require_text(text, what), what)
        if self.tokenizer.eos in text:
            raise ValueError(f"{what} holds {self.tokenizer.eos}, which ends a document; cut it there, or take it out")
        return self.tokenizer.encode(text) if opening else self._encode_inside(text)

    def _encode_inside(self, text: str) -> list[int]:
        """The tokens of a text that follows another one, without the space that some tokenizers put before a text."""
        if self.tokenizer.continuation(" x") == " x":
            return self.tokenizer.encode(text)
        if text.startswith(" "):
            return self.tokenizer.encode(self.tokenizer.continuation(text))
        line, whole = self.tokenizer.encode("\n"), self.tokenizer.encode("\n" + text)
        return whole[len(line) :] if whole[: len(line)] == line else self.tokenizer.encode(text)

    def _check(self, tokens: Sequence[int]) -> list[int]:
        if not isinstance(tokens, Sequence) or isinstance(tokens, bytes) or not all(map(_is_whole, tokens)):
            raise ValueError(
                f"the text is {tokens!r:.80}; allowed are a text, a list of its tokens and a list of texts"
            )
        if not tokens:
            raise ValueError("the text is empty; give at least one word")
        self._require_room(len(tokens))
        self.tokenizer.decode(tokens)  # raises for what is no token
        return [int(token) for token in tokens]

    def _mark(self, tokens: Sequence[int], damaged: Damage) -> list[bool]:
        if isinstance(damaged, str) or not isinstance(damaged, Iterable) or not all(map(_is_place, damaged)):
            raise ValueError(
                f"damaged is {damaged!r:.80}; allowed are a bool per token, token positions, or spans (begin, end)"
            )
        places = list(damaged)
        if places and all(isinstance(place, bool) for place in places):
            if len(places) != len(tokens):
                raise ValueError(f"damaged has {len(places)} marks for {len(tokens)} tokens; give one per token")
            marked = [bool(place) for place in places]
        elif all(isinstance(place, int) for place in places):
            marked = self._mark_positions(len(tokens), [int(place) for place in places])  # type: ignore[call-overload]
        else:
            marked = self._mark_spans(tokens, places)  # type: ignore[arg-type]
        if not any(marked):
            raise ValueError("damaged names no token; leave it out to have the model find them")
        return marked

    def _mark_positions(self, num_tokens: int, positions: Sequence[int]) -> list[bool]:
        if wrong := [place for place in positions if not 0 <= place < num_tokens]:
            raise ValueError(f"damaged has token position {wrong[0]}; allowed are 0 .. {num_tokens - 1}")
        known = set(positions)
        return [place in known for place in range(num_tokens)]

    def _mark_spans(self, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
        pieces = pieces_of(self.tokenizer, tokens)
        size = sum(map(len, pieces))
        for span in spans:
            if len(span) != 2 or not 0 <= span[0] < span[1] <= size:
                raise ValueError(f"damaged has the span {span}; allowed are 0 <= begin < end <= {size} characters")
        covered = list(accumulate(_depths(spans, size), lambda sum, depth: sum + (depth > 0), initial=0))
        within = _depths([(begin + 1, end) for begin, end in spans], size)  # where a token of no character is damaged
        ends = list(accumulate(map(len, pieces), initial=0))
        return [covered[end] > covered[begin] if end > begin else within[begin] > 0 for begin, end in pairwise(ends)]

    # --- limits, before anything is tokenised or allocated ------------------------------------------------------------

    @cached_property
    def most(self) -> int:
        """The most tokens that a text may have."""
        if self.canvas is not None:
            return MAX_CANVASES * self.canvas
        return longest_text(self.length, extra=int(self.bos_id is not None))

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.pieces))

    def _require_room(self, num_tokens: int) -> None:
        if num_tokens > self.most:
            parts = f"{MAX_BLOCKS} blocks" if self.canvas is None else f"{MAX_CANVASES} canvases of {self.canvas}"
            raise ValueError(
                f"{num_tokens} tokens are too many; at most {self.most} are possible, {parts}: ask for less"
            )

    def _require_short(self, text: str, what: str) -> None:
        """Raise for a text that even of the longest tokens would have too many."""
        if len(text) > self.most * self._longest_token:
            raise ValueError(
                f"{what} has {len(text)} characters, more than {self.most} tokens, which are the most that are "
                "possible, can hold: cut it"
            )


def _depths(spans: Sequence[tuple[int, int]], size: int) -> list[int]:
    """How many spans cover each of the characters 0 .. size, in one pass."""
    changes = [0] * (size + 2)
    for begin, end in spans:
        changes[begin] += 1
        changes[end] -= 1
    return list(accumulate(changes))


def longest_text(size: int, *, extra: int = 0) -> int:
    """The most tokens that a text of a model of this training length may have."""
    if size <= extra:
        raise ValueError(f"length is {size}; a model that has its first token given needs at least {extra + 1} tokens")
    return size + (MAX_BLOCKS - 1) * ((size - extra + 1) // 2)


def _require_text(text: str, what: str = "the text") -> str:
    if not isinstance(text, str):
        raise ValueError(f"{what} is {text!r:.40}; allowed is a string")
    if not text:
        what_to_do = "give at least one word" if what == "the text" else "write something, or leave it out"
        raise ValueError(f"{what} is empty; {what_to_do}")
    return text


def _split_gaps(text: str) -> list[str | int]:
    """Text and sizes of gaps in turn, a text first and last."""
    parts: list[str | int] = []
    words, at = "", 0
    for match in _GAP.finditer(text):
        words, at = words + text[at : match.start()], match.end()
        if match[0].startswith("\\"):
            words += "[["
        elif match[1] is None or not 1 <= len(match[1]) <= 6 or int(match[1]) < 1:
            raise ValueError(
                rf"the text has [[ at character {match.start()}, which opens no gap; write [[6]] for a gap of six "
                r"tokens, or \[[ for the two characters"
            )
        else:
            parts += [words, int(match[1])]
            words = ""
    return [*parts, words + text[at:]]
