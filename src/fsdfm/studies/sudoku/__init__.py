"""Sudoku: few-step sampling where an answer is right or wrong.

Reading order: board (rules, solver, puzzles), network, solving (sampling, scores), methods, study, figure.
"""

from fsdfm.studies.sudoku.board import Puzzle, is_solution, make_puzzle, make_solutions, read_board, solve, write_board
from fsdfm.studies.sudoku.study import SudokuNumbers, run_sudoku, solve_board

__all__ = [
    "Puzzle",
    "SudokuNumbers",
    "is_solution",
    "make_puzzle",
    "make_solutions",
    "read_board",
    "run_sudoku",
    "solve",
    "solve_board",
    "write_board",
]
