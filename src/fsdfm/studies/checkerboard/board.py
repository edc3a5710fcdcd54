"""The checkerboard of appendix B.3: a two-token world whose posterior is known in closed form, and a network for it.

A sample is a pair of tokens (a, b), a point of the plane; it is data if its square is allowed, that is if
a // square + b // square is even. p_1 is uniform over the allowed cells.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdfm.flow import MixturePath, path_loss
from fsdfm.flow.exact import normalised
from fsdfm.noise import Noise, Purpose

__all__ = ["Board", "CheckerboardDenoiser", "CheckerboardNetwork", "NetworkFit", "train_network"]

LATEST_TIME = 0.999  # training draws t below it: g(t) is infinite at 1, and 100 frames ask for nothing later than 0.99
FIRST_TRAINING_SAMPLE = 1 << 40  # training pairs and generated samples never share a random number
BATCH = 256
LEARNING_RATE = 3e-3
CHUNK = 32  # batches whose noise is drawn at once; changes no number, saves most of its cost


@dataclass(frozen=True)
class Board:
    """A checkerboard of `size` x `size` cells in squares of `square` x `square`; the first square is allowed."""

    size: int = 128
    square: int = 32

    def __post_init__(self) -> None:
        if self.square < 1 or self.size < 2 * self.square or self.size % (2 * self.square):
            raise ValueError(
                f"a board of size {self.size} cannot have squares of {self.square}; "
                "size must be a positive multiple of twice the square"
            )

    def allowed(self, x: Tensor) -> Tensor:
        """Which samples are data: bool [B] for tokens [B, 2]; a masked sample (a token >= size) is not."""
        return x.div(self.square, rounding_mode="floor").sum(-1).remainder(2).eq(0) & x.lt(self.size).all(-1)

    def probabilities(self, vocab_size: int) -> Tensor:
        """p_1 over all pairs of tokens: float64 [V, V]; zero at tokens that are no cells, such as the mask."""
        if vocab_size < self.size:
            raise ValueError(f"a vocabulary of {vocab_size} tokens is too small for a board of size {self.size}")
        token = torch.arange(vocab_size)
        cells = self.allowed(torch.cartesian_prod(token, token)).view(vocab_size, vocab_size)
        return cells.to(torch.float64) * (2 / self.size**2)

    def sample(self, noise: Noise) -> Tensor:
        """x_1 ~ p_1: int64 [B, 2]; the second token is drawn among the half of the cells the first one allows."""
        u = noise.uniform(Purpose.DATA, 2)
        first, half = (u * torch.tensor([self.size, self.size // 2])).to(torch.int64).unbind(-1)
        block, offset = half // self.square, half % self.square
        second = (2 * block + first // self.square % 2) * self.square + offset
        return torch.stack([first, second], -1)


class CheckerboardDenoiser:
    """The exact posterior p_{1|t} of the board for any source with independent coupling: O(V) a position, no [V, V].

    A position of token a shows z at time t with likelihood l(z | a) = kappa [z = a] + (1 - kappa) p_0(z), so

        p(x_1^1 = a | z)  ~  l(z_1 | a) sum_b p_1(a, b) l(z_2 | b)
                          =  l(z_1 | a) (kappa p_1(a, z_2) + (1 - kappa) p_0(z_2) p_1(a)).

    A state that the path cannot reach (a sampler can: under the mask source two tokens revealed together may be off
    the board) has no posterior; there each position is treated alone, and where even that is undefined it stays.
    """

    def __init__(self, path: MixturePath, board: Board):
        joint = board.probabilities(path.source.vocab_size)
        self.path = path
        self._given = torch.stack([joint.T, joint])  # [position, token of the other position, own token]
        self._alone = self._given.sum(1)
        self._p_0 = path.source.probabilities()

    def trunk(self, x_t: Tensor, t: Tensor, _: Tensor, /) -> Tensor:
        """All that a position's posterior depends on; the rest is done where a token may jump."""
        return _position_features(x_t, self.path.schedule.kappa(t))

    def logits_at(self, features: Tensor) -> Tensor:
        """log p_{1|t} of chosen positions: [N, 4] -> float64 [N, V]."""
        own, other, position, kappa = _unpack(features)
        alone = self._alone[position]
        likelihood = ((1 - kappa) * self._p_0[own, None]).expand_as(alone).scatter_add(-1, own[:, None], kappa)
        context = kappa * self._given[position, other] + (1 - kappa) * self._p_0[other, None] * alone
        stays = torch.zeros_like(alone).scatter(-1, own[:, None], 1.0)
        probs = normalised(likelihood * context, normalised(likelihood * alone, stays))
        return torch.log(probs)

    def __call__(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """log p_{1|t}(. | x_t): float64 [B, 2, V]; truth ignores the step size."""
        return self.logits_at(self.trunk(x_t, t, h).flatten(0, 1)).view(*x_t.shape, -1)


def _position_features(x_t: Tensor, value: Tensor) -> Tensor:
    """Own token, the other position's token, the position, and a number per sample: float64 [B, 2, 4]."""
    columns = (x_t, x_t.flip(-1), torch.arange(2).expand_as(x_t), value[:, None].expand(x_t.shape))
    return torch.stack([column.to(torch.float64) for column in columns], -1)


def _unpack(features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse for chosen positions [N, 4]: int64 [N] three times, and the number as float64 [N, 1]."""
    own, other, position = features[:, :3].to(torch.int64).unbind(-1)
    return own, other, position, features[:, 3:]


class CheckerboardNetwork(nn.Module):
    """A small denoiser: both tokens embedded beside a sinusoidal t, a residual MLP, a head tied to an embedding.

    What the posterior mostly says is "the token I see, unless it contradicts the other one": so a position's features
    are its own embedding, gated, plus what the MLP adds, and the head reads them with the same embedding.
    """

    frequencies: Tensor

    def __init__(self, vocab_size: int, width: int = 128):
        super().__init__()
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(8))
        self.embed_time = nn.Linear(2 * len(self.frequencies), width)
        self.embed_own, self.embed_other = nn.Embedding(vocab_size, width), nn.Embedding(vocab_size, width)
        self.embed_position = nn.Embedding(2, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.gate, self.add = nn.Linear(width, width), nn.Linear(width, width)
        self.token = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.token.weight, std=width**-0.5)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def trunk(self, x_t: Tensor, t: Tensor, _: Tensor, /) -> Tensor:
        """What a position is asked about; this network is not step-aware and ignores h."""
        return _position_features(x_t, t)

    def logits_at(self, features: Tensor) -> Tensor:
        """The network at chosen positions: [N, 4] -> [N, V]."""
        own, other, position, t = _unpack(features)
        angles = t.to(self.frequencies) * self.frequencies
        state = self.embed_time(torch.cat([angles.sin(), angles.cos()], -1))
        state = state + self.embed_own(own) + self.embed_other(other) + self.embed_position(position)
        state = state + self.mlp(state)
        read = self.gate(state) * self.token(own) + self.add(state)
        return nn.functional.linear(read, self.token.weight, self.bias)

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Logits of p_{1|t}: [B, 2, V]."""
        return self.logits_at(self.trunk(x_t, t, h).flatten(0, 1)).view(*x_t.shape, -1)


@dataclass(frozen=True)
class NetworkFit:
    """How a network was trained, and how far from the truth it ended."""

    steps: int
    seconds: float
    kl_to_exact: float  # nats per token, mean over p_t and t uniform


def train_network(path: MixturePath, board: Board, *, seed: int, steps: int) -> tuple[CheckerboardNetwork, NetworkFit]:
    """Train a network on the path loss with g(t), t uniform; the global random state is not touched."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; training needs at least 1 step")
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = CheckerboardNetwork(path.source.vocab_size)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    for x_1, x_t, t in _training_pairs(path, board, seed=seed, steps=steps):
        loss = path_loss(network(x_t, t, t), x_1, x_t, scalar=path.schedule.scalar(t)).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    return network.eval(), NetworkFit(steps, seconds, _kl_to_exact(network, path, board))


def _training_pairs(
    path: MixturePath, board: Board, *, seed: int, steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`steps` batches (x_1, x_t, t), each row addressed by its own sample index."""
    for first in range(0, steps, CHUNK):
        num_rows = min(CHUNK, steps - first) * BATCH
        start = FIRST_TRAINING_SAMPLE + first * BATCH
        x_1, x_t, t = _draw_pairs(path, board, Noise(seed, range(start, start + num_rows)))
        batches = (x_1.view(-1, BATCH, 2), x_t.view(-1, BATCH, 2), t.view(-1, BATCH))
        yield from zip(*(rows.unbind() for rows in batches), strict=True)


def _draw_pairs(path: MixturePath, board: Board, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    x_1 = board.sample(noise)
    t = noise.uniform(Purpose.TIME, 1)[:, 0] * LATEST_TIME
    return x_1, path.sample(path.sample_x_0(x_1, noise), x_1, t, noise=noise), t


def _kl_to_exact(network: CheckerboardNetwork, path: MixturePath, board: Board, *, num_rows: int = 4096) -> float:
    """The mean of KL(p_{1|t} of the truth || of the network) over fresh x_t, in nats per token."""
    _, x_t, t = _draw_pairs(path, board, Noise(0, range(num_rows)))
    truth = CheckerboardDenoiser(path, board)(x_t, t, t)
    with torch.no_grad():
        learned = torch.log_softmax(network(x_t, t, t).to(truth), -1)
    probs = truth.exp()
    return float(torch.where(probs > 0, probs * (truth - learned), 0.0).sum(-1).mean())
