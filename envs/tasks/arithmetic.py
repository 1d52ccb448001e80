"""Column arithmetic with worked steps: the demo's task, learnable by a policy of a million parameters in minutes.

The answer to `47+85=` is `7+5+0=12;4+8+1=13;132`: one step per column from the right, `digit+digit+carry=sum`, then the
result. Subtraction takes the smaller from the larger number; a column that borrows shows a leading 1: the answer to
`85-47=` is `15-7-0=8;8-4-1=3;38`. A product has one digit on the right: the answer to `47*8=` is
`7*8+0=56;4*8+5=37;376`.

A hash of the canonical prompt alone decides whether a problem is held out, so training and held-out problems are
disjoint for every seed and every difficulty. (A linear congruence of the operands would leak into the answers.)
Commuted sums and products have the same canonical prompt, so they are in the same split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Literal

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import Judged, pure
from penstock.envs.rewards.answers import AnswerValue, equals_answer, last_field

Operator = Literal["+", "-", "*"]

HELD_OUT_PERCENT = 10
MAX_DIGITS = 6
MISTAKES = ("sum", "digit", "carry", "answer")
_OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
_SETS: dict[Operator, str] = {"+": "sums", "-": "differences", "*": "products"}
_HELD_OUT_SEED = "arithmetic/held-out"
_MAX_ENUMERATED = 250_000


@dataclass(frozen=True, slots=True)
class Problem:
    """Two non-negative operands; `left >= right` where the operator is `-`, and `right < 10` where it is `*`."""

    left: int
    operator: Operator
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.operator}{self.right}="

    @property
    def answer(self) -> int:
        if self.operator == "*":
            return self.left * self.right
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def is_held_out(self) -> bool:
        """Whether blake2b of the canonical prompt, modulo 100, is below `HELD_OUT_PERCENT`."""
        low, high = sorted((self.left, self.right))
        digest = blake2b(f"{low}{self.operator}{high}=".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT

    @classmethod
    def from_prompt(cls, prompt: str) -> Problem:
        """Parse `47+85=`.

        Raises:
            ValueError: If `prompt` is not a problem of this environment.
        """
        for operator in _OPERATORS:
            left, _, right = prompt.removesuffix("=").partition(operator)
            if left.isdecimal() and right.isdecimal() and (operator != "*" or len(right) == 1):
                return cls(int(left), operator, int(right))
        raise ValueError(f"{prompt!r} is no arithmetic prompt; expected e.g. '47+85='")


def worked_response(problem: Problem, rng: random.Random | None = None) -> str:
    """Worked columns, then the answer from them: one step per column from the right, with its carry or borrow.

    With `rng` it has one mistake, as a half-trained policy makes it: the later steps are consistent with it, and the
    answer is wrong.

    648+257=  8+7+0=15;4+5+1=10;6+2+1=9;905       correct
    8+7+0=14;4+5+1=10;6+2+1=9;904       `sum`: one off, and the answer follows from it
    8+7+0=15;4+3+1=8;6+2+0=8;885        `digit`: copied wrong, but summed correctly
    8+7+0=15;4+5+0=9;6+2+0=8;895        `carry`: forgotten or invented
    8+7+0=15;4+5+1=10;6+2+1=9;915       `answer`: one digit of it off by one
    """
    left, right, operator = str(problem.left), str(problem.right), problem.operator
    width = max(len(left), len(right))
    mistake, place = (None, 0) if rng is None else (rng.choice(MISTAKES), rng.randrange(width))
    next_sign = "-" if operator == "-" else "+"
    steps, digits, carry = [], [], 0
    lower = right * width if operator == "*" else right.zfill(width)
    columns = zip(map(int, reversed(left.zfill(width))), map(int, reversed(lower)), strict=True)
    for column, (above, below) in enumerate(columns):
        b, carried, off = below, carry, 0
        if rng is not None and column == place:
            if mistake == "carry":
                carried = 0 if carry else 1
            elif mistake == "digit" and (operator != "*" or above):
                b = (below + rng.choice((-1, 1, 2, 3))) % 10
            elif mistake != "answer":  # a wrong digit times 0 would be no mistake
                off = rng.choice((-1, 1))
        if operator == "-":
            carry = int(above < b + carried)
            top = above + 10 * carry
            result = (top - b - carried + off) % 10
        else:
            result = abs((above * b if operator == "*" else above + b) + carried + off)
            top, carry = above, result // 10
        steps.append(f"{top}{operator}{b}{next_sign}{carried}={result}")
        digits.append(result % 10)
    answer = int("".join(map(str, reversed(digits)))) + (0 if operator == "-" else 10**width * carry)
    if rng is not None and mistake == "answer":
        step = 10**place
        answer += step if answer < step else rng.choice((-step, step))
    return ";".join([*steps, str(answer)])


class ArithmeticTasks:
    """Task source of column sums, differences and products; see the module for the form of a task.

    Args:
        seed: Order of the training stream. Held-out tasks do not depend on it.
        digits: Largest number of digits of an operand, 1..6; the right operand of a product has one. A gold response
            has about `9·digits + 4` characters.
        operators: The operators that occur, each of `+`, `-` and `*` at most once, drawn uniformly. Of several, the
            held-out tasks of each are an evaluation set.
        min_digits: Smallest number of digits of an operand, `None` is `digits`; the number is drawn uniformly between
            the two.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, seed: int, digits: int = 2, operators: str = "+", min_digits: int | None = None) -> None:
        smallest = digits if min_digits is None else min_digits
        if not 1 <= digits <= MAX_DIGITS:
            raise ValueError(f"digits={digits} is outside 1..{MAX_DIGITS}")
        if not 1 <= smallest <= digits:
            raise ValueError(f"min_digits={smallest} is outside 1..digits={digits}")
        if not operators or set(operators) - set(_OPERATORS) or len(set(operators)) != len(operators):
            raise ValueError(f"operators={operators!r} is not made of '+', '-' and '*', each at most once")
        self._seed = seed
        self._lengths = range(smallest, digits + 1)
        self._operators = tuple(operator for operator in _OPERATORS if operator in operators)

    def train(self) -> Iterator[Task]:
        """Endless stream of problems that are not held out, the same for the same seed."""
        rng = random.Random(f"arithmetic/train/{self._seed}")
        index = 0
        while True:
            problem = self._draw(rng)
            if not problem.is_held_out:
                yield _task(problem, "train", index)
                index += 1

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out problems, all if there are fewer; all distinct, the same for every seed."""
        problems = islice(self._held_out_problems(), num_tasks)
        tasks = [_task(problem, "held_out", index) for index, problem in enumerate(problems)]
        if len(self._operators) == 1:
            return tasks
        return [replace(task, evaluation_set=_SETS[Problem.from_prompt(str(task.prompt)).operator]) for task in tasks]

    def gold_response(self, task: Task) -> str:
        """Worked columns, then the answer."""
        if not isinstance(task.prompt, str):
            raise TypeError(f"{task.task_id}: an arithmetic prompt is text, not chat messages")
        return worked_response(Problem.from_prompt(task.prompt))

    def mistaken_response(self, task: Task, rng: random.Random) -> str:
        """The same with a plausible mistake."""
        assert isinstance(task.prompt, str), "gold_response comes first"
        return worked_response(Problem.from_prompt(task.prompt), rng)

    def _draw(self, rng: random.Random) -> Problem:
        """One problem: lengths first, so that short operands are as frequent as long ones."""
        operator = rng.choice(self._operators)
        lengths = (self._lengths, (1,) if operator == "*" else self._lengths)
        left, right = (rng.choice(_operands(rng.choice(these))) for these in lengths)
        if operator == "-" and left < right:
            left, right = right, left
        return Problem(left, operator, right)

    def _held_out_problems(self) -> Iterator[Problem]:
        """Distinct held-out problems in a fixed order: a small space is listed and shuffled, a large one is sampled."""
        rng = random.Random(_HELD_OUT_SEED)
        num_operands = sum(len(_operands(length)) for length in self._lengths)
        num_pairs = num_operands * sum(10 if operator == "*" else num_operands for operator in self._operators)
        if num_pairs <= _MAX_ENUMERATED:
            operands = [operand for length in self._lengths for operand in _operands(length)]
            problems = [
                Problem(left, operator, right)
                for operator in self._operators
                for left in operands
                for right in (_operands(1) if operator == "*" else operands)
                if operator != "-" or left >= right
            ]
            problems = [problem for problem in problems if problem.is_held_out]
            rng.shuffle(problems)
            yield from problems
            return
        seen: set[Problem] = set()
        # A fiftieth of all pairs is less than half of the held-out ones, so drawing distinct ones stays cheap and ends.
        while len(seen) < num_pairs // 50:
            problem = self._draw(rng)
            if problem.is_held_out and problem not in seen:
                seen.add(problem)
                yield problem


def _operands(length: int) -> range:
    """Numbers of `length` digits; 0 counts as one digit."""
    return range(0 if length == 1 else 10 ** (length - 1), 10**length)


def _task(problem: Problem, split: str, index: int) -> Task:
    return Task(TaskId(f"arithmetic/{split}/{index}"), problem.prompt, {"answer": str(problem.answer)})


@pure
def exact_match(trajectory: Trajectory, answer: AnswerValue, **_: object) -> float:
    """1 if the response ended by itself and the text after its last `;` is `answer` (envs/rewards/answers.py), else 0.

    An answer with n `;` itself is compared with the last n + 1 fields.

    Raises:
        ValueError: If no response could equal the answer.
    """
    found, is_whole = last_field(trajectory.response, answer), trajectory.finish_reason == "stop"
    is_right = equals_answer(found, answer)
    return Judged(is_right and is_whole, (str(answer) if is_right else found.strip()) if is_whole else "")
