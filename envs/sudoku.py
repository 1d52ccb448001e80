"""Sudoku of 4x4 or 9x9: every puzzle has exactly one solution, and the verifier is exact.

Difficulty is the number of blanks. A puzzle is one of a few minimal ones, some of its blanks filled in, under a random
symmetry of the rules: thousands are drawn in a second, and each keeps its only solution.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from penstock.dataflow.trajectory import Task, Trajectory
from penstock.envs.contract import pure
from penstock.envs.generated_tasks import GeneratedTasks
from penstock.envs.sudoku_grids import Grid, is_solution, minimal_puzzle, shuffled

MAX_BLANKS = {4: 10, 9: 52}
"""By size: random minimal puzzles have about as many."""
_NUM_BASES = 4
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class SudokuTasks(GeneratedTasks):
    """Task source of Sudoku.

    Args:
        seed: Order of the training stream.
        size: 4 or 9.
        num_blanks: Cells to fill in, 1..10 or 1..52.
        chat: Ask in chat messages, to be answered in `<answer>` tags; else `1002;..=`, 0 for a blank, answered by the
            rows alone.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, seed: int, size: int = 9, num_blanks: int = 30, *, chat: bool = True) -> None:
        if size not in MAX_BLANKS:
            raise ValueError(f"size={size}: it is 4 or 9")
        if not 1 <= num_blanks <= MAX_BLANKS[size]:
            raise ValueError(f"num_blanks={num_blanks} is outside 1..{MAX_BLANKS[size]} for size={size}")
        super().__init__(seed)
        self._size = size
        self._num_blanks = num_blanks
        self._chat = chat

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """A puzzle in rows, and its solution."""
        puzzle, solution = rng.choice(_bases(self._size))
        blanks = [cell for cell, digit in enumerate(puzzle) if digit == 0]
        kept = set(rng.sample(blanks, self._num_blanks))
        fuller = [0 if cell in kept else digit for cell, digit in enumerate(solution)]
        fuller, solution = shuffled(rng, [fuller, solution], self._size)
        rows = [self._rows(fuller), self._rows(solution)]
        return {"prompt": self._prompt(rows[0]), "puzzle": rows[0], "solution": rows[1]}

    def gold_response(self, task: Task) -> str:
        """The solution."""
        rows: list[str] = task.fields["solution"]
        return "<answer>\n" + "\n".join(rows) + "\n</answer>" if self._chat else ";".join(rows)

    def _rows(self, grid: Grid) -> list[str]:
        digits = "".join(map(str, grid))
        return [digits[start : start + self._size] for start in range(0, len(digits), self._size)]

    def _prompt(self, rows: list[str]) -> str | list[dict[str, str]]:
        if not self._chat:
            return f"{';'.join(rows)}="
        side = {4: 2, 9: 3}[self._size]
        question = (
            f"Solve this Sudoku: replace each 0, so that every row, column and {side}x{side} box holds each digit of "
            f"1..{self._size} once.\n\n" + "\n".join(rows) + "\n\nThink, then give all rows, one in a line, in "
            "<answer> </answer> tags."
        )
        return [{"role": "user", "content": question}]


@cache
def _bases(size: int) -> list[tuple[Grid, Grid]]:
    """The same minimal puzzles for every seed, each with enough blanks, and their solutions."""
    rng = random.Random(f"sudoku/{size}")
    found: list[tuple[Grid, Grid]] = []
    while len(found) < _NUM_BASES:
        puzzle, solution = minimal_puzzle(rng, size)
        if puzzle.count(0) >= MAX_BLANKS[size]:
            found.append((puzzle, solution))
    return found


def solves(answer: str, puzzle: list[str]) -> bool:
    """Does an answer hold all digits of a solution of `puzzle`, in order, and besides them only blanks and `;,|`?"""
    if not re.fullmatch(r"[\d\s;,|]*", answer, re.ASCII):
        return False
    grid = [int(digit) for digit in re.sub(r"\D", "", answer)]
    given = [int(digit) for row in puzzle for digit in row]
    kept = len(grid) == len(given) and all(old in (0, new) for old, new in zip(given, grid, strict=True))
    return kept and is_solution(grid, len(puzzle))


@pure
def sudoku_reward(trajectory: Trajectory, puzzle: list[str], **_: object) -> float:
    """1 if the last `<answer>`, or the whole response without one, solves the puzzle, else 0."""
    answers = _TAG.findall(trajectory.response)
    return float(solves(answers[-1] if answers else trajectory.response, puzzle))
