"""Sudoku: the verifier and the number of solutions agree with brute force, and every drawn puzzle has one solution."""

from __future__ import annotations

import random
from itertools import islice, permutations, product
from math import isqrt

import pytest

from penstock.envs.sudoku import MAX_BLANKS, SudokuTasks, solves, sudoku_reward
from penstock.envs.sudoku_grids import completions, has_one_solution, is_solution
from tests.answers import answered


def is_right(rows: list[str]) -> bool:
    """The rules, written down once more: no two equal digits in a row, a column or a box."""
    size, box = len(rows), isqrt(len(rows))
    cells = list(product(range(size), repeat=2))
    return all(
        rows[r][c] != rows[y][x]
        for (r, c), (y, x) in product(cells, cells)
        if (r, c) < (y, x) and (r == y or c == x or (r // box == y // box and c // box == x // box))
    )


ALL_4X4 = [list(rows) for rows in product(["".join(p) for p in permutations("1234")], repeat=4) if is_right(list(rows))]


def test_all_288_grids_of_4x4_are_found_and_only_they_are_solutions() -> None:
    found = {"".join(map(str, grid)) for grid in completions([0] * 16, 4)}
    assert found == {"".join(rows) for rows in ALL_4X4}
    assert len(found) == 288
    rng = random.Random(0)
    for _ in range(2000):
        rows = ["".join(rng.sample("1234", 4)) for _ in range(4)]
        assert is_solution([int(digit) for digit in "".join(rows)], 4) == is_right(rows)
        assert solves("\n".join(rows), ["0000"] * 4) == is_right(rows)


def test_the_number_of_solutions_is_that_of_brute_force() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(300):
        solution = "".join(rng.choice(ALL_4X4))
        puzzle = [0 if rng.random() < 0.65 else int(digit) for digit in solution]
        fitting = [
            rows for rows in ALL_4X4 if all(a in (0, int(b)) for a, b in zip(puzzle, "".join(rows), strict=True))
        ]
        assert has_one_solution(puzzle, 4) == (len(fitting) == 1)
        seen.add(len(fitting) == 1)
    assert seen == {True, False}


@pytest.mark.parametrize(("size", "num_blanks"), [(4, 1), (4, 10), (9, 30), (9, 52)])
@pytest.mark.parametrize("chat", [True, False])
def test_every_puzzle_has_the_blanks_asked_for_and_one_solution_the_gold_answer(
    size: int, num_blanks: int, *, chat: bool
) -> None:
    source = SudokuTasks(0, size, num_blanks, chat=chat)
    for task in islice(source.train(), 20):
        puzzle, solution = task.fields["puzzle"], task.fields["solution"]
        assert "".join(puzzle).count("0") == num_blanks
        assert is_right(solution)
        assert has_one_solution([int(digit) for digit in "".join(puzzle)], size)
        gold = source.gold_response(task)
        assert sudoku_reward(answered(gold), **task.fields) == 1.0
        assert sudoku_reward(answered("\n".join(puzzle)), **task.fields) == 0.0


def test_tasks_are_the_same_for_the_same_seed_and_held_out_ones_for_every_seed() -> None:
    first, again, other = (list(islice(SudokuTasks(seed, 4, 8).train(), 50)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert SudokuTasks(0, 4, 8).held_out(20) == SudokuTasks(1, 4, 8).held_out(20)


PUZZLE, SOLUTION = ["1030", "0002", "0100", "4001"], ["1234", "3412", "2143", "4321"]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>1234\n3412\n2143\n4321</answer>", 1),
        ("1 2 3 4 | 3 4 1 2 | 2 1 4 3 | 4 3 2 1", 1),
        ("First <answer>0</answer>, no: <answer>1234;3412;2143;4321</answer>", 1),
        ("<answer>1234;3412;2143;4321</answer> or <answer>1</answer>", 0),
        ("1234;3412;2143;432", 0),
        ("1234;3412;2143;43211", 0),
        ("1234;3412;2143;4321.", 0),
        ("2134;3412;1243;4321", 0),
        ("1432;3214;2143;4321", 0),
        ("1030;0002;0100;4001", 0),
        ("١٢٣٤;3412;2143;4321", 0),
        ("", 0),
    ],
)
def test_only_a_whole_solution_that_keeps_the_given_digits_scores(response: str, reward: float) -> None:
    assert is_right(SOLUTION)
    assert sudoku_reward(answered(response), puzzle=PUZZLE, solution=SOLUTION) == reward


@pytest.mark.parametrize(("size", "num_blanks"), [(6, 3), (4, 11), (9, 53), (9, 0)])
def test_arguments_out_of_range_are_refused(size: int, num_blanks: int) -> None:
    with pytest.raises(ValueError, match=r"size=6: it is 4 or 9|is outside 1\.\."):
        SudokuTasks(0, size, num_blanks)
    assert set(MAX_BLANKS) == {4, 9}


def test_plain_prompts_are_made_of_signs_that_the_character_tokenizer_knows() -> None:
    task = next(SudokuTasks(0, 4, 5, chat=False).train())
    assert set(task.prompt + "".join(task.fields["solution"])) <= set("0123456789+-*=() ;")
