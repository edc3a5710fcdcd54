"""The one loop: requests of equal length through the sampler, a block at a time.

A `GenerationRun` asks for what it needs to know (`events` yields questions and receives posteriors) and tells of every
step; `run` answers its own questions, a server those of many runs at once.

A row no longer than the training length is one block. A longer one is cut into overlapping blocks: each begins half a
block before the end of the one before, and what is decided there stands fast. A canvas model (`fsdfm.model.context`)
writes canvas after canvas and reads each once it is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdfm.checkpoint import Checkpoint
from fsdfm.flow import Denoiser, Grid, MixturePath, Posterior, Question, Sampler
from fsdfm.flow.posterior import BannedTokens, LogitsHook, Rows
from fsdfm.generate.blind import JUDGED_AT, consistent_time, find_damage, find_recurring, leave_one_out
from fsdfm.generate.cache import PromptCache
from fsdfm.generate.config import SamplerConfig
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.generate.request import MAX_BLOCKS, MAX_CANVASES, Request, longest_text
from fsdfm.generate.result import Generation, State, pieces_of
from fsdfm.model.context import Context
from fsdfm.noise import Noise
from fsdfm.peers.llada import Guided

__all__ = ["GenerationRun", "StepState", "blocks_of", "cut_blocks", "least_known"]

_NEAR = 0.1  # of log2 h: a step size within 7 % of a trained one passes for it
_FINEST = 2.0**-10  # the step size of a plain posterior, for models that do not say theirs


def cut_blocks(length: int, size: int, *, extra: int = 0) -> list[range]:
    """Blocks that cover 0 .. length-1: `size` positions, in later blocks `extra` fewer, half of them seen before."""
    most = longest_text(size, extra=extra)
    if length > most:
        raise ValueError(
            f"{length} tokens are too many; at most {most} are possible, {MAX_BLOCKS} blocks: ask for less"
        )
    blocks, inner = [range(min(length, size))], size - extra
    while blocks[-1].stop < length:
        stop = min(blocks[-1].stop + (inner + 1) // 2, length)
        blocks.append(range(max(0, stop - inner), stop))
    return blocks


def cut_canvases(length: int, size: int) -> list[range]:
    """Canvases that cover 0 .. length-1."""
    if length > MAX_CANVASES * size:
        raise ValueError(
            f"{length} tokens are too many; at most {MAX_CANVASES * size} are possible, {MAX_CANVASES} canvases of "
            f"{size}: ask for less"
        )
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def blocks_of(checkpoint: Checkpoint, length: int) -> list[range]:
    """What a text of so many tokens is written in: canvases where the model has them, else overlapping blocks."""
    canvas: int | None = getattr(checkpoint.model.config, "canvas", None)
    if canvas is not None:
        return cut_canvases(length, canvas)
    return cut_blocks(length, checkpoint.length, extra=int(checkpoint.bos_id is not None))


def least_known(request: Request, blocks: Sequence[range]) -> tuple[float, int]:
    """(the share that is known of the block of which least is known when its turn comes, blocks with a turn)."""
    known, shares = [*request.frozen], []
    for block in blocks:
        own = [known[place] for place in block if place >= request.num_bos]
        if not all(own):
            shares.append(sum(own) / len(own))
        known[block.start : block.stop] = [True] * len(block)
    return min(shares, default=0.0), max(1, len(shares))


@dataclass(frozen=True)
class StepState:
    """A step of a block: which rows it belongs to [n], their times [n], and what it changed, bool [n, length].

    done   whether it was the last of its block
    """

    block: int
    step: int
    rows: Tensor
    t: Tensor
    changed: Tensor
    done: bool = False


Event = Question | StepState
Observer = Callable[[Tensor, Rows], None]
"""Sees the logits of every step, [N, V], and which rows of the run they belong to; changes nothing."""


class GenerationRun:
    """Some requests of equal length on their way: `run` to the end, then take the `results`.

    observe   looks on while the model speaks
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        network: BatchInvariant,
        requests: Sequence[Request],
        *,
        config: SamplerConfig,
        observe: Observer | None = None,
    ):
        self.checkpoint, self.network, self.requests, self.config = checkpoint, network, requests, config
        self.observe, self.warnings = observe, list[str]()
        self.steps = config.num_steps()
        self.canvas: int | None = getattr(checkpoint.model.config, "canvas", None)
        self.contexts: list[Context | None] = [None] * len(requests)
        self.extra = int(checkpoint.bos_id is not None and self.canvas is None)
        self.blocks = self._cut()
        self.x = torch.tensor([request.tokens for request in requests])
        self.frozen = torch.tensor([request.frozen for request in requests])
        self.draft = torch.tensor([request.draft for request in requests])
        self.blind = torch.tensor([request.blind for request in requests])
        self.suspected = torch.zeros_like(self.frozen)
        self.recurring = torch.zeros_like(self.frozen)
        self.recurring[self.blind] = find_recurring(self.x[self.blind], checkpoint.path.source.vocab_size)
        self.ends = torch.tensor([request.ends for request in requests])
        self.decided = torch.zeros_like(self.frozen)
        self.last_changed = torch.zeros_like(self.x)
        self.changes = torch.zeros(len(requests), self.steps, dtype=torch.int64)
        self.calls = torch.zeros(len(requests), dtype=torch.int64)
        self.asked = torch.zeros_like(self.calls)  # calls without those that a text had nothing to ask in
        self.num_blocks = torch.zeros_like(self.calls)
        self.starts = torch.full((len(requests),), math.nan, dtype=torch.float64)
        self.seconds = torch.zeros(len(requests), dtype=torch.float64)
        self.states: list[list[State]] = [[] for _ in requests]

    def run(self) -> Iterator[StepState]:
        """Every step of every block, the questions answered by the own network."""
        events = self.events()
        answer: Posterior | None = None
        while True:
            try:
                event = events.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(event, Question):
                asked = event.denoiser or self.network
                answer = asked.posterior(event.x_t, event.t, event.h, rows=event.rows)
            else:
                yield event

    def events(self) -> Generator[Event, Posterior | None, None]:
        """Questions, each to be answered with a posterior, and steps; a text that has ended takes no further block."""
        began = time.perf_counter()
        for block, positions in enumerate(self.blocks):
            columns = torch.arange(positions.start, positions.stop)
            rows = self._open_rows(columns)
            if self.canvas is not None and block:
                self._read(self.blocks[block - 1])
            if len(rows):
                yield from self._run_block(block, rows, columns)
                self.seconds[rows] = time.perf_counter() - began
            self.decided[:, columns] = True

    def state(self, at: StepState, row: int) -> State:
        """The text of a row after a step."""
        place = int((at.rows == row).nonzero()[0, 0])
        part = slice(self.requests[row].num_bos, self.blocks[at.block].stop)
        return State(
            step=at.step,
            steps=self.steps,
            block=at.block,
            t=float(at.t[place]),
            tokens=tuple(self.x[row, part].tolist()),
            changed=tuple(at.changed[place, part].tolist()),
            given=tuple(self.frozen[row, part].tolist()),
            tokenizer=self.checkpoint.tokenizer,
        )

    def tokens(self, row: int, start: int, stop: int) -> list[int]:
        """The tokens of a text at positions start .. stop-1, up to its end and without what begins it."""
        request, end = self.requests[row], self._end(row)
        last = stop if end is None else min(stop, end)
        found: list[int] = self.x[row, max(start, request.num_bos) : last].tolist()
        return found

    def results(self) -> list[Generation]:
        """What came of every request, in their order."""
        return [self._result(row) for row in range(len(self.requests))]

    def _cut(self) -> list[range]:
        """The blocks of these texts, and a warning where there are several."""
        length, size = len(self.requests[0].tokens), self.checkpoint.length
        blocks = blocks_of(self.checkpoint, length)
        if self.canvas is not None:
            self._warn_of_suffixes(self.canvas)
        elif len(blocks) > 1:
            self._warn(
                f"{length} tokens are more than the {size} this model was trained on; they are written in "
                f"{len(blocks)} overlapping blocks, each with its own network calls, and only a half of the block "
                "before is remembered"
            )
        return blocks

    def _warn_of_suffixes(self, size: int) -> None:
        """Say where something is given behind the canvas that is written first."""
        for request in self.requests:
            free = [i for i, frozen in enumerate(request.frozen) if not frozen]
            if any(request.frozen[(free[0] // size + 1) * size :]):
                self._warn(
                    f"this model writes {size} tokens at a time after what stands before; what is given further "
                    "behind is not seen until then"
                )

    def _read(self, positions: range) -> None:
        """Let every unfinished text read its last canvas."""
        for row in range(len(self.requests)):
            if self._end(row) is None:
                tokens = self.x[row : row + 1, positions.start : positions.stop].to(self.network.runtime.device)
                self.contexts[row] = self.network.read(tokens, self.contexts[row])

    # --- one block ----------------------------------------------------------------------------------------------------

    def _open_rows(self, columns: Tensor) -> Tensor:
        """The rows that have something left to write in these columns."""
        unfinished = torch.tensor([self._end(row) is None for row in range(len(self.requests))])
        frozen = (self.frozen | self.decided)[:, columns]
        return (unfinished & ~frozen.all(-1)).nonzero()[:, 0]

    def _run_block(self, block: int, rows: Tensor, columns: Tensor) -> Generator[Event, Posterior | None, None]:
        path, config, device = self.checkpoint.path, self.config, self.network.runtime.device
        extra = self.extra if block else 0
        frozen = _prepend((self.frozen | self.decided)[rows][:, columns], extra, True)
        x_t = _prepend(self.x[rows][:, columns], extra, self.checkpoint.bos_id)
        if bool(self.blind[rows].any()):
            frozen = yield from self._freeze_likely(x_t, frozen, rows, columns=columns, extra=extra)
            rows, x_t, frozen = yield from self._leave_whole(block, rows, x_t, frozen=frozen)
            if not len(rows):
                return
        num_bos = torch.tensor([extra or self.requests[row].num_bos for row in rows.tolist()])
        noise = Noise(config.seed, [self.requests[row].sample_index(block) for row in rows.tolist()])
        kept = frozen | self.draft[rows][:, None]
        x_t = torch.where(kept, x_t, path.source.sample(noise, x_t.shape[1]))
        denoiser = self._denoiser(rows)
        x_t, starts = yield from self._start(x_t, frozen, rows, num_bos=num_bos, noise=noise)
        grid = config.make_grid(starts, path.schedule)
        self._warn_of_step_sizes(grid)
        self.starts[rows] = torch.where(self.starts[rows].isnan(), starts, self.starts[rows])
        self.x[rows[:, None], columns] = x_t[:, extra:]
        nothing = torch.zeros_like(self.frozen[rows])
        yield self._told(StepState(block, 0, rows, starts, nothing))
        sampler = Sampler(
            path,
            x_t.to(device),
            grid=grid,
            noise=noise,
            rule=config.rule(),
            frozen=frozen.to(device),
            filter=config.filter(),
            hook=self._hook(rows, columns, extra),
            renoise=config.renoise,
            origin=torch.where(self.draft[rows], 0.0, starts),
        )
        guided = self._guided(frozen)
        denoiser, cost = guided or denoiser or self._cached(frozen), 1 if guided is None else 2
        while not sampler.done:
            question = replace(sampler.question(), denoiser=denoiser)
            self.asked[rows] += cost * _asked(question)
            self.calls[rows] += cost
            step = sampler.answer(_answered((yield question)))
            before, after = self.x[rows[:, None], columns], step.x_next[:, extra:].cpu()
            self.x[rows[:, None], columns] = after
            changed = nothing.clone()
            changed[:, columns] = after != before
            self.last_changed[rows] = torch.where(changed, step.index + 1, self.last_changed[rows])
            self.changes[rows, step.index] += changed.sum(-1)
            yield self._told(StepState(block, step.index + 1, rows, step.t_next, changed, sampler.done))
        self.num_blocks[rows] += 1

    def _denoiser(self, rows: Tensor) -> Denoiser | None:
        """Who is asked about these rows where they have read something; None: the network."""
        contexts = [self.contexts[row] for row in rows.tolist()]
        return self.network.after(contexts) if any(context is not None for context in contexts) else None

    def _cached(self, frozen: Tensor) -> Denoiser | None:
        """Who is asked where the keys and values of what is given are kept; None: the network."""
        refresh = self.config.refresh()
        if refresh is None or not bool(frozen.any()):
            return None
        return PromptCache(self.network, frozen, refresh=refresh)

    def _guided(self, frozen: Tensor) -> Denoiser | None:
        """Who is asked where the rule wants guidance away from the text without its prompt; None: the network."""
        guidance, mask_token = getattr(self.config.rule(), "guidance", 0.0), self.checkpoint.path.source.mask_token
        if not guidance or not bool(frozen.any()) or mask_token is None:
            return None
        if self.canvas is not None or self.config.refresh() is not None:
            raise ValueError("guidance asks the network about whole texts twice; leave --cache out, or guidance")
        known = frozen.to(self.network.runtime.device)
        return Guided(self.network, known, guidance=guidance, mask_token=mask_token)

    # --- blind repair -------------------------------------------------------------------------------------------------

    def _freeze_likely(
        self, x_t: Tensor, frozen: Tensor, rows: Tensor, *, columns: Tensor, extra: int
    ) -> Generator[Question, Posterior | None, Tensor]:
        """What stands fast where texts are repaired blind: all but the tokens that are likely wrong."""
        blind = self.blind[rows]
        path, device = self.checkpoint.path, self.network.runtime.device
        shown, told = x_t[blind].to(device), self._times(_judging_time(path), int(blind.sum()))
        posterior = _answered((yield Question(shown, told, self._finest(told), None, self._denoiser(rows[blind]))))
        self.calls[rows[blind]] += 1
        log_odds = _shown_log_odds(posterior, shown, mask_token=path.source.mask_token)
        scores = leave_one_out(path, log_odds, x_t[blind], kappa=JUDGED_AT)
        damaged = find_damage(scores, ~frozen[blind], path.source.vocab_size)
        damaged &= ~_prepend(self.recurring[rows[blind]][:, columns], extra, True)
        self.suspected[rows[blind][:, None], columns] |= damaged[:, extra:]
        frozen = frozen.clone()
        frozen[blind] |= ~damaged
        return frozen

    def _leave_whole(
        self, block: int, rows: Tensor, x_t: Tensor, *, frozen: Tensor
    ) -> Generator[Event, Posterior | None, tuple[Tensor, Tensor, Tensor]]:
        """Rows, tokens and what stands fast of the texts that have something to mend; the others are done here."""
        whole = frozen.all(-1)
        if bool(whole.any()):
            done = rows[whole]
            self.num_blocks[done] += 1
            yield self._told(StepState(block, 0, done, torch.ones(len(done)), torch.zeros_like(self.frozen[done])))
        return rows[~whole], x_t[~whole], frozen[~whole]

    def _times(self, t: float, num: int) -> Tensor:
        """The same time for `num` rows, as the network is told it."""
        device = self.network.runtime.device
        return torch.full((num,), t, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)

    def _finest(self, told: Tensor) -> Tensor:
        """The smallest step size that the model knows, as far as there is time for it."""
        finest = 1 / max(self.checkpoint.budgets) if self.checkpoint.budgets else _FINEST
        return (1 - told).clamp(max=finest)

    def _told(self, state: StepState) -> StepState:
        """The state of a step, kept where states are asked for."""
        if self.config.keep_states:
            for row in state.rows.tolist():
                self.states[row].append(self.state(state, row))
        return state

    def _start(
        self, x_t: Tensor, frozen: Tensor, rows: Tensor, *, num_bos: Tensor, noise: Noise
    ) -> Generator[Question, Posterior | None, tuple[Tensor, Tensor]]:
        """x_{t_0} and t_0 of every row.

        A share k of known tokens is what the path shows at kappa^-1(k). A draft has a time of its own; to start before
        it, it is renoised, which is exact.
        """
        path, fixed = self.checkpoint.path, self.config.fixed_start()
        inside = torch.arange(x_t.shape[1]) >= num_bos[:, None]
        share = (frozen & inside).sum(-1).to(torch.float64) / inside.sum(-1)
        starts = path.schedule.kappa_inverse(share)
        draft = self.draft[rows]
        if bool(draft.any()):
            found = yield from self._estimate(x_t[draft], ~frozen[draft], rows[draft])
            starts[draft] = found
            if fixed is not None:
                back = found.clamp(max=fixed)
                renoised = path.renoise(x_t[draft], found, back, noise=noise[draft])
                x_t[draft] = torch.where(frozen[draft], x_t[draft], renoised)
        return x_t, starts if fixed is None else torch.full_like(starts, fixed)

    def _estimate(self, x_t: Tensor, free: Tensor, rows: Tensor) -> Generator[Question, Posterior | None, Tensor]:
        """The time of drafts x_t [n, L] whose free positions are unknown to be right: [n]."""
        path, device = self.checkpoint.path, self.network.runtime.device
        precise = torch.float32 if device.type == "mps" else torch.float64
        search = consistent_time(path, free.sum(-1))
        t = next(search)
        while True:
            told = t.to(device, precise)
            posterior = yield Question(x_t.to(device), told, self._finest(told), None, self._denoiser(rows))
            self.calls[rows] += 1
            log_odds = _shown_log_odds(_answered(posterior), x_t.to(device), mask_token=path.source.mask_token)
            shown = torch.sigmoid(log_odds)
            try:
                t = search.send(torch.where(free, shown, 0.0).sum(-1) / free.sum(-1))
            except StopIteration as found:
                time: Tensor = found.value
                return time

    def _hook(self, rows: Tensor, columns: Tensor, extra: int) -> LogitsHook | None:
        """What is banned from the texts, and who looks on."""
        ban, observe = self._ban(rows), self.observe
        if observe is None:
            return ban

        def hook(logits: Tensor, where: Rows) -> Tensor:
            logits = logits if ban is None else ban(logits, where)
            own = where.position >= extra
            place = columns.to(where.position.device)[where.position[own] - extra]
            sample = rows.to(where.sample.device)[where.sample[own]]
            observe(logits if bool(own.all()) else logits[own], replace(where, sample=sample, position=place))
            return logits

        return hook

    def _ban(self, rows: Tensor) -> LogitsHook | None:
        """Keep BOS out of every text, and the end of a document out of those that may not end."""
        eos, closed = self.checkpoint.tokenizer.eos_id, ~self.ends[rows]
        bos = eos if self.checkpoint.bos_id is None else self.checkpoint.bos_id  # one token may be both
        if bos == eos and not bool(closed.any()):
            return None
        return BannedTokens({eos: closed} | ({} if bos == eos else {bos: torch.ones_like(closed)}))

    def _warn_of_step_sizes(self, grid: Grid) -> None:
        """Say where somebody chose steps that the model was not trained for.

        A trained budget is known however much is given: its steps are then shorter, and the model is told their true
        size: a trained one near it in its place made worse text in one call and no other in eight (lab notes).
        """
        budgets, config = self.checkpoint.budgets, self.config
        if budgets is None:
            return
        if self.steps in budgets and config.grid == "uniform" and config.fixed_start() is None and not config.renoise:
            return
        sizes = torch.log2(self._told_sizes(grid).flatten())
        distance = (sizes[:, None] + torch.log2(torch.tensor(budgets, dtype=torch.float64))).abs().amin(-1)
        worst = int(distance.argmax())
        if float(distance[worst]) > _NEAR:
            self._warn(
                f"a step has the size h = 1/{float(2 ** -sizes[worst]):.4g}, and this model was trained for "
                f"{', '.join(f'1/{budget}' for budget in budgets)}; it works, at a loss perhaps"
            )

    def _told_sizes(self, grid: Grid) -> Tensor:
        """The step sizes that the model is told: longer where a step goes back first."""
        t, t_next = grid.times[..., :-1], grid.times[..., 1:]
        back = torch.where(t_next < 1, self.config.renoise * (t_next - t), 0.0).minimum(t)
        return t_next - t + back

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def _end(self, row: int) -> int | None:
        """Where a row that may end early has ended: the first EOS behind everything given."""
        if not self.ends[row]:
            return None
        behind = int(self.frozen[row].nonzero()[-1, 0]) + 1 if bool(self.frozen[row].any()) else 0
        ends = (self.x[row] == self.checkpoint.tokenizer.eos_id) & self.decided[row]
        found = ends[behind:].nonzero()
        return behind + int(found[0, 0]) if len(found) else None

    def _result(self, row: int) -> Generation:
        request, end = self.requests[row], self._end(row)
        part = slice(request.num_bos, end)
        tokens = tuple(self.x[row, part].tolist())
        pieces = pieces_of(self.checkpoint.tokenizer, tokens)
        asked, none = request.tokens[part] if request.damaged else tokens, (False,) * len(tokens)
        return Generation(
            text="".join(pieces),
            tokens=tokens,
            pieces=pieces,
            given=request.frozen[part],
            marked=tuple(self.suspected[row, part].tolist()) if request.blind else request.damaged[part] or none,
            replaced=tuple(a != b for a, b in zip(asked, tokens, strict=True)),
            last_changed=tuple(self.last_changed[row, part].tolist()),
            changes=tuple(self.changes[row].tolist()),
            steps=self.steps,
            start=float(self.starts[row].nan_to_num(1.0)),
            blocks=int(self.num_blocks[row]),
            calls=int(self.calls[row]),
            seconds=float(self.seconds[row]),
            seed=self.config.seed,
            copy=request.copy,
            finished=end is not None,
            states=tuple(self.states[row]),
            warnings=tuple(self.warnings),
        )


def _prepend(values: Tensor, extra: int, value: int | bool | None) -> Tensor:
    """A column of `value` before the others, if there is one extra."""
    return values if not extra else torch.cat([torch.full_like(values[:, :1], value), values], 1)  # type: ignore[arg-type]


def _asked(question: Question) -> Tensor:
    """Whether a question is about each of its texts, 1 or 0: one that nothing is asked about needs no call; [n]."""
    count, length = question.x_t.shape
    if question.rows is None:
        return torch.ones(count, dtype=torch.int64)
    return torch.bincount(question.rows.cpu() // length, minlength=count).clamp(max=1)


def _answered(posterior: Posterior | None) -> Posterior:
    if posterior is None:
        raise ValueError("a question was not answered; send the posterior that it asks for")
    return posterior


def _judging_time(path: MixturePath) -> float:
    return float(path.schedule.kappa_inverse(torch.tensor(JUDGED_AT, dtype=torch.float64)))


def _shown_log_odds(posterior: Posterior, x_t: Tensor, *, mask_token: int | None) -> Tensor:
    """logit p_{1|t}(x_t^i | x_t), the log-odds of the token that is shown: float64 [B, L].

    The other tokens are summed without it, so that the digits stay where it is nearly certain.
    """
    posterior = posterior.given(torch.full_like(x_t, -1), forbidden=mask_token)
    tokens, found = x_t.flatten(), torch.empty(x_t.numel(), dtype=torch.float64)
    for part, tile, own in posterior.marginals(torch.arange(x_t.numel(), device=x_t.device)):
        wide = (tile if own is None else tile[own]).to(torch.float32, copy=True)
        if mask_token is not None:
            wide[:, mask_token] = -torch.inf
        shown = wide.gather(-1, tokens[part, None])
        others = wide.scatter(-1, tokens[part, None], -torch.inf).logsumexp(-1)
        found[part] = (shown[:, 0].double() - others.double()).cpu()
    return found.view(x_t.shape)
