"""The prompt's keys and values, kept from the first call of a block.

In every call the given tokens are the same, yet their keys and values are not: they attend to the noise around them,
and the time is another. Kept all the same they cost a little agreement and save their rows in all later calls: with
half of a text given and S calls, 2S / (S + 1) times fewer. It is not exact, so it is off unless asked for; the price is
measured in the documentation (docs/long.md).

What is computed in a later call: the positions that are free, and in a next-token model those before them, which speak
of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdfm.flow import Posterior, network_posterior
from fsdfm.generate.invariant import BatchInvariant
from fsdfm.model.context import Beside

__all__ = ["PromptCache"]


class PromptCache:
    """A denoiser of one block of texts whose given tokens are computed in the first call, and every `refresh` calls.

    frozen    what is given: bool [B, L]
    refresh   0: never again
    """

    samples_apart = True

    def __init__(self, network: BatchInvariant, frozen: Tensor, *, refresh: int = 0):
        self.network, self.refresh = network, refresh
        self.model: Any = network.model
        if not hasattr(self.model, "features_beside"):
            raise ValueError(f"cache is not known to {type(self.model).__name__}; leave it out")
        self.shifted = bool(getattr(getattr(network.model, "config", None), "next_token", False))
        computed = ~frozen
        if self.shifted:
            computed[:, :-1] |= ~frozen[:, 1:]
        self.computed = computed.to(network.runtime.device)
        self.calls = 0
        self._kept: dict[int, tuple[list[Beside], Tensor]] = {}

    @property
    def joint(self) -> Any:
        """The model's joint head, if it has one."""
        return self.network.joint

    @property
    def vocabulary(self) -> Any:
        """The module that gives the logits, where that is a product and no more."""
        return self.network.vocabulary

    @property
    def logits_at(self) -> Any:
        """The head, as ever."""
        return self.network.logits_at

    @torch.no_grad()
    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """p_{1|t}(. | x_t), nearly."""
        if self.refresh and self.calls % self.refresh == 0:
            self._kept = {}
        self.calls += 1
        return network_posterior(self, x_t, t, h=h, rows=rows)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C], one sample at a time."""
        found = []
        for sample in range(len(x_t)):
            one = slice(sample, sample + 1)
            with self.network.runtime.autocast():
                features = self._features(sample, x_t[one], t[one], h=h[one])
            found.append(features.to(torch.float32))
        features = torch.cat(found)
        return torch.cat((features[:, :1], features[:, :-1]), 1) if self.shifted else features

    def _features(self, sample: int, x_t: Tensor, t: Tensor, *, h: Tensor) -> Tensor:
        length, every = x_t.shape[1], torch.arange(x_t.shape[1], device=x_t.device)
        if sample not in self._kept:
            beside = [Beside() for _ in self.model.blocks]
            features: Tensor = self.model.features_beside(x_t, t, h, positions=every, length=length, beside=beside)
            self._keep(sample, beside, features)
            return features
        kept, before = self._kept[sample]
        own = every[self.computed[sample]]
        beside = [Beside(layer.keys, layer.values) for layer in kept]
        fresh = self.model.features_beside(x_t[:, own], t, h, positions=own, length=length, beside=beside)
        return before.index_copy(1, own, fresh.to(before))

    def _keep(self, sample: int, passed: list[Beside], features: Tensor) -> None:
        """The keys and values of what is not computed again, of every layer."""
        given, layers = (~self.computed[sample]).nonzero()[:, 0], []
        for layer in passed:
            assert layer.own is not None
            layers.append(Beside(layer.own[0][:, :, given], layer.own[1][:, :, given]))
        self._kept[sample] = layers, features
