"""Tiny trainable denoisers for the tests."""

import torch
from torch import Tensor, nn


class TableNet(nn.Module):
    """A network that can say anything about a tiny world: one feature vector for each (state, time slot)."""

    def __init__(self, vocab: int, length: int, slots: int = 4, *, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.length, self.slots = vocab, length, slots
        self.table = nn.Parameter(torch.randn(slots, vocab**length, length, vocab, generator=generator))
        self.head = nn.Linear(vocab, vocab)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(vocab))
            self.head.bias.zero_()

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        place = self.vocab ** torch.arange(self.length - 1, -1, -1)
        slot = (t * self.slots).long().clamp(max=self.slots - 1)
        return self.table[slot, (x_t * place).sum(-1)]

    def logits_at(self, rows: Tensor) -> Tensor:
        return self.head(rows)

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return self.logits_at(self.trunk(x_t, t, h))


class MixerNet(nn.Module):
    """Embedding, one mixing layer over positions, t and h added, a linear head: enough to have gradients everywhere."""

    def __init__(self, vocab: int, width: int = 16, *, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocab, width)
            self.mix = nn.Linear(2 * width + 2, width)
            self.head = nn.Linear(width, vocab)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        x = self.embedding(x_t)
        context = x.mean(1, keepdim=True).expand_as(x)
        scalars = torch.stack([t, h], -1).to(x.dtype)[:, None].expand(*x.shape[:2], 2)
        return torch.tanh(self.mix(torch.cat([x, context, scalars], -1)))

    def logits_at(self, rows: Tensor) -> Tensor:
        return self.head(rows)

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return self.logits_at(self.trunk(x_t, t, h))
