"""The sampler: from x_0 along a grid to x_1, one network call a step.

`trajectory` is a generator of steps: progress bars, plots and streaming are the caller's. `sample` is its last state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import ParamSpec, Protocol, runtime_checkable

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter
from fsdfm.flow.crf import ChainCRF, Transitions, transitions_of
from fsdfm.flow.grid import Grid
from fsdfm.flow.path import IndependentCoupling, MixturePath, require_rows
from fsdfm.flow.rule import JUMPS, Jump, RowLogits, advance
from fsdfm.noise import Noise

__all__ = [
    "CRFLogits",
    "Denoiser",
    "DenseLogits",
    "LogitsHook",
    "PickedLogits",
    "PickyDenoiser",
    "Rows",
    "SplitDenoiser",
    "SplitLogits",
    "Step",
    "ask",
    "linked",
    "sample",
    "trajectory",
]

_P = ParamSpec("_P")
_SAMPLES = 8  # whose texts are drawn together on a GPU
_TILE = 128  # rows a head call: enough for an efficient matrix product, little enough to hold [tile, V]


class Denoiser(Protocol):
    """Anything that turns (x_t, t, h) into the logits of p_{1|t}: tokens [B, L], times [B], sizes [B] -> [B, L, V]."""

    def __call__(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Logits [B, L, V]."""
        ...


@runtime_checkable
class SplitDenoiser(Protocol):
    """A denoiser whose vocabulary head can be asked for chosen positions only."""

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C], everything but the head."""
        ...

    def logits_at(self, features: Tensor) -> Tensor:
        """The head on chosen features: [N, C] -> [N, V]."""
        ...


@runtime_checkable
class PickyDenoiser(SplitDenoiser, Protocol):
    """A split denoiser that saves work in its trunk, too, where only some positions are asked for."""

    def features_at(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor) -> Tensor:
        """The features of positions b * L + i, in order: int64 [N] -> [N, C]."""
        ...


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


class DenseLogits:
    """Logits [B, L, V] that are there already."""

    def __init__(self, logits: Tensor):
        self.flat = logits.flatten(0, 1)

    def tiles(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """One tile: the tensor itself, so that nothing is copied."""
        yield slice(0, len(rows)), self.flat, rows if len(rows) < len(self.flat) else None


class SplitLogits:
    """Logits that a head computes for the rows asked for."""

    def __init__(self, denoiser: SplitDenoiser, features: Tensor):
        self.denoiser, self.length = denoiser, features.shape[1]
        self.flat = features.flatten(0, 1)

    def tiles(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """A head call for every few rows."""
        return _head_tiles(self.denoiser, self.flat[rows], rows // self.length)


class PickedLogits:
    """Logits of a network that is not asked before it is known which rows are wanted."""

    def __init__(self, denoiser: PickyDenoiser, x_t: Tensor, t: Tensor, h: Tensor):
        self.denoiser, self.asked = denoiser, (x_t, t, h)

    def tiles(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """One network call, then a head call for every few rows."""
        features = self.denoiser.features_at(*self.asked, rows=rows)
        return _head_tiles(self.denoiser, features, rows // self.asked[0].shape[1])


def _head_tiles(
    denoiser: SplitDenoiser, features: Tensor, sample: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Tiles of the rows [N] of `sample` [N]; none of two samples where the denoiser says that it works so.

    A matrix product rounds by its number of rows; which rows a sample asks for, its own coins decide. For a denoiser of
    short samples such tiles would be tiny, and the calls many.
    """
    apart = getattr(denoiser, "samples_apart", False)
    counts = torch.bincount(sample).tolist() if apart else [len(features)]
    start = 0
    for count in counts:
        for first in range(start, start + count, _TILE):
            tile = slice(first, min(first + _TILE, start + count))
            yield tile, denoiser.logits_at(features[tile]), None
        start += count


class _HookedLogits:
    """Other logits, with a hook run over every tile."""

    def __init__(self, logits: RowLogits, hook: LogitsHook, state: tuple[Tensor, Tensor, Tensor]):
        self.logits, self.hook = logits, hook
        self.x_t, self.t, self.t_next = state

    def tiles(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        for part, tile, tile_rows in self.logits.tiles(rows):
            for start in range(0, part.stop - part.start, _TILE):
                few = slice(start, min(start + _TILE, part.stop - part.start))
                own = tile[few] if tile_rows is None else tile[tile_rows[few]]
                if tile_rows is None and isinstance(self.logits, DenseLogits):
                    own = own.clone()  # a hook may work in place; what a head has made belongs to us, this does not
                inside = slice(part.start + few.start, part.start + few.stop)
                yield inside, self._changed(own, rows[inside]), None

    def _changed(self, logits: Tensor, rows: Tensor) -> Tensor:
        length = self.x_t.shape[1]
        changed = self.hook(logits, Rows(rows // length, rows % length, self.x_t, self.t, self.t_next))
        if not isinstance(changed, Tensor):
            raise ValueError(f"the hook returned {type(changed).__name__}; it must return the logits it was given")
        return changed


class CRFLogits:
    """Logits that are the fields u of a chain with links: marginals for those who ask for rows, texts for a sampler.

    held        the token of every position that is certain, -1 elsewhere: int64 [B, L]
    forbidden   a token that cannot be, such as the mask

    On a CPU one sample at a time, so that what is drawn does not depend on the rows beside it.
    """

    def __init__(self, logits: RowLogits, links: Transitions, held: Tensor, *, forbidden: int | None = None):
        self.logits, self.links, self.held, self.forbidden = logits, links, held, forbidden
        self.length = held.shape[1]

    def tiles(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The log marginals of a sample's rows, sample after sample."""
        samples, counts = torch.unique_consecutive(rows // self.length, return_counts=True)
        start = 0
        for sample, fields, count in zip(samples, self._fields(samples), counts.tolist(), strict=True):
            own = slice(start, start + count)
            marginals = ChainCRF.of(fields[None], self.links, held=self.held[sample][None]).log_marginals()[0]
            yield own, marginals[rows[own] % self.length], None
            start = own.stop

    def draw_texts(self, samples: Tensor, u: Tensor, *, filter: Filter | None) -> Tensor:
        """Texts drawn from the chain, all positions together: int64 [n, L]. A temperature divides fields and links."""
        temperature = 1.0 if filter is None else filter.temperature
        together = 1 if self.held.device.type == "cpu" else _SAMPLES
        fields, texts = self._fields(samples), []
        for own_samples, own_u in zip(
            torch.split(samples, together), torch.split(u.to(self.held.device), together), strict=True
        ):
            own = torch.cat([next(fields) for _ in own_samples])
            own = own if filter is None else filter(own)
            chain = ChainCRF.of(
                own.view(*own_u.shape, -1), self.links, held=self.held[own_samples], temperature=temperature
            )
            texts.append(chain.draw(own_u))
        return torch.cat(texts)

    def _fields(self, samples: Tensor) -> Iterator[Tensor]:
        """u of one sample after the other, in memory of its own, float32 or finer: [L, V] each."""
        rows = samples[:, None] * self.length + torch.arange(self.length, device=samples.device)
        waiting: list[Tensor] = []
        for _, tile, own in self.logits.tiles(rows.flatten()):
            waiting.append(tile if own is None else tile[own])
            while sum(map(len, waiting)) >= self.length:
                joined = torch.cat(waiting)
                fields, waiting = joined[: self.length], [joined[self.length :]]
                fields = fields.to(torch.float64 if fields.dtype == torch.float64 else torch.float32)
                if self.forbidden is not None:
                    fields[:, self.forbidden] = -torch.inf
                yield fields


@dataclass(frozen=True)
class Step:
    """One step of a trajectory: from x_t at time t [B] to x_next at t_next [B]; `jumps` are the changed positions.

    With churn, t is the time gone back to and x_t the state renoised to it, not the last step's x_next.
    """

    index: int
    t: Tensor
    t_next: Tensor
    x_t: Tensor
    x_next: Tensor
    jumps: Tensor


def trajectory(
    denoiser: Denoiser | SplitDenoiser,
    path: MixturePath,
    x_0: Tensor,
    *,
    grid: Grid,
    noise: Noise,
    jump: Jump = JUMPS["exact"],
    frozen: Tensor | None = None,
    filter: Filter | None = None,
    hook: LogitsHook | None = None,
    churn: float = 0.0,
) -> Iterator[Step]:
    """GenerationRun from x_0 along the grid, one network call a step, and yield every step.

    jump     the rule of a step; the closed form `ExactJump` unless another is given
    frozen   positions that keep their token, bool [B, L]: prompts, known words of an infill, intact words of a repair
    filter   temperature, top-k, top-p
    hook     changes logits before they are used
    churn    opt-in renoising: a step of size h first goes back by churn * h to a time s >= 0 (`MixturePath.renoise`: exact,
             no network call; under the mask source it remasks), then forward from s
    """
    _check(path, x_0, grid, noise=noise, frozen=frozen, churn=churn)
    return _walk(
        denoiser, path, x_0, grid=grid, noise=noise, jump=jump, frozen=frozen, filter=filter, hook=hook, churn=churn
    )


def _walk(
    denoiser: Denoiser | SplitDenoiser,
    path: MixturePath,
    x_0: Tensor,
    *,
    grid: Grid,
    noise: Noise,
    jump: Jump,
    frozen: Tensor | None,
    filter: Filter | None,
    hook: LogitsHook | None,
    churn: float,
) -> Iterator[Step]:
    batch, device = len(x_0), x_0.device
    precise = torch.float32 if device.type == "mps" else torch.float64
    x_t, bounds = x_0, torch.empty(batch, 0, dtype=torch.float64)
    for index in range(grid.steps):
        t = grid.times[..., index].expand(batch)
        t_next = grid.times[..., index + 1].expand(batch)
        if churn:
            t_back = (t - churn * (t_next - t)).clamp(min=0)
            renoised = path.renoise(x_t, t, t_back, noise, step=index)
            x_t = renoised if frozen is None else torch.where(frozen, x_t, renoised)
            t = t_back
        redraws = jump.redraws(path.schedule, t, t_next)
        with torch.no_grad():
            logits = ask(denoiser, x_t, t.to(device, precise), (t_next - t).to(device, precise))
            if hook is not None:
                logits = _HookedLogits(logits, hook, (x_t, t, t_next))
            logits = linked(logits, denoiser, path, x_t, frozen)
            x_next, jumps = advance(
                x_t,
                logits,
                redraws,
                jump=jump,
                path=path,
                noise=noise,
                step=index,
                earlier_bounds=bounds,
                frozen=frozen,
                filter=None if filter is None else filter.at(index, grid.steps),
            )
        bounds = torch.cat([bounds, -torch.expm1(-redraws)[:, None]], -1)
        yield Step(index, t, t_next, x_t, x_next, jumps)
        x_t = x_next


def _last_state(walk: Callable[_P, Iterator[Step]]) -> Callable[_P, Tensor]:
    def sample(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        (last,) = deque(walk(*args, **kwargs), maxlen=1)
        return last.x_next

    sample.__doc__ = "x_1, int64 [B, L]: the last state of `trajectory`, whose arguments it takes."
    sample.__signature__ = signature(walk).replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    return sample


sample = _last_state(trajectory)


def ask(denoiser: Denoiser | SplitDenoiser, x_t: Tensor, t: Tensor, h: Tensor) -> RowLogits:
    """What a denoiser says of x_t [B, L] at times t for steps of size h [B]: the logits of any rows."""
    if isinstance(denoiser, PickyDenoiser):
        return PickedLogits(denoiser, x_t, t, h)
    if isinstance(denoiser, SplitDenoiser):
        return SplitLogits(denoiser, denoiser.trunk(x_t, t, h))
    return DenseLogits(denoiser(x_t, t, h))


def linked(
    logits: RowLogits, denoiser: object, path: MixturePath, x_t: Tensor, frozen: Tensor | None = None
) -> RowLogits:
    """The logits as the fields of a chain where the denoiser has links; what cannot move in x_t is certain there."""
    links = transitions_of(denoiser)
    if links is None:
        return logits
    certain = ~path.source.movable(x_t) if frozen is None else frozen | ~path.source.movable(x_t)
    return CRFLogits(logits, links, torch.where(certain, x_t, -1), forbidden=path.source.mask_token)


def _check(path: MixturePath, x_0: Tensor, grid: Grid, *, noise: Noise, frozen: Tensor | None, churn: float) -> None:
    if x_0.ndim != 2 or x_0.dtype != torch.int64 or x_0.numel() == 0:
        raise ValueError(f"x_0 is {x_0.dtype} {tuple(x_0.shape)}; it must be int64 [samples, positions], not empty")
    if int(x_0.min()) < 0 or int(x_0.max()) >= path.source.vocab_size:
        raise ValueError(f"x_0 holds a token outside 0 .. {path.source.vocab_size - 1}, the vocabulary of the source")
    require_rows(noise, len(x_0))
    if frozen is not None and (frozen.shape != x_0.shape or frozen.dtype != torch.bool):
        raise ValueError(f"frozen is {frozen.dtype} {tuple(frozen.shape)}; it must be bool {tuple(x_0.shape)}")
    if grid.times.ndim == 2 and len(grid.times) != len(x_0):
        raise ValueError(f"the grid has times for {len(grid.times)} rows and x_0 has {len(x_0)}")
    if not 0 <= churn < float("inf"):
        raise ValueError(f"churn is {churn}; allowed are finite numbers >= 0")
    if churn and not isinstance(path.coupling, IndependentCoupling):
        raise ValueError("churn needs a path with the independent coupling; leave it out")
