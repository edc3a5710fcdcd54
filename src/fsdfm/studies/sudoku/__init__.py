"""Sudoku: few-step sampling where an answer is right or wrong.

Reading order: board (rules, solver, puzzles), network, solving (sampling, scores), methods, model
(a trained network that a user can ask), study, figure.
"""

from fsdfm.studies.sudoku.board import Puzzle, is_solution, make_puzzle, make_solutions, read_board, solve, write_board
from fsdfm.studies.sudoku.methods import BoardSetting
from fsdfm.studies.sudoku.model import BoardAnswer, BoardModel, load_board_model
from fsdfm.studies.sudoku.study import SudokuNumbers, run_sudoku

__all__ = [
    "BoardAnswer",
    "BoardModel",
    "BoardSetting",
    "Puzzle",
    "SudokuNumbers",
    "is_solution",
    "load_board_model",
    "make_puzzle",
    "make_solutions",
    "read_board",
    "run_sudoku",
    "solve",
    "write_board",
]
