"""The likelihood bound: an upper bound of -log p(x_1) under the model, in nats per token.

Derivation. Given x_1 the path is itself a Markov chain: it starts in p_0, and a position that does not show its x_1
token jumps to it at rate g(t) = kappa'_t / (1 - kappa_t). The model's chain also starts in p_0 and jumps to a != z at
rate g(t) p(a | z). The divergence of two such chains is the integral of sum_a u log(u/v) - u + v over their rates u, v.
A position that shows its token has u = 0 and v = g (1 - p(z)); any other has u = g at a = x_1 and gives
-g log p(x_1) - g + g (1 - p(z)). Both are the path loss with the *instantaneous* scalar:

    L_t = -g(t) [ p(x_t) - delta_{x_1}(x_t) + (1 - delta_{x_1}(x_t)) log p(x_1) ]

and since the path given x_1 ends there, the divergence of the chains is at least that of their ends:

    -log p(x_1)  <=  integral_0^1 E_{x_t | x_1} sum_i L_t^i dt

With the exact posterior the mask source has equality for every x_1, because the integral averages the chain rule over
all orders of the positions. Other sources stay above: the chain forgets which tokens were noise. The mean scalar
gbar_{t,h} of training is a weight on a grid and gives no bound.

Time. With u = sqrt(1 - kappa_t) the law of dt becomes g(t) dt = (2/u) du: u is drawn uniformly, and the second moment
of the term in log p(x_1), (2/u)^2 * u^2, is the same at every u; uniform t would have infinite variance.

The end. A network never is quite sure, so its exit rate g(t) (1 - p(z)) is infinite as t -> 1 and so is its bound. We
therefore bound the law that the sampler has: flow until `t_end`, then one redraw of every movable position,

    -log p(x_1)  <=  integral_0^{t_end} (...) dt + E_{x_{t_end} | x_1} sum_i -log p(x_1^i | x_{t_end})
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdfm.flow import (
    Denoiser,
    IndependentCoupling,
    LogitsFunction,
    MixturePath,
    SplitNetwork,
    generalised_kl,
    posterior_of,
)
from fsdfm.noise import Noise, Purpose

__all__ = ["Bound", "nll_bound"]

_END = 1 - 2.0**-10  # the last step of 1,024
_SMALLEST_H = 2.0**-10


_AnyDenoiser = Denoiser | SplitNetwork | LogitsFunction


@dataclass(frozen=True)
class Bound:
    """An upper bound of the negative log-likelihood, estimated on N rows.

    rows            the estimate of each row, nats a scored token: float64 [N]
    draws_per_row   times drawn for each
    """

    rows: Tensor
    draws_per_row: int

    @property
    def nats_per_token(self) -> float:
        """The mean over rows."""
        return float(self.rows.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean, in nats per token: times are stratified within rows, so rows are independent."""
        return float(self.rows.std() / math.sqrt(len(self.rows))) if len(self.rows) > 1 else math.nan

    @property
    def bits_per_token(self) -> float:
        """The mean in bits."""
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        """exp(nats per token), an upper bound of the model's perplexity."""
        return math.exp(self.nats_per_token)


@torch.no_grad()
def nll_bound(
    denoiser: _AnyDenoiser,
    path: MixturePath,
    x_1: Tensor,
    *,
    seed: int = 0,
    draws: int = 8,
    t_end: float = _END,
    h: float = _SMALLEST_H,
    given: Tensor | None = None,
    first: int = 0,
    batch_size: int = 16,
) -> Bound:
    """Estimate the bound on data x_1, int64 [N, L], with `draws` stratified times per row and one more at `t_end`.

    t_end   where flowing ends and one redraw follows; 1 is the flow itself, finite only for a denoiser that is certain
            at t = 1
    h       the step size that a step-aware model is told
    given   positions that are never noised and not scored, bool [N, L], such as a first token
    first   the index of the first row; a row's noise belongs to its index
    """
    _check(path, x_1, given, draws=draws, t_end=t_end)
    parts = []
    for start in range(0, len(x_1), batch_size):
        part = slice(start, start + batch_size)
        noise = Noise(seed, range(first + start, first + start + len(x_1[part])), device=x_1.device)
        scorer = _Scorer(denoiser, path, h=h, x_1=x_1[part], given=None if given is None else given[part])
        total = torch.zeros(len(noise), dtype=torch.float64)
        for step, (u, weight) in enumerate(_times(path, noise, draws, t_end=t_end)):
            total += weight * scorer.path_loss(u, noise, step) / draws
        if t_end < 1:
            total += scorer.redraw_loss(t_end, noise, draws)
        parts.append(total / scorer.scored.sum(1).cpu())
    return Bound(torch.cat(parts), draws)


def _check(path: MixturePath, x_1: Tensor, given: Tensor | None, *, draws: int, t_end: float) -> None:
    if not isinstance(path.coupling, IndependentCoupling):
        raise ValueError("the bound needs the independent coupling: under another, x_0 given x_1 costs bits of its own")
    if x_1.ndim != 2 or not len(x_1) or draws < 1:
        raise ValueError(
            f"x_1 has shape {tuple(x_1.shape)} and draws is {draws}; give int64 [N, L], N >= 1, draws >= 1"
        )
    if not 0 < t_end <= 1:
        raise ValueError(f"t_end is {t_end}; allowed are 0 < t_end <= 1; 1 - 1/S is the last step of S")
    if given is not None and (given.shape != x_1.shape or bool(given.all(1).any())):
        raise ValueError("given must have the shape of x_1 and leave a position to score in every row")


def _times(path: MixturePath, noise: Noise, draws: int, *, t_end: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Stratified u = sqrt(1 - kappa_t) of every row, and the weight (2/u) |du| that g(t) dt is: float64 [B] each."""
    smallest = math.sqrt(float(1 - path.schedule.kappa(t_end)))
    inside = noise.uniform(Purpose.TIME, draws).cpu()
    for k in range(draws):
        u = smallest + (1 - smallest) * (k + inside[:, k]) / draws
        yield u, 2 * (1 - smallest) / u


class _Scorer:
    """The losses of some rows at any time, in nats per row."""

    def __init__(
        self,
        denoiser: _AnyDenoiser,
        path: MixturePath,
        h: float,
        *,
        x_1: Tensor,
        given: Tensor | None,
    ):
        self.denoiser, self.path, self.h, self.x_1, self.given = denoiser, path, h, x_1, given
        self.scored = torch.ones_like(x_1, dtype=torch.bool) if given is None else ~given

    def path_loss(self, u: Tensor, noise: Noise, step: int) -> Tensor:
        """sum_i L_t^i / g(t) at 1 - kappa_t = u^2: float64 [B]."""
        x_t, log_p_1, log_p_t = self._ask(self.path.schedule.kappa_inverse(1 - u**2), noise, step)
        one = torch.ones((), dtype=torch.float64)
        loss = generalised_kl(log_p_1, log_p_t, (x_t == self.x_1).cpu(), scalar=one)
        return self._sum(loss, x_t)

    def redraw_loss(self, t_end: float, noise: Noise, step: int) -> Tensor:
        """sum_i -log p(x_1^i | x_t) at t_end: float64 [B]."""
        t = torch.full((len(self.x_1),), t_end, dtype=torch.float64)
        x_t, log_p_1, _ = self._ask(t, noise, step)
        return self._sum(-log_p_1, x_t)

    def _sum(self, loss: Tensor, x_t: Tensor) -> Tensor:
        # What the source cannot move has the delta as its posterior: no loss there.
        counts = (self.scored & self.path.source.movable(x_t)).cpu()
        return torch.where(counts, loss, 0.0).sum(1)

    def _ask(self, t: Tensor, noise: Noise, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """x_t, and log p(x_1 | x_t) and log p(x_t | x_t) of every position: float64 [B, L]."""
        device, length = self.x_1.device, self.x_1.shape[1]
        x_0 = self.path.source.sample(noise, length, step=step)
        x_t = self.path.sample(x_0, self.x_1, t, noise=noise, step=step)
        if self.given is not None:
            x_t = torch.where(self.given, self.x_1, x_t)
        precise = torch.float32 if device.type == "mps" else torch.float64
        h = torch.full_like(t, self.h).to(device, precise)
        certain = ~self.path.source.movable(x_t) if self.given is None else self.given | ~self.path.source.movable(x_t)
        every = torch.arange(x_t.numel(), device=device)
        posterior = posterior_of(self.denoiser, x_t, t.to(device, precise), h=h, rows=every)
        posterior = posterior.given(torch.where(certain, x_t, -1), forbidden=self.path.source.mask_token)
        tokens = torch.stack([self.x_1.flatten(), x_t.flatten()], -1)
        found = torch.empty(tokens.shape, dtype=torch.float64)
        for part, tile, rows in posterior.marginals(every):
            log_probs = self._log_probs(tile if rows is None else tile[rows])
            found[part] = log_probs.gather(-1, tokens[part]).cpu().double()
        log_p_1, log_p_t = found.view(*x_t.shape, 2).unbind(-1)
        return x_t, log_p_1, log_p_t

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Normalised over the tokens that can be emitted, in float32 or better."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        mask = self.path.source.mask_token
        if mask is not None:
            wide = wide.index_fill(-1, torch.tensor([mask], device=wide.device), -torch.inf)
        return torch.log_softmax(wide, -1)
