"""Small worlds, solved by enumeration: the true posterior, the generator, and the law of a sampler.

For a known distribution over V^L sequences (up to a few thousand) everything the method approximates can be computed:
p_t, the posterior p_{1|t}, the generator u_t, and the law a sampler ends in. Tests and `fsdfm study truth`
stand on this.
States are numbered in row-major order: state n is row n of `all_states`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fsdfm.flow.grid import Grid
from fsdfm.flow.path import MixturePath, velocity
from fsdfm.flow.posterior import Independent, LogitsFunction
from fsdfm.flow.rule import Jump

__all__ = [
    "ExactDenoiser",
    "all_states",
    "generator",
    "normalised",
    "posterior_table",
    "renoise_matrix",
    "sampler_law",
    "total_variation",
    "transition_matrix",
]

MAX_STATES = 1 << 15


def all_states(vocab_size: int, length: int) -> Tensor:
    """Every sequence: int64 [V^L, L]."""
    _check_states(vocab_size, length)
    return torch.cartesian_prod(*[torch.arange(vocab_size)] * length).view(-1, length)


def _check_states(vocab_size: int, length: int) -> None:
    if vocab_size**length > MAX_STATES:
        raise ValueError(f"{vocab_size}^{length} sequences are too many to enumerate; at most {MAX_STATES}")


def _places(vocab_size: int, length: int) -> Tensor:
    """What a token at each position adds to the number of its state, a token."""
    return vocab_size ** torch.arange(length - 1, -1, -1)


def _length_of(num_states: int, vocab_size: int) -> int:
    """L with V^L = num_states."""
    length = next((n for n in range(1, 64) if vocab_size**n >= num_states), 1)
    if vocab_size**length != num_states:
        raise ValueError(
            f"{num_states} states are no power of the vocabulary's {vocab_size}; there must be V^L of them"
        )
    return length


def total_variation(p: Tensor, q: Tensor) -> float:
    """Half the L1 distance of two laws."""
    return float((p - q).abs().sum() / 2)


class ExactDenoiser:
    """The true posterior p_{1|t} of a known distribution, as a denoiser.

    p_1   [V, ..., V], one axis a position: the data, over the path's vocabulary (zero at the mask token)
    pi    alternatively the coupling pi(x_0, x_1) of the two ends: [V^L, V^L]; p_1 is then its second marginal

    Both cases are one contraction. Let each position hold a value a: x_1 itself, or the pair (x_0, x_1). A sequence of
    values has a weight, each value a likelihood K[z, a] of showing the token z at time t, and the posterior of position
    i is the weight times all likelihoods, summed over every position but i.

    A state that the path cannot reach (a sampler can) has no posterior; there each position is treated as independent
    of the others, and where even that is undefined the token stays.
    """

    def __init__(self, path: MixturePath, *, p_1: Tensor | None = None, pi: Tensor | None = None):
        vocab = path.source.vocab_size
        if (p_1 is None) == (pi is None):
            raise ValueError("give either p_1 (independent coupling) or pi (a coupling of your own), not both")
        self.path = path
        if p_1 is not None:
            if not p_1.ndim or any(size != vocab for size in p_1.shape):
                raise ValueError(
                    f"p_1 has shape {tuple(p_1.shape)}; every axis must have the vocabulary's {vocab} entries"
                )
            self.length = p_1.ndim
            self._weights = p_1.to(torch.float64)
            self._token = torch.arange(vocab)
        elif pi is not None:
            self.length = _length_of(len(pi), vocab)
            if pi.shape != (vocab**self.length,) * 2:
                raise ValueError(f"pi has shape {tuple(pi.shape)}; it must be [V^L, V^L] for V = {vocab}")
            axes = pi.to(torch.float64).reshape([vocab] * (2 * self.length))
            paired = [axis for i in range(self.length) for axis in (i, self.length + i)]
            self._weights = axes.permute(paired).reshape([vocab * vocab] * self.length)
            self._token = torch.arange(vocab * vocab) % vocab
        total = float(self._weights.sum())
        if not abs(total - 1) < 1e-5 or bool((self._weights < 0).any()):
            raise ValueError(f"the probabilities sum to {total} or are negative; they must be a distribution")
        self._weights = self._weights / total  # float32 tables miss 1 by a little
        _check_states(vocab, self.length)
        if path.source.mask_token is not None and float(self._data_share(path.source.mask_token)) > 0:
            raise ValueError(
                f"the data holds the mask token {path.source.mask_token}; it must have probability 0 there"
            )
        self._tables: dict[float, Tensor] = {}

    def _data_share(self, token: int) -> Tensor:
        """How much probability has the token in x_1, summed over positions."""
        chosen = (self._token == token).to(torch.float64)
        return torch.stack([(self._weights.movedim(i, -1) @ chosen).sum() for i in range(self.length)]).sum()

    def _likelihood(self, t: float) -> Tensor:
        """K[z, a]: the probability that a position with value a shows z at time t."""
        kappa = float(self.path.schedule.kappa(t))
        eye = torch.eye(self.path.source.vocab_size, dtype=torch.float64)
        if len(self._token) == len(eye):
            return kappa * eye + (1 - kappa) * self.path.source.probabilities()[:, None]
        shows_x_0, shows_x_1 = eye.repeat_interleave(len(eye), 1), eye.repeat(1, len(eye))
        return (1 - kappa) * shows_x_0 + kappa * shows_x_1

    def _contract(self, factors: list[Tensor]) -> Tensor:
        """Sum the weights over all values, position i with factors[i] [n_i, a]: [n_1, ..., n_L]."""
        result = self._weights
        for factor in factors:  # each contraction takes the first axis away and puts its own last
            result = torch.tensordot(result, factor, dims=([0], [1]))
        return result

    def marginal(self, t: float) -> Tensor:
        """p_t over all states: float64 [V^L]."""
        return self._contract([self._likelihood(t)] * self.length).flatten()

    def table(self, t: float) -> Tensor:
        """p_{1|t} of every position in every state: float64 [V^L, L, V]."""
        if t not in self._tables:
            self._tables = {t: torch.stack([self._posterior_of(i, t) for i in range(self.length)], 1)}
        return self._tables[t]

    def _posterior_of(self, i: int, t: float) -> Tensor:
        vocab = self.path.source.vocab_size
        shows = self._likelihood(t)
        is_token = (self._token[None, :] == torch.arange(vocab)[:, None]).to(torch.float64)
        shows_and_is = (shows[:, None, :] * is_token[None, :, :]).flatten(0, 1)
        joint = self._contract([shows_and_is if j == i else shows for j in range(self.length)])
        joint = joint.reshape([vocab] * i + [vocab, vocab] + [vocab] * (self.length - 1 - i))
        joint = joint.movedim(i + 1, -1).reshape(-1, vocab)
        alone = self._weights.sum(dim=[j for j in range(self.length) if j != i]) if self.length > 1 else self._weights
        fallback = normalised((shows_and_is @ alone).view(vocab, vocab), torch.eye(vocab, dtype=torch.float64))
        shown = all_states(vocab, self.length)[:, i]
        return normalised(joint, fallback[shown])

    def __call__(self, x_t: Tensor, t: Tensor, _: Tensor | None = None) -> Tensor:
        """Logits log p_{1|t}(. | x_t): float64 [B, L, V]; the step size is ignored, truth needs none."""
        vocab = self.path.source.vocab_size
        if x_t.shape[-1] != self.length or int(x_t.min()) < 0 or int(x_t.max()) >= vocab:
            raise ValueError(f"x_t must be [samples, {self.length}] of tokens 0 .. {vocab - 1}")
        state = (x_t * _places(vocab, self.length)).sum(-1)
        times, which = torch.unique(t, return_inverse=True)
        probs = torch.empty(*x_t.shape, vocab, dtype=torch.float64)
        for n, time in enumerate(times.tolist()):
            probs[which == n] = self.table(time)[state[which == n]]
        return torch.log(probs)

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, **_: Tensor | None) -> Independent:
        """The true marginals p_{1|t}(. | x_t) of every position; of the joint law see `fsdfm.flow.exact.all_states`."""
        return Independent.of_logits(self(x_t, t, h))


def normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """Weights [..., V] as probabilities; where they are all zero, the fallback."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), fallback)


def posterior_table(denoiser: LogitsFunction, path: MixturePath, length: int, *, t: float, h: float) -> Tensor:
    """softmax of a denoiser's logits in every state, without the mask token: float64 [V^L, L, V]."""
    states = all_states(path.source.vocab_size, length)
    times = torch.full((len(states),), t, dtype=torch.float64)
    with torch.no_grad():
        logits = denoiser(states, times, torch.full_like(times, h)).to(torch.float64)
    if path.source.mask_token is not None:
        logits = logits.clone()
        logits[..., path.source.mask_token] = -torch.inf
    return torch.softmax(logits, -1)


def transition_matrix(probs: Tensor, path: MixturePath, jump: Jump, *, t: float, t_next: float) -> Tensor:
    """The law of one step of the sampler between all states: float64 [V^L, V^L], rows sum to 1."""
    num_states, length, vocab = probs.shape
    states = all_states(vocab, length)
    redraws = jump.redraws(path.schedule, t, t_next).expand(num_states, length)
    kernel = jump.kernel(probs, states, redraws)
    stays = torch.nn.functional.one_hot(states, vocab).to(kernel)
    kernel = torch.where(path.source.movable(states)[..., None], kernel, stays)
    matrix = kernel[:, 0]
    for i in range(1, length):
        matrix = (matrix[:, :, None] * kernel[:, i, None, :]).flatten(1)
    return matrix


def renoise_matrix(path: MixturePath, length: int, *, t: float, t_back: float) -> Tensor:
    """The law of `MixturePath.renoise` between all states: float64 [V^L, V^L], rows sum to 1."""
    vocab, now, back = path.source.vocab_size, float(path.schedule.kappa(t)), float(path.schedule.kappa(t_back))
    kept = back / now if now > 0 else 1.0
    single = kept * torch.eye(vocab, dtype=torch.float64) + (1 - kept) * path.source.probabilities()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(length):
        matrix = torch.kron(matrix, single)
    return matrix


def sampler_law(
    denoiser: LogitsFunction, path: MixturePath, start: Tensor, *, grid: Grid, jump: Jump, renoise: float = 0.0
) -> Tensor:
    """The law in which the sampler ends, computed, not sampled: float64 like `start`.

    start   the law of x_0 over all states [V^L], or a stack of them [K, V^L]; diag(p_0) gives the joint pi(x_0, x_1)
    renoise   steps back before each but the last, as in `Sampler`
    """
    if grid.times.ndim != 1:
        raise ValueError("the grid has times of its own for every row; a law needs one grid for all")
    length = _length_of(start.shape[-1], path.source.vocab_size)
    law = start.to(torch.float64)
    times = grid.times.tolist()
    for t, t_next in pairwise(times):
        if renoise and t_next < 1:
            t_back = max(0.0, t - renoise * (t_next - t))
            law, t = law @ renoise_matrix(path, length, t=t, t_back=t_back), t_back
        probs = posterior_table(denoiser, path, length, t=t, h=t_next - t)
        law = law @ transition_matrix(probs, path, jump, t=t, t_next=t_next)
    return law


def generator(probs: Tensor, scalar: Tensor) -> Tensor:
    """The generator u_t(x, y) = sum_i delta(y, x off i) u_t^i(y^i, x) of the factorised velocity: [V^L, V^L]."""
    num_states, length, vocab = probs.shape
    states = all_states(vocab, length)
    rates = velocity(probs, states, scalar)
    place = _places(vocab, length)
    rows = torch.arange(num_states)
    matrix = torch.zeros(num_states, num_states, dtype=probs.dtype)
    for i in range(length):
        neighbours = rows[:, None] + (torch.arange(vocab)[None, :] - states[:, i, None]) * place[i]
        matrix.scatter_add_(1, neighbours, rates[:, i])
    return matrix
