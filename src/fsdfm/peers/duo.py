"""Duo (Sahoo et al. 2025, arXiv 2506.10892; Psi samplers 2602.21185): uniform-state diffusion born of a Gaussian one.

Noise: with probability 1 - kappa a position shows a uniform token of all V. The NELBO is the limit of
KL(q(x_s | x_t, x_1) || q(x_s | x_t, x_theta)) per time. x_theta = softmax(logits) stands where a prior stands, which
q weighs by the likelihood of x_t once more, so the NELBO is least not at p_{1|t} but at the leave-one-out posterior,
what all *other* positions know of a token (`fsdfm.flow.reading` has the way there and back). The discrete noise is the
arg-max of a Gaussian diffusion of one-hots, w = a e_x + s eps, which gives a curriculum (soft inputs) and a coupling of
two times by one eps: discrete consistency distillation (DCD). The network is told sigma = -ln kappa.

    ancestral     q_{s|t} with x_theta in the place of the data
    greedy tail   one more call at t = 1 - 1e-5 and the arg-max of x_theta everywhere (the paper says of the posterior)
    Psi           c q_{s|t} + (1-c) [kappa_s q_{0|t} + (1-kappa_s) pi]: some positions are denoised and noised anew
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fsdfm.flow.schedule import Time
from fsdfm.noise import Noise, Purpose
from fsdfm.peers.mdlm import subs
from fsdfm.peers.noising import LogLinear, Noising, column
from fsdfm.peers.transition import masked_law, nucleus

__all__ = [
    "Divergence",
    "GaussianNoise",
    "Leading",
    "Psi",
    "UniformAncestral",
    "consistency_loss",
    "diffuse",
    "gaussian_kappa",
    "leading_noise",
    "nelbo",
    "posterior_law",
    "psi_mixture",
    "psi_times",
    "soft_input",
]

Divergence = Literal["kl-bwd", "kl-fwd"]


# --- the objective ----------------------------------------------------------------------------------------------------


def nelbo(log_probs: Tensor, x_1: Tensor, x_t: Tensor, *, kappa: Tensor, kappa_dot: Tensor) -> Tensor:
    """The NELBO per position and unit of time: [B, L], >= 0; kappa' is per unit of our time.

    With y_v = V kappa x_theta(v) + 1 - kappa, z = x_t, x = x_1, c = (1-kappa)/(V kappa + 1 - kappa), e = [z = x]:

        l = -kappa'/(V kappa) { V/(1 - kappa + V kappa e) - V/y_z - (c e + 1 - e)(V ln y_z - sum_v ln y_v)
              - (1-e) V kappa/(1-kappa) (ln y_z - ln y_x) - ((V-1) c e - (1-e)/c) ln c }
    """
    vocab = log_probs.shape[-1]
    kappa, kappa_dot = column(kappa), column(kappa_dot)
    lost = 1 - kappa
    log_y = torch.log(vocab * kappa[..., None] * log_probs.to(torch.float64).exp() + lost[..., None])
    log_y_z = log_y.gather(-1, x_t[..., None])[..., 0]
    log_y_x = log_y.gather(-1, x_1[..., None])[..., 0]
    same = (x_t == x_1).to(torch.float64)
    other = 1 - same
    ratio = lost / (vocab * kappa + lost)
    braces = (
        vocab / (lost + vocab * kappa * same)
        - vocab * torch.exp(-log_y_z)
        - (ratio * same + other) * (vocab * log_y_z - log_y.sum(-1))
        - other * vocab * kappa / lost * (log_y_z - log_y_x)
        - ((vocab - 1) * ratio * same - other / ratio) * torch.log(ratio)
    )
    return -kappa_dot / (vocab * kappa) * braces


# --- the Gaussian underneath ------------------------------------------------------------------------------------------


class GaussianKappa(NamedTuple):
    """kappa of a noise level gamma and its derivative, float64 like gamma."""

    kappa: Tensor
    slope: Tensor


def gaussian_kappa(gamma: Tensor, vocab_size: int) -> GaussianKappa:
    """kappa(gamma) = (V P - 1)/(V - 1) and d kappa/d gamma, P = integral phi(y - m) Phi(y)^(V-1) dy, m = e^(-gamma/2).

    P is the probability that the arg-max of a e_x + s eps is x, a^2 = sigmoid(-gamma), s^2 = sigmoid(gamma). The
    integrand is analytic and falls off like a Gaussian, so equal spacing (0.01) is exact to rounding. The originals
    read a table of 100,000 entries, its derivative by differences.
    """
    gamma = gamma.to(torch.float64)
    m = torch.exp(-gamma / 2)[..., None]
    step, reach = 0.01, 10.0
    offset = torch.arange(-reach, reach + step / 2, step, dtype=torch.float64)
    density = torch.exp(-(offset**2) / 2) / math.sqrt(2 * math.pi)
    others = torch.exp((vocab_size - 1) * torch.special.log_ndtr(m + offset))
    p = (density * others).sum(-1) * step
    p_slope = (-0.5 * m * offset * density * others).sum(-1) * step
    scale = vocab_size / (vocab_size - 1)
    return GaussianKappa(scale * p - 1 / (vocab_size - 1), scale * p_slope)


@dataclass(frozen=True)
class GaussianNoise:
    """The Gaussian schedule, linear in gamma: gamma(t) = gamma_max - t (gamma_max - gamma_min) in our time.

    OpenWebText: [-3.55, -1.85] for the curriculum (kappa 0.9455 to 0.0493), [-4, -1] for distillation.
    """

    vocab_size: int
    gamma_min: float = -3.55
    gamma_max: float = -1.85

    def gamma(self, t: Time) -> Tensor:
        """The noise level at t: small at the data."""
        return self.gamma_max - (self.gamma_max - self.gamma_min) * torch.as_tensor(t, dtype=torch.float64)

    def kappa(self, t: Time) -> GaussianKappa:
        """kappa_t and its derivative by our t."""
        kappa, slope = gaussian_kappa(self.gamma(t), self.vocab_size)
        return GaussianKappa(kappa, -(self.gamma_max - self.gamma_min) * slope)


def diffuse(x_1: Tensor, epsilon: Tensor, gamma: Tensor) -> Tensor:
    """w = a e_x + s eps: [B, L, V] from Gaussian noise [B, L, V] and one gamma a row; x_t is its arg-max."""
    level = gamma.to(torch.float64).reshape(-1, 1, 1)
    signal, spread = torch.sigmoid(-level).sqrt(), torch.sigmoid(level).sqrt()
    one_hot = torch.nn.functional.one_hot(x_1, epsilon.shape[-1])
    return (signal * one_hot + spread * epsilon).to(epsilon.dtype)


def soft_input(w: Tensor, temperature: float = 1e-3) -> Tensor:
    """softmax(w / temperature): what the curriculum embeds, instead of a token."""
    return torch.softmax(w / temperature, -1)


class Leading(NamedTuple):
    """The k largest Gaussian noises of the V - 1 other tokens, and the own one: enough for every arg-max.

    own      eps at the data's token: float64 [B, L]
    values   the largest noises elsewhere, in order: float64 [B, L, k]
    tokens   where they are: int64 [B, L, k], all different, none the data's
    """

    own: Tensor
    values: Tensor
    tokens: Tensor

    def state(self, x_1: Tensor, gamma: Tensor) -> Tensor:
        """x_t = arg-max of a e_x + s eps: int64 [B, L], one gamma a row."""
        level = gamma.to(torch.float64).reshape(-1, 1)
        own = torch.sigmoid(-level).sqrt() + torch.sigmoid(level).sqrt() * self.own
        return torch.where(own > torch.sigmoid(level).sqrt() * self.values[..., 0], x_1, self.tokens[..., 0])

    def weights(self, x_1: Tensor, gamma: Tensor, *, temperature: float = 1e-3) -> tuple[Tensor, Tensor]:
        """A sparse soft input: tokens [B, L, k+1] and their softmax weights; the rest has e^(-gap/temperature) less."""
        level = gamma.to(torch.float64).reshape(-1, 1, 1)
        spread = torch.sigmoid(level).sqrt()
        own = torch.sigmoid(-level).sqrt() + spread * self.own[..., None]
        w = torch.cat([own, spread * self.values], -1)
        return torch.cat([x_1[..., None], self.tokens], -1), torch.softmax(w / temperature, -1)


def leading_noise(x_1: Tensor, noise: Noise, *, vocab_size: int, k: int = 2, step: int = 0) -> Leading:
    """Draw what decides the arg-max, exactly, with 2k + 1 uniforms per position instead of V Gaussians.

    The largest of n normals is Phi^-1(U^(1/n)); the next ones follow by Phi(M_(j+1)) = Phi(M_j) U^(1/(n-j)), and their
    places are uniform without replacement. Work is in log Phi, for M is far in the tail.
    """
    if not 1 <= k < vocab_size:
        raise ValueError(f"k is {k}; allowed are 1 <= k < vocab_size = {vocab_size}")
    length = x_1.shape[1]
    u = noise.uniform(Purpose.PATH, length * (k + 1), step).view(*x_1.shape, k + 1)
    own = torch.special.ndtri(u[..., 0])
    others = vocab_size - 1 - torch.arange(k, dtype=torch.float64)
    log_phi = torch.cumsum(torch.log(u[..., 1:]) / others, -1)
    values = -torch.special.ndtri(-torch.expm1(log_phi))  # by the upper tail, which has the digits
    places = noise.uniform(Purpose.SOURCE, length * k, step).view(*x_1.shape, k)
    return Leading(own, values, _distinct(places, x_1, vocab_size))


def _distinct(u: Tensor, x_1: Tensor, vocab_size: int) -> Tensor:
    """k different tokens, none of them x_1, uniform without replacement: int64 [..., k]."""
    taken, chosen = x_1[..., None], []
    for j in range(u.shape[-1]):
        token = (u[..., j] * (vocab_size - 1 - j)).to(torch.int64)
        for smaller in taken.sort(-1).values.unbind(-1):  # the token-th of those not taken
            token = token + (token >= smaller)
        chosen.append(token)
        taken = torch.cat([taken, token[..., None]], -1)
    return torch.stack(chosen, -1)


def consistency_loss(log_student: Tensor, log_teacher: Tensor, divergence: Divergence = "kl-bwd") -> Tensor:
    """DCD's loss per position: KL(student || teacher) (`kl-bwd`, theirs) or KL(teacher || student) (`kl-fwd`): [B, L].

    The student reads (x_t, sigma_t), the teacher (x_s, sigma_s), one noise for both. No weight, no data term.
    """
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence is {divergence!r}; allowed are {', '.join(get_args(Divergence))}")
    first, second = (log_student, log_teacher) if divergence == "kl-bwd" else (log_teacher, log_student)
    return (first.exp() * (first - second)).sum(-1)


# --- samplers ---------------------------------------------------------------------------------------------------------


def posterior_law(probs: Tensor, x_t: Tensor, *, kappa_t: Tensor, kappa_next: Tensor) -> Tensor:
    """q_{s|t}(v | x_t, x_theta) for uniform noise: float64 [B, L, V].

    [ (V kappa_t p(v) + kappa_t/kappa_s - kappa_t) [v = x_t] + (kappa_s - kappa_t) p(v)
      + (1 - kappa_t/kappa_s)(1 - kappa_s)/V ] / (V kappa_t p(x_t) + 1 - kappa_t)
    """
    vocab = probs.shape[-1]
    now, then = column(kappa_t)[..., None], column(kappa_next)[..., None]
    shown = torch.nn.functional.one_hot(x_t, vocab).to(probs)
    stays = (vocab * now * probs + now / then - now) * shown
    moves = (then - now) * probs + (1 - now / then) * (1 - then) / vocab
    shown_prob = probs.gather(-1, x_t[..., None])
    return (stays + moves) / (vocab * now * shown_prob + 1 - now)


@dataclass(frozen=True)
class UniformAncestral:
    """Duo's sampler: x_next ~ q_{s|t}(. | x_t, x_theta); `top_p` filters x_theta before."""

    noising: Noising = field(default_factory=LogLinear)
    top_p: float = 1.0

    def probs(self, logits: Tensor) -> Tensor:
        """x_theta after the nucleus: float64 [B, L, V]."""
        probs = torch.softmax(logits.to(torch.float64), -1)
        return nucleus(probs, self.top_p) if self.top_p < 1 else probs

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): float64 [B, L, V]."""
        kappa_t, kappa_next = self.noising.kappa(t), self.noising.kappa(t_next)
        return posterior_law(self.probs(logits), x_t, kappa_t=kappa_t, kappa_next=kappa_next)


@dataclass(frozen=True)
class Psi:
    """The Psi sampler for one mixture weight: `mixture` = 1 is ancestral, 0 denoises and noises everything anew.

    source   "uniform": Duo; "mask": the same for MDLM, where it is ReMDM with rho = (1 - mixture)(1 - kappa_next)
    """

    mixture: float
    source: Literal["uniform", "mask"] = "uniform"
    noising: Noising = field(default_factory=LogLinear)
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.mixture <= 1:
            raise ValueError(f"mixture is {self.mixture}; allowed are 0 <= mixture <= 1, 1 is ancestral sampling")

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): float64 [B, L, V]."""
        kappa_t, kappa_next = self.noising.kappa(t), self.noising.kappa(t_next)
        then = column(kappa_next)[..., None]
        if self.source == "mask":
            backward, denoised = self._masked(logits, x_t, (column(kappa_t), column(kappa_next)))
            fresh = torch.zeros(logits.shape[-1], dtype=torch.float64)
            fresh[-1] = 1
        else:
            probs = UniformAncestral(top_p=self.top_p).probs(logits)
            backward = posterior_law(probs, x_t, kappa_t=kappa_t, kappa_next=kappa_next)
            denoised = posterior_law(probs, x_t, kappa_t=kappa_t, kappa_next=torch.ones_like(kappa_t))
            fresh = torch.full((logits.shape[-1],), 1 / logits.shape[-1], dtype=torch.float64)
        return self.mixture * backward + (1 - self.mixture) * (then * denoised + (1 - then) * fresh)

    def _masked(self, logits: Tensor, x_t: Tensor, kappas: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        now, then = kappas
        probs = subs(logits.to(torch.float64), x_t).exp()
        probs = nucleus(probs, self.top_p) if self.top_p < 1 else probs
        none = torch.zeros_like(now)
        backward = masked_law(probs, x_t, reveal=(then - now) / (1 - now), remask=none)
        return backward, masked_law(probs, x_t, reveal=torch.ones_like(now), remask=none)


def psi_times(
    steps: int, *, level: float | None = None, shares: tuple[float, float] = (0.0, 0.0), stop: float = 1e-5
) -> Tensor:
    """Our times of the T + 1 grid points: equal steps, or down to `level`, staying there, and on: float64 [T+1].

    level    kappa at which the middle phase stays (theirs: `linear-constant-linear-LEVEL-inv`); None: equal steps
    shares   of the points in the first and the middle phase, rounded to even as Python does

    With few steps the last phase has a single point, at the level: the text never gets cleaner than that.
    """
    if level is None:
        return 1 - torch.linspace(1, stop, steps + 1, dtype=torch.float64)
    first, middle, last = _phases(steps, shares)
    noise = 1 - level
    parts = (
        torch.linspace(1, noise, first, dtype=torch.float64),
        torch.full((middle,), noise, dtype=torch.float64),
        torch.linspace(noise, stop, last, dtype=torch.float64),
    )
    return 1 - torch.cat(parts)


def _phases(steps: int, shares: tuple[float, float]) -> tuple[int, int, int]:
    first, middle = (round(share * (steps + 1)) for share in shares)
    return first, middle, steps + 1 - first - middle


def psi_mixture(
    times: Tensor,
    modes: Sequence[str] = ("constant-1", "constant-1", "constant-1"),
    *,
    shares: tuple[float, float] = (1.0, 0.0),
    noising: Noising | None = None,
) -> Tensor:
    """The mixture weight of every grid point, by phase (first, middle, last): float64 [T+1]; the last has no step.

    modes   `constant-C`: C; `pure-posterior` 1; `pure-pc` 0; and clip(1 - rho/(1 - kappa_next), 0, 1) with rho of
            `max-capped-ETA` min(ETA, rho_max), `max-rescale-ETA` ETA min(ETA, rho_max) (ETA squared, where ReMDM has
            ETA: theirs), `constant-remdm-ETA` ETA; the last point of such a phase has 1
    """
    kappa = (noising or LogLinear()).kappa(times)
    first, middle, last = _phases(len(times) - 1, shares)
    parts, start = [], 0
    for mode, size in zip(modes, (first, middle, last), strict=True):
        parts.append(_phase_mixture(mode, kappa[start : start + size]))
        start += size
    return torch.cat(parts)


def _phase_mixture(mode: str, kappa: Tensor) -> Tensor:
    fixed = {"pure-posterior": 1.0, "pure-pc": 0.0}
    name, _, number = mode.rpartition("-")
    if mode in fixed or name == "constant":
        return torch.full_like(kappa, fixed[mode] if mode in fixed else float(number))
    if name not in ("max-capped", "max-rescale", "constant-remdm"):
        raise ValueError(
            f"mode is {mode!r}; allowed are pure-posterior, pure-pc, constant-C, max-capped-ETA, max-rescale-ETA, "
            "constant-remdm-ETA"
        )
    eta, now, then = float(number), kappa[:-1], kappa[1:]
    capped = torch.minimum(torch.full_like(now, eta), (1 - then) / now)
    rho = {"max-capped": capped, "max-rescale": eta * capped, "constant-remdm": torch.full_like(now, eta)}[name]
    mixture = (1 - rho / (1 - then)).clamp(0, 1)
    return torch.cat([mixture, torch.ones_like(kappa[:1])])
