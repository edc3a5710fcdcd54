"""Joint heads: the part of a network that makes its positions depend on each other.

A head is named by its config, `ModelConfig(posterior=CRFConfig(rank=64))`, and docks on `fsdfm.flow.Posterior`: what it
gives to a sampler is a posterior, what it gives to training is the log-probability of whole texts. One of your own is a
file with a config, a head and a line of registration:

    register_joint_head(MyConfig, MyHead)  # MyHead(stack: StackConfig, config: MyConfig)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from fsdfm.flow import Posterior, SplitNetwork
from fsdfm.model.layers import StackConfig

__all__ = [
    "JOINT_HEADS",
    "JointConfig",
    "JointHead",
    "JointStackConfig",
    "make_joint_head",
    "read_joint_config",
    "register_joint_head",
]


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """What a joint head is made of; `kind` is its name in config.json and recipes."""

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; `read_joint_config` is its inverse."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class JointStackConfig(StackConfig):
    """The shape of a network that may have a joint head."""

    posterior: JointConfig | None = None  # how positions depend on each other; None: they do not, given x_t

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.posterior is None or isinstance(self.posterior, JointConfig)):
            raise ValueError(f"posterior is {self.posterior!r:.80}; give a config of a joint head, or None")

    @property
    def transition_rank(self) -> int:
        """The rank of a CRF's transitions; 0 where there is none."""
        rank: int = getattr(self.posterior, "rank", 0)
        return rank

    def to_dict(self) -> dict[str, Any]:
        """The config as plain JSON values."""
        return {**super().to_dict(), "posterior": None if self.posterior is None else self.posterior.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The config of a mapping, as `to_dict` or an earlier fsdfm wrote it."""
        known = dict(values)
        rank = known.pop("transition_rank", 0)
        if isinstance(known.get("posterior"), Mapping):
            known["posterior"] = read_joint_config(known["posterior"])
        elif rank:
            known["posterior"] = read_joint_config({"kind": "crf", "rank": rank})
        return super().from_dict(known)


class JointHead(nn.Module, ABC):
    """Makes positions depend on each other; zero at the start, so that a child with one says what its parent says."""

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Draw the weights."""

    @abstractmethod
    def posterior(
        self, network: SplitNetwork, x_t: Tensor, t: Tensor, *, h: Tensor, rows: Tensor | None = None
    ) -> Posterior:
        """p_{1|t}(. | x_t) of texts of which somebody will ask about these rows; None: any."""

    @abstractmethod
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
        """log p(x_1 | x_t) of texts from the trunk's features [B, L, C]: [B], differentiable.

        held   the token of every position that is certain, -1 elsewhere: int64 [B, L]
        real   positions that are part of the text: bool [B, L]
        forbidden   a token that cannot be, such as the mask
        """

    def grow_from(self, other: JointHead, **start: Any) -> None:
        """Say what a smaller head of this kind says; `start` is where new weights may come from."""
        raise ValueError(f"a joint head {type(self).__name__} cannot grow from {type(other).__name__}; {start} unused")

    def shared(self, network: SplitNetwork) -> list[nn.Parameter]:
        """Weights of the network, besides its vocabulary head, that this one uses, too."""
        del network  # most use none
        return []


JOINT_HEADS: dict[str, tuple[type[JointConfig], Callable[[StackConfig, Any], JointHead]]] = {}
"""The joint heads by their kind: the class of their config, and what makes one."""


def register_joint_head(config: type[JointConfig], build: Callable[[StackConfig, Any], JointHead]) -> None:
    """Make a head known by its config's `kind`."""
    JOINT_HEADS[config.kind] = config, build


def make_joint_head(stack: StackConfig, config: JointConfig) -> JointHead:
    """The head of a config, for a network of this shape."""
    return JOINT_HEADS[config.kind][1](stack, config)


def read_joint_config(values: Mapping[str, Any]) -> JointConfig:
    """The config that a mapping describes: `{"kind": "crf", "rank": 64}`."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in JOINT_HEADS:
        raise ValueError(
            f"the kind of the posterior is {kind!r}; allowed are {', '.join(JOINT_HEADS)}, or import the module that "
            "adds it (fsdfm --plugin FILE.py COMMAND ...)"
        )
    options = {key: value for key, value in values.items() if key != "kind"}
    known = [field.name for field in fields(JOINT_HEADS[kind][0])]
    for key in options:
        if key not in known:
            raise ValueError(f"{key!r} is no option of the posterior {kind!r}; allowed are {', '.join(known)}")
    return JOINT_HEADS[kind][0](**options)
