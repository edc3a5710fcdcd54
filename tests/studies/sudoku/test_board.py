"""Boards: the rules by brute force, one solution each, difficulty on known boards, text both ways."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fsdfm.noise import Noise
from fsdfm.studies.sudoku.board import (
    cell_groups,
    count_solutions,
    is_solution,
    judge_difficulty,
    make_puzzle,
    make_solutions,
    read_board,
    solve,
    write_board,
)

SOLVED = """
534678912
672195348
198342567
859761423
426853791
713924856
961537284
287419635
345286179
"""  # Wikipedia's
PUZZLE = """
53. .7. ...
6.. 195 ...
.98 ... .6.
8.. .6. ..3
4.. 8.3 ..1
7.. .2. ..6
.6. ... 28.
... 419 ..5
... .8. .79
"""


def test_a_known_puzzle_has_its_known_solution() -> None:
    puzzle, solved = read_board(PUZZLE, 3), read_board(SOLVED, 3)
    assert is_solution(solved, 3)
    assert (solve(puzzle, 3) == solved).all()
    assert count_solutions(puzzle, 3) == 1
    assert judge_difficulty(puzzle, 3) == "easy"
    assert write_board(solved, 3) == SOLVED.strip()
    assert (read_board(write_board(puzzle, 3), 3) == puzzle).all()


def test_the_solver_counts_what_enumeration_counts() -> None:
    """4 x 4 with four empty cells and more: all fillings tried."""
    solved = make_solutions(2, Noise(0, [0]))[0]
    rng = np.random.default_rng(0)
    for empty in (4, 5, 6):
        board = solved.copy()
        cells = rng.choice(16, size=empty, replace=False)
        board[cells] = 0
        count = 0
        for filling in product(range(1, 5), repeat=empty):
            board[cells] = filling
            count += is_solution(board, 2)
        board[cells] = 0
        assert count_solutions(board, 2, limit=10**6) == count


def test_there_are_288_boards_of_four() -> None:
    assert count_solutions(np.zeros(16, dtype=np.int64), 2, limit=1000) == 288
    assert len({tuple(board) for board in make_solutions(2, Noise(0, range(4000)))}) == 288


@pytest.mark.parametrize("box", [2, 3, 4])
def test_boards_are_solutions_and_functions_of_seed_and_sample(box: int) -> None:
    boards = make_solutions(box, Noise(5, range(40)))
    assert all(is_solution(board, box) for board in boards)
    assert (make_solutions(box, Noise(5, [7])) == boards[7:8]).all()
    assert len({tuple(board) for board in boards}) > 30


@pytest.mark.parametrize("box", [2, 3])
def test_puzzles_have_one_solution_and_no_given_too_many(box: int) -> None:
    for k in range(4):
        puzzle = make_puzzle(box, noise=Noise(0, [k]))
        assert count_solutions(puzzle.givens, box) == 1
        given = puzzle.givens != 0
        assert (puzzle.givens[given] == puzzle.solution[given]).all()
        assert (solve(puzzle.givens, box) == puzzle.solution).all()
        for cell in np.flatnonzero(given):  # every given is needed
            less = puzzle.givens.copy()
            less[cell] = 0
            assert count_solutions(less, box) == 2


def test_more_givens_are_kept_where_they_are_asked_for() -> None:
    puzzle = make_puzzle(3, noise=Noise(0, [1]), num_givens=40)
    assert puzzle.num_givens == 40
    assert puzzle.difficulty == "easy"


def test_difficulty_is_what_is_needed() -> None:
    found = {make_puzzle(3, noise=Noise(1, [k])).difficulty for k in range(12)}
    assert found >= {"medium", "hard"}


def test_groups_are_row_column_and_box() -> None:
    assert cell_groups(2)[6] == (1, 2, 1)
    assert cell_groups(3)[80] == (8, 8, 8)


def test_what_is_no_board_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 'X'"):
        read_board("X" * 81, 3)
    with pytest.raises(ValueError, match="has 80 cells"):
        read_board("1" * 80, 3)
    with pytest.raises(ValueError, match="box is 5"):
        make_solutions(5, Noise(0))
    with pytest.raises(ValueError, match="no solution"):
        solve(read_board("11" + "." * 14, 2), 2)
    with pytest.raises(ValueError, match="16 numbers"):
        solve(np.full(16, 9), 2)
    with pytest.raises(ValueError, match="2 rows"):
        make_puzzle(2, noise=Noise(0, [1, 2]))
    with pytest.raises(ValueError, match="num_givens is 99"):
        make_puzzle(2, noise=Noise(0), num_givens=99)
    assert not is_solution(np.ones(16, dtype=np.int64), 2)
