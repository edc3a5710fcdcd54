"""Sudoku boards: a world in which an answer is right or wrong.

    puzzle = make_puzzle(3, noise=Noise(0, [7]))     # 9 x 9, one solution
    puzzle.givens, puzzle.solution, puzzle.difficulty
    print(write_board(puzzle.givens, 3))

A board of box size b has n = b^2 rows, columns, boxes and digits: 9 x 9 for b = 3, 4 x 4 for b = 2. It is a row of n^2
numbers, row by row: 0 is an empty cell, 1 .. n are digits. Every puzzle has exactly one solution, which the solver
proves by looking for a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fsdfm.noise import Noise, Purpose

__all__ = [
    "DIFFICULTIES",
    "Difficulty",
    "Puzzle",
    "cell_groups",
    "count_solutions",
    "is_solution",
    "judge_difficulty",
    "make_puzzle",
    "make_solutions",
    "read_board",
    "solve",
    "write_board",
]

Board = npt.NDArray[np.int64]
Difficulty = Literal["easy", "medium", "hard"]
"""What solves it: easy, cells with one digit left; medium, also digits with one cell left; hard, only trying."""

DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)
_EMPTY = 0
_BASE_BOARDS = 64  # boards found by search, of which the others are symmetric images


@dataclass(frozen=True)
class Puzzle:
    """A board with empty cells (0), its one solution, and how hard it is."""

    givens: Board
    solution: Board
    difficulty: Difficulty

    @property
    def num_givens(self) -> int:
        """Cells that are given."""
        return int((self.givens != _EMPTY).sum())


# --- the rules --------------------------------------------------------------------------------------------------------


def _size(box: int) -> int:
    if box not in (2, 3, 4):
        raise ValueError(f"box is {box}; allowed are 2, 3 and 4, boards of 4 x 4, 9 x 9 and 16 x 16")
    return box * box


@cache
def cell_groups(box: int) -> tuple[tuple[int, int, int], ...]:
    """Row, column and box of every cell: n^2 times three numbers 0 .. n-1."""
    n = _size(box)
    return tuple((c // n, c % n, c // n // box * box + c % n // box) for c in range(n * n))


@cache
def _units(box: int) -> tuple[tuple[int, ...], ...]:
    """The cells of every row, column and box: 3 n times n cells."""
    n = _size(box)
    groups = cell_groups(box)
    return tuple(tuple(c for c in range(n * n) if groups[c][kind] == unit) for kind in range(3) for unit in range(n))


def is_solution(board: Board, box: int) -> bool:
    """Does every row, column and box hold every digit once?"""
    n = _size(box)
    whole = set(range(1, n + 1))
    return board.shape == (n * n,) and all({int(board[c]) for c in unit} == whole for unit in _units(box))


# --- solving ----------------------------------------------------------------------------------------------------------


class _Search:
    """A board as bits: which digits each row, column and box still lacks."""

    def __init__(self, board: Sequence[int], box: int):
        n = _size(box)
        self.n, self.groups = n, cell_groups(box)
        self.cells = [0] * (n * n)
        self.rows, self.columns, self.boxes = ([(1 << n) - 1] * n for _ in range(3))
        self.valid = all(digit == _EMPTY or self.put(cell, 1 << (digit - 1)) for cell, digit in enumerate(board))

    def free(self, cell: int) -> int:
        """The digits that a cell may hold, as bits."""
        row, column, square = self.groups[cell]
        return self.rows[row] & self.columns[column] & self.boxes[square]

    def put(self, cell: int, bit: int) -> bool:
        if not self.free(cell) & bit:
            return False
        self._flip(cell, bit)
        self.cells[cell] = bit
        return True

    def clear(self, cell: int) -> None:
        self._flip(cell, self.cells[cell])
        self.cells[cell] = 0

    def _flip(self, cell: int, bit: int) -> None:
        row, column, square = self.groups[cell]
        self.rows[row] ^= bit
        self.columns[column] ^= bit
        self.boxes[square] ^= bit

    def solutions(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Every completion, cells with the fewest digits first; digits are tried in `order`."""
        best, digits = -1, 0
        fewest = self.n + 1
        for cell, value in enumerate(self.cells):
            if not value:
                free = self.free(cell)
                count = free.bit_count()
                if count < fewest:
                    best, digits, fewest = cell, free, count
                    if count <= 1:
                        break
        if best < 0:
            yield [value.bit_length() for value in self.cells]
            return
        for digit in order:
            bit = 1 << digit
            if digits & bit:
                self.put(best, bit)
                yield from self.solutions(order)
                self.clear(best)


def _solutions(board: Board, box: int, order: Sequence[int] | None = None) -> Iterator[list[int]]:
    n = _size(box)
    if board.shape != (n * n,) or board.min() < 0 or board.max() > n:
        raise ValueError(f"the board has shape {board.shape}; give {n * n} numbers 0 .. {n}, 0 for an empty cell")
    search = _Search(board.tolist(), box)
    return search.solutions(order or range(n)) if search.valid else iter(())


def solve(board: Board, box: int) -> Board:
    """A solution of a board; a ValueError where there is none."""
    found = next(_solutions(board, box), None)
    if found is None:
        raise ValueError("the board has no solution: two givens contradict each other")
    return np.array(found, dtype=np.int64)


def count_solutions(board: Board, box: int, *, limit: int = 2) -> int:
    """The number of solutions, counted up to `limit`."""
    return sum(1 for _, _ in zip(range(limit), _solutions(board, box), strict=False))


def judge_difficulty(board: Board, box: int) -> Difficulty:
    """How a board with one solution is solved: by single candidates, by single places too, or only by trying."""
    if _fill_singles(board, box, places=False):
        return "easy"
    return "medium" if _fill_singles(board, box, places=True) else "hard"


def _fill_singles(board: Board, box: int, *, places: bool) -> bool:
    """Whether writing what is forced fills the board: cells with one digit left and, with `places`, the reverse."""
    search = _Search(board.tolist(), box)
    moved = True
    while moved:
        moved = False
        for cell, value in enumerate(search.cells):
            free = 0 if value else search.free(cell)
            if free.bit_count() == 1:
                moved = search.put(cell, free)
        if places and not moved:
            moved = _fill_place(search, box)
    return all(search.cells)


def _fill_place(search: _Search, box: int) -> bool:
    """Write one digit that has one place left in a row, column or box."""
    for unit in _units(box):
        seen = twice = 0
        for cell in unit:
            free = 0 if search.cells[cell] else search.free(cell)
            twice |= seen & free
            seen |= free
        if once := seen & ~twice:
            bit = once & -once
            cell = next(c for c in unit if not search.cells[c] and search.free(c) & bit)
            return search.put(cell, bit)
    return False


# --- making -----------------------------------------------------------------------------------------------------------


def make_solutions(box: int, noise: Noise) -> Board:
    """Full boards, one for each row of the noise: [B, n^2].

    A board found by search (one of 64, by the sample's number) is turned into another by what changes no rule: digits
    renamed, rows and columns of a band and whole bands in another order, rows and columns exchanged.
    """
    n = _size(box)
    base = _base_boards(box)
    uniform = noise.uniform(Purpose.DATA, max(n, 2), step=0).cpu().numpy()
    boards = np.array([base[int(u[0] * len(base))] for u in uniform]).reshape(-1, n, n)
    rows, columns = (_orders(box, noise, first) for first in (1, 4))
    each = np.arange(len(boards))[:, None]
    boards = boards[each, rows][each[:, :, None], np.arange(n)[None, :, None], columns[:, None, :]]
    boards = np.where((uniform[:, 1] < 0.5)[:, None, None], boards.transpose(0, 2, 1), boards)
    names = noise.uniform(Purpose.DATA, n, step=7).argsort(1).cpu().numpy() + 1
    found: Board = names[each, boards.reshape(len(boards), -1) - 1]
    return found


def _orders(box: int, noise: Noise, first: int) -> Board:
    """Orders of n rows that keep bands together: [B, n]; streams `first` and the next one."""
    bands = noise.uniform(Purpose.DATA, box, step=first).argsort(1).cpu().numpy()
    inside = noise.uniform(Purpose.DATA, box * box, step=first + 1).cpu().numpy().reshape(-1, box, box).argsort(2)
    chosen = np.take_along_axis(inside, bands[:, :, None], 1)
    order: Board = (bands[:, :, None] * box + chosen).reshape(len(bands), -1)
    return order


@cache
def _base_boards(box: int) -> tuple[tuple[int, ...], ...]:
    """Boards that a search finds which tries digits in random order, from a random first row: not all of one kind."""
    n = _size(box)
    boards = []
    for number in range(_BASE_BOARDS if box < 4 else 1):
        noise = Noise(0, [number])
        first = noise.uniform(Purpose.CONTROL, n)[0].argsort() + 1
        order = noise.uniform(Purpose.CONTROL, n, step=1)[0].argsort().tolist()
        board = np.zeros(n * n, dtype=np.int64)
        board[:n] = first.numpy()
        place = n + int(noise.integers(Purpose.CONTROL, 1, n, step=2)[0, 0])
        for digit in order:  # a second row that does not begin like every other
            board[place] = digit + 1
            if (solution := next(_solutions(board, box, order), None)) is not None:
                boards.append(tuple(solution))
                break
    return tuple(boards)


def make_puzzle(box: int, *, noise: Noise, num_givens: int = 0) -> Puzzle:
    """A puzzle with one solution: cells are emptied in random order as long as there is no second one.

    noise        one row; the puzzle is a function of its seed and sample
    num_givens   stop where so many are left; 0: no cell more can be emptied
    """
    n = _size(box)
    if len(noise) != 1:
        raise ValueError(f"the noise has {len(noise)} rows; give one, Noise(seed, [k]), for puzzle k")
    if not 0 <= num_givens <= n * n:
        raise ValueError(f"num_givens is {num_givens}; allowed are 0 to {n * n}")
    solution = make_solutions(box, noise)[0]
    board = solution.copy()
    left = n * n
    for cell in noise.uniform(Purpose.CONTROL, n * n, step=3)[0].argsort().tolist():
        if left == num_givens:
            break
        board[cell] = _EMPTY
        if _has_other(board, solution, cell, box=box):
            board[cell] = solution[cell]
        else:
            left -= 1
    return Puzzle(board, solution, judge_difficulty(board, box))


def _has_other(board: Board, solution: Board, cell: int, *, box: int) -> bool:
    """Whether there is a solution with another digit in a cell: the board had one before the cell was emptied."""
    search = _Search(board.tolist(), box)
    for digit in range(1, _size(box) + 1):
        if digit != solution[cell] and search.put(cell, 1 << (digit - 1)):
            if next(search.solutions(range(_size(box))), None) is not None:
                return True
            search.clear(cell)
    return False


# --- text -------------------------------------------------------------------------------------------------------------

_DIGITS = "123456789ABCDEFG"
_BLANKS = "._0*"


def write_board(board: Board, box: int) -> str:
    """A board as lines of digits, `.` for an empty cell."""
    n = _size(box)
    signs = ["." if digit == _EMPTY else _DIGITS[digit - 1] for digit in board.tolist()]
    return "\n".join("".join(signs[k : k + n]) for k in range(0, n * n, n))


def read_board(text: str, box: int) -> Board:
    """The board that a text shows: digits, and . _ 0 or * for an empty cell; blanks, bars and lines are passed over."""
    n = _size(box)
    signs = [sign for sign in text.upper() if sign not in " \t\r\n|-+"]
    allowed = _DIGITS[:n] + _BLANKS
    if wrong := next((sign for sign in signs if sign not in allowed), None):
        raise ValueError(f"the board holds {wrong!r}; allowed are the digits {_DIGITS[:n]} and . for an empty cell")
    if len(signs) != n * n:
        raise ValueError(f"the board has {len(signs)} cells; give {n * n}, {n} lines of {n}")
    return np.array([_EMPTY if sign in _BLANKS else _DIGITS.index(sign) + 1 for sign in signs], dtype=np.int64)
