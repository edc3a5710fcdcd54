"""Step rules: how x_t becomes x_{t+h}.

A rule *plans* which rows of the posterior it wants, before the network runs, and then *applies* what it was told. Own
rules are subclasses of `StepRule`; `RULES["name"] = MyRule()` gives one a name on the command line and in recipes.

**Jumps**, this file's rules, decide position by position. With the posterior p frozen over the step, a position is
redrawn from p at rate g(t); let E be the number of redraws a rule expects in the step and q = 1 - p(x_t). The rules
differ in one probability, that of staying:

    ExactJump     E = G_{t,h}     stay = e^-E + (1 - e^-E) p(x_t)     exp(G (1p^T - I)) in closed form
    SingleJump    E = G_{t,h}     stay = e^(-E q)                     the paper's, appendix B.1
    InstantJump   E = h g(t)      stay = e^(-E q)                     the paper's before the cumulative scalar

A position goes to a != x_t with probability r p(a), where r = (1 - stay) / q is the *leave ratio*; a rule states it
itself, for the quotient loses all digits when the posterior is nearly certain. At t+h = 1 every rule redraws from p (E
is infinite, stay = p(x_t), r = 1): the printed rule would force even a certain token to leave, and does not converge
(`LiteralJump`).

Since no rule leaves with probability more than 1 - e^-E, which needs no p, a coin u decides in two stages without a
second random number: a position is a *candidate* if u < 1 - e^-E, and jumps if also u < leave(p). Only candidates
need their logits. This is the thinning of the paper's rule, and under ExactJump the redraw itself.

Sweeps, which settle positions from left to right, each once and for all, stand in `fsdfm.flow.sweep`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdfm.files import nearest
from fsdfm.flow.categorical import Filter, draw
from fsdfm.flow.path import MixturePath, require_rows
from fsdfm.flow.posterior import Posterior
from fsdfm.flow.schedule import Schedule, Time, as_interval
from fsdfm.flow.source import Source
from fsdfm.noise import Noise, Purpose

__all__ = [
    "RULES",
    "ExactJump",
    "InstantJump",
    "Jump",
    "LiteralJump",
    "LowDiscrepancyJump",
    "Plan",
    "SamplerState",
    "SingleJump",
    "StepRule",
    "SystematicJump",
    "advance",
    "find_rule",
    "low_discrepancy_turns",
    "require_retreat",
    "scalar_fields",
    "transition_log_prob",
]

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass
class SamplerState:
    """Where a sampler stands before a step from t to t_next, and what its rule may look at.

    x_t      int64 [B, L]
    t, t_next   float64 [B] each
    index    the number of the step, which addresses the noise, of `steps` in all
    frozen   positions that must not change: bool [B, L]
    filter   temperature, top-k and top-p of this step
    memory   what a rule wants to remember for its next step, by names of its own; empty at the start. A rule that
             writes "t" [B] there decides itself how far a text has come, and "finished" [B] ends texts before the grid
    """

    x_t: Tensor
    t: Tensor
    t_next: Tensor
    path: MixturePath
    noise: Noise
    index: int = 0
    steps: int = 1
    frozen: Tensor | None = None
    filter: Filter | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)

    def movable(self) -> Tensor:
        """Positions that may change: neither frozen nor held fast by the source; bool [B, L]."""
        movable = self.path.source.movable(self.x_t)
        return movable if self.frozen is None else movable & ~self.frozen


@dataclass(frozen=True)
class Plan:
    """The rows whose posterior a step wants, int64 [N] in order, and what else was decided with them."""

    rows: Tensor
    coins: Tensor | None = None


class StepRule(ABC):
    """One step of the sampler.

    goes_back   whether texts may be sent back in time between its steps (`renoise`): false for rules that count for
                themselves what has had its turn, remember what they drew, or have a schedule that is not the path's
    """

    goes_back: ClassVar[bool] = True

    @abstractmethod
    def plan(self, state: SamplerState) -> Plan:
        """Which rows this step wants to know about, before anything is known about them."""

    @abstractmethod
    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """x_{t+h}, int64 [B, L], from the posterior at the rows of the plan."""

    def options(self) -> dict[str, Any]:
        """What of a rule can be set by name, `find_rule("name:option=value")`, and its present values."""
        return scalar_fields(self)

    def with_options(self, **options: Any) -> StepRule:
        """The same rule with some of its options set."""
        return replace(self, **options)  # type: ignore[type-var]


class Jump(StepRule):
    """A rule that decides position by position: the expected number of redraws, and the probability of staying."""

    markov = True  # the next state depends on the present one only, so a transition has a probability

    @property
    def redraws_candidates(self) -> bool:
        """Whether a candidate simply takes a draw from p, so that candidates may be drawn together."""
        return False

    @abstractmethod
    def _redraws(self, schedule: Schedule, t: Tensor, t_next: Tensor) -> Tensor:
        """E for t_next < 1."""

    @abstractmethod
    def _log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        """log stay for finite E."""

    @abstractmethod
    def _leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        """(1 - stay) / q for finite E, its limit at q = 0 included."""

    def redraws(self, schedule: Schedule, t: Time, t_next: Time) -> Tensor:
        """E, the number of redraws expected in [t, t_next]: float64 like t; infinite at t_next = 1."""
        start, end = as_interval(t, t_next)
        return torch.where(end == 1, math.inf, self._redraws(schedule, start, end))

    def log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        """log P(x_{t+h} = x_t) for log_p = log p_{1|t}(x_t); the limit for infinite E is a redraw from p."""
        at_end, finite = _split_end(redraws)
        return torch.where(at_end, log_p, self._log_stay(log_p, finite))

    def leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        """r = P(x_{t+h} != x_t) / q, so that P(x_{t+h} = a) = r p(a) for every other token a; 1 for infinite E."""
        at_end, finite = _split_end(redraws)
        return torch.where(at_end, 1.0, self._leave_ratio(q, finite))

    def leave(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        """P(x_{t+h} != x_t)."""
        q = -torch.expm1(log_p)
        return torch.where(q > 0, q * self.leave_ratio(q, redraws), 0.0)

    def coins(self, noise: Noise, length: int, step: int, *, bounds: Tensor) -> Tensor:
        """The uniforms that decide over jumps in a step: float64 [B, length].

        bounds   P(candidate) of each step of the trajectory so far, this one last: float64 [B, step+1] or [B, 1]
        """
        del bounds  # coins that know of no other step
        return noise.uniform(Purpose.COIN, length, step)

    def plan(self, state: SamplerState) -> Plan:
        """The candidates: positions whose coin lies below the bound, which needs no posterior."""
        length, device = state.x_t.shape[1], state.x_t.device
        require_rows(state.noise, len(state.x_t))
        bound = self._bound(state)
        earlier = state.memory.get("bounds")
        bounds = bound[:, None] if earlier is None else torch.cat([earlier, bound[:, None]], -1)
        coins = self.coins(state.noise, length, state.index, bounds=bounds.to(state.noise.samples.device))
        candidate = (coins < bound[:, None].to(coins.device)).to(device) & state.movable()
        return Plan(candidate.flatten().nonzero()[:, 0], coins)

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """The only place that draws destinations.

        Where the posterior is a joint one and a candidate is redrawn from it, all positions are drawn together and the
        candidates take what was drawn for them. Other rules are asked of its marginals.
        """
        bound = self._bound(state)[:, None]
        earlier = state.memory.get("bounds")
        state.memory["bounds"] = bound if earlier is None else torch.cat([earlier, bound], -1)
        u = state.noise.uniform(Purpose.DESTINATION, state.x_t.shape[1], state.index)
        if posterior.joint and self.redraws_candidates:
            return redrawn_together(state, plan, posterior, u=u)
        return self._moved(state, plan, posterior, u=u.flatten()[plan.rows.to(u.device)])

    def _bound(self, state: SamplerState) -> Tensor:
        """P(candidate) of this step: float64 [B]."""
        return -torch.expm1(-self.redraws(state.path.schedule, state.t, state.t_next).expand(len(state.x_t)))

    def _moved(self, state: SamplerState, plan: Plan, posterior: Posterior, *, u: Tensor) -> Tensor:
        """Every candidate leaves or stays, and goes where its own u says."""
        assert plan.coins is not None
        device, length, source = state.x_t.device, state.x_t.shape[1], state.path.source
        precise = torch.float32 if device.type == "mps" else torch.float64
        rows, current = plan.rows, state.x_t.flatten()[plan.rows]
        tokens, log_p = torch.empty_like(current), torch.empty(len(rows), dtype=precise, device=device)
        for part, tile, own in posterior.marginals(rows):
            check_width(tile, source)
            drawn = draw(
                tile, u[part], rows=own, exclude=current[part], forbidden=source.mask_token, filter=state.filter
            )
            assert drawn.log_p_excluded is not None
            tokens[part], log_p[part] = drawn.tokens, drawn.log_p_excluded
        redraws = self.redraws(state.path.schedule, state.t, state.t_next).expand(len(state.x_t))
        leave = self.leave(log_p, redraws.to(device, precise)[rows // length])
        jumping = plan.coins.to(device, precise).flatten()[rows] < leave
        x_next = state.x_t.flatten().clone()
        x_next[rows[jumping]] = tokens[jumping]
        return x_next.view_as(state.x_t)

    def kernel(self, probs: Tensor, x_t: Tensor, redraws: Tensor) -> Tensor:
        """The law of x_{t+h} a position, dense: probs [..., V], x_t [...], redraws like x_t -> [..., V]."""
        if not self.markov:
            raise ValueError(f"{self} is not Markov: a step depends on earlier ones and has no law of its own")
        others = probs.scatter(-1, x_t[..., None], 0.0)
        moves = others * self.leave_ratio(others.sum(-1), redraws)[..., None]
        return moves.scatter(-1, x_t[..., None], (1 - moves.sum(-1, keepdim=True)).clamp(min=0))


def _split_end(redraws: Tensor) -> tuple[Tensor, Tensor]:
    """Where E is infinite, and E with 0 there: the branch not taken must have a gradient, too."""
    at_end = torch.isinf(redraws)
    return at_end, torch.where(at_end, 0.0, redraws)


@dataclass(frozen=True)
class ExactJump(Jump):
    """The closed-form kernel of the frozen posterior: with probability w = 1 - e^-G redraw from p, else stay."""

    @property
    def redraws_candidates(self) -> bool:
        """It does."""
        return True

    def _redraws(self, schedule: Schedule, t: Tensor, t_next: Tensor) -> Tensor:
        return schedule.cumulative_scalar(t, t_next)

    def _log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        return torch.logaddexp(-redraws, torch.log(-torch.expm1(-redraws)) + log_p)

    def _leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        return -torch.expm1(-redraws) * torch.ones_like(q)


@dataclass(frozen=True)
class SingleJump(Jump):
    """The paper's rule: at most one jump a step, with probability 1 - exp(-h lambda), lambda = gbar_{t,h} q."""

    def _redraws(self, schedule: Schedule, t: Tensor, t_next: Tensor) -> Tensor:
        return schedule.cumulative_scalar(t, t_next)

    def _log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        return redraws * torch.expm1(log_p)

    def _leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        positive = torch.where(q > 0, q, 1.0)
        return torch.where(q > 0, -torch.expm1(-redraws * positive) / positive, redraws)


@dataclass(frozen=True)
class InstantJump(SingleJump):
    """The paper's rule before the cumulative scalar: lambda = g(t) q, the rate at the start of the step."""

    def _redraws(self, schedule: Schedule, t: Tensor, t_next: Tensor) -> Tensor:
        return (t_next - t) * schedule.scalar(t)


@dataclass(frozen=True)
class LiteralJump(Jump):
    """A rule as printed, without its limit at t_next = 1; for demonstrations of why the limit is needed."""

    rule: Jump

    def __post_init__(self) -> None:
        if not self.rule.markov or isinstance(self.rule, LiteralJump):
            raise ValueError(f"rule is {self.rule}; allowed are ExactJump(), SingleJump() and InstantJump()")

    def _redraws(self, schedule: Schedule, t: Tensor, t_next: Tensor) -> Tensor:
        return self.rule._redraws(schedule, t, t_next)

    def _log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        return torch.nan_to_num(self.rule._log_stay(log_p, redraws), nan=0.0, neginf=-math.inf)  # p = 1: nowhere to go

    def _leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        return self.rule._leave_ratio(q, redraws)

    def redraws(self, schedule: Schedule, t: Time, t_next: Time) -> Tensor:
        """E without the limit."""
        return self._redraws(schedule, *as_interval(t, t_next))

    def log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        """log stay without the limit."""
        return self._log_stay(log_p, redraws)

    def leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        """The ratio without the limit; 0 where there is nowhere to go."""
        return torch.where(q > 0, self._leave_ratio(q, redraws), 0.0)


@dataclass(frozen=True)
class _PlannedJump(Jump):
    """A rule whose candidates do not come independently; what a candidate does is the other rule's affair."""

    rule: Jump = field(default_factory=ExactJump)
    markov = False

    @property
    def redraws_candidates(self) -> bool:
        """As the other rule."""
        return self.rule.redraws_candidates

    def _redraws(self, schedule: Schedule, t: Tensor, t_next: Tensor) -> Tensor:
        return self.rule._redraws(schedule, t, t_next)

    def _log_stay(self, log_p: Tensor, redraws: Tensor) -> Tensor:
        return self.rule._log_stay(log_p, redraws)

    def _leave_ratio(self, q: Tensor, redraws: Tensor) -> Tensor:
        return self.rule._leave_ratio(q, redraws)


@dataclass(frozen=True)
class SystematicJump(_PlannedJump):
    """A rule whose candidates are spread evenly over the steps instead of independently (variance-reduced).

    With A_s the sum of the candidate probabilities up to step s and one uniform phase U per position, the position is a
    candidate in step s if floor(A_s + U) > floor(A_{s-1} + U). Every step keeps its probability; the number of
    candidates of a position loses its variance, to floor or ceil of A_S. It is not Markov and so has no transition
    probability. It is made for sources whose tokens may move again: a position that leaves once for all, as under the
    mask source, would leave ahead of the schedule (P(left by s) = min(1, A_s) instead of kappa).
    """

    def coins(self, noise: Noise, length: int, step: int, *, bounds: Tensor) -> Tensor:
        """1 where the position is no candidate, else uniform below the candidate probability."""
        bound = bounds[:, -1:]
        before = bounds[:, :-1].sum(-1, keepdim=True)
        phase = noise.uniform(Purpose.PHASE, length)
        candidate = (torch.floor(before + bound + phase) > torch.floor(before + phase)) | (bound == 1)
        return torch.where(candidate, bound * noise.uniform(Purpose.COIN, length, step), 1.0)


@dataclass(frozen=True)
class LowDiscrepancyJump(_PlannedJump):
    """A rule in which neighbours take their first turn far apart: who is drawn together is spread over the text.

    Positions drawn in one step do not see each other, and neighbours depend on each other most. So position i has its
    first turn at the time when kappa reaches frac(U + i/phi), phi the golden ratio, U one uniform phase per sample:
    those whose turn is in the same step are as evenly spread as can be, whatever the grid. Later turns are independent
    again. Since U is uniform each position, taken alone, is a candidate exactly as often and as early as under the
    rule itself, with every source; only together they are not independent. It is not Markov.
    """

    def coins(self, noise: Noise, length: int, step: int, *, bounds: Tensor) -> Tensor:
        """1 before a position's first turn, uniform below the candidate probability at it, any uniform after it."""
        bound = bounds[:, -1:]
        begin = 1 - (1 - bounds[:, :-1]).prod(-1, keepdim=True)
        end = 1 - (1 - begin) * (1 - bound)
        turn = low_discrepancy_turns(noise, length)
        coin = noise.uniform(Purpose.COIN, length, step)
        return torch.where(turn < begin, coin, torch.where(turn < end, bound * coin, 1.0))


def low_discrepancy_turns(noise: Noise, length: int) -> Tensor:
    """kappa at each position's first turn under `LowDiscrepancyJump`: frac(U + i/phi), float64 [B, length]."""
    position = torch.arange(length, dtype=torch.float64, device=noise.samples.device)
    return torch.frac(noise.uniform(Purpose.PHASE, 1) + _GOLDEN * position)


RULES: dict[str, StepRule] = {
    "exact": ExactJump(),
    "single": SingleJump(),
    "instant": InstantJump(),
    "systematic": SystematicJump(ExactJump()),
    "spaced": LowDiscrepancyJump(ExactJump()),
}
"""The rules by their names on the command line and in recipes; add your own."""


def find_rule(text: str) -> StepRule:
    """The rule of a name, some of its options set: `exact`, `remdm-cap:eta=0.02`, `llada:order=random,eot_id=3`."""
    name, colon, words = text.partition(":") if isinstance(text, str) else (None, "", "")
    if name not in RULES:
        near = nearest(name, RULES)
        raise ValueError(
            f"jump is {text!r}; {f'did you mean {near!r}? ' if near else ''}allowed are {', '.join(RULES)}, or import "
            "the module that adds it (fsdfm --plugin FILE.py COMMAND ...)"
        )
    rule, options = RULES[name], {}
    for word in words.split(",") if colon else ():
        option, sign, value = word.partition("=")
        if option not in rule.options() or not sign:
            known = ", ".join(rule.options()) or "none"
            raise ValueError(f"jump is {text!r}; the options of {name} are {known}: write {name}:OPTION=VALUE,...")
        options[option] = _read_value(value)
    try:
        return rule.with_options(**options) if options else rule
    except TypeError as error:
        raise ValueError(f"jump is {text!r}; {error}: give numbers where numbers belong") from error


def require_retreat(rule: StepRule) -> None:
    """Raise unless texts may go back in time between the steps of this rule."""
    if not rule.goes_back:
        name = next((name for name, known in RULES.items() if known == rule), str(rule))
        raise ValueError(
            f"renoise goes back in time, which the rule {name} cannot: it keeps count of what is settled or has a "
            "schedule of its own; leave renoise out, or take a rule that looks at the time alone: exact, spaced"
        )


def scalar_fields(item: Any) -> dict[str, Any]:
    """The fields of a dataclass that hold a number, a word, or nothing."""
    held = {f.name: getattr(item, f.name) for f in fields(item)} if is_dataclass(item) else {}
    return {name: value for name, value in held.items() if isinstance(value, int | float | str | None)}


def _read_value(text: str) -> Any:
    """none, true, false, a number, or a word."""
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    if text in words:
        return words[text]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def advance(state: SamplerState, rule: StepRule, posterior: Posterior) -> Tensor:
    """One step with a posterior that is there already: x_{t+h}, int64 [B, L]."""
    return rule.apply(state, rule.plan(state), posterior)


def redrawn_together(state: SamplerState, plan: Plan, posterior: Posterior, *, u: Tensor) -> Tensor:
    """Candidates take their part of a whole text drawn for their sample."""
    candidate = torch.zeros(state.x_t.numel(), dtype=torch.bool, device=state.x_t.device)
    candidate[plan.rows] = True
    candidate = candidate.view_as(state.x_t)
    moving = candidate.any(1).nonzero()[:, 0]
    x_next = state.x_t.clone()
    if len(moving):
        texts = posterior.draw(moving, u[moving.to(u.device)], filter=state.filter)
        x_next[moving] = torch.where(candidate[moving], texts, state.x_t[moving])
    return x_next


def check_width(logits: Tensor, source: Source) -> None:
    if logits.shape[-1] != source.vocab_size:
        mask = "" if source.mask_token is None else ", the mask token included"
        raise ValueError(
            f"the logits have {logits.shape[-1]} tokens and the source {source.vocab_size}{mask}; make them agree"
        )


def transition_log_prob(
    logits: Tensor,
    x_t: Tensor,
    x_next: Tensor,
    *,
    redraws: Tensor,
    jump: Jump,
    path: MixturePath,
    frozen: Tensor | None = None,
    filter: Filter | None = None,
) -> Tensor:
    """log P(x_{t+h} = x_next | x_t) a position: float64 [B, L], differentiable in the logits [B, L, V].

        stay:  log stay                          Exact: log[(1-w) + w p(x_t)]   Single: q log(1-w)
        move:  log r + log p(x_next)             r the leave ratio

    A sum over positions is the log-probability of the step. Frozen positions, and those the source holds fast, stay for
    certain. A rule that is not Markov raises ValueError.
    """
    if not jump.markov:
        raise ValueError(f"{jump} is not Markov: its steps have no log-probability; use {ExactJump()} for that")
    check_width(logits, path.source)
    shaped = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if path.source.mask_token is not None or filter is not None:
        shaped = shaped.clone()
    if path.source.mask_token is not None:
        shaped[..., path.source.mask_token] = -math.inf
    if filter is not None:  # in the precision the sampler filters in, so that both keep the same tokens
        shaped = filter(shaped.flatten(0, 1)).view_as(shaped)
    shaped = shaped.to(torch.float64)
    normaliser = torch.logsumexp(shaped, -1)
    log_p = shaped.gather(-1, x_t[..., None])[..., 0] - normaliser
    log_p_next = shaped.gather(-1, x_next[..., None])[..., 0] - normaliser
    expected = redraws.to(log_p).expand(len(x_t))[:, None]
    log_move = torch.log(jump.leave_ratio(-torch.expm1(log_p), expected)) + log_p_next
    moved = x_next != x_t
    log_prob = torch.where(moved, log_move, jump.log_stay(log_p, expected))
    held = ~path.source.movable(x_t) if frozen is None else ~path.source.movable(x_t) | frozen
    return torch.where(held, torch.where(moved, -math.inf, 0.0).to(log_prob), log_prob)
