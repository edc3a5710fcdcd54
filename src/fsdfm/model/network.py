"""What a network must be to stand in a checkpoint: the base class of `DiT`, `Transformer` and of networks from outside.

An own network is one file and one line of registration, in the program that saves and in every one that loads:

    @dataclass(frozen=True)
    class MyConfig:                      # what config.json keeps: numbers, strings, true and false
        vocab_size: int
        to_dict, from_dict               # {"vocab_size": ...} and back

    class MyNetwork(Network):
        def __init__(self, config: MyConfig, *, seed: int = 0): ...
        def trunk(self, x_t, t, h): ...      # features [B, L, C]
        def logits_at(self, features): ...   # [N, C] -> [N, V]

    ARCHITECTURES["mine"] = Architecture(MyConfig, MyNetwork)

It then saves, loads, generates and is evaluated like any other; `examples/own_network.py` does all of it. A recipe
trains it: `model.architecture = "mine"` with its other keys in [model.network], or as model.parent; few-step objectives
want a config that says `is_step_aware`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor, nn

from fsdfm.flow import Posterior, network_posterior

__all__ = ["Network", "NetworkConfig"]


class NetworkConfig(Protocol):
    """The sizes of a network, as config.json keeps them.

    It may say more: `next_token` (the output for position i comes from i-1; no unless said), `num_blocks`,
    `is_step_aware`.
    """

    @property
    def vocab_size(self) -> int:
        """V, the mask included."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        ...

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Of such a mapping, every key checked."""
        ...


class Network(nn.Module):
    """A network of p_{1|t}(. | x_t) in two parts: a trunk, and a head that can be asked for chosen positions only.

    config      its sizes: a `NetworkConfig`
    precision   of its matrix products
    """

    config: Any
    precision: str = "float32"
    if TYPE_CHECKING:  # what reduced precision, few-step training and couplings look at
        embedding: Any
        blocks: Any
        head: Any

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor, /) -> Tensor:
        """Features [B, L, C] of states x_t [B, L] at times t [B] for steps of size h [B]."""
        raise NotImplementedError(f"{type(self).__name__} needs a method trunk(x_t, t, h) -> features [B, L, C]")

    def logits_at(self, features: Tensor) -> Tensor:
        """The head at chosen rows of the features: [N, C] -> [N, V]."""
        raise NotImplementedError(f"{type(self).__name__} needs a method logits_at(features) -> logits [N, V]")

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """p_{1|t}(. | x_t) at the rows that somebody will ask about; None: any."""
        return network_posterior(self, x_t, t, h=h, rows=rows)

    def step_aware(self, *, seed: int = 0) -> Network:
        """A child that knows its step size."""
        del seed  # nothing is drawn
        raise ValueError(f"{type(self).__name__} cannot be made step-aware; start from a network that is")

    def with_transitions(self, left: Tensor, right: Tensor) -> Network:
        """A child with transitions between neighbours."""
        raise ValueError(
            f"{type(self).__name__} takes no transitions of {tuple(left.shape)} and {tuple(right.shape)}; leave "
            "model.transition_rank out"
        )
