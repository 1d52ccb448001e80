"""Sudoku grids: their rules, the completions of a grid, and puzzles with exactly one.

A grid is a list of `size · size` digits, row by row, 0 for a blank; `size` is 4 or 9, its boxes are 2x2 or 3x3.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from math import isqrt

Grid = list[int]


@cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
    """Cells of every row, column and box."""
    box = isqrt(size)
    rows = [tuple(range(size * row, size * (row + 1))) for row in range(size)]
    columns = [tuple(range(column, size * size, size)) for column in range(size)]
    boxes = [
        tuple(size * (top + row) + left + column for row in range(box) for column in range(box))
        for top in range(0, size, box)
        for left in range(0, size, box)
    ]
    return (*rows, *columns, *boxes)


def is_solution(grid: Grid, size: int) -> bool:
    """Does every row, column and box hold every digit of 1..size once?"""
    digits = set(range(1, size + 1))
    return len(grid) == size * size and all({grid[cell] for cell in unit} == digits for unit in units(size))


@cache
def _neighbours(size: int) -> tuple[tuple[int, ...], ...]:
    """Of each cell: the others that share a unit with it."""
    return tuple(
        tuple({other for unit in units(size) if cell in unit for other in unit} - {cell}) for cell in range(size * size)
    )


def completions(grid: Grid, size: int, rng: random.Random | None = None) -> Iterator[Grid]:
    """Every solution that keeps the digits of `grid`, in order or, with `rng`, in random order."""
    best: list[int] = []
    cell_of_best = -1
    for cell, digit in enumerate(grid):
        if digit:
            continue
        taken = {grid[other] for other in _neighbours(size)[cell]}
        free = [digit for digit in range(1, size + 1) if digit not in taken]
        if cell_of_best < 0 or len(free) < len(best):
            cell_of_best, best = cell, free
            if len(free) <= 1:
                break
    if cell_of_best < 0:
        if is_solution(grid, size):
            yield grid
        return
    if rng is not None:
        rng.shuffle(best)
    for digit in best:
        yield from completions([*grid[:cell_of_best], digit, *grid[cell_of_best + 1 :]], size, rng)


def has_one_solution(grid: Grid, size: int) -> bool:
    """Exactly one."""
    found = completions(grid, size)
    return next(found, None) is not None and next(found, None) is None


def minimal_puzzle(rng: random.Random, size: int) -> tuple[Grid, Grid]:
    """A puzzle none of whose digits can be left out without losing its only solution, and that solution."""
    solution = next(completions([0] * size**2, size, rng))
    puzzle = list(solution)
    for cell in rng.sample(range(size**2), size**2):
        digit, puzzle[cell] = puzzle[cell], 0
        if not has_one_solution(puzzle, size):
            puzzle[cell] = digit
    return puzzle, solution


def shuffled(rng: random.Random, grids: list[Grid], size: int) -> list[Grid]:
    """The same symmetry of the rules on each grid: digits renamed, rows, columns and bands exchanged, mirrored."""
    box = isqrt(size)
    lines = [[box * band + line for band in rng.sample(range(box), box) for line in rng.sample(range(box), box)]
             for _ in range(2)]  # fmt: skip
    cells = [size * row + column for row in lines[0] for column in lines[1]]
    if rng.random() < 0.5:
        cells = [cells[size * column + row] for row in range(size) for column in range(size)]
    names = [0, *rng.sample(range(1, size + 1), size)]
    return [[names[grid[cell]] for cell in cells] for grid in grids]
