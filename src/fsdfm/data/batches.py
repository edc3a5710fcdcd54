"""Endless, shuffled, resumable x_1: sample k is a pure function of (corpus, seed, k).

The only state of a data stream is the index of its next sample. Neither batch size nor process count changes a sample,
and no order is stored: the shuffle of an epoch is a keyed permutation, computed for one index at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.data.corpus import Corpus
from fsdfm.noise import Noise, Purpose, philox

__all__ = ["BeginWith", "Blocks", "RowSource", "TrainingBatch", "batches", "begin_with", "permute"]

_Words: TypeAlias = npt.NDArray[np.int64]

_MASK = 0xFFFFFFFF
_ROUNDS = 6
_SHORT, _LENGTH, _DOCUMENT_START, _DOCUMENT, _GIVEN, _FROM, _TO, _PROMPT = range(8)


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Rows of training data and where they stand in the stream: what a source of rows gives and an objective takes.

    x_1         tokens, int64 [B, L]
    x_0         the other end of coupled pairs, int64 [B, L]; None, or a row of -1: drawn from the path's coupling
    real        positions that hold data, bool [B, L]; None: all. A short row is padded with EOS
    given       positions that are never noised and never scored, bool [B, L], such as a prompt; None: none
    t           times of rows that are on their way already: x_0 is then x_t; float64 [B]. None: all begin with noise
    larger      (h, x_0, x_1): pairs [B, L] that take the place of the rows at steps of size h and larger, h growing;
                they are whole, and of what is given only the first position counts
    samples     the rows' global indices, int64 [B]: what `Noise` wants; 0, 1, ... unless given
    next_sample the state to resume from after this batch
    size        samples in the whole batch over all portions and processes; None: those here
    processes   how many compute parts of it at this moment: all of them ask a teacher, or none
    """

    x_1: Tensor
    x_0: Tensor | None = None
    real: Tensor | None = None
    given: Tensor | None = None
    t: Tensor | None = None
    larger: tuple[tuple[float, Tensor, Tensor], ...] = ()
    samples: Tensor = None  # type: ignore[assignment]  # filled below
    next_sample: int = 0
    size: int | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if self.samples is None:
            object.__setattr__(self, "samples", torch.arange(len(self.x_1)))

    def to(self, device: torch.device) -> TrainingBatch:
        """The same rows on a device; their indices stay where they are."""
        return replace(
            self,
            x_1=self.x_1.to(device, non_blocking=True),
            x_0=None if self.x_0 is None else self.x_0.to(device, non_blocking=True),
            real=None if self.real is None else self.real.to(device, non_blocking=True),
            given=None if self.given is None else self.given.to(device, non_blocking=True),
            larger=tuple(
                (h, x_0.to(device, non_blocking=True), x_1.to(device, non_blocking=True)) for h, x_0, x_1 in self.larger
            ),
        )


class RowSource(Protocol):
    """Training rows by sample index: `Blocks` of a corpus, or coupled `Pairs`."""

    def rows(self, samples: Sequence[int] | Tensor) -> TrainingBatch:
        """The rows with these sample indices, in this order."""
        ...


class Blocks:
    """The training rows of a corpus: block k of L tokens, shuffled anew in every epoch.

        blocks = Blocks(corpus, length=1024, seed=0)
        x_1 = blocks.rows(range(8)).x_1  # int64 [8, 1024]

    A share `document_starts` of the rows begins where some document begins, and a share `short_share` is only
    `shortest` to L-1 tokens long (uniformly), then EOS, so that short texts are in distribution. Of a share
    `given_share` a part is given: all but a gap between two uniform cuts, or, in half of them, what precedes the first.
    """

    def __init__(
        self,
        corpus: Corpus,
        length: int,
        seed: int = 0,
        *,
        short_share: float = 0.0,
        shortest: int = 1,
        document_starts: float = 0.0,
        given_share: float = 0.0,
    ):
        Noise(seed)  # checks the seed
        if not 1 <= length <= len(corpus):
            raise ValueError(
                f"length is {length}; allowed are 1 <= length <= {len(corpus)}, the tokens of the corpus: "
                "take shorter blocks, or bring more text"
            )
        shares = {"short_share": short_share, "document_starts": document_starts, "given_share": given_share}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; allowed are 0 <= {name} <= 1")
        if short_share and not 1 <= shortest < length:
            raise ValueError(f"shortest is {shortest}; allowed are 1 <= shortest < {length}, the length of a block")
        self.corpus, self.length, self.seed = corpus, length, seed
        self.short_share, self.shortest, self.document_starts = short_share, shortest, document_starts
        self.given_share = given_share
        self._num_starts = int(np.searchsorted(corpus.starts, len(corpus) - length, side="right"))
        if document_starts and not self._num_starts:
            raise ValueError(f"no document has {length} tokens after its start; take a shorter length")

    def __len__(self) -> int:
        """The number of blocks, which is the number of samples in an epoch."""
        return len(self.corpus) // self.length

    def rows(self, samples: Sequence[int] | Tensor) -> TrainingBatch:
        """The rows with these sample indices, in this order."""
        noise = Noise(self.seed, samples)
        index = noise.samples
        draws = noise.uniform(Purpose.BATCH, length=8)
        starts = self._starts(index, draws)
        lengths = self._lengths(draws)
        x_1 = np.full((len(index), self.length), self.corpus.header.eos_id, dtype=np.int64)
        for row, start, size in zip(x_1, starts.tolist(), lengths.tolist(), strict=True):
            if not 0 <= start <= len(self.corpus) - size:
                raise ValueError(f"{self.corpus.folder} is damaged: a document begins at {start}; prepare it again")
            row[:size] = self.corpus.tokens[start : start + size]
        if x_1.size and int(x_1.max()) >= self.corpus.header.vocab_size:
            raise ValueError(
                f"{self.corpus.folder} is damaged: it holds the token {x_1.max()}, and tokens are below "
                f"{self.corpus.header.vocab_size}; prepare it again"
            )
        real = torch.arange(self.length) < lengths[:, None]
        end = int(index.max()) + 1 if len(index) else 0
        given = self._given(draws, lengths)
        return TrainingBatch(torch.from_numpy(x_1), real=real, given=given, samples=index, next_sample=end)

    def _starts(self, index: Tensor, draws: Tensor) -> Tensor:
        """The first token of every row: that of a shuffled block, or of a document."""
        shuffled = permute(index % len(self), len(self), index // len(self), seed=self.seed) * self.length
        document = (draws[:, _DOCUMENT] * self._num_starts).to(torch.int64)
        chosen = draws[:, _DOCUMENT_START] < self.document_starts
        for row in chosen.nonzero().flatten().tolist():
            shuffled[row] = int(self.corpus.starts[int(document[row])])
        return shuffled

    def _lengths(self, draws: Tensor) -> Tensor:
        shorter = self.shortest + (draws[:, _LENGTH] * (self.length - self.shortest)).to(torch.int64)
        full = torch.full_like(shorter, self.length)
        return torch.where(draws[:, _SHORT] < self.short_share, shorter, full)

    def _given(self, draws: Tensor, lengths: Tensor) -> Tensor | None:
        """All but a gap of one token or more inside the row, or behind a prompt; nothing in most rows."""
        if not self.given_share:
            return None
        cuts = (draws[:, [_FROM, _TO]] * lengths[:, None]).to(torch.int64)
        begin, last = cuts.amin(1, keepdim=True), cuts.amax(1, keepdim=True)
        last = torch.where(draws[:, [_PROMPT]] < 0.5, self.length - 1, last)
        position = torch.arange(self.length)
        return (draws[:, [_GIVEN]] < self.given_share) & ((position < begin) | (position > last))


@dataclass(frozen=True)
class BeginWith:
    """Rows of another source behind a first token, which is given; a row of text loses its last token for it.

    Pairs come from a sampler, which has put the token there already.
    """

    token: int
    source: RowSource

    def rows(self, samples: Sequence[int] | Tensor) -> TrainingBatch:
        """The rows with these sample indices, in this order."""
        rows = self.source.rows(samples)
        real = torch.ones_like(rows.x_1, dtype=torch.bool) if rows.real is None else rows.real
        given = torch.zeros_like(real) if rows.given is None else rows.given.roll(1, 1)
        given[:, 0] = True
        is_text = torch.ones_like(real[:, :1]) if rows.x_0 is None else rows.x_0[:, :1] < 0
        x_1 = torch.where(is_text, begin_with(self.token, rows.x_1), rows.x_1)
        real = torch.where(is_text, torch.cat([real[:, :1], real[:, :-1]], 1), real)
        return replace(rows, x_1=x_1, real=real, given=given)


def begin_with(token: int, x_1: Tensor) -> Tensor:
    """Rows [B, L] behind a first token; each loses its last."""
    return torch.cat([torch.full_like(x_1[:, :1], token), x_1[:, :-1]], 1)


def batches(
    source: RowSource, batch_size: int, start: int = 0, *, portions: int = 1, rank: int = 0, num_ranks: int = 1
) -> Iterator[TrainingBatch]:
    """Portions of batches of `batch_size` rows from sample `start` on, without end; each rank gets its share of one.

    A rank takes every `num_ranks`-th row: neighbours, which few-step training gives like step sizes and with them like
    work, go to different ranks. To resume, start at the `next_sample` of the last batch used, the same on every rank.
    """
    parts = portions * num_ranks
    if batch_size < 1 or portions < 1 or num_ranks < 1 or batch_size % parts:
        raise ValueError(
            f"batch_size is {batch_size} in {portions} portions over {num_ranks} processes; allowed are positive "
            f"multiples of {parts}, so that every process has as many rows"
        )
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}; allowed are 0 <= rank < {num_ranks}")
    if start < 0:
        raise ValueError(f"start is {start}; a sample index is 0 or more")
    return _portions(source, batch_size, start, portion=batch_size // portions, rank=rank, num_ranks=num_ranks)


def _portions(
    source: RowSource, batch_size: int, start: int, *, portion: int, rank: int, num_ranks: int
) -> Iterator[TrainingBatch]:
    while True:
        rows = source.rows(range(start + rank, start + portion, num_ranks))
        start += portion
        yield replace(rows, next_sample=start, size=batch_size, processes=num_ranks)


def permute(index: Tensor, size: int, epoch: Tensor, *, seed: int) -> Tensor:
    """Where each index goes in its epoch's shuffle of 0 .. size-1: a bijection for every (seed, epoch).

    A Feistel network, its round keys drawn by Philox, permutes the next power of four; walking along its cycles until
    the value is below `size` (on average under four times) makes of it a permutation of the range itself.
    """
    if not 1 <= size < 2**62:
        raise ValueError(f"size is {size}; allowed are 1 <= size < 2**62")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise ValueError(f"an index is outside 0 <= index < {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    turn = torch.arange(_ROUNDS)
    address = (turn, epoch[:, None] & _MASK, epoch[:, None] >> 32, torch.full_like(turn, Purpose.SHUFFLE))
    keys = philox(address, (seed & _MASK, seed >> 32))[0].numpy()
    value = _feistel(index.numpy(), keys, half)  # NumPy: the arrays are small, and its calls are quicker than torch's
    while len(outside := np.flatnonzero(value >= size)):
        value[outside] = _feistel(value[outside], keys[outside], half)
    return torch.from_numpy(value)


def _feistel(value: _Words, keys: _Words, half: int) -> _Words:
    """A bijection of the 2 * half bits of `value` [B] for every row of 32-bit `keys` [B, rounds]."""
    low = (1 << half) - 1
    left, right = value >> half, value & low
    for key in keys.T:
        left, right = right, left ^ (_mix(right ^ key) & low)
    return left << half | right


def _mix(word: _Words) -> _Words:
    """Scatter 32 bits over 32 bits (MurmurHash3's finaliser)."""
    word = (word ^ word >> 16) * 0x85EBCA6B & _MASK
    word = (word ^ word >> 13) * 0xC2B2AE35 & _MASK
    return word ^ word >> 16
