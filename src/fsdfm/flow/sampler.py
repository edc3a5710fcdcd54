"""The sampler: from x_0 along a grid to x_1, one network call per step.

`Sampler` asks: `question()` says what it wants to know (a state, its times, the rows that matter), and
`answer(posterior)` takes the step. Whoever holds several samplers can put their questions into one network call,
whatever step each is in. `trajectory` answers its own questions with a denoiser and yields every step; `sample` is its
last state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import ParamSpec

import torch
from torch import Tensor

from fsdfm.flow.categorical import Filter
from fsdfm.flow.grid import Grid
from fsdfm.flow.path import IndependentCoupling, MixturePath, require_rows
from fsdfm.flow.posterior import Denoiser, LogitsFunction, LogitsHook, Posterior, SplitNetwork, posterior_of
from fsdfm.flow.rule import RULES, Plan, SamplerState, StepRule, require_retreat
from fsdfm.noise import Noise

__all__ = ["Question", "Sampler", "Step", "sample", "trajectory"]

_P = ParamSpec("_P")


@dataclass(frozen=True)
class Question:
    """What a sampler wants to know: p_{1|t}(. | x_t) at these rows, for a step of size h.

    x_t    int64 [B, L]
    t, h   [B] each, in the precision the network is told
    rows   positions b * L + i, in order: int64 [N]; None: any may be asked about
    denoiser   who is to be asked in place of the network, such as one that has read what stands before; None: nobody
    """

    x_t: Tensor
    t: Tensor
    h: Tensor
    rows: Tensor | None
    denoiser: Denoiser | None = None


@dataclass(frozen=True)
class Step:
    """One step of a trajectory: from x_t at time t [B] to x_next at t_next [B]; `jumps` are the changed positions.

    With renoising, t is the time gone back to and x_t the state renoised to it, not the last step's x_next.
    """

    index: int
    t: Tensor
    t_next: Tensor
    x_t: Tensor
    x_next: Tensor
    jumps: Tensor


class Sampler:
    """Walks from x_0 along the grid, a question and an answer per step.

        sampler = Sampler(path, x_0, grid=Grid.uniform(8), noise=noise)
        while not sampler.done:
            asked = sampler.question()
            step = sampler.answer(denoiser.posterior(asked.x_t, asked.t, asked.h, rows=asked.rows))

    rule      how a step is taken; the closed form `ExactJump` unless another is given
    frozen    positions that keep their token, bool [B, L]: prompts, known words of an infill, intact words of a repair
    filter    temperature, top-k, top-p
    hook      changes logits before they are used
    calls     per text, so far: a rule may finish one before the grid is at its end
    renoise   opt-in: a step of size h that does not end at t = 1 first goes back by renoise * h to a time s >= origin
              (`MixturePath.renoise`: exact, no network call; under the mask source it remasks), then forward from s
    origin    the time at which positions that are not frozen were noise alone, [B]: where others were given, kappa^-1
              of their share. 0 unless said

    **What renoising does.** p_t -> p_s is exact for any model, so with the true posterior and h -> 0 the end is p_1 as
    without it. A step is a predictor, and going back and forth a corrector whose fixed point is p_t: the sum of the
    forward and the backward rates of Campbell et al. 2022 (arXiv 2205.14987), whose predictor-corrector is that of Song
    et al. 2021 (2011.13456), and of Gat et al. 2024 (2407.15595). Going back before every step is what Karras
    et al. 2022 (2206.00364) do; ReMDM's remasking (Wang et al. 2025, 2503.00307) is a rate of it under the mask source.
    Whatever laws come in are drawn together: positions that return to the source forget what was wrong about them, and
    of the total variation of two laws over L positions at most 1 - (1 - kappa_s/kappa_t)^L is left. What it costs is
    longer steps, (1 + renoise) h: with the true posterior, where there is nothing to correct, as many calls end further
    from p_1 (by enumeration, tests/flow/test_renoise.py). It gains where a network's errors are larger than those of
    its steps: in many calls. It does not precede the last step, which would be longer, and nothing behind it corrects.
    """

    def __init__(
        self,
        path: MixturePath,
        x_0: Tensor,
        *,
        grid: Grid,
        noise: Noise,
        rule: StepRule = RULES["exact"],
        frozen: Tensor | None = None,
        filter: Filter | None = None,
        hook: LogitsHook | None = None,
        renoise: float = 0.0,
        origin: Tensor | None = None,
    ):
        _check(path, x_0, grid, noise=noise, frozen=frozen, renoise=renoise)
        if renoise:
            require_retreat(rule)
        self.path, self.grid, self.noise, self.rule = path, grid, noise, rule
        self.frozen, self.filter, self.hook, self.renoise = frozen, filter, hook, renoise
        self.origin = torch.zeros(len(x_0), dtype=torch.float64) if origin is None else origin
        self.x, self.index = x_0, 0
        self.calls = torch.zeros(len(x_0), dtype=torch.int64)
        self._memory: dict[str, Tensor] = {}
        self._asked: tuple[SamplerState, Plan] | None = None

    @property
    def done(self) -> bool:
        """Whether the grid is at its end, or the rule says that every text is at its own."""
        finished = self._memory.get("finished")
        return self.index == self.grid.steps or (finished is not None and bool(finished.all()))

    def question(self) -> Question:
        """What the next step wants to know; asked again, the same."""
        if self._asked is None:
            state = self._state()
            self._asked = state, self.rule.plan(state)
        state, plan = self._asked
        device = state.x_t.device
        precise = torch.float32 if device.type == "mps" else torch.float64
        t, h = state.t.to(device, precise), (state.t_next - state.t).to(device, precise)
        return Question(state.x_t, t, h, plan.rows)

    @torch.no_grad()
    def answer(self, posterior: Posterior) -> Step:
        """Take the step with the posterior that was asked for."""
        if self._asked is None:
            raise ValueError("nothing was asked; call question() before answer(posterior)")
        (state, plan), self._asked = self._asked, None
        finished = self._memory.get("finished")
        self.calls += 1 if finished is None else (~finished).to(self.calls)
        if self.hook is not None:
            posterior = posterior.changed(self.hook, state.x_t, t=state.t, t_next=state.t_next)
        held = torch.where(state.movable(), -1, state.x_t)
        x_next = self.rule.apply(state, plan, posterior.given(held, forbidden=self.path.source.mask_token))
        self.x, self.index = x_next, self.index + 1
        return Step(state.index, state.t, state.t_next, state.x_t, x_next, x_next != state.x_t)

    def _state(self) -> SamplerState:
        if self.done:
            raise ValueError(f"all {self.grid.steps} steps are taken; the text is in `x`")
        batch, index, x_t = len(self.x), self.index, self.x
        t = self.grid.times[..., index].expand(batch)
        t_next = self.grid.times[..., index + 1].expand(batch)
        if "t" in self._memory:  # the rest is shared out evenly over the calls that are left
            own = self._memory["t"]
            pace = own + (1 - own) / (self.grid.steps - index)
            t, t_next = torch.where(own < 1, own, t), torch.where(own < 1, pace, t_next)  # of finished ones, any
        if self.renoise:
            t_back = torch.where(t_next < 1, (t - self.renoise * (t_next - t)).maximum(self.origin.minimum(t)), t)
            renoised = self.path.renoise(
                x_t, t, t_back, noise=self.noise, step=index, origin=self.origin.minimum(t_back)
            )
            x_t = renoised if self.frozen is None else torch.where(self.frozen, x_t, renoised)
            t = t_back
        return SamplerState(
            x_t,
            t,
            t_next,
            self.path,
            self.noise,
            index=index,
            steps=self.grid.steps,
            frozen=self.frozen,
            filter=None if self.filter is None else self.filter.at(index, self.grid.steps),
            memory=self._memory,
        )


def trajectory(
    denoiser: Denoiser | SplitNetwork | LogitsFunction,
    path: MixturePath,
    x_0: Tensor,
    *,
    grid: Grid,
    noise: Noise,
    rule: StepRule = RULES["exact"],
    frozen: Tensor | None = None,
    filter: Filter | None = None,
    hook: LogitsHook | None = None,
    renoise: float = 0.0,
) -> Iterator[Step]:
    """Walk from x_0 along the grid, one network call per step, and yield every step: see `Sampler`."""
    sampler = Sampler(
        path, x_0, grid=grid, noise=noise, rule=rule, frozen=frozen, filter=filter, hook=hook, renoise=renoise
    )
    return _walk(sampler, denoiser)


def _walk(sampler: Sampler, denoiser: Denoiser | SplitNetwork | LogitsFunction) -> Iterator[Step]:
    while not sampler.done:
        asked = sampler.question()
        with torch.no_grad():
            step = sampler.answer(posterior_of(denoiser, asked.x_t, asked.t, h=asked.h, rows=asked.rows))
        yield step


def _last_state(walk: Callable[_P, Iterator[Step]]) -> Callable[_P, Tensor]:
    def sample(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        (last,) = deque(walk(*args, **kwargs), maxlen=1)
        return last.x_next

    sample.__doc__ = "x_1, int64 [B, L]: the last state of `trajectory`, whose arguments it takes."
    sample.__signature__ = signature(walk).replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    return sample


sample = _last_state(trajectory)


def _check(path: MixturePath, x_0: Tensor, grid: Grid, *, noise: Noise, frozen: Tensor | None, renoise: float) -> None:
    if x_0.ndim != 2 or x_0.dtype != torch.int64 or x_0.numel() == 0:
        raise ValueError(f"x_0 is {x_0.dtype} {tuple(x_0.shape)}; it must be int64 [samples, positions], not empty")
    if int(x_0.min()) < 0 or int(x_0.max()) >= path.source.vocab_size:
        raise ValueError(f"x_0 holds a token outside 0 .. {path.source.vocab_size - 1}, the vocabulary of the source")
    require_rows(noise, len(x_0))
    if frozen is not None and (frozen.shape != x_0.shape or frozen.dtype != torch.bool):
        raise ValueError(f"frozen is {frozen.dtype} {tuple(frozen.shape)}; it must be bool {tuple(x_0.shape)}")
    if grid.times.ndim == 2 and len(grid.times) != len(x_0):
        raise ValueError(f"the grid has times for {len(grid.times)} rows and x_0 has {len(x_0)}")
    if not 0 <= renoise < float("inf"):
        raise ValueError(f"renoise is {renoise}; allowed are finite numbers >= 0")
    if renoise and not isinstance(path.coupling, IndependentCoupling):
        raise ValueError("renoise needs a path with the independent coupling; leave it out")
