"""The one loop: rows of equal length through the sampler, a block at a time, every step given away.

A row no longer than the training length is one block. A longer one is cut into overlapping blocks: each begins half a
block before the end of the one before, and what is decided there stands fast.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdfm.checkpoint import Checkpoint
from fsdfm.flow import Grid, trajectory
from fsdfm.flow.posterior import LogitsHook, Rows
from fsdfm.generate.blind import HALVINGS, consistent_time
from fsdfm.generate.config import SamplerConfig
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.generate.request import MAX_BLOCKS, Request
from fsdfm.generate.result import Generation, State, pieces_of
from fsdfm.noise import Noise

__all__ = ["GenerationRun", "StepState", "cut_blocks"]

_NEAR = 0.1  # of log2 h: a step size within 7 % of a trained one passes for it
_FINEST = 2.0**-10  # the step size of a plain posterior, for models that do not say theirs


def cut_blocks(length: int, size: int, *, extra: int = 0) -> list[range]:
    """Blocks that cover 0 .. length-1: `size` positions, in later blocks `extra` fewer, half of them seen before."""
    blocks, inner = [range(min(length, size))], size - extra
    while blocks[-1].stop < length:
        stop = min(blocks[-1].stop + (inner + 1) // 2, length)
        blocks.append(range(max(0, stop - inner), stop))
    return blocks


@dataclass(frozen=True)
class StepState:
    """A step of a block: which rows it belongs to [n], their times [n], and what it changed, bool [n, length]."""

    block: int
    step: int
    rows: Tensor
    t: Tensor
    changed: Tensor


class GenerationRun:
    """Some requests of equal length on their way: `run` to the end, then take the `results`."""

    def __init__(
        self, bundle: Checkpoint, network: BatchInvariant, requests: Sequence[Request], settings: SamplerConfig
    ):
        self.bundle, self.network, self.requests, self.settings = bundle, network, requests, settings
        self.steps = settings.num_steps()
        self.extra = int(bundle.bos_id is not None)
        self.blocks = _check_blocks(len(requests[0].tokens), bundle.length, self.extra)
        self.x = torch.tensor([request.tokens for request in requests])
        self.given = torch.tensor([request.given for request in requests])
        self.draft = torch.tensor([request.draft for request in requests])
        self.ends = torch.tensor([request.ends for request in requests])
        self.decided = torch.zeros_like(self.given)
        self.last_changed = torch.zeros_like(self.x)
        self.changes = torch.zeros(len(requests), self.steps, dtype=torch.int64)
        self.calls = torch.zeros(len(requests), dtype=torch.int64)
        self.num_blocks = torch.zeros_like(self.calls)
        self.starts = torch.full((len(requests),), math.nan, dtype=torch.float64)
        self.seconds = torch.zeros(len(requests), dtype=torch.float64)
        self.states: list[list[State]] = [[] for _ in requests]

    def run(self) -> Iterator[StepState]:
        """Every step of every block; a text that has ended takes no further block."""
        began = time.perf_counter()
        for block, positions in enumerate(self.blocks):
            columns = torch.arange(positions.start, positions.stop)
            rows = self._open_rows(columns)
            if len(rows):
                for moment in self._run_block(block, rows, columns):
                    if self.settings.keep_states:
                        for row in rows.tolist():
                            self.states[row].append(self.state(moment, row))
                    yield moment
                self.seconds[rows] = time.perf_counter() - began
            self.decided[:, columns] = True

    def state(self, moment: StepState, row: int) -> State:
        """The text of a row at a moment."""
        place = int((moment.rows == row).nonzero()[0, 0])
        part = slice(self.requests[row].lead, self.blocks[moment.block].stop)
        return State(
            step=moment.step,
            steps=self.steps,
            block=moment.block,
            t=float(moment.t[place]),
            tokens=tuple(self.x[row, part].tolist()),
            changed=tuple(moment.changed[place, part].tolist()),
            given=tuple(self.given[row, part].tolist()),
            tokenizer=self.bundle.tokenizer,
        )

    def results(self) -> list[Generation]:
        """What came of every request, in their order."""
        return [self._result(row) for row in range(len(self.requests))]

    # --- one block ----------------------------------------------------------------------------------------------------

    def _open_rows(self, columns: Tensor) -> Tensor:
        """The rows that have something left to write in these columns."""
        unfinished = torch.tensor([self._end(row) is None for row in range(len(self.requests))])
        frozen = (self.given | self.decided)[:, columns]
        return (unfinished & ~frozen.all(-1)).nonzero()[:, 0]

    def _run_block(self, block: int, rows: Tensor, columns: Tensor) -> Iterator[StepState]:
        path, settings, device = self.bundle.path, self.settings, self.network.runtime.device
        extra = self.extra if block else 0
        frozen = _prepend((self.given | self.decided)[rows][:, columns], extra, True)
        x_t = _prepend(self.x[rows][:, columns], extra, self.bundle.bos_id)
        leads = torch.tensor([extra or self.requests[row].lead for row in rows.tolist()])
        noise = Noise(settings.seed, [self.requests[row].sample_index(block) for row in rows.tolist()])
        kept = frozen | self.draft[rows][:, None]
        x_t = torch.where(kept, x_t, path.source.sample(noise, x_t.shape[1]))
        x_t, starts = self._start(x_t, frozen, rows, leads=leads, noise=noise)
        grid = settings.make_grid(starts, path.schedule)
        self._warn_of_step_sizes(grid)
        self.starts[rows] = torch.where(self.starts[rows].isnan(), starts, self.starts[rows])
        self.x[rows[:, None], columns] = x_t[:, extra:]
        nothing = torch.zeros_like(self.given[rows])
        yield StepState(block, 0, rows, starts, nothing)
        for step in trajectory(
            self.network,
            path,
            x_t.to(device),
            grid=grid,
            noise=noise,
            rule=settings.rule(),
            frozen=frozen.to(device),
            filter=settings.filter(),
            hook=self._ban(rows),
        ):
            self.x[rows[:, None], columns] = step.x_next[:, extra:].cpu()
            changed = nothing.clone()
            changed[:, columns] = step.jumps[:, extra:].cpu()
            self.last_changed[rows] = torch.where(changed, step.index + 1, self.last_changed[rows])
            self.changes[rows, step.index] += changed.sum(-1)
            yield StepState(block, step.index + 1, rows, step.t_next, changed)
        self.calls[rows] += self.steps
        self.num_blocks[rows] += 1

    def _start(
        self, x_t: Tensor, frozen: Tensor, rows: Tensor, *, leads: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """x_{t_0} and t_0 of every row.

        A share k of known tokens is what the path shows at kappa^-1(k). A draft has a time of its own; to start before
        it, it is renoised, which is exact.
        """
        path, fixed = self.bundle.path, self.settings.fixed_start()
        inside = torch.arange(x_t.shape[1]) >= leads[:, None]
        share = (frozen & inside).sum(-1).to(torch.float64) / inside.sum(-1)
        starts = path.schedule.kappa_inverse(share)
        draft = self.draft[rows]
        if bool(draft.any()):
            found = self._estimate(x_t[draft], ~frozen[draft])
            self.calls[rows[draft]] += HALVINGS + 1
            starts[draft] = found
            if fixed is not None:
                back = found.clamp(max=fixed)
                renoised = path.renoise(x_t[draft], found, back, noise[draft])
                x_t[draft] = torch.where(frozen[draft], x_t[draft], renoised)
        return x_t, starts if fixed is None else torch.full_like(starts, fixed)

    def _estimate(self, x_t: Tensor, free: Tensor) -> Tensor:
        """The time of drafts x_t [n, L] whose free positions are unknown to be right: [n]."""
        device = self.network.runtime.device
        precise = torch.float32 if device.type == "mps" else torch.float64
        finest = 1 / max(self.bundle.budgets) if self.bundle.budgets else _FINEST

        def agreement(t: Tensor) -> Tensor:
            told = t.to(device, precise)
            h = (1 - told).clamp(max=finest)
            shown = self.network.shown_probability(
                x_t.to(device), told, h, mask_token=self.bundle.path.source.mask_token
            )
            return torch.where(free, shown, 0.0).sum(-1) / free.sum(-1)

        return consistent_time(agreement, self.bundle.path, free.sum(-1))

    def _ban(self, rows: Tensor) -> LogitsHook | None:
        """Keep BOS out of every text, and the end of a document out of those that may not end."""
        eos, closed = self.bundle.tokenizer.eos_id, ~self.ends[rows]
        bos = eos if self.bundle.bos_id is None else self.bundle.bos_id  # one token may be both
        if bos == eos and not bool(closed.any()):
            return None

        def hook(logits: Tensor, where: Rows) -> Tensor:
            if bos != eos:
                logits[:, bos] = -math.inf
            logits[closed.to(logits.device)[where.sample], eos] = -math.inf
            return logits

        return hook

    def _warn_of_step_sizes(self, grid: Grid) -> None:
        budgets = self.bundle.budgets
        if budgets is None:
            return
        sizes = torch.log2(grid.h.flatten())
        distance = (sizes[:, None] + torch.log2(torch.tensor(budgets, dtype=torch.float64))).abs().amin(-1)
        worst = int(distance.argmax())
        if float(distance[worst]) > _NEAR:
            warnings.warn(
                f"a step has the size h = 1/{float(2 ** -sizes[worst]):.4g}, and this model was trained for "
                f"{', '.join(f'1/{budget}' for budget in budgets)}; it works, at a loss perhaps",
                stacklevel=2,
            )

    # --- what came of it ----------------------------------------------------------------------------------------------

    def _end(self, row: int) -> int | None:
        """Where a row that may end early has ended: the first EOS behind everything given."""
        if not self.ends[row]:
            return None
        behind = int(self.given[row].nonzero()[-1, 0]) + 1 if bool(self.given[row].any()) else 0
        ends = (self.x[row] == self.bundle.tokenizer.eos_id) & self.decided[row]
        found = ends[behind:].nonzero()
        return behind + int(found[0, 0]) if len(found) else None

    def _result(self, row: int) -> Generation:
        request, end = self.requests[row], self._end(row)
        part = slice(request.lead, end)
        tokens = tuple(self.x[row, part].tolist())
        pieces = pieces_of(self.bundle.tokenizer, tokens)
        asked = request.tokens[part] if request.marked else tokens
        return Generation(
            text="".join(pieces),
            tokens=tokens,
            pieces=pieces,
            given=request.given[part],
            marked=request.marked[part] or (False,) * len(tokens),
            replaced=tuple(a != b for a, b in zip(asked, tokens, strict=True)),
            last_changed=tuple(self.last_changed[row, part].tolist()),
            changes=tuple(self.changes[row].tolist()),
            steps=self.steps,
            start=float(self.starts[row]),
            blocks=int(self.num_blocks[row]),
            calls=int(self.calls[row]),
            seconds=float(self.seconds[row]),
            seed=self.settings.seed,
            copy=request.copy,
            finished=end is not None,
            states=tuple(self.states[row]),
        )


def _prepend(values: Tensor, extra: int, value: int | bool | None) -> Tensor:
    """A column of `value` before the others, if there is one extra."""
    return values if not extra else torch.cat([torch.full_like(values[:, :1], value), values], 1)  # type: ignore[arg-type]


def _check_blocks(length: int, size: int, extra: int) -> list[range]:
    most = size + (MAX_BLOCKS - 1) * ((size - extra + 1) // 2)
    if length > most:
        raise ValueError(
            f"{length} tokens are too many; at most {most} are possible, {MAX_BLOCKS} blocks: ask for less"
        )
    blocks = cut_blocks(length, size, extra=extra)
    if len(blocks) > 1:
        warnings.warn(
            f"{length} tokens are more than the {size} this model was trained on; they are written in {len(blocks)} "
            "overlapping blocks, each with its own network calls, and only a half of the block before is remembered",
            stacklevel=2,
        )
    return blocks
