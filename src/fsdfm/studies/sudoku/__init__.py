"""Sudoku: few-step sampling where an answer is right or wrong.

Reading order: board (rules, solver, puzzles).
"""

from fsdfm.studies.sudoku.board import Puzzle, is_solution, make_puzzle, make_solutions, read_board, solve, write_board

__all__ = ["Puzzle", "is_solution", "make_puzzle", "make_solutions", "read_board", "solve", "write_board"]
