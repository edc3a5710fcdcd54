"""ReMDM (Wang et al. 2025, arXiv 2503.00307): MDLM's network, and a sampler that may mask shown tokens again.

With remasking probability rho a shown token is masked with rho and a masked position revealed with

    reveal = (kappa_next - (1 - rho) kappa_t) / (1 - kappa_t),    0 <= rho <= rho_max = min(1, (1 - kappa_next)/kappa_t)

which keeps the share of masks on schedule for every such rho; rho = 0 is MDLM. kappa = t here, without an epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsdfm.flow.schedule import Time
from fsdfm.peers.mdlm import subs
from fsdfm.peers.noising import column
from fsdfm.peers.transition import draw_tokens, masked_law, strict_nucleus

__all__ = ["Cap", "Confidence", "Corrector", "ForwardBackward", "Loop", "Rates", "Remasking", "Rescale", "rho_max"]


class Rates(NamedTuple):
    """The probabilities of a step: a masked position is revealed, a shown one masked."""

    reveal: Tensor
    remask: Tensor


def rho_max(kappa_t: Tensor, kappa_next: Tensor) -> Tensor:
    """The largest remasking probability that keeps the schedule: min(1, (1 - kappa_next)/kappa_t), 1 at kappa = 0."""
    return torch.where(kappa_t > 0, (1 - kappa_next) / kappa_t.clamp(min=1e-300), 1.0).clamp(max=1.0)


def _on_schedule(kappa_t: Tensor, kappa_next: Tensor, rho: Tensor) -> Rates:
    return Rates((kappa_next - (1 - rho) * kappa_t) / (1 - kappa_t), rho)


@dataclass(frozen=True)
class Remasking:
    """What all of them share; a subclass states its two rates.

    top_p   their nucleus (`strict_nucleus`), before everything else; 1: none. Their scripts use 0.9
    """

    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed are 0 < top_p <= 1, 1 for none")
        eta = getattr(self, "eta", 0.0)
        if not 0 <= eta <= 1:
            raise ValueError(f"eta is {eta}; allowed are 0 <= eta <= 1")

    def rates(self, t: Tensor, t_next: Tensor) -> Rates:
        """Reveal and remask of a step; without remasking, MDLM's."""
        return _on_schedule(t, t_next, torch.zeros_like(t))

    def probs(self, logits: Tensor, x_t: Tensor) -> Tensor:
        """p(x_1 | x_t) after SUBS and the nucleus: float64 [B, L, V]."""
        probs = subs(logits.to(torch.float64), x_t).exp()
        return strict_nucleus(probs, self.top_p) if self.top_p < 1 else probs

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): float64 [B, L, V]."""
        reveal, remask = self.rates(column(t), column(t_next))
        return masked_law(self.probs(logits, x_t), x_t, reveal=reveal, remask=remask)


@dataclass(frozen=True)
class Cap(Remasking):
    """rho = min(eta, rho_max): at most a share eta of shown tokens. Theirs: 0.008 for T >= L, else 0.04."""

    eta: float = 0.04

    def rates(self, t: Tensor, t_next: Tensor) -> Rates:
        """Capped."""
        return _on_schedule(t, t_next, rho_max(t, t_next).clamp(max=self.eta))


@dataclass(frozen=True)
class Rescale(Remasking):
    """rho = eta rho_max. Theirs: eta 0.015 for T >= L, else 0.045."""

    eta: float = 0.045

    def rates(self, t: Tensor, t_next: Tensor) -> Rates:
        """Rescaled."""
        return _on_schedule(t, t_next, self.eta * rho_max(t, t_next))


@dataclass(frozen=True)
class ForwardBackward(Remasking):
    """rho = (kappa_next - kappa_t)/kappa_t, 1 at kappa = 0: a step back for every step forward.

    In the last step it exceeds rho_max: reveal is cut to 1 and shown tokens are still masked with 1/(T-1), so that
    about L/T masks are left to the greedy call.
    """

    def rates(self, t: Tensor, t_next: Tensor) -> Rates:
        """As much back as forward."""
        rho = torch.where(t > 0, (t_next - t) / t.clamp(min=1e-300), 1.0)
        return _on_schedule(t, t_next, rho)


@dataclass(frozen=True)
class Loop(Remasking):
    """Three phases: reveal up to a level, remask at that level with eta for a while, reveal the rest.

    begin, end   the loop in our time (theirs: t_on = 1 - begin, t_off = 1 - end); level: kappa there (alpha_on)
    eta          rho inside the loop, not capped. Theirs: 0.02 for T >= L, else 0.055

    A step uses the phase in which it begins for both of its ends, as theirs does.
    """

    eta: float = 0.055
    begin: float = 0.45
    end: float = 0.95
    level: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.begin < self.end < 1 or not 0 < self.level < 1:
            raise ValueError(
                f"the loop runs from {self.begin} to {self.end} at kappa {self.level}; allowed are "
                "0 < begin < end < 1 and 0 < level < 1"
            )

    def rates(self, t: Tensor, t_next: Tensor) -> Rates:
        """By phase of t."""

        def before(time: Tensor) -> Tensor:
            return time * self.level / self.begin

        def after(time: Tensor) -> Tensor:
            return 1 - (1 - time) * (1 - self.level) / (1 - self.end)

        level, eta, none = torch.full_like(t, self.level), torch.full_like(t, self.eta), torch.zeros_like(t)
        phases = (
            _on_schedule(before(t), before(t_next), none),
            _on_schedule(level, level, eta),
            _on_schedule(after(t), after(t_next), none),
        )
        early, late = t < self.begin, t >= self.end
        chosen = [torch.where(early, a, torch.where(late, c, b)) for a, b, c in zip(*phases, strict=True)]
        return Rates(*chosen)


@dataclass(frozen=True)
class Corrector(Remasking):
    """The DFM corrector: rates a and b = a - 1, a = 1 + strength (t (1-t))^(1/4).

    reveal = a (kappa_next - kappa_t)/(1 - kappa_t), remask = b (kappa_next - kappa_t)/kappa_t. Where rates are large
    its steps are short (`times`): T says little about its calls.
    """

    strength: float = 10.0

    def rates(self, t: Tensor, t_next: Tensor) -> Rates:
        """Both, in proportion to the step; at t = 0 plain MDLM."""
        back = self.strength * (t * (1 - t)).clamp(min=0) ** 0.25
        step = t_next - t
        return Rates((back + 1) * step / (1 - t), torch.where(t > 0, back * step / t.clamp(min=1e-300), 0.0))

    def times(self, steps: int, *, stop: float = 1e-5) -> Tensor:
        """Its own grid: step = min(1/T, 1/(a/(1-t) + b/t)), until 1 - t <= (1 - stop)/T: float64 [calls + 1]."""
        t = 0.0
        times = [t]
        while 1 - t > (1 - stop) / steps:
            step = 1 / steps
            if t > 0:
                back = self.strength * (t * (1 - t)) ** 0.25
                step = min(step, 1 / ((back + 1) / (1 - t) + back / t))
            t += step
            times.append(t)
        return torch.tensor(times, dtype=torch.float64)


@dataclass(frozen=True)
class Confidence(Remasking):
    """remdm-conf: rho_max shared out over the shown positions by softmax(-p), p the confidence when last revealed.

    It sums to rho_max over the text: about one remasked token per step at most. Masked positions are revealed as in
    MDLM, without the compensation of the other rules, so masks run ahead of the schedule and some are left to the last
    call. `confidence` is float64 [B, L], minus the probability, -inf at masks.
    """

    def start(self, x_t: Tensor) -> Tensor:
        """Nothing is shown yet: -inf everywhere."""
        return torch.full(x_t.shape, -torch.inf, dtype=torch.float64)

    def law_given(self, logits: Tensor, x_t: Tensor, t: Time, *, t_next: Time, confidence: Tensor) -> Tensor:
        """P(x_next | x_t, confidence): float64 [B, L, V]."""
        now, then = column(t), column(t_next)
        shown = torch.isfinite(confidence)
        weights = torch.where(shown, confidence, -torch.inf)
        any_shown = shown.any(-1, keepdim=True)
        share = torch.softmax(torch.where(any_shown, weights, 0.0), -1)
        remask = torch.where(any_shown & shown, rho_max(now, then) * share, 0.0)
        return masked_law(self.probs(logits, x_t), x_t, reveal=(then - now) / (1 - now), remask=remask)

    def remember(self, confidence: Tensor, probs: Tensor, x_t: Tensor, *, x_next: Tensor) -> Tensor:
        """The confidence after a step: -p(x_next) where a token was revealed, -inf where one was masked."""
        mask = probs.shape[-1] - 1
        revealed = (x_t == mask) & (x_next != mask)
        chosen = -probs.gather(-1, x_next[..., None])[..., 0]
        kept = torch.where(x_next == mask, -torch.inf, confidence)
        return torch.where(revealed, chosen, kept)

    def step(
        self, logits: Tensor, x_t: Tensor, t: Time, *, t_next: Time, u: Tensor, confidence: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One step from uniforms u [B, L]: x_next and the confidence after it."""
        law = self.law_given(logits, x_t, t, t_next=t_next, confidence=confidence)
        x_next = draw_tokens(law, u)
        return x_next, self.remember(confidence, self.probs(logits, x_t), x_t, x_next=x_next)
