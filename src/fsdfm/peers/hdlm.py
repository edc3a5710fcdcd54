"""HDLM (Fathi et al. 2025, arXiv 2504.06416): hybrids of masks and random tokens, and schedules per position.

epsilon   mask with probability p, else a random token with probability epsilon; plain cross-entropy, no time; the
          adaptive correction sampler (ACS) draws shown tokens anew now and then
gamma     the generator (1-gamma) Q_absorb + gamma Q_uniform, scores as in SEDD, one sigma a position

Two faults of the released gamma sampler. The score of the own token is read where nothing ever trained it: `own_score`
"network" does so, "one" is mended. And its step is no exact posterior even with exact scores: the ratios it is trained
on are those of the two pure graphs, not of the hybrid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fsdfm.flow.schedule import Time
from fsdfm.peers.noising import LogLinear, Noising, column
from fsdfm.peers.sedd import Absorb, Uniform
from fsdfm.peers.transition import clipped

__all__ = [
    "BlockSchedule",
    "Correction",
    "Corrupted",
    "EpsilonHybrid",
    "GammaHybrid",
    "GammaRule",
    "Remask",
    "SlidingSchedule",
    "hidden_positions",
    "level_times",
]

_SETTLED = 1e-4  # noise of a settled position; 1 - this that of one not begun
_GAMMA_NOISING = LogLinear(5e-3)


# --- epsilon ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corrupted:
    """A noised text: x_t [B, L], and which positions were masked or replaced (maybe by themselves), bool [B, L]."""

    x_t: Tensor
    masked: Tensor
    replaced: Tensor


@dataclass(frozen=True)
class EpsilonHybrid:
    """The epsilon hybrid: noise, weights of the loss.

    strength   lambda, the weight of positions that show a token; the published epsilon-0.0 has 0
    """

    epsilon: float = 0.01
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1 or not 0 <= self.strength < math.inf:
            raise ValueError(f"epsilon is {self.epsilon} and strength {self.strength}; allowed are [0, 1) and >= 0")

    def masking(self, t: Time) -> Tensor:
        """The probability of a mask at our t: 1e-4 + (1 - 1e-4)(1 - t)."""
        return _SETTLED + (1 - _SETTLED) * (1 - torch.as_tensor(t, dtype=torch.float64))

    def corrupt(
        self, x_1: Tensor, p: Tensor, *, mask: int, coin_mask: Tensor, coin_replace: Tensor, tokens: Tensor
    ) -> Corrupted:
        """x_t from uniforms [B, L] and random tokens [B, L]; p is the masking probability, [B] or [B, L]."""
        masked = coin_mask < column(p)
        replaced = ~masked & (coin_replace < self.epsilon)
        x_t = torch.where(masked, mask, torch.where(replaced, tokens, x_1))
        return Corrupted(x_t, masked, replaced)

    def weights(self, corrupted: Corrupted, p: Tensor, *, scheduled: bool = False) -> Tensor:
        """The weight of each position's cross-entropy [B, L]: 1/p at masks, lambda (1-eps)/(1-p) at replaced ones,
        lambda eps/(1-p) at intact ones; under a hyperschedule without the 1/(1-p).
        """
        p = column(p)
        shown = torch.ones_like(p) if scheduled else 1 / (1 - p)
        kept = torch.where(corrupted.replaced, 1 - self.epsilon, self.epsilon) * self.strength * shown
        return torch.where(corrupted.masked, 1 / p, kept)


@dataclass(frozen=True)
class Correction:
    """ACS: a masked position is drawn with w = (t_next - t)/(1 - t), a shown one drawn anew with eta (1 - w).

    The mask's output takes part in the softmax, so a mask can be drawn and masks may be left at the end. eta = 0 is
    their `original`. One call per step; in the last step nothing is corrected. Theirs: eta 0.01 to 0.015.
    """

    eta: float = 0.01
    temperature: float = 1.0

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): float64 [B, L, V]."""
        now, then = column(t), column(t_next)
        w = (then - now) / (1 - now)
        drawn = torch.where(x_t == logits.shape[-1] - 1, w, self.eta * (1 - w))[..., None]
        probs = torch.softmax(logits.to(torch.float64) / self.temperature, -1)
        return drawn * probs + (1 - drawn) * torch.nn.functional.one_hot(x_t, logits.shape[-1])


@dataclass(frozen=True)
class Remask:
    """Their `remask`: fill all masks, then mask every position again with 1 - w, w = (t_next - t)/(1 - t)."""

    temperature: float = 1.0

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): float64 [B, L, V]."""
        now, then = column(t), column(t_next)
        w = ((then - now) / (1 - now)).expand_as(x_t)[..., None]
        vocab = logits.shape[-1]
        probs = torch.softmax(logits.to(torch.float64) / self.temperature, -1)
        shown = torch.nn.functional.one_hot(x_t, vocab).to(probs)
        filled = torch.where((x_t == vocab - 1)[..., None], probs, shown)
        mask = torch.zeros(vocab, dtype=torch.float64)
        mask[-1] = 1
        return w * filled + (1 - w) * mask


# --- gamma ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GammaHybrid:
    """The gamma hybrid: noise and loss; N = V - 1 tokens and the mask.

    Forward: a mask with 1 - e^(-(1-gamma) sigma), else a random token with 1 - e^(-gamma sigma).
    """

    gamma: float = 0.01
    noising: Noising = _GAMMA_NOISING

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; allowed are 0 (masks only) <= gamma <= 1 (random tokens only)")

    def log_score(self, head: Tensor, sigma: Tensor) -> Tensor:
        """head - ln(e^sigma - 1) - ln(V - 1), the own token's as it comes: [B, L, V]."""
        scale = torch.log(torch.expm1(column(sigma))) + math.log(head.shape[-1] - 1)
        return head - scale[..., None].to(head)

    def corrupt(self, x_1: Tensor, sigma: Tensor, *, mask: int, coins: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
        """x_t from two uniforms and a random token per position."""
        total = column(sigma)
        masked = coins[0] < -torch.expm1(-(1 - self.gamma) * total)
        replaced = coins[1] < -torch.expm1(-self.gamma * total)
        return torch.where(masked, mask, torch.where(replaced, tokens, x_1))

    def score_entropy(self, log_scores: Tensor, x_1: Tensor, x_t: Tensor, *, sigma: Tensor) -> Tensor:
        """(1-gamma) times SEDD's absorbing loss at masks, gamma times its uniform one elsewhere: [B, L]."""
        masked = x_t == log_scores.shape[-1] - 1
        absorb = Absorb().score_entropy(log_scores, x_1, x_t, sigma=sigma)
        shown = torch.where(masked, x_1, x_t)  # any token: the result there is not used
        tokens = log_scores[..., :-1].scatter(-1, shown[..., None], 0.0)
        uniform = Uniform().score_entropy(tokens, x_1, shown, sigma=sigma)
        return torch.where(masked, (1 - self.gamma) * absorb, self.gamma * uniform)


@dataclass(frozen=True)
class GammaRule:
    """gamma-HDLM's analytic step on raw outputs of its network.

    own_score   "one": the own token's score is 1, as it must be; "network": what the network says there, which nothing
                trains: as released, and then nearly every mask is revealed in the first step
    """

    hybrid: GammaHybrid = field(default_factory=GammaHybrid)
    own_score: Literal["one", "network"] = "one"

    def weights(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """[(1-gamma) S_a + gamma S_u]_y T_y, what a step draws from: float64 [B, L, V], not normalised."""
        noising, gamma = self.hybrid.noising, self.hybrid.gamma
        log_scores = self.hybrid.log_score(logits.to(torch.float64), noising.sigma(t))
        if self.own_score == "one":
            log_scores = log_scores.scatter(-1, x_t[..., None], 0.0)
        d = column(noising.sigma(t) - noising.sigma(t_next))[..., None]
        scores = log_scores.exp()
        tokens, own_mask = scores[..., :-1], scores[..., -1:]
        absorb = torch.cat([torch.exp(d) * tokens, torch.exp(d) * own_mask - torch.expm1(d) * scores.sum(-1, True)], -1)
        even = torch.exp(d) * tokens - torch.expm1(d) / tokens.shape[-1] * tokens.sum(-1, True)
        uniform = torch.cat([even, own_mask], -1)
        return ((1 - gamma) * absorb + gamma * uniform) * self._forward(x_t, d, logits.shape[-1])

    def _forward(self, x_t: Tensor, d: Tensor, vocab: int) -> Tensor:
        """T_y: how the noise of the step leads from y to x_t."""
        gamma, mask = self.hybrid.gamma, vocab - 1
        to_mask, unmoved = -torch.expm1(-(1 - gamma) * d), torch.exp(-(1 - gamma) * d)
        shown = torch.nn.functional.one_hot(x_t, vocab)
        kept = unmoved * (-torch.expm1(-gamma * d) / (vocab - 1) + shown * torch.exp(-gamma * d))
        is_mask = torch.arange(vocab, device=x_t.device) == mask
        return torch.where(
            (x_t == mask)[..., None], torch.where(is_mask, 1.0, to_mask), torch.where(is_mask, 0.0, kept)
        )

    def law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """P(x_next | x_t): the weights, clipped."""
        return clipped(self.weights(logits, x_t, t=t, t_next=t_next))

    def last_law(self, logits: Tensor, x_t: Tensor, *, t: Time, t_next: Time) -> Tensor:
        """The last step, with the mask forbidden."""
        weights = self.weights(logits, x_t, t=t, t_next=t_next).clone()
        weights[..., -1] = 0
        return clipped(weights)


# --- hyperschedules ---------------------------------------------------------------------------------------------------


def level_times(levels: Tensor, depth: int) -> Tensor:
    """Our times of levels 0 (clean) .. depth-1, and `depth`: not begun; float64.

    Noise 1e-3 + level (1 - 2e-3)/(depth - 1); 1 - 1e-4 where not begun.
    """
    begun = 1e-3 + levels.to(torch.float64) * (1 - 2e-3) / (depth - 1)
    return 1 - torch.where(levels == depth, 1 - _SETTLED, begun)


@dataclass(frozen=True)
class BlockSchedule:
    """Blocks of `width` positions from left to right, each for `depth` steps from level depth-1 down to 0."""

    width: int
    depth: int

    def levels(self, length: int) -> Tensor:
        """A level a step and position, `depth` where not begun: int64 [steps, L]."""
        blocks = -(-length // self.width)
        step = torch.arange(blocks * self.depth)[:, None]
        block = (torch.arange(length) // self.width)[None, :]
        return (self.depth - 1 - (step - block * self.depth)).clamp(0, self.depth)

    def settled(self, length: int) -> Tensor:
        """How many positions are settled in each step: int64 [steps]."""
        blocks = -(-length // self.width)
        return torch.arange(blocks * self.depth) // self.depth * self.width

    def times(self, length: int) -> Tensor:
        """Our times per step and position; settled positions have noise 1e-4: float64 [steps, L]."""
        settled = torch.arange(length)[None, :] < self.settled(length)[:, None]
        return torch.where(settled, 1 - _SETTLED, level_times(self.levels(length), self.depth))

    def calls(self, length: int) -> int:
        """Network calls of a text: depth times the number of blocks."""
        return self.depth * -(-length // self.width)


@dataclass(frozen=True)
class SlidingSchedule:
    """A window of `width` positions that moves on by one per step; levels fall linearly through it."""

    width: int
    depth: int

    def levels(self, length: int) -> Tensor:
        """A level a step and position: int64 [length + width - 1, L]."""
        age = torch.arange(length + self.width - 1)[:, None] - torch.arange(length)[None, :]
        ladder = torch.tensor([round(i * (self.depth - 1) / (self.width - 1)) for i in range(self.width)])
        inside = ladder[(self.width - 1 - age).clamp(0, self.width - 1)]
        return torch.where(age < 0, self.depth, torch.where(age >= self.width, 0, inside))

    def settled(self, length: int) -> Tensor:
        """How many positions have left the window: int64 [steps]."""
        return (torch.arange(length + self.width - 1) - self.width + 1).clamp(min=0)


def hidden_positions(settled: int, begun: int, length: int, *, width: int | None = None) -> Tensor:
    """Who may not look where, bool [L, L]: positions below `settled` are settled, below `begun` active, others unborn.

    Settled positions see settled ones (of their own and earlier blocks of `width`; None: all), active ones settled and
    active ones, unborn ones nobody.
    """
    place = torch.arange(length)
    kind = (place >= settled).int() + (place >= begun).int()  # 0 settled, 1 active, 2 unborn
    sees = (kind[:, None] >= kind[None, :]) & (kind[:, None] < 2)
    if width is not None:
        later = place[None, :] // width > place[:, None] // width
        sees &= ~(later & (kind[:, None] == 0) & (kind[None, :] == 0))
    return ~sees
