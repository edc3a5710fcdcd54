"""A causal head over the trunk's features: a joint posterior with exact likelihoods and exact draws.

    p(x_1 | x_t) = prod_i p(x_i | x_<i, f_i),       p(. | x_<i, f_i) = softmax(V (f_i (1 + s) + W g_i))
    g = norm(blocks(z)),                            z_i = E[x_{i-1}] + P f_i + c        (no E at i = 0)
    (c, s) = A SiLU(phi(1000 t) + phi'(log2 h)),    blocks: causal rotary attention and SwiGLU

f [L, C] are the trunk's features, f_i that of token i; V and E are the network's own head and embedding. P, W and A are
zero at the start, so that a child says what its parent says, for every x_<i, t and h. Where the trunk knows nothing of
the text, at t = 0, the head is an autoregressive model of a few blocks; where most tokens are shown it only has to make
the others agree. A trunk that stands still and a recurrent head over it were tried first (lab notes); the idea of a few
causal layers on top of a parallel network is that of self-speculative masked diffusion (arXiv 2510.03929) and ADJUST
(2509.22738).

**A draw** is x_i = F^-1(u_i | x_<i, f_i), one after the other: on a CPU in a loop over positions, texts side by side,
that does little else than multiply (`causal_loop`). Elsewhere in *windows*: their tokens are guessed, all their draws
are made in one pass, what was guessed right is settled with the first that was not, and the window moves on (Jacobi
iteration). The text is a function of u alone, whatever the guesses; what the text showed before the step is a good one.

Positions that are held keep their token: the law is then prod over the free positions of p(x_i | x_<i, f_i), the one
that is drawn from, not the conditional law given what is held to the right, of which only the trunk knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.flow import Filter, Independent, LogitsHook, Posterior, Rows, SplitNetwork, draw
from fsdfm.flow.posterior import BannedTokens, Tile, without_token
from fsdfm.model.causal import CausalModel
from fsdfm.model.causal_loop import CausalParts, CausalTexts, can_loop, draw_texts
from fsdfm.model.few_rows import LARGE
from fsdfm.model.joint import JointConfig, JointHead, register_joint_head
from fsdfm.model.layers import TIME_SCALE, Block, Cache, Norm, Sinusoid, StackConfig, initialise, linear, rotary_phases

__all__ = ["CausalHead", "CausalHeadConfig", "CausalPosterior"]

_FIRST_WINDOW, _LARGEST_WINDOW = 8, 64
_WORTH_A_PASS = 4  # held positions at the beginning that are read together, not one by one
_SAMPLES = 8  # whose texts are drawn together on a GPU


@dataclass(frozen=True, kw_only=True)
class CausalHeadConfig(JointConfig):
    """A head of so many causal blocks, shaped like the network's own."""

    kind = "causal"
    num_blocks: int = 2
    cond_width: int = 64

    def __post_init__(self) -> None:
        for name in ("num_blocks", "cond_width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed are whole numbers >= 1")


class CausalHead(JointHead):
    """The head of a network with `embedding`, `trunk` and `logits_at`."""

    def __init__(self, stack: StackConfig, config: CausalHeadConfig):
        super().__init__()
        self.config, width = config, stack.width
        self.head_width = stack.head_width
        self.blocks = nn.ModuleList(Block(stack, causal=True) for _ in range(config.num_blocks))
        self.norm = Norm(stack)
        self.project = linear(width, width, bias=False)  # P
        self.combine = linear(width, width, bias=False)  # W
        self.time, self.step = Sinusoid(config.cond_width), Sinusoid(config.cond_width, bias=False)
        self.modulation = linear(config.cond_width, 2 * width, bias=True)  # A

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Blocks as those of any network, phi by N(0, 1/fan_in), and P = W = A = phi' = 0."""
        initialise(self, self.config.num_blocks, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for module in (self.time.into, self.time.out, self.step.into):
            if not module.weight.is_meta:
                module.weight.normal_(0, module.in_features**-0.5, generator=generator)
        for module in (self.project, self.combine, self.modulation, self.step.out):
            nn.init.zeros_(module.weight)

    @torch.no_grad()
    def start_from(self, causal: CausalModel) -> None:
        """Take blocks of an autoregressive model, its first ones and its last, and its norm."""
        count = self.config.num_blocks
        chosen = [*causal.blocks[: count - 1], causal.blocks[-1]]
        for own, other in zip(self.blocks, chosen, strict=True):
            own.load_state_dict(other.state_dict())
        self.norm.load_state_dict(causal.norm.state_dict())

    @torch.no_grad()
    def grow_from(self, other: JointHead, **start: Any) -> None:
        """Say what a head of fewer blocks says: its last stays the last, and new blocks before it add nothing yet.

        causal   an autoregressive model whose blocks new ones start from, each at its height, but for the weights they
                 write with; None: fresh ones
        """
        old, causal = getattr(other, "blocks", nn.ModuleList()), start.get("causal")
        kept, count = len(old), len(self.blocks)
        if not isinstance(other, CausalHead) or kept >= count:
            raise ValueError(f"a head of {count} causal blocks cannot grow from one of {kept}; allowed are more blocks")
        rest = {name: value for name, value in other.state_dict().items() if not name.startswith("blocks.")}
        self.load_state_dict(rest, strict=False)
        for own, block in zip([*self.blocks[: kept - 1], self.blocks[-1]], old, strict=True):
            own.load_state_dict(block.state_dict())
        for number in range(kept - 1, count - 1):
            new = self.blocks[number]
            assert isinstance(new, Block)
            if causal is not None:
                new.load_state_dict(causal.blocks[number * len(causal.blocks) // count].state_dict())
            for parameter in (*new.attention.out.parameters(), *new.mlp.out.parameters()):
                nn.init.zeros_(parameter)

    def shared(self, network: SplitNetwork) -> list[nn.Parameter]:
        """The embedding, which the head reads the tokens before with."""
        return list(_embedding(network).parameters())

    def posterior(
        self, network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
    ) -> CausalPosterior:
        """Of the samples that rows are asked of: the trunk runs on those alone, and draws end behind the last row."""
        length = x_t.shape[1]
        samples = torch.arange(len(x_t), device=x_t.device)
        end = torch.full_like(samples, length)
        if rows is not None:
            samples = torch.unique_consecutive(rows // length)
            end = torch.zeros_like(end).scatter_reduce_(0, rows // length, rows % length + 1, "amax")
        features = network.trunk(x_t[samples], t[samples], h[samples]) if len(samples) else x_t.new_zeros(0)
        place = torch.full((len(x_t),), -1, device=x_t.device)
        place[samples] = torch.arange(len(samples), device=x_t.device)
        return CausalPosterior(self, network, features, place, x_t, t, h, torch.full_like(x_t, -1), end)

    def log_prob(
        self,
        network: SplitNetwork,
        features: Tensor,
        x_1: Tensor,
        *,
        t: Tensor,
        h: Tensor,
        held: Tensor,
        real: Tensor,
        forbidden: int | None = None,
    ) -> Tensor:
        """By teacher forcing, in one pass: [B]."""
        log_p = self.position_log_probs(network, features, x_1, t=t, h=h, forbidden=forbidden)
        return torch.where((held < 0) & real, log_p, 0.0).sum(-1)

    def position_log_probs(
        self,
        network: SplitNetwork,
        features: Tensor,
        x_1: Tensor,
        *,
        t: Tensor,
        h: Tensor,
        forbidden: int | None = None,
    ) -> Tensor:
        """log p(x_i | x_<i, f_i) of every position: [B, L]."""
        logits = network.logits_at(self.read(network, features, x_1, t=t, h=h).flatten(0, 1)).float()
        if forbidden is not None:
            logits = without_token(logits, forbidden)
        return torch.log_softmax(logits, -1).gather(-1, x_1.flatten()[:, None])[:, 0].view_as(x_1)

    def read(self, network: SplitNetwork, features: Tensor, x: Tensor, *, t: Tensor, h: Tensor) -> Tensor:
        """Features whose product with V is the logits of every x_i given x_<i: [B, L, C]."""
        inputs, base = self.inputs(features, t, h)
        z = inputs + F.pad(_embed(network, x[:, :-1]), (0, 0, 1, 0)).to(inputs.dtype)
        return base + self.combine(self.stack(z, 0, None))  # type: ignore[no-any-return]

    @torch.no_grad()
    def settle(self, posterior: CausalPosterior, samples: Tensor, u: Tensor, *, filter: Filter | None) -> Tensor:
        """Texts of some samples [n] from uniforms [n, L], drawn together: int64 [n, L]."""
        if can_loop(self.blocks, posterior.features):
            return self._settle_rows(posterior, samples, u, filter=filter)
        network, held, guess = posterior.network, posterior.held[samples], posterior.x_t[samples]
        features = posterior.features[posterior.place[samples]]
        length = features.shape[1]
        inputs, base = self.inputs(features, posterior.t[samples], posterior.h[samples])
        x = torch.where(held >= 0, held, guess)
        caches = [Cache(length) for _ in self.blocks]
        start, end = self._read_held(posterior.network, inputs, held, caches=caches), int(posterior.end[samples].max())
        window = _FIRST_WINDOW if x.device.type == "cpu" else length
        while start < end:
            part = slice(start, min(start + window, end))
            before = _embed(network, x[:, max(start - 1, 0) : part.stop - 1]).to(inputs.dtype)
            z = inputs[:, part] + (F.pad(before, (0, 0, 1, 0)) if start == 0 else before)
            for cache in caches:
                cache.length = start
            logits = network.logits_at((base[:, part] + self.combine(self.stack(z, start, caches))).flatten(0, 1))
            positions = torch.arange(part.start, part.stop, device=x.device)
            logits = posterior.shaped(logits, (samples[:, None] * length + positions).flatten())
            drawn = draw(logits, u[:, part].flatten(), filter=filter).tokens.view(len(x), -1)
            drawn = torch.where(held[:, part] >= 0, held[:, part], drawn)
            right = int((drawn == x[:, part]).all(0).cumprod(0).sum())
            x[:, part] = drawn
            size = part.stop - start
            start += min(right + 1, size)
            if x.device.type == "cpu":  # as far as the guesses have been good
                window = min(2 * window, _LARGEST_WINDOW) if right >= size - 1 else max(2, min(window, 2 * right + 2))
        return x

    def _read_held(self, network: SplitNetwork, inputs: Tensor, held: Tensor, *, caches: list[Cache]) -> int:
        """Keys and values of what is held at the beginning of all texts [n, L], in one pass; how many positions it is.

        A beginning of a few is not worth a pass: 0.
        """
        known = int((held >= 0).long().cumprod(1).sum(1).min())
        if known < _WORTH_A_PASS:
            return 0
        before = F.pad(_embed(network, held[:, : known - 1]), (0, 0, 1, 0))
        self.stack(inputs[:, :known] + before.to(inputs.dtype), 0, caches)
        return known

    def _settle_rows(self, posterior: CausalPosterior, samples: Tensor, u: Tensor, *, filter: Filter | None) -> Tensor:
        """Texts side by side, position by position: [n, L]."""
        network, held = posterior.network, posterior.held[samples]
        inputs, base, starts, caches = [], [], [], []
        for text in range(len(samples)):  # one at a time: a product rounds by its number of rows
            own = samples[text : text + 1]
            features = posterior.features[posterior.place[own]]
            told, kept = self.inputs(features, posterior.t[own], posterior.h[own])
            caches.append([Cache(features.shape[1]) for _ in self.blocks])
            starts.append(self._read_held(network, told, held[text : text + 1], caches=caches[-1]))
            inputs.append(told)
            base.append(kept)
        table, vocabulary = _embedding(network).weight, getattr(network, "vocabulary", None) or network.logits_at
        texts = CausalTexts(
            torch.where(held >= 0, held, posterior.x_t[samples]),
            held < 0,
            inputs=torch.cat(inputs),
            base=torch.cat(base),
            starts=starts,
            ends=posterior.end[samples].tolist(),
            caches=caches,
            u=u,
            filter=filter,
            banned=posterior.banned(samples, table.shape[0]),
            shaped=lambda logits, own, at: posterior.shaped(logits, samples[own] * held.shape[1] + at),
        )
        return draw_texts(CausalParts(self.blocks, self.norm, table, vocabulary, self.combine), texts)

    def inputs(self, features: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """P f_i + c and f_i (1 + s): what a position gets from the trunk, [B, L, C] each."""
        told = F.silu(self.time(t * TIME_SCALE) + self.step(torch.log2(h)))
        c, s = self.modulation(told)[:, None].chunk(2, -1)
        return self.project(features) + c, features * (1 + s)

    def stack(self, z: Tensor, start: int, caches: list[Cache] | None) -> Tensor:
        """g of positions start .. start + n - 1."""
        rotary = rotary_phases(z.shape[1], self.head_width, start=start, device=z.device)
        for number, block in enumerate(self.blocks):
            z = block(z, rotary, None if caches is None else caches[number])
        return self.norm(z)  # type: ignore[no-any-return]


def _embedding(network: Any) -> nn.Embedding:
    """The embedding of a network, or of what it wraps."""
    found: nn.Embedding = getattr(network, "model", network).embedding
    return found


def _embed(network: Any, tokens: Tensor) -> Tensor:
    found: Tensor = _embedding(network)(tokens)
    return found


@dataclass(frozen=True)
class CausalPosterior(Posterior):
    """The law of a causal head over features [n, L, C]; sample b's are features[place[b]].

    A draw ends at `end` [B], behind the last row that was asked about: a prefix of a text has the law of prefixes, and
    what follows keeps what it shows. What is held at the beginning of a text is read in one pass.

    The head's own marginals would be sums over all prefixes. `marginals` are its laws given the prefix that is shown,
    p(x_i | x_t^1 .. x_t^{i-1}, f_i): right where what is shown is right, an approximation elsewhere. On a
    CPU one text at a time, so that it does not depend on the rows beside it.
    """

    head: CausalHead
    network: SplitNetwork
    features: Tensor
    place: Tensor
    x_t: Tensor
    t: Tensor
    h: Tensor
    held: Tensor
    end: Tensor
    forbidden: int | None = None
    hook: tuple[LogitsHook, Tensor, Tensor, Tensor] | None = None
    joint = True

    def marginals(self, rows: Tensor) -> Iterator[Tile]:
        """The law of each position given what is shown before it, in one pass."""
        length = self.x_t.shape[1]
        own = (self.place >= 0).nonzero()[:, 0]
        read = self.head.read(self.network, self.features, self.x_t[own], t=self.t[own], h=self.h[own])
        fields = Independent.of_features(read, self.network)
        inside = self.place[rows // length] * length + rows % length
        if self.hook is None:
            return fields.marginals(inside)
        return self._hooked(fields.marginals(inside), rows)

    def _hooked(self, tiles: Iterator[Tile], rows: Tensor) -> Iterator[Tile]:
        for part, tile, own in tiles:
            yield part, self._changed(tile if own is None else tile[own], rows[part]), None

    def draw(self, samples: Tensor, u: Tensor, *, filter: Filter | None = None) -> Tensor:
        """Some texts together; on a CPU, where blocks are not what goes side by side, one after the other."""
        together = _SAMPLES
        if self.x_t.device.type == "cpu":
            together = LARGE if can_loop(self.head.blocks, self.features) else 1
        parts = zip(torch.split(samples, together), torch.split(u.to(self.x_t.device), together), strict=True)
        return torch.cat([self.head.settle(self, own, own_u, filter=filter) for own, own_u in parts])

    def log_prob(self, x_1: Tensor) -> Tensor:
        """log of the law that is drawn from: free positions given what stands before them."""
        every = torch.ones_like(x_1, dtype=torch.bool)
        found = self.head.log_prob(
            self.network,
            self.features[self.place],
            x_1,
            t=self.t,
            h=self.h,
            held=self.held,
            real=every,
            forbidden=self.forbidden,
        )
        wrong = ((self.held >= 0) & (self.held != x_1)).any(-1)
        return torch.where(wrong, -torch.inf, found)

    def given(self, held: Tensor, *, forbidden: int | None = None) -> CausalPosterior:
        """What is held stands in the text that the head reads."""
        return replace(self, held=held, forbidden=forbidden)

    def part(self, first: int, count: int) -> CausalPosterior:
        """Some of the samples, with the same features."""
        own = slice(first, first + count)
        cut = {name: getattr(self, name)[own] for name in ("place", "x_t", "t", "h", "held", "end")}
        return replace(self, **cut)

    def changed(self, hook: LogitsHook, x_t: Tensor, *, t: Tensor, t_next: Tensor) -> CausalPosterior:
        """The hook changes every conditional law; it may see a position more than once, with other tokens before it."""
        return replace(self, hook=(hook, x_t, t, t_next))

    def shaped(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits [N, V] of these rows: hooked, and without what is forbidden."""
        logits = self._changed(logits, rows)
        return logits if self.forbidden is None else without_token(logits, self.forbidden)

    def banned(self, samples: Tensor, vocab_size: int) -> Tensor | None:
        """What added to the logits of these samples says all that `shaped` does: 0 or -inf, [n, V]; None: nothing."""
        hook = None if self.hook is None else self.hook[0]
        if hook is not None and not isinstance(hook, BannedTokens):
            return None
        mask = torch.zeros(len(samples), vocab_size) if hook is None else hook.mask(samples, vocab_size)
        if self.forbidden is not None:
            mask[:, self.forbidden] = -torch.inf
        return mask

    def _changed(self, logits: Tensor, rows: Tensor) -> Tensor:
        if self.hook is None:
            return logits
        (hook, x_t, t, t_next), length = self.hook, self.x_t.shape[1]
        return hook(logits, Rows(rows // length, rows % length, x_t, t, t_next))


register_joint_head(CausalHeadConfig, CausalHead)
