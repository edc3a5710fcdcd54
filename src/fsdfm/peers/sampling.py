"""The peers' samplers as step rules of ours, and network calls counted as made.

    sample(denoiser, path, x_0, grid=Grid.uniform(8), noise=noise, rule=LawRule(remdm.Cap(eta=0.04)))

A peer's step is a law per position (`StepLaw`); `LawRule` asks the posterior for the rows that may change and draws
from the law by the exact draw. `fsdfm.flow.RULES` knows the published settings by name: see `PEER_RULES`. What a rule
of a mask source does here and its original does not: the mask is never drawn as a token, and a step that ends at t = 1
reveals everything, so that S steps are S calls and no further one is needed.

    law = end_law(rule, say, start, times=times, states=states)  # the law it ends in, by enumeration
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fsdfm.flow import RULES, Grid, Plan, Posterior, SamplerState, StepRule
from fsdfm.flow.posterior import Denoiser, LogitsFunction, SplitNetwork, posterior_of
from fsdfm.flow.reading import leave_one_out
from fsdfm.flow.rule import scalar_fields
from fsdfm.flow.schedule import Time
from fsdfm.noise import Purpose
from fsdfm.peers import duo, hdlm, remdm, sedd
from fsdfm.peers.mdlm import Ancestral, subs
from fsdfm.peers.noising import Geometric, column
from fsdfm.peers.transition import clipped, draw_tokens, joint_matrix, masked_law

__all__ = [
    "PEER_RULES",
    "Cached",
    "ConfidenceRule",
    "Counted",
    "DuoRule",
    "GammaStep",
    "LawRule",
    "StepLaw",
    "UniformSEDDRule",
    "end_law",
    "geometric_grid",
    "released_times",
    "tail_grid",
]

_ROWS = 64  # whose laws live at a time: float64 [rows, V]


class StepLaw(Protocol):
    """A sampler's step as transition probabilities.

    One whose `keeps_shown` is true never changes a shown token of a masked model: nobody is asked about those.
    """

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t) of every position: float64 [B, L, V]."""
        ...


# --- calls ------------------------------------------------------------------------------------------------------------


class Counted:
    """A denoiser that counts how often its network is asked."""

    def __init__(self, denoiser: Denoiser | SplitNetwork | LogitsFunction):
        self.denoiser, self.calls = denoiser, 0

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """Ask it."""
        self.calls += 1
        return posterior_of(self.denoiser, x_t, t, h=h, rows=rows)


class Cached(Counted):
    """A counted denoiser that is not asked again while no token of the batch has changed.

    Only for networks that are told neither time nor step size: MDLM's and SDTT's. The fewer texts in a batch, the more
    calls it saves.
    """

    def __init__(self, denoiser: Denoiser | SplitNetwork | LogitsFunction):
        super().__init__(denoiser)
        self._last: tuple[Tensor, Posterior] | None = None

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, **_: Tensor | None) -> Posterior:
        """Ask it about every row, or answer as last time."""
        if self._last is None or not torch.equal(self._last[0], x_t):
            self._last = (x_t.clone(), super().posterior(x_t, t, h))
        return self._last[1]


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LawRule(StepRule):
    """Any peer's step as a rule: every row that may change is asked for and drawn from the step's law.

    source   the kind of noise it is made for; another one is refused
    """

    step: StepLaw = field(default_factory=Ancestral)
    source: Literal["mask", "uniform"] = "mask"

    def options(self) -> dict[str, Any]:
        """Those of the step: eta, top_p and so on."""
        return scalar_fields(self.step)

    def with_options(self, **options: Any) -> StepRule:
        """The rule with another setting of its step."""
        return replace(self, step=replace(self.step, **options))  # type: ignore[type-var]

    @property
    def goes_back(self) -> bool:  # type: ignore[override]
        """Unless it loops: kappa is then not what the path says."""
        return not isinstance(self.step, remdm.Loop)

    @property
    def keeps_shown(self) -> bool:
        """Whether a token that is shown always stays."""
        return self.source == "mask" and bool(getattr(self.step, "keeps_shown", False))

    def plan(self, state: SamplerState) -> Plan:
        """All rows but the frozen ones: a shown token may be masked again, or replaced; where it never is, masks."""
        self._check(state)
        free = torch.ones_like(state.x_t, dtype=torch.bool) if state.frozen is None else ~state.frozen
        if self.keeps_shown:
            free = free & (state.x_t == state.path.source.mask_token)
        return Plan(free.flatten().nonzero()[:, 0])

    def _check(self, state: SamplerState) -> None:
        masked = state.path.source.mask_token is not None
        if masked != (self.source == "mask"):
            named = self.step if type(self) is LawRule else self  # a subclass has a step of its own
            raise ValueError(
                f"{type(named).__name__} is a step for the {self.source} source and the model's is "
                f"{state.path.source!r}; choose another rule, such as exact"
            )

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """Draw every planned row from the law."""
        length = state.x_t.shape[1]
        u = state.noise.uniform(Purpose.DESTINATION, length, state.index).flatten()
        x_next = state.x_t.flatten().clone()
        for rows, logits in _tiles(posterior, plan.rows):
            x_next[rows] = draw_tokens(self.row_law(logits, rows, state), u[rows.to(u.device)]).to(x_next.device)
        return x_next.view_as(state.x_t)

    def row_law(self, logits: Tensor, rows: Tensor, state: SamplerState) -> Tensor:
        """The law of some rows: float64 [n, V]."""
        sample = (rows // state.x_t.shape[1]).to(state.t.device)
        logits, x_t = _filtered(logits, state)[:, None], state.x_t.flatten()[rows][:, None]
        t, t_next = state.t[sample].to(logits.device), state.t_next[sample].to(logits.device)
        return self._last_or(self.step.law(logits, x_t, t=t, t_next=t_next), logits, x_t, t_next=t_next)[:, 0]

    def _last_or(self, law: Tensor, logits: Tensor, x_t: Tensor, *, t_next: Tensor) -> Tensor:
        """The law, and in a step that ends at t = 1, where no mask may be left, everything revealed."""
        if self.source != "mask" or not bool((t_next == 1).any()):
            return law
        one = torch.ones((), dtype=torch.float64)
        last = masked_law(subs(logits, x_t).exp(), x_t, reveal=one, remask=0 * one)
        return torch.where((column(t_next) == 1)[..., None], last, law)


def _tiles(posterior: Posterior, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A few rows at a time, and their logits."""
    for part, tile, own in posterior.marginals(rows):
        asked = rows[part]
        for start in range(0, len(asked), _ROWS):
            few = slice(start, start + _ROWS)
            yield asked[few], tile[few] if own is None else tile[own[few]]


def _filtered(logits: Tensor, state: SamplerState) -> Tensor:
    """Logits [n, V] in float64, without the mask, after temperature, top-k and top-p."""
    shaped = logits.to(torch.float64, copy=True)
    if state.path.source.mask_token is not None:
        shaped[:, state.path.source.mask_token] = -torch.inf
    return shaped if state.filter is None else state.filter(shaped)


@dataclass(frozen=True)
class ConfidenceRule(LawRule):
    """remdm-conf as a rule; it remembers at which probability each token was revealed."""

    goes_back = False

    step: remdm.Confidence = field(default_factory=remdm.Confidence)

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """Draw, and remember; a given token is fully trusted and never masked."""
        confidence = state.memory.get("confidence")
        if confidence is None:
            confidence = self.step.start(state.x_t).to(state.x_t.device)
        state.memory["confidence"] = confidence
        x_next = super().apply(state, plan, posterior)
        state.memory["confidence"] = self._remembered(state, plan, posterior, x_next=x_next)
        return x_next

    def _remembered(self, state: SamplerState, plan: Plan, posterior: Posterior, *, x_next: Tensor) -> Tensor:
        """-p where a token was revealed, -inf where one was masked, elsewhere as before."""
        mask = state.x_t.new_tensor(state.path.source.mask_token)
        x_t, after = state.x_t.flatten(), x_next.flatten()
        confidence = torch.where(after == mask, -torch.inf, state.memory["confidence"].flatten())
        for rows, logits in _tiles(posterior, plan.rows):
            chosen = torch.softmax(_filtered(logits, state), -1).gather(-1, after[rows][:, None])[:, 0]
            revealed = (x_t[rows] == mask) & (after[rows] != mask)
            confidence[rows] = torch.where(revealed, -chosen, confidence[rows])
        return confidence.view_as(state.x_t)

    def row_law(self, logits: Tensor, rows: Tensor, state: SamplerState) -> Tensor:
        """The share of a row in rho_max is that of its confidence among all of its text."""
        length = state.x_t.shape[1]
        confidence = state.memory["confidence"]
        shown = torch.isfinite(confidence)
        share = torch.softmax(torch.where(shown.any(-1, keepdim=True), confidence, 0.0), -1)
        share = torch.where(shown, share, 0.0).flatten()[rows]
        sample = (rows // length).to(state.t.device)
        t, t_next = state.t[sample].to(rows.device), state.t_next[sample].to(rows.device)
        logits, x_t = _filtered(logits, state)[:, None], state.x_t.flatten()[rows][:, None]
        reveal, remask = (t_next - t) / (1 - t), remdm.rho_max(t, t_next) * share
        law = masked_law(subs(logits, x_t).exp(), x_t, reveal=reveal[:, None], remask=remask[:, None])
        return self._last_or(law, logits, x_t, t_next=t_next)[:, 0]


@dataclass(frozen=True)
class DuoRule(LawRule):
    """Duo's samplers for any model of a uniform source: the posterior is made a leave-one-out one first.

    mixture   of Psi; 1 is ancestral sampling
    tail      the last step: "ancestral" redraws from the posterior, "greedy" takes the arg-max of x_theta everywhere
              (the originals' greedy tail; its grid is `tail_grid`). It does not converge to the data's law
    """

    source: Literal["mask", "uniform"] = "uniform"
    mixture: float = 1.0
    tail: Literal["ancestral", "greedy"] = "ancestral"

    def __post_init__(self) -> None:
        if not 0 <= self.mixture <= 1 or self.tail not in ("ancestral", "greedy"):
            raise ValueError(
                f"mixture is {self.mixture} and tail {self.tail!r}; allowed are 0 <= mixture <= 1, ancestral and greedy"
            )

    def options(self) -> dict[str, Any]:
        """Its own."""
        return {"mixture": self.mixture, "tail": self.tail}

    def with_options(self, **options: Any) -> StepRule:
        """With its own options set."""
        return replace(self, **options)

    def row_law(self, logits: Tensor, rows: Tensor, state: SamplerState) -> Tensor:
        """q_{s|t} or its mixture, in the path's own schedule; temperature, top-k and top-p act on x_theta."""
        sample = (rows // state.x_t.shape[1]).to(state.t.device)
        t, t_next = state.t[sample], state.t_next[sample]
        now, then = (state.path.schedule.kappa(time).to(rows.device) for time in (t, t_next))
        x_t = state.x_t.flatten()[rows][:, None]
        log_theta = leave_one_out(logits.to(torch.float64), x_t[:, 0], now)[:, None]
        probs = torch.softmax(_filtered(log_theta[:, 0], state), -1)[:, None]
        law = duo.posterior_law(probs, x_t, kappa_t=now, kappa_next=then)
        if self.mixture < 1:
            clean = duo.posterior_law(probs, x_t, kappa_t=now, kappa_next=torch.ones_like(now))
            fresh = column(then)[..., None] * clean + (1 - column(then)[..., None]) / logits.shape[-1]
            law = self.mixture * law + (1 - self.mixture) * fresh
        if self.tail == "greedy":
            best = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).to(law)
            law = torch.where((t_next.to(rows.device) == 1)[:, None, None], best, law)
        return law[:, 0]


@dataclass(frozen=True)
class UniformSEDDRule(LawRule):
    """SEDD's steps on the uniform graph, for any model of a uniform source: the posterior is made scores first.

    kind   "analytic", or "euler": a first-order step in ln sigma, theirs on `geometric_grid`; the step that ends at
           t = 1 is analytic, their last call

    Sigma is -ln kappa, at most `Geometric().largest`.
    """

    source: Literal["mask", "uniform"] = "uniform"
    kind: Literal["analytic", "euler"] = "analytic"

    def __post_init__(self) -> None:
        if self.kind not in ("analytic", "euler"):
            raise ValueError(f"kind is {self.kind!r}; allowed are analytic and euler")

    def options(self) -> dict[str, Any]:
        """Its own."""
        return {"kind": self.kind}

    def with_options(self, **options: Any) -> StepRule:
        """With its own options set."""
        return replace(self, **options)

    def row_law(self, logits: Tensor, rows: Tensor, state: SamplerState) -> Tensor:
        """The weights of a step, clipped; temperature, top-k and top-p act on the posterior."""
        sample = (rows // state.x_t.shape[1]).to(state.t.device)
        kappas = (state.path.schedule.kappa(time)[sample].to(logits.device) for time in (state.t, state.t_next))
        now, then = (-torch.log(kappa.clamp(min=math.exp(-Geometric().largest))) for kappa in kappas)
        graph, x_t = sedd.Uniform(), state.x_t.flatten()[rows][:, None]
        scores = graph.scores(torch.softmax(_filtered(logits, state), -1)[:, None], x_t, now)
        weights = graph.analytic(scores, x_t, now - then)
        if self.kind == "euler":
            euler = graph.euler(scores, x_t, now * torch.log(now / then))
            weights = torch.where((then > 0)[:, None, None], euler, weights)
        return clipped(weights)[:, 0]


@dataclass(frozen=True)
class GammaStep(LawRule):
    """gamma-HDLM's step as a rule, on the raw outputs of its network; the last step forbids the mask.

    gamma       that of the model: a checkpoint advises its own
    own_score   "one", or "network": as released (`hdlm.GammaRule`)
    """

    gamma: float = 0.01
    own_score: Literal["one", "network"] = "one"
    keeps_shown = False  # its noise has random tokens, too

    def __post_init__(self) -> None:
        hdlm.GammaHybrid(self.gamma)
        if self.own_score not in ("one", "network"):
            raise ValueError(f"own_score is {self.own_score!r}; allowed are one (mended) and network (as released)")

    def options(self) -> dict[str, Any]:
        """Its own."""
        return {"gamma": self.gamma, "own_score": self.own_score}

    def with_options(self, **options: Any) -> StepRule:
        """With its own options set."""
        return replace(self, **options)

    def row_law(self, logits: Tensor, rows: Tensor, state: SamplerState) -> Tensor:
        """Temperature, top-k and top-p act on the scores; the mask's own as released, where that is asked for."""
        rule = hdlm.GammaRule(hdlm.GammaHybrid(self.gamma), self.own_score)
        sample = (rows // state.x_t.shape[1]).to(state.t.device)
        shaped, x_t = _filtered(logits, state), state.x_t.flatten()[rows][:, None]
        if self.own_score == "network":
            shaped[:, -1] = logits[:, -1].to(shaped)
        t, t_next = state.t[sample].to(logits.device), state.t_next[sample].to(logits.device)
        law = rule.law(shaped[:, None], x_t, t=t, t_next=t_next)
        if bool((t_next == 1).any()):
            last = rule.last_law(shaped[:, None], x_t, t=t, t_next=t_next)
            law = torch.where((column(t_next) == 1)[..., None], last, law)
        return law[:, 0]


PEER_RULES: dict[str, StepRule] = {
    "mdlm": LawRule(Ancestral()),
    "remdm-cap": LawRule(remdm.Cap(eta=0.04)),
    "remdm-rescale": LawRule(remdm.Rescale(eta=0.045)),
    "remdm-conf": ConfidenceRule(),
    "remdm-loop": LawRule(remdm.Loop(eta=0.055)),
    "forward-backward": LawRule(remdm.ForwardBackward()),
    "dfm-corrector": LawRule(remdm.Corrector()),
    "sedd": LawRule(sedd.Rule()),
    "sedd-uniform": UniformSEDDRule(),
    "hdlm-acs": LawRule(hdlm.Correction(eta=0.01)),
    "hdlm-gamma": GammaStep(),
    "duo": DuoRule(),
    "duo-greedy": DuoRule(tail="greedy"),
    "duo-psi": DuoRule(mixture=0.95),
}
"""The published settings for few steps, by their names on the command line; another setting is an object of yours."""

RULES.update(PEER_RULES)


# --- times and laws ---------------------------------------------------------------------------------------------------


def released_times(steps: int, *, stop: float = 1e-5) -> Tensor:
    """The peers' grid in our time: 0 to 1 - stop in equal steps; a last call does the rest: float64 [steps + 1].

    With `stop` 0 the last step ends at t = 1 and no further call is needed: what an equal number of calls asks for.
    """
    return 1 - torch.linspace(1, stop, steps + 1, dtype=torch.float64)


def tail_grid(calls: int, *, stop: float = 1e-5) -> Grid:
    """A grid of so many calls whose last one is asked at t = 1 - stop: the greedy tail's, and SEDD's denoising call."""
    if calls < 2:
        raise ValueError(f"calls is {calls}; a tail needs at least 2, one before it")
    return Grid(torch.cat([released_times(calls - 1, stop=stop), torch.ones(1, dtype=torch.float64)]))


def geometric_grid(calls: int, *, stop: float = 1e-5) -> Grid:
    """The grid of SEDD's uniform graph in kappa: sigma falls geometrically from 20, and a last call does the rest."""
    if calls < 2:
        raise ValueError(f"calls is {calls}; a geometric grid needs at least 2, the last one beside it")
    times = Geometric().kappa(released_times(calls - 1, stop=stop))
    return Grid(torch.cat([torch.zeros(1, dtype=torch.float64), times[1:], torch.ones(1, dtype=torch.float64)]))


def end_law(rule: StepLaw, say: Callable[[float], Tensor], start: Tensor, *, times: Tensor, states: Tensor) -> Tensor:
    """The law a sampler ends in on a small world, computed: float64 [V^L].

    say      the logits in every state at a time: [V^L, L, V]
    start    the law of x_0 over all states [V^L];  states   all of them [V^L, L]
    """
    law = start.to(torch.float64)
    for t, t_next in pairwise(times.tolist()):
        law = law @ joint_matrix(rule.law(say(t), states, t=t, t_next=t_next))
    return law
