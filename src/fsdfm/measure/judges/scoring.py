"""Scoring text with a causal language model: what a judge is, and the one loop that every judge runs.

    judge = make_judge("gpt2-large")
    scores = judge.score(["Once upon a time there was a fox."])
    scores.token_perplexity, scores.sequence_perplexity

A text is re-tokenised for the judge. With a beginning-of-text token every token of the text is scored, without one all
but the first. A text longer than the judge's context is read in overlapping windows: each token is scored once, by a
window that shows at least half a context before it (all there is, near the start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Judge", "Scores", "TokenJudge"]

_FLOATS_AT_ONCE = 2**26  # logits that live at a time: 256 MB of float32
_TEXTS_AT_ONCE = 512  # texts whose windows are sorted by length together


@dataclass(frozen=True)
class Scores:
    """What a judge says of N texts.

    nll          -sum log p over a text's scored tokens, in nats: float64 [N]
    num_tokens   how many tokens of the judge's vocabulary that were: int64 [N]; 0 where there was nothing to score
    """

    nll: Tensor
    num_tokens: Tensor

    def __post_init__(self) -> None:
        if self.nll.shape != self.num_tokens.shape or self.nll.ndim != 1:
            raise ValueError(
                f"nll has shape {tuple(self.nll.shape)} and num_tokens {tuple(self.num_tokens.shape)}; "
                "give one number per text in each"
            )

    def __len__(self) -> int:
        return len(self.nll)

    @property
    def token_perplexity(self) -> float:
        """exp(sum of all NLL / number of all tokens): every token counts the same. This one decides."""
        return math.exp(float(self.nll.sum()) / self._total())

    @property
    def sequence_perplexity(self) -> float:
        """Mean over texts of exp(NLL / tokens), as in the paper; texts without a scored token are left out."""
        return float(self.perplexities().mean())

    def perplexities(self) -> Tensor:
        """exp(NLL / tokens) of every text that has a scored token: float64 [<= N]."""
        self._total()
        scored = self.num_tokens > 0
        return torch.exp(self.nll[scored] / self.num_tokens[scored])

    def _total(self) -> int:
        total = int(self.num_tokens.sum())
        if total == 0:
            raise ValueError(
                f"none of the {len(self)} texts holds a token to score; give at least one that is not empty"
            )
        return total


class Judge(Protocol):
    """Who scores text: a name for tables, and the negative log-likelihood of every text."""

    @property
    def name(self) -> str:
        """How tables call it."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a reader needs to reproduce its numbers: context, first token, precision."""
        ...

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> Scores:
        """-log p(text), or -log p(text | prefix) with one prefix a text."""
        ...


@dataclass(frozen=True)
class _Window:
    """Tokens to show, of which the last `num_scored` count for the text `text`."""

    text: int
    tokens: list[int]
    num_scored: int


@dataclass(frozen=True)
class TokenJudge:
    """A judge made of a causal network and a tokenizer.

    nll          tokens int64 [B, L] -> -log p(x_i | x_0 .. x_{i-1}) in nats for i = 1 .. L-1: [B, L-1]; deterministic
    encode       texts -> token ids, without special tokens
    max_length   tokens the network can look at
    bos_id       what stands before a text and is never scored; None: the first token of a text is given instead
    hidden       tokens [B, L] -> the features that the head reads, [B, L, C]; None: the network does not show them
    """

    name: str
    nll: Callable[[Tensor], Tensor]
    encode: Callable[[Sequence[str]], list[list[int]]]
    max_length: int
    vocab_size: int
    bos_id: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | str = "cpu"
    hidden: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; a judge needs a context of at least 2 tokens")

    @property
    def facts(self) -> Mapping[str, Any]:
        """Context, stride of the windows, first token, and what the maker added."""
        return {"context": self.max_length, "stride": self._stride, "bos_id": self.bos_id, **self.details}

    @property
    def _stride(self) -> int:
        return self.max_length // 2

    @torch.no_grad()
    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> Scores:
        """Sum of -log p over each text's tokens, given its prefix.

        Prefix and text are tokenised as one. Given are the leading tokens that the prefix alone also has; a token that
        straddles the border counts for the text.
        """
        if prefixes is not None and len(prefixes) != len(texts):
            raise ValueError(f"there are {len(prefixes)} prefixes for {len(texts)} texts; one per text, '' for none")
        nll = torch.zeros(len(texts), dtype=torch.float64)
        num_tokens = torch.zeros(len(texts), dtype=torch.int64)
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            part = slice(start, start + _TEXTS_AT_ONCE)
            windows = self._windows(texts[part], None if prefixes is None else prefixes[part])
            for batch in self._batches(sorted(windows, key=lambda window: (len(window.tokens), window.text))):
                for window, row in zip(batch, self._row_nll(batch), strict=True):
                    nll[start + window.text] += row
                    num_tokens[start + window.text] += window.num_scored
        return Scores(nll, num_tokens)

    def _windows(self, texts: Sequence[str], prefixes: Sequence[str] | None) -> Iterator[_Window]:
        whole = self.encode(texts if prefixes is None else [a + b for a, b in zip(prefixes, texts, strict=True)])
        given = [0] * len(whole) if prefixes is None else map(_shared, self.encode(prefixes), whole)
        first = [] if self.bos_id is None else [self.bos_id]
        for i, (tokens, num_given) in enumerate(zip(whole, given, strict=True)):
            yield from self._cut(i, first + tokens, max(1, num_given + len(first)))

    def _cut(self, text: int, tokens: list[int], scored_from: int) -> Iterator[_Window]:
        """Windows of at most max_length + 1 tokens, the last of which is only predicted."""
        size = self.max_length + 1
        end = max(size, scored_from + self._stride)
        while scored_from < len(tokens):
            end = min(end, len(tokens))
            yield _Window(text, tokens[max(0, end - size) : end], end - scored_from)
            scored_from, end = end, end + self._stride

    def _batches(self, windows: Sequence[_Window]) -> Iterator[list[_Window]]:
        """Windows of like length together, so many that their logits fit in the memory we allow."""
        batch: list[_Window] = []
        for window in windows:  # ascending: the new one is the longest
            if batch and (len(batch) + 1) * len(window.tokens) * self.vocab_size > _FLOATS_AT_ONCE:
                yield batch
                batch = []
            batch.append(window)
        if batch:
            yield batch

    def _row_nll(self, batch: Sequence[_Window]) -> list[float]:
        """The sum of each window's scored tokens; padding stands on the right, where a causal network sees it not."""
        longest = max(len(window.tokens) for window in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        counts = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
        for row, window in enumerate(batch):
            end = len(window.tokens)
            tokens[row, :end] = torch.tensor(window.tokens)
            counts[row, end - 1 - window.num_scored : end - 1] = True
        nll = self.nll(tokens.to(self.device)).to("cpu", torch.float64)
        return torch.where(counts, nll, 0.0).sum(1).tolist()


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
