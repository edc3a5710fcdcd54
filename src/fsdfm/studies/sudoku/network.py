"""The network of the study: a small transformer whose heads look along rows, columns, boxes and everywhere.

A digit d in 1 .. n is the token d - 1 where the sampler writes it and n + d - 1 where it is given; the mask, where
there is one, is 2n. The network never says a given token or the mask, so that what is given can only be frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.flow import Filter, MaskSource, Source, SplitNetwork
from fsdfm.model import CRFConfig, JointHead, ModelConfig, TransitionTables
from fsdfm.model.causal_head import CausalHead, CausalHeadConfig, CausalPosterior
from fsdfm.noise import Noise, Purpose
from fsdfm.studies.sudoku.board import cell_groups

__all__ = ["BoardNetwork", "DigitSource", "make_source"]

_NEVER = -1e4  # a logit that is never drawn, and finite: a position of weight 0 has a loss of 0
_HEADS = 4  # along rows, columns, boxes, and everywhere
_SMALLEST = 2.0**-10
_RANK = 8  # of the transitions between neighbouring cells


class DigitSource(Source):
    """x_0 uniform over the n digits that a sampler writes; given digits are in the vocabulary, but no noise."""

    def __init__(self, num_digits: int):
        self.num_digits = num_digits
        self.vocab_size = 2 * num_digits
        self.mask_token = None

    def sample(self, noise: Noise, length: int, *, step: int = 0) -> Tensor:
        """Uniform digits."""
        return noise.integers(Purpose.SOURCE, length, self.num_digits, step=step)

    def probabilities(self) -> Tensor:
        """1/n at the digits, 0 at what is given."""
        p = torch.zeros(self.vocab_size, dtype=torch.float64)
        p[: self.num_digits] = 1 / self.num_digits
        return p


def make_source(name: str, box: int) -> Source:
    """The source of boards: "uniform" or "mask"."""
    if name == "uniform":
        return DigitSource(box * box)
    if name == "mask":
        return MaskSource(2 * box * box + 1)
    raise ValueError(f"source is {name!r}; allowed are 'uniform' and 'mask'")


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, _HEADS, width // _HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class BoardNetwork(nn.Module):
    """Logits of p_{1|t} from a board x_t [B, n^2], t and h.

    Cells know their row, column and box. The weights of h start at zero: a child that is trained on steps of several
    sizes starts as its parent, bit for bit. With a `joint` head cells are drawn together: "crf", as a
    chain row by row; "causal", each given all those before it.
    """

    def __init__(self, box: int, vocab_size: int, *, width: int = 64, blocks: int = 5, joint: str = "", seed: int = 0):
        super().__init__()
        n = box * box
        self.num_digits, self.vocab_size = n, vocab_size
        groups = torch.tensor(cell_groups(box))
        same = groups[:, None] == groups[None]  # [n^2, n^2, 3]
        seen = torch.cat((same, torch.ones_like(same[..., :1])), -1).permute(2, 0, 1)
        self.groups, self.seen = nn.Buffer(groups, persistent=False), nn.Buffer(seen[None], persistent=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab_size, width)
            self.place = nn.ModuleList(nn.Embedding(n, width) for _ in range(groups.shape[1]))
            self.time = nn.Linear(_waves(torch.zeros(1)).shape[-1], width)
            self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, n)
            self.joint = _make_joint(joint, vocab_size, width, seed=seed) if joint else None
        self.step = nn.Linear(_waves(torch.zeros(1)).shape[-1], width, bias=False)
        nn.init.zeros_(self.step.weight)

    def plain_parameters(self) -> Iterable[nn.Parameter]:
        """Everything but the weights of h."""
        return (p for name, p in self.named_parameters() if not name.startswith("step."))

    def step_aware_parameters(self) -> Iterable[nn.Parameter]:
        """Everything."""
        return self.parameters()

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, n^2, C]."""
        level = 1 + torch.log2(h.clamp(min=_SMALLEST)) / 10
        condition = self.time(_waves(t)) + self.step(_waves(level))
        x = self.embedding(x_t) + condition[:, None]
        for kind, place in enumerate(self.place):
            x = x + place(self.groups[:, kind])
        for block in self.blocks:
            x = block(x, self.seen)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits_at(self, rows: Tensor) -> Tensor:
        """The head: [N, C] -> [N, V]; given digits and the mask are never said."""
        digits: Tensor = self.head(rows)
        return F.pad(digits, (0, self.vocab_size - self.num_digits), value=_NEVER)

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Logits [B, n^2, V]."""
        return self.logits_at(self.trunk(x_t, t, h))


def _make_joint(kind: str, vocab_size: int, width: int, *, seed: int) -> JointHead:
    """A head that says at the start what the network says without it."""
    shape = ModelConfig(vocab_size=vocab_size, width=width, num_heads=_HEADS, num_blocks=1, dropout=0.0)
    head = _HEADS_BY_NAME[kind](shape)
    head.initialise(seed)
    return head


class _BoardHead(CausalHead):
    """A causal head whose boards are drawn together: they are short, and many are asked at once."""

    def posterior(
        self, network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
    ) -> CausalPosterior:
        """As of any causal head, but for the draw."""
        found = super().posterior(network, x_t, t, h=h, rows=rows)
        return _BoardPosterior(**{field.name: getattr(found, field.name) for field in fields(found)})


class _BoardPosterior(CausalPosterior):
    def draw(self, samples: Tensor, u: Tensor, *, filter: Filter | None = None) -> Tensor:
        """All boards at once."""
        return self.head.settle(self, samples, u, filter=filter)


_HEADS_BY_NAME: dict[str, Callable[[ModelConfig], JointHead]] = {
    "crf": lambda shape: TransitionTables(shape, CRFConfig(rank=_RANK)),
    "causal": lambda shape: _BoardHead(shape, CausalHeadConfig(num_blocks=1)),
}


def _waves(s: Tensor) -> Tensor:
    """s in [0, 1] and sinusoids of it: float32 [B, 13]."""
    waves = [wave(math.pi * 2.0**k * s) for k in range(6) for wave in (torch.sin, torch.cos)]
    return torch.stack([s, *waves], -1).float()
