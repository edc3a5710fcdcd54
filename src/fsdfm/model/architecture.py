"""Architectures: the networks that a checkpoint can hold, by the name that its config.json gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdfm.model.dit import DiT, ModelConfig
from fsdfm.model.network import Network, NetworkConfig
from fsdfm.model.stack import Transformer, TransformerConfig

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Network",
    "NetworkConfig",
    "architecture_of",
    "build_network",
    "find_architecture",
]


@dataclass(frozen=True)
class Architecture:
    """A network class and the class of its config."""

    config: type[Any]
    network: type[Any]

    def read(self, values: Mapping[str, Any]) -> NetworkConfig:
        """The config of a mapping, every key checked."""
        found: NetworkConfig = self.config.from_dict(values)
        return found

    def build(self, config: NetworkConfig, *, seed: int = 0) -> Network:
        """A network with weights drawn from the seed."""
        made: Network = self.network(config, seed=seed)
        return made


ARCHITECTURES: dict[str, Architecture] = {
    "dit": Architecture(ModelConfig, DiT),
    "transformer": Architecture(TransformerConfig, Transformer),
}
"""The networks by name; a checkpoint that names none holds a DiT. `ARCHITECTURES["mine"] = Architecture(MyConfig,
MyNetwork)` adds one from outside (`fsdfm.model.network`)."""


def find_architecture(name: object = "dit") -> Architecture:
    """The architecture of that name."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architecture is {name!r:.80}; allowed are {', '.join(ARCHITECTURES)}: update fsdfm, or import the module "
            "that adds it to fsdfm.model.ARCHITECTURES (fsdfm --plugin FILE.py COMMAND ...)"
        )
    return ARCHITECTURES[name]


def architecture_of(config: NetworkConfig) -> str:
    """The name of the architecture that such a config is of."""
    for name, found in ARCHITECTURES.items():
        if type(config) is found.config:
            return name
    raise ValueError(
        f"{type(config).__name__} is the config of no architecture; name it first: "
        f'ARCHITECTURES["mine"] = Architecture({type(config).__name__}, its network)'
    )


def build_network(config: NetworkConfig, *, seed: int = 0) -> Network:
    """The network of a config, with weights drawn from the seed."""
    return ARCHITECTURES[architecture_of(config)].build(config, seed=seed)
