"""Posteriors: what a network says about x_t.

A posterior p_{1|t}(. | x_t) is a law of texts x_1 [B, L]. It answers three questions: the law of a single position
(`marginals`), a text drawn from it (`draw`) and the log-probability of a text (`log_prob`).

    Independent   p(x_1) = prod_i p_i(x_1^i), the softmax of logits per position        this file
    ChainCRF      neighbours know of each other                                       fsdfm.flow.crf

A denoiser is anything with a method `posterior(x_t, t, h, rows=...)`, and every function (x_t, t, h) -> logits passes
for one. A *row* is a position of a text, numbered b * L + i; whoever asks for a few rows says so before the network
runs, for a network may save the work of the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter, draw

__all__ = [
    "BannedTokens",
    "Denoiser",
    "Independent",
    "LogitsFunction",
    "LogitsHook",
    "Posterior",
    "Rows",
    "SplitNetwork",
    "Tile",
    "network_posterior",
    "posterior_of",
]

_TILE = 128  # rows per head call: enough for an efficient matrix product, little enough to hold [tile, V]

Tile = tuple[slice, Tensor, Tensor | None]
"""Some of the rows asked for: which of them, logits [M, V], and which of the M are meant (None: all, in order)."""


@dataclass(frozen=True)
class Rows:
    """Which positions some logits belong to: sample and position indices [N], the state [B, L] and the step [B]."""

    sample: Tensor
    position: Tensor
    x_t: Tensor
    t: Tensor
    t_next: Tensor


LogitsHook = Callable[[Tensor, Rows], Tensor]
"""Changes logits [N, V] before they are used: guidance, banned words, a constraint. May work in place."""


@dataclass(frozen=True)
class BannedTokens:
    """A hook under which tokens are never drawn: for each of them, of which samples, bool [B]."""

    tokens: Mapping[int, Tensor]

    def __call__(self, logits: Tensor, where: Rows) -> Tensor:
        """In place."""
        for token, samples in self.tokens.items():
            logits[samples.to(logits.device)[where.sample], token] = -torch.inf
        return logits

    def mask(self, samples: Tensor, vocab_size: int) -> Tensor:
        """What is added to all logits of these samples: 0 or -inf, float32 [n, V]."""
        mask = torch.zeros(len(samples), vocab_size, device=samples.device)
        for token, banned in self.tokens.items():
            mask[banned.to(samples.device)[samples], token] = -torch.inf
        return mask


class Posterior(ABC):
    """p_{1|t}(. | x_t) of a batch of texts [B, L]."""

    joint: bool = False  # whether the positions of a text depend on each other, so that a draw is of whole texts

    @abstractmethod
    def marginals(self, rows: Tensor) -> Iterator[Tile]:
        """The law of each of these rows, int64 [N] in order, whatever stands elsewhere: logits, a tile at a time."""

    @abstractmethod
    def draw(self, samples: Tensor, u: Tensor, *, filter: Filter | None = None) -> Tensor:
        """x_1 ~ p of some samples, int64 [n], from uniforms u in (0, 1), float64 [n, L]: int64 [n, L]."""

    @abstractmethod
    def log_prob(self, x_1: Tensor) -> Tensor:
        """log p(x_1 | x_t) of a text per sample, int64 [B, L] -> [B]."""

    @abstractmethod
    def given(self, held: Tensor, *, forbidden: int | None = None) -> Posterior:
        """The posterior where some positions are certain and one token is impossible.

        held        the token of every position that is certain, -1 elsewhere: int64 [B, L]
        forbidden   a token that cannot be, such as the mask
        """

    @abstractmethod
    def part(self, first: int, count: int) -> Posterior:
        """The posterior of samples first .. first + count - 1, numbered from 0: one network call for many callers."""

    @abstractmethod
    def changed(self, hook: LogitsHook, x_t: Tensor, *, t: Tensor, t_next: Tensor) -> Posterior:
        """The posterior with a hook run over its logits."""


@dataclass(frozen=True)
class Independent(Posterior):
    """Positions that are independent given x_t: p(x_1) = prod_i softmax(logits_i)(x_1^i).

    Made of logits, of features and a head (`of_features`: the head runs on what is asked for), or of features that are
    there only at some rows (`of_rows`).

    tiles      the logits of any rows, a tile at a time
    length     L
    borrowed   whether the tiles show the caller's own memory, which nobody may change
    """

    tiles: Callable[[Tensor], Iterator[Tile]]
    length: int
    borrowed: bool = False
    held: Tensor | None = None
    forbidden: int | None = None

    @classmethod
    def of_logits(cls, logits: Tensor) -> Independent:
        """Of logits [B, L, V]; nothing is copied."""
        flat = logits.flatten(0, 1)

        def tiles(rows: Tensor) -> Iterator[Tile]:
            yield slice(0, len(rows)), flat, rows if len(rows) < len(flat) else None

        return cls(tiles, logits.shape[1], borrowed=True)

    @classmethod
    def of_features(cls, features: Tensor, network: SplitNetwork) -> Independent:
        """Of features [B, L, C], for any rows."""
        length, flat = features.shape[1], features.flatten(0, 1)
        return cls(lambda rows: _head_tiles(network, flat[rows], rows // length), length)

    @classmethod
    def of_rows(cls, features: Tensor, rows: Tensor, network: SplitNetwork, *, length: int) -> Independent:
        """Of features [N, C] at these rows [N], which are in order, and no others."""

        def tiles(asked: Tensor) -> Iterator[Tile]:
            own = features
            if len(asked) != len(rows):
                own = features[torch.searchsorted(rows, asked)]
            return _head_tiles(network, own, asked // length)

        return cls(tiles, length)

    def marginals(self, rows: Tensor) -> Iterator[Tile]:
        """The logits themselves: what is held or forbidden is up to whoever draws."""
        return self.tiles(rows)

    def draw(self, samples: Tensor, u: Tensor, *, filter: Filter | None = None) -> Tensor:
        """Every position by itself."""
        rows = rows_of(samples, self.length)
        flat, tokens = u.flatten(), torch.empty(len(rows), dtype=torch.int64, device=samples.device)
        for part, tile, own in self.tiles(rows):
            tokens[part] = draw(tile, flat[part], rows=own, forbidden=self.forbidden, filter=filter).tokens
        drawn = tokens.view(-1, self.length)
        return drawn if self.held is None else torch.where(self.held[samples] >= 0, self.held[samples], drawn)

    def log_prob(self, x_1: Tensor) -> Tensor:
        """The sum over positions of log softmax; a position that is held counts 0, or -inf if it says otherwise."""
        tokens = x_1.flatten()
        found: list[Tensor] = []
        for part, tile, own in self.tiles(torch.arange(len(tokens), device=x_1.device)):
            logits = _precise(tile if own is None else tile[own])
            if self.forbidden is not None:
                logits = without_token(logits, self.forbidden)
            found.append(torch.log_softmax(logits, -1).gather(-1, tokens[part, None])[:, 0])
        log_p = torch.cat(found).view_as(x_1)
        if self.held is not None:
            certain = torch.where(self.held == x_1, 0.0, -torch.inf).to(log_p)
            log_p = torch.where(self.held >= 0, certain, log_p)
        return log_p.sum(-1)

    def given(self, held: Tensor, *, forbidden: int | None = None) -> Independent:
        """Others do not notice."""
        return replace(self, held=held, forbidden=forbidden)

    def part(self, first: int, count: int) -> Independent:
        """The same tiles, asked for by other numbers."""
        held = None if self.held is None else self.held[first : first + count]
        return replace(self, tiles=lambda rows: self.tiles(rows + first * self.length), held=held)

    def changed(self, hook: LogitsHook, x_t: Tensor, *, t: Tensor, t_next: Tensor) -> Independent:
        """The hook sees few rows at a time, in memory that it may change."""

        def tiles(rows: Tensor) -> Iterator[Tile]:
            for part, tile, tile_rows in self.tiles(rows):
                for start in range(0, part.stop - part.start, _TILE):
                    few = slice(start, min(start + _TILE, part.stop - part.start))
                    own = tile[few] if tile_rows is None else tile[tile_rows[few]]
                    if tile_rows is None and self.borrowed:
                        own = own.clone()
                    inside = slice(part.start + few.start, part.start + few.stop)
                    where = Rows(rows[inside] // self.length, rows[inside] % self.length, x_t, t, t_next)
                    yield inside, _require_logits(hook(own, where)), None

        return replace(self, tiles=tiles, borrowed=False)


def _require_logits(changed: object) -> Tensor:
    if not isinstance(changed, Tensor):
        raise ValueError(f"the hook returned {type(changed).__name__}; it must return the logits it was given")
    return changed


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def without_token(logits: Tensor, token: int) -> Tensor:
    """Logits [..., V] under which a token is never drawn."""
    column = torch.arange(logits.shape[-1], device=logits.device) == token
    return logits.masked_fill(column, -torch.inf)


def rows_of(samples: Tensor, length: int) -> Tensor:
    """All rows of some samples, in order."""
    return (samples[:, None] * length + torch.arange(length, device=samples.device)).flatten()


def _head_tiles(network: SplitNetwork, features: Tensor, sample: Tensor) -> Iterator[Tile]:
    """Tiles of the rows [N] of `sample` [N]; none of two samples where the network says that it works so.

    A matrix product rounds by its number of rows; which rows a sample asks for, its own coins decide. For a network of
    short samples such tiles would be tiny, and the calls many.
    """
    apart = getattr(network, "samples_apart", False)
    counts = torch.bincount(sample).tolist() if apart else [len(features)]
    start = 0
    for count in counts:
        for first in range(start, start + count, _TILE):
            tile = slice(first, min(first + _TILE, start + count))
            yield tile, network.logits_at(features[tile]), None
        start += count


# --- who gives posteriors ---------------------------------------------------------------------------------------------


@runtime_checkable
class Denoiser(Protocol):
    """Anything that says p_{1|t}(. | x_t)."""

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """Of states [B, L] at times [B] for steps of size [B]; nobody will ask about other rows than these."""
        ...


LogitsFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_t [B, L], t [B], h [B]) -> logits [B, L, V]: the simplest denoiser."""


@runtime_checkable
class SplitNetwork(Protocol):
    """A network in two parts: its vocabulary head can be asked for chosen positions only.

    It may have a method `features_at(x_t, t, h, rows=rows)` -> [N, C], which saves work in the trunk, too, and a head
    `joint` with a method `posterior(network, x_t, t, h, rows=rows)`, for positions that depend on each other.
    """

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor, /) -> Tensor:
        """Features [B, L, C], everything but the head."""
        ...

    def logits_at(self, features: Tensor) -> Tensor:
        """The head on chosen features: [N, C] -> [N, V]."""
        ...


def posterior_of(
    denoiser: Denoiser | SplitNetwork | LogitsFunction, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
) -> Posterior:
    """What a denoiser of any kind says of x_t [B, L] at times t for steps of size h [B]."""
    if isinstance(denoiser, Denoiser):
        return denoiser.posterior(x_t, t, h, rows=rows)
    if isinstance(denoiser, SplitNetwork):
        return network_posterior(denoiser, x_t, t, h=h, rows=rows)
    return Independent.of_logits(denoiser(x_t, t, h))


def network_posterior(
    network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
) -> Posterior:
    """The posterior of a network in two parts: that of its joint head, if it has one, else independent positions."""
    joint: Any = getattr(network, "joint", None)
    if joint is not None:
        found: Posterior = joint.posterior(network, x_t, t, h=h, rows=rows)
        return found
    return independent_posterior(network, x_t, t, h=h, rows=rows)


def independent_posterior(
    network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
) -> Independent:
    """The positions' own laws, whatever joint head the network has."""
    features_at = getattr(network, "features_at", None)
    if rows is None or features_at is None:
        return Independent.of_features(network.trunk(x_t, t, h), network)
    return Independent.of_rows(features_at(x_t, t, h, rows=rows), rows, network, length=x_t.shape[1])
