"""Countdown: reach a target from given numbers, each used at most once, by + - * / (as in TinyZero, arXiv:2504.01296).

    cd examples
    penstock train experiment=arithmetic env.factory=countdown:CountdownTasks 'env.args={chat: false}' \\
        reward.fn=countdown:countdown_reward name=countdown

The verifier is exact: fractions, and no `eval` of what the policy wrote. Every task can be solved: the target is
computed from a random expression, which is its gold trace. Difficulty: `num_numbers`, `max_number`, `max_target`.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import pure
from penstock.envs.tasks.generated_tasks import GeneratedTasks

MAX_CHARACTERS = 200
_SIGNS = re.compile(r"[\d\s+*/()-]*")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of numbers, + - * / and parentheses, and the numbers in it, left to right.

    Raises:
        ValueError: If it is too long, no such expression, or divides by zero.
    """
    if len(expression) > MAX_CHARACTERS or _SIGNS.fullmatch(expression) is None:
        raise ValueError(f"{expression[:MAX_CHARACTERS]!r} is no expression of numbers, + - * / and parentheses")
    try:
        tree = ast.parse(" ".join(expression.split()), mode="eval")
    except (SyntaxError, MemoryError) as error:  # the second: parentheses nested too deeply
        raise ValueError(f"{expression!r} is no expression: {error}") from error
    numbers: list[int] = []

    def value(node: ast.AST) -> Fraction:
        match node:
            case ast.Constant(int(number)):
                numbers.append(number)
                return Fraction(number)
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Sub(), right):
                return value(left) - value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
            case ast.BinOp(left, ast.Div(), right):
                return value(left) / value(right)
        raise ValueError(f"{expression!r}: only + - * / are known")

    try:
        return value(tree.body), numbers
    except ZeroDivisionError:
        raise ValueError(f"{expression!r}: division by zero") from None


class CountdownTasks(GeneratedTasks):
    """Task source of Countdown.

    Args:
        seed: Order of the training stream.
        num_numbers: Numbers given, 2..6.
        max_number: Largest of them, 2..100.
        max_target: Largest target, 1..1000.
        chat: Ask in chat messages, to be answered in `<answer>` tags; else `1;2;3=6?`, answered by the expression.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self, seed: int, num_numbers: int = 4, max_number: int = 25, max_target: int = 100, *, chat: bool = True
    ) -> None:
        limits = [
            ("num_numbers", num_numbers, 2, 6),
            ("max_number", max_number, 2, 100),
            ("max_target", max_target, 1, 1000),
        ]
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise ValueError(f"{name}={value} is outside {low}..{high}")
        super().__init__(seed)
        self._num_numbers = num_numbers
        self._max_number = max_number
        self._max_target = max_target
        self._chat = chat

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """Numbers, a target that can be reached, and an expression that does it."""
        while True:
            numbers = [rng.randint(1, self._max_number) for _ in range(self._num_numbers)]
            value, solution = _random_expression(rng, numbers)
            if value.denominator == 1 and 1 <= value <= self._max_target:
                target = int(value)
                prompt = self._prompt(numbers, target)
                return {"prompt": prompt, "numbers": numbers, "target": target, "solution": solution}

    def split_by(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Numbers in any order, and the target: the same task may have been made from several expressions."""
        return {"numbers": sorted(row["numbers"]), "target": row["target"]}

    def gold_response(self, task: Task) -> str:
        """The expression that the task was made from."""
        solution = str(task.fields["solution"])
        return f"<answer>{solution}</answer>" if self._chat else solution

    def _prompt(self, numbers: list[int], target: int) -> str | list[dict[str, str]]:
        if not self._chat:
            return f"{';'.join(map(str, numbers))}={target}?"
        question = (
            f"Using the numbers {numbers}, each at most once, and + - * / and parentheses, make {target}. Think, then "
            "give the expression alone in <answer> </answer> tags."
        )
        return [{"role": "user", "content": question}]


def _random_expression(rng: random.Random, numbers: list[int]) -> tuple[Fraction, str]:
    """Combine numbers in random order until one value is left; every step gives a positive integer."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        if a < b:
            a, b, left, right = b, a, right, left
        steps = [(a + b, f"({left}+{right})"), (a * b, f"({left}*{right})")]
        if a > b:
            steps.append((a - b, f"({left}-{right})"))
        if a % b == 0:
            steps.append((a / b, f"({left}/{right})"))
        parts.append(rng.choice(steps))
    return parts[0]


def solves(expression: str, numbers: list[int], target: int) -> bool:
    """Whether an expression uses only `numbers`, each at most as often as it is there, and is exactly `target`."""
    try:
        value, used = evaluate(expression)
    except ValueError:
        return False
    return not Counter(used) - Counter(numbers) and value == target


@pure
def countdown_reward(trajectory: Trajectory, numbers: list[int], target: int, **_: object) -> float:
    """1 if the last `<answer>`, or the whole response without one, solves the task, else 0."""
    answers = _TAG.findall(trajectory.response)
    return float(solves(answers[-1] if answers else trajectory.response, numbers, target))
