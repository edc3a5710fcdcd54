"""Methods: what is compared on boards, as rows of data, and how each network is trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import RULES, CertainTurns, MixturePath, StableStop, StepRule
from fsdfm.noise import Noise
from fsdfm.studies.sudoku.network import BoardNetwork, make_source
from fsdfm.studies.sudoku.solving import ConfidentRule, make_training_boards
from fsdfm.studies.truth.methods import Method as Recipe
from fsdfm.studies.truth.methods import make_objective
from fsdfm.studies.truth.training import Lessons, train

__all__ = [
    "METHODS",
    "SHARES",
    "BoardData",
    "BoardMethod",
    "BoardSetting",
    "adaptive_rules_of",
    "rules_of",
    "train_method",
]

SHARES = (0.15, 0.75)  # of cells that are given in training, uniform for each board


@dataclass(frozen=True)
class BoardSetting:
    """The size of everything.

    box           of a board: 2 is 4 x 4, 3 is 9 x 9
    train_steps   of a parent; a child takes a quarter of them
    puzzles       of every difficulty
    """

    box: int = 3
    width: int = 64
    blocks: int = 5
    train_steps: int = 3000
    batch_size: int = 32
    learning_rate: float = 1.5e-3
    puzzles: int = 50
    budgets: tuple[int, ...] = (1, 2, 4, 8, 16, 32)

    @classmethod
    def small(cls) -> BoardSetting:
        """4 x 4, in minutes."""
        return cls(box=2, width=32, blocks=3, train_steps=1000, puzzles=100)

    @classmethod
    def quick(cls) -> BoardSetting:
        """4 x 4, in a minute or two."""
        return cls(box=2, width=32, blocks=2, train_steps=400, puzzles=32, budgets=(1, 2, 4, 8))


@dataclass(frozen=True)
class BoardMethod:
    """One row of the study.

    source     "uniform" or "mask"
    start      the method whose network it starts from; "": it is a parent
    recipe     teacher, hops, loss and step sizes, in the words of `studies.truth`; None: the path loss alone
    joint      how cells depend on each other given x_t: "crf" or "causal"; "": they do not
    """

    name: str
    what: str
    source: str = "uniform"
    start: str = ""
    recipe: Recipe | None = None
    joint: str = ""


METHODS = (
    BoardMethod("dfm", "discrete flow matching, uniform source"),
    BoardMethod("mask", "discrete flow matching, mask source", source="mask"),
    BoardMethod("path-only", "as long on the path loss alone: the control of the next ones", start="dfm"),
    BoardMethod(
        "paper",
        "the paper's few-step training (RK-4, its own jump rule and loss)",
        start="dfm",
        recipe=Recipe("paper", tableau="rk4", jump="single", loss="generalised-kl"),
    ),
    BoardMethod(
        "rk2",
        "few-step training with RK-2, exact hops, cross-entropy",
        start="dfm",
        recipe=Recipe("rk2", tableau="rk2"),
    ),
    BoardMethod("crf", "cells as a chain, trained on its likelihood", start="dfm", joint="crf"),
    BoardMethod("causal", "a causal head, as our few-step story model has", start="dfm", joint="causal"),
    BoardMethod("mask+crf", "mask source, cells as a chain", source="mask", start="mask", joint="crf"),
)
"""In the order of the report."""


def rules_of(method: BoardMethod) -> dict[str, StepRule]:
    """The rules that a method is sampled with."""
    rules = {name: RULES[name] for name in ("exact", "spaced")}
    if method.source == "mask":
        rules["confident"] = ConfidentRule()
    return rules


def adaptive_rules_of(method: BoardMethod) -> dict[str, StepRule]:
    """The rules that decide how many calls a board gets, of parents: others are compared with a fixed number."""
    if method.start:
        return {}
    return {
        "certain": RULES["certain"],
        "bound 0.1": CertainTurns(bound=0.1),
        "bound 0.5": CertainTurns(bound=0.5),
        "stop 0.1": StableStop(RULES["exact"], entropy=0.1),
    }


@dataclass(frozen=True)
class BoardData:
    """Draws training data: solved boards of which a share of the cells is given."""

    box: int
    shares: tuple[float, float] = SHARES

    def batch(self, noise: Noise) -> TrainingBatch:
        """One board per row of the noise."""
        x_1, given = make_training_boards(self.box, noise, shares=self.shares)
        return TrainingBatch(x_1, given=given)


def make_network(method: BoardMethod, setting: BoardSetting, seed: int) -> BoardNetwork:
    """A network whose weights are drawn from the seed."""
    vocab_size = make_source(method.source, setting.box).vocab_size
    return BoardNetwork(
        setting.box,
        vocab_size,
        width=setting.width,
        blocks=setting.blocks,
        joint=method.joint,
        seed=seed,
    )


def train_method(
    method: BoardMethod, setting: BoardSetting, *, seed: int, parent: dict[str, Tensor] | None = None
) -> BoardNetwork:
    """Train a network; `parent` are the weights of the method that it starts from."""
    network = make_network(method, setting, seed)
    if parent is not None:
        network.load_state_dict({**network.state_dict(), **parent})
    steps = setting.train_steps // 4 if method.start else setting.train_steps
    lessons = Lessons(
        steps,
        batch_size=setting.batch_size,
        learning_rate=setting.learning_rate / (3 if method.start else 1),
        ema_decay=0.995,
    )
    path = MixturePath(make_source(method.source, setting.box))
    recipe = method.recipe or Recipe(method.name)
    return train(
        network,
        make_objective(recipe, path, steps),
        BoardData(setting.box),
        lessons=lessons,
        seed=seed + (1000 if method.start else 0),
        step_aware=method.recipe is not None,
        watch=lambda *_: None,
    )
