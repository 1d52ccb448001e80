"""Small Python programs to write: steps to apply to a list of integers, with tests that a sandbox runs.

Difficulty is the number of steps. Tasks are drawn, so there is no limit on their number. The expected results in the
tests are computed by the function of `gold_response`. Use it with `reward=python_code`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

from penstock.dataflow.task import Task
from penstock.envs.tasks.generated_tasks import GeneratedTasks

MAX_STEPS = 8
_MAX_DRAWS = 100
"""Draws of inputs until their results differ; after that, other steps are drawn."""

Numbers = list[int]


class _Step(NamedTuple):
    """One step. `{k}` is replaced by a number that is drawn."""

    text: str
    """Its description in the prompt."""
    code: str
    """Its expression over `numbers`."""
    low: int = 0
    high: int = 0


_STEPS = (
    _Step("keep only multiples of {k}", "[n for n in numbers if n % {k} == 0]", 2, 4),
    _Step("drop all numbers below {k}", "[n for n in numbers if n >= {k}]", -9, 9),
    _Step("add {k} to each number", "[n + {k} for n in numbers]", 1, 9),
    _Step("multiply each number by {k}", "[n * {k} for n in numbers]", 2, 5),
    _Step("replace each number by its absolute value", "[abs(n) for n in numbers]"),
    _Step("keep only the first {k} numbers", "numbers[:{k}]", 3, 6),
    _Step("keep every second number, beginning with the first", "numbers[::2]"),
    _Step("reverse the order", "numbers[::-1]"),
    _Step("sort in ascending order", "sorted(numbers)"),
    _Step("remove repeated numbers, keeping the first of each", "list(dict.fromkeys(numbers))"),
    _Step(
        "replace each number by the sum of all numbers up to and including it",
        "[sum(numbers[: i + 1]) for i in range(len(numbers))]",
    ),
    _Step(
        "replace the list by the differences of neighbours, each number minus the one before it",
        "[b - a for a, b in zip(numbers, numbers[1:])]",
    ),
)
_RESULTS = (
    _Step("the list", "numbers"),
    _Step("the sum of the numbers, 0 if none are left", "sum(numbers)"),
    _Step("how many numbers are left", "len(numbers)"),
    _Step("the largest number, 0 if none are left", "max(numbers, default=0)"),
)


@dataclass(eq=False)
class PythonTasks(GeneratedTasks):
    """Task source of small programs.

    Args:
        seed: Order of the training stream.
        num_steps: Steps before the result is returned, 1..8.
        num_tests: Test inputs of each task, 2..50.
        form: `function`: the tests call `solve(numbers)` in the interpreter of the answer; `program`: the answer reads
            the numbers from standard input and prints the result, which is compared outside, so code cannot cheat.

    Raises:
        ValueError: If an argument is out of its range.
    """

    num_steps: int = 3
    num_tests: int = 8
    _: KW_ONLY
    form: Literal["function", "program"] = "function"

    def __post_init__(self) -> None:
        limits = (("num_steps", self.num_steps, 1, MAX_STEPS), ("num_tests", self.num_tests, 2, 50))
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise ValueError(f"{name}={value} is outside {low}..{high}")
        if self.form not in ("function", "program"):
            raise ValueError(f"form={self.form!r}: it is function or program")

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """A prompt, its tests, and the lines of a correct function."""
        while True:
            steps = [(step, rng.randint(step.low, step.high)) for step in rng.choices(_STEPS, k=self.num_steps)]
            result = rng.choice(_RESULTS)
            body = [f"numbers = {step.code.format(k=k)}" for step, k in steps] + [f"return {result.code}"]
            solved = _draw_inputs(rng, body, self.num_tests)
            if solved is not None:
                return {"prompt": self._prompt(steps, result), "body": body, **self._tests(solved)}

    def split_by(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The steps alone, regardless of the test inputs."""
        return {"body": row["body"]}

    def gold_response(self, task: Task) -> str:
        """A correct answer in one code block."""
        code = _function(task.fields["body"])
        if self.form == "program":
            code += "\n\nprint(solve([int(word) for word in input().split()]))"
        return f"```python\n{code}\n```"

    def _tests(self, solved: list[tuple[Numbers, Numbers | int]]) -> dict[str, Any]:
        if self.form == "function":
            return {"tests": [f"assert solve({given!r}) == {result!r}" for given, result in solved]}
        return {"cases": [[" ".join(map(str, given)) + "\n", f"{result}\n"] for given, result in solved]}

    def _prompt(self, steps: list[tuple[_Step, int]], result: _Step) -> list[dict[str, str]]:
        if self.form == "function":
            head = "Write a Python function `solve(numbers)`. It gets a list of integers and does this, in order:"
            end = f"Then it returns {result.text}."
        else:
            head = (
                "Write a Python program. It reads one line of integers, separated by spaces, and does this, in order:"
            )
            end = f"Then it prints {result.text}, as Python's print does."
        todo = "\n".join(f"{number}. {step.text.format(k=k)}" for number, (step, k) in enumerate(steps, start=1))
        content = f"{head}\n\n{todo}\n\n{end} Answer with one ```python code block."
        return [{"role": "user", "content": content}]


def _function(body: list[str]) -> str:
    return "\n".join(["def solve(numbers):", *(f"    {line}" for line in body)])


def _draw_inputs(rng: random.Random, body: list[str], num_tests: int) -> list[tuple[Numbers, Numbers | int]] | None:
    """Draw inputs with their results. The results are neither all equal nor all equal to the input, so that constant
    answers fail. None if such inputs are rare.
    """
    space: dict[str, Any] = {}
    exec(_function(body), space)  # noqa: S102  the lines come from this module, not from the policy
    for _ in range(_MAX_DRAWS):
        inputs = [[rng.randint(-20, 20) for _ in range(rng.randint(1, 10))] for _ in range(num_tests)]
        solved = [(given, space["solve"](given)) for given in inputs]
        if len({repr(result) for _, result in solved}) > 1 and any(result != given for given, result in solved):
            return solved
    return None
