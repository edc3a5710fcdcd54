"""Rewards that measure: a judge's perplexity, and the distance to real text in feature space.

    objective.reward = {kind = "judge", judge = "smollm2"}
    objective.reward = {kind = "mmd", real = "valid.txt", features = "style"}

The second is the gradient of a distance between *sets*: with the kernel k of `fsdfm.measure.distances.mmd`,

    r_i = 2 (mean_j k(x_i, y_j) - mean_{l != i} k(x_i, x_l)),      y_j real texts,  x_l the texts drawn with x_i

so that E[r grad log pi] = -grad MMD^2: representation-space matching as in arXiv 2610.06648. The second mean depends on
the other draws, so that the leave-one-out baseline is no longer quite independent of x_i: a bias of order 1/K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.data import SEPARATOR, open_documents, texts
from fsdfm.learn import register_reward
from fsdfm.measure.distances import median_distance, style_features
from fsdfm.measure.judges import make_judge

__all__ = ["JudgeRewardConfig", "MmdReward", "MmdRewardConfig"]


@dataclass(frozen=True, kw_only=True)
class JudgeRewardConfig:
    """Texts that a judge finds likely: r = -(nats per token of the judge). Watch the entropy: repetition is likely."""

    kind: str = "judge"
    judge: str = "smollm2"  # as in `fsdfm evaluate --judge`


@dataclass(frozen=True, kw_only=True)
class MmdRewardConfig:
    """Texts that are together like real ones, in feature space."""

    kind: str = "mmd"
    real: str = ""  # a text file, as data.inputs
    num: int = 256  # real texts that are compared with
    features: Literal["style", "minilm"] = "style"  # counts of letters, words and marks; sentence embeddings
    separator: str = SEPARATOR  # between the texts of the file

    def __post_init__(self) -> None:
        if not self.real or self.num < 2:
            raise ValueError(f"real is {self.real!r} and num {self.num}; name a file of real texts, at least 2 of them")


def _judge_reward(config: JudgeRewardConfig) -> Callable[[Sequence[str]], Tensor]:
    found: list[object] = []

    def reward(drawn: Sequence[str]) -> Tensor:
        if not found:  # read when it is first asked: recipes are checked without it
            found.append(make_judge(config.judge))
        told = [text if text.strip() else "." for text in drawn]
        return -torch.log(found[0].score(told).perplexities())  # type: ignore[attr-defined]

    return reward


class MmdReward:
    """The witness function of MMD^2 between what is drawn and some real texts.

    embed   texts -> features [N, D]
    real    the real texts
    """

    def __init__(self, embed: Callable[[Sequence[str]], npt.NDArray[np.floating]], real: Sequence[str]):
        features = np.asarray(embed(real), dtype=np.float64)
        self.embed, self.scale = embed, np.maximum(features.std(0), 1e-6)
        self.real = torch.from_numpy(features / self.scale)
        self.bandwidth = max(median_distance(self.real), 1e-6)

    def __call__(self, drawn: Sequence[str]) -> Tensor:
        """r_i of texts that were drawn together."""
        x = torch.from_numpy(np.asarray(self.embed(drawn), dtype=np.float64) / self.scale)
        own = self._kernel(x, x)
        others = (own.sum(1) - own.diagonal()) / max(1, len(x) - 1)
        return 2 * (self._kernel(x, self.real).mean(1) - others)

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(torch.cdist(a, b).square() / (-2 * self.bandwidth**2))


def _mmd_reward(config: MmdRewardConfig) -> Callable[[Sequence[str]], Tensor]:
    made: list[MmdReward] = []

    def reward(drawn: Sequence[str]) -> Tensor:
        if not made:
            documents = texts(open_documents([config.real], config.separator, "text", max_documents=config.num))
            made.append(MmdReward(_embedding(config.features), [*documents]))
        return made[0](drawn)

    return reward


def _embedding(name: str) -> Callable[[Sequence[str]], npt.NDArray[np.floating]]:
    if name == "style":
        return style_features
    from fsdfm.measure.mauve import minilm_features

    return minilm_features()


register_reward("judge", _judge_reward, JudgeRewardConfig)
register_reward("mmd", _mmd_reward, MmdRewardConfig)
