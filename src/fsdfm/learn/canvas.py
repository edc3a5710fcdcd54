"""Training of canvas models: every canvas of a row is noised and written after the clean text before it.

    L = E_t mean over canvases b of  path loss of x_1^b given (x_t^b, clean x_1^<b)

All canvases of a row are trained in one pass (`fsdfm.model.context`): the clean row is read once, block-causally, and
all noised canvases see it under one mask. That is what sampling does canvas after canvas, so that its keys and values,
computed once, are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import MixturePath
from fsdfm.learn.objective import Outcome, TrainableDenoiser, UntaughtObjective
from fsdfm.learn.path import PathConfig, PathObjective, make_path_objective
from fsdfm.model.context import Context
from fsdfm.noise import Noise

__all__ = ["CanvasConfig", "CanvasObjective", "make_canvas_objective"]


@dataclass(frozen=True, kw_only=True)
class CanvasConfig(PathConfig):
    """The keys of [objective] with kind = "canvas": those of the path loss, and what the network sees."""

    kind: str = "canvas"
    canvas: int = 128  # tokens that are written at a time; divides data.length
    window: int | None = None  # of the clean text before, so many tokens are seen: a multiple of canvas; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.canvas < 1 or (self.window is not None and (self.window < 1 or self.window % self.canvas)):
            raise ValueError(
                f"canvas is {self.canvas} and window {self.window}; allowed are whole numbers >= 1, and a window that "
                "is a multiple of the canvas"
            )


class _WithContext:
    """A network that sees a clean text beside what it is asked about."""

    def __init__(self, model: Any, context: Context):
        self.model, self.context = model, context
        self.head, self.logits_at = model.head, model.logits_at

    @property
    def joint(self) -> Any:
        return getattr(self.model, "joint", None)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        features: Tensor = self.model.trunk(x_t, t, h, context=self.context)
        return features


@dataclass(frozen=True)
class CanvasObjective(UntaughtObjective):
    """The path loss of every canvas, given what stands before it."""

    path_objective: PathObjective
    canvas: int = 128
    window: int | None = None

    @property
    def network(self) -> Mapping[str, Any]:
        """What the network's config must say."""
        return {"canvas": self.canvas, "window": self.window}

    @property
    def loss(self) -> object:
        """That of the path."""
        return self.path_objective.loss

    @property
    def step_sizes(self) -> Tensor:
        """As the path loss."""
        return self.path_objective.step_sizes

    def __call__(
        self,
        model: TrainableDenoiser,
        batch: TrainingBatch,
        noise: Noise,
        /,
        **_: Any,
    ) -> Outcome:
        """The loss of a batch of rows of whole canvases."""
        if batch.x_1.shape[1] % self.canvas or batch.x_0 is not None or batch.larger:
            raise ValueError(
                f"rows of {batch.x_1.shape[1]} tokens, or coupled pairs, cannot be cut into canvases of {self.canvas}; "
                "make data.length a multiple of objective.canvas, and train on text"
            )
        reads: Any = model
        seeing = _WithContext(model, reads.read_all(batch.x_1))
        return self.path_objective(seeing, batch, noise)


def make_canvas_objective(config: CanvasConfig, path: MixturePath) -> CanvasObjective:
    """The objective of a recipe's section."""
    return CanvasObjective(make_path_objective(config, path), config.canvas, config.window)
