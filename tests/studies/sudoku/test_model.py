"""A network of boards as a folder: saved and read again, a board filled in, and the command that asks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fsdfm.cli import app
from fsdfm.flow import Filter
from fsdfm.studies.sudoku import BoardModel, BoardSetting, load_board_model
from fsdfm.studies.sudoku.methods import METHODS, make_network
from fsdfm.studies.sudoku.model import save_board_model

TINY = replace(BoardSetting.quick(), width=16, blocks=1)
BOARD = "1... .... .... ...2"


def stored(folder: Path, name: str = "mask") -> BoardModel:
    method = next(method for method in METHODS if method.name == name)
    model = BoardModel(make_network(method, TINY, 0).eval(), method, TINY)
    save_board_model(folder, model)
    return model


@pytest.mark.parametrize("name", ["dfm", "mask", "causal"])
def test_what_is_read_answers_as_what_was_written(tmp_path: Path, name: str) -> None:
    model = stored(tmp_path, name)
    found = load_board_model(tmp_path)
    assert found.setting == TINY
    assert found.method == model.method
    for own, other in zip(model.network.parameters(), found.network.parameters(), strict=True):
        assert torch.equal(own, other)
    first, again = (each.solve(BOARD, steps=3, seed=4) for each in (model, found))
    assert (first.board == again.board).all()
    assert first.board[0] == 1
    assert first.board[-1] == 2


def test_every_empty_cell_of_the_mask_source_is_written_once(tmp_path: Path) -> None:
    answer = stored(tmp_path).solve(BOARD, steps=7)
    assert set(answer.written[answer.givens == 0].tolist()) == set(range(1, 8))  # 14 cells, two a step
    assert np.bincount(answer.written[answer.givens == 0])[1:].tolist() == [2] * 7
    assert (answer.written[answer.givens > 0] == 0).all()


def test_an_answer_says_whether_it_is_one(tmp_path: Path) -> None:
    answer = stored(tmp_path).solve("1234 3412 2143 432.", steps=1)
    right = replace(answer, board=np.array([int(d) for d in "1234341221434321"]))
    assert right.is_right
    assert not replace(answer, board=np.array([int(d) for d in "1234341221434322"])).is_right


def test_a_cold_draw_is_the_likeliest(tmp_path: Path) -> None:
    model = stored(tmp_path, "dfm")
    cold = {model.solve(BOARD, steps=1, seed=seed, filter=Filter(top_k=1)).text for seed in (0, 0)}
    assert len(cold) == 1


def test_the_command_fills_in_a_board_and_draws_it(tmp_path: Path) -> None:
    stored(tmp_path / "m")
    run = CliRunner().invoke(app, ["generate", BOARD, "--model", str(tmp_path / "m"), "--steps", "2"])
    assert run.exit_code == 0, run.output
    lines = run.stdout.split()
    assert len(lines) >= 4
    assert lines[0][0] == "1"
    picture = tmp_path / "board.png"
    run = CliRunner().invoke(app, ["generate", BOARD, "--model", str(tmp_path / "m"), "--out", str(picture)])
    assert run.exit_code == 0, run.output
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "this model fills in boards"),
        (["generate", "12"], "the board has 2 cells; give 16"),
        (["generate", BOARD, "--jump", "single"], "this model of boards knows confident, exact, spaced"),
        (["generate", BOARD, "--num", "2"], "no others"),
        (["generate", BOARD, "--format", "json"], "a board is text"),
        (["infill", "a [[2]]"], "is not a whole checkpoint"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    stored(tmp_path / "m")
    run = CliRunner().invoke(app, [*arguments, "--model", str(tmp_path / "m")])
    told = run.output + str(run.exception)
    assert run.exit_code != 0
    assert said in " ".join(told.split())


def test_a_broken_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    stored(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no whole network of boards"):
        load_board_model(tmp_path)
    with pytest.raises(ValueError, match="fsdfm study sudoku"):
        load_board_model(tmp_path / "nowhere")
