"""A trained board network as a folder that a user can ask: `fsdfm generate BOARD --model sudoku/models/mask.0`.

    model = load_board_model("sudoku/models/mask.0")
    answer = model.solve("53..7.... 6..195... ...", steps=8)
    print(answer.text)

The folder holds config.json, which says the size and the method, and model.safetensors. An answer keeps what is given,
fills in the rest, knows the step that wrote each cell and whether all is right. Nothing is searched.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fsdfm.files import read_text, replace_file, write_json
from fsdfm.flow import Filter, MixturePath
from fsdfm.noise import Noise
from fsdfm.studies.sudoku.board import is_solution, read_board, write_board
from fsdfm.studies.sudoku.methods import METHODS, BoardMethod, BoardSetting, make_network, rules_of
from fsdfm.studies.sudoku.network import BoardNetwork, make_source
from fsdfm.studies.sudoku.solving import walk_boards

__all__ = ["BoardAnswer", "BoardModel", "load_board_model", "save_board_model"]

_ARCHITECTURE = "sudoku"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_Board = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BoardAnswer:
    """A board filled in.

    written   the step, 1 .., that changed each cell last; 0 where it is given, or as the noise was
    """

    givens: _Board
    board: _Board
    written: _Board
    box: int

    @property
    def text(self) -> str:
        """Lines of digits."""
        return write_board(self.board, self.box)

    @property
    def is_right(self) -> bool:
        """Whether every row, column and box holds every digit once."""
        return is_solution(self.board, self.box)


@dataclass(frozen=True)
class BoardModel:
    """A network, the method that trained it and the size of its boards."""

    network: BoardNetwork
    method: BoardMethod
    setting: BoardSetting

    @property
    def rules(self) -> list[str]:
        """The rules that it can be sampled with, the advised one first."""
        return sorted(rules_of(self.method), key=lambda name: name != "confident")

    def solve(
        self, board: str, *, steps: int = 8, rule: str | None = None, seed: int = 0, filter: Filter | None = None
    ) -> BoardAnswer:
        """Fill in a board typed as digits, `.` for an empty cell; its givens are frozen tokens."""
        name = rule or self.rules[0]
        if name not in self.rules:
            raise ValueError(f"jump is {name!r}; this model of boards knows {', '.join(self.rules)}")
        givens = read_board(board, self.setting.box)
        walk = walk_boards(
            self.network,
            MixturePath(make_source(self.method.source, self.setting.box)),
            torch.from_numpy(givens)[None],
            steps=steps,
            rule=rules_of(self.method)[name],
            noise=Noise(seed, [0]),
            filter=filter,
        )
        written = np.zeros_like(givens)
        for step in walk:
            written = np.where(step.jumps[0].numpy(), step.index + 1, written)
        filled = (walk[-1].x_next % self.network.num_digits + 1)[0].numpy()
        return BoardAnswer(givens, np.where(givens > 0, givens, filled), written, self.setting.box)


def save_board_model(folder: Path, model: BoardModel) -> None:
    """Write the weights, then what they are: a folder without config.json is none."""
    weights = {name: value.contiguous() for name, value in model.network.state_dict().items()}
    replace_file(folder / _WEIGHTS, lambda file: save_file(weights, file))
    write_json(
        folder / _CONFIG,
        {"architecture": _ARCHITECTURE, "method": model.method.name, "setting": asdict(model.setting)},
    )


def load_board_model(folder: str | Path) -> BoardModel:
    """The network of a folder."""
    place = Path(folder)
    try:
        config = json.loads(read_text(place / _CONFIG))
        setting = BoardSetting(**{**config["setting"], "budgets": tuple(config["setting"]["budgets"])})
        method = next(each for each in METHODS if each.name == config["method"])
        network = make_network(method, setting, 0)
        network.load_state_dict(load_file(place / _WEIGHTS))
    except (KeyError, TypeError, ValueError, StopIteration, OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{folder} holds no whole network of boards ({type(error).__name__}: {error!s:.80}); make one with "
            "`fsdfm study sudoku --out FOLDER` and name FOLDER/models/METHOD.SEED"
        ) from error
    return BoardModel(network.eval(), method, setting)
