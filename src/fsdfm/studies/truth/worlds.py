"""Worlds: known distributions of coupled tokens, small enough (V^L <= 4096) to compute every law exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdfm.flow import MaskSource, MixturePath, UniformSource
from fsdfm.flow.exact import all_states
from fsdfm.noise import Noise, Purpose

__all__ = ["WORLDS", "World", "make_world"]


@dataclass(frozen=True)
class World:
    """A distribution p_1 over the path's vocabulary, one axis a position (zero at the mask token), and its path."""

    name: str
    path: MixturePath
    p_1: Tensor

    @property
    def length(self) -> int:
        """L."""
        return self.p_1.ndim

    @property
    def truth(self) -> Tensor:
        """p_1 over all states: float64 [V^L]."""
        return self.p_1.flatten()

    @property
    def start(self) -> Tensor:
        """p_0 over all states: float64 [V^L]."""
        law = torch.ones(1, dtype=torch.float64)
        for _ in range(self.length):
            law = torch.outer(law, self.path.source.probabilities()).flatten()
        return law

    @property
    def masked(self) -> bool:
        """Whether the source is the mask source."""
        return self.path.source.mask_token is not None


def _random_rows(rows: int, columns: int, *, sharpness: float, step: int) -> Tensor:
    """Random distributions, sharper with `sharpness`: float64 [rows, columns]."""
    weights = Noise(seed=5, samples=range(rows)).uniform(Purpose.DATA, columns, step) ** sharpness
    return weights / weights.sum(-1, keepdim=True)


def markov_chain(vocab: int = 4, length: int = 6) -> Tensor:
    """A Markov chain with random transitions: neighbours depend on each other; 6.5 bits of 12."""
    law = _random_rows(1, vocab, sharpness=1.0, step=0)[0]
    transition = _random_rows(vocab, vocab, sharpness=4.7, step=1)
    for _ in range(length - 1):
        law = law[..., None] * transition
    return law


def topic_mixture(vocab: int = 4, length: int = 5, topics: int = 6) -> Tensor:
    """A topic is drawn, then every word from the topic's own distribution: all positions depend on each other alike."""
    words = _random_rows(topics, vocab, sharpness=6.0, step=2)
    law = torch.full((topics,), 1 / topics, dtype=torch.float64)
    for _ in range(length):
        law = law[..., None] * words.reshape(topics, *[1] * (law.ndim - 1), vocab)
    return law.sum(0)


def balanced(length: int = 10) -> Tensor:
    """Binary words with as many ones as zeros, each change between neighbours halving the weight: a hard constraint."""
    words = all_states(2, length)
    changes = (words[:, 1:] != words[:, :-1]).sum(1)
    weights = torch.where(2 * words.sum(1) == length, 0.5 ** changes.to(torch.float64), 0.0)
    return (weights / weights.sum()).view([2] * length)


_DATA: dict[str, Callable[[], Tensor]] = {"markov": markov_chain, "topics": topic_mixture, "balanced": balanced}

WORLDS = ("topics", "markov", "balanced", "topics-mask")
"""The worlds of the study; `NAME-mask` is the data of NAME under the mask source."""


def make_world(name: str) -> World:
    """A world by its name."""
    data, _, source = name.partition("-")
    if data not in _DATA or source not in ("", "mask"):
        raise ValueError(f"unknown world {name!r}; choose from {', '.join(WORLDS)}")
    p_1 = _DATA[data]()
    vocab = p_1.shape[0]
    if not source:
        return World(name, MixturePath(UniformSource(vocab)), p_1)
    return World(name, MixturePath(MaskSource(vocab + 1)), torch.nn.functional.pad(p_1, (0, 1) * p_1.ndim))
