"""Drawn programs: the gold answer passes its tests in the sandbox, and what only looks like an answer does not."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from itertools import accumulate, islice, pairwise
from typing import Literal

import pytest

from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.contract import RewardContext
from penstock.envs.loading import load_task_source
from penstock.envs.rewards.python_code import PythonCodeReward
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.scripted_check import check_environment
from penstock.envs.tasks.python_tasks import MAX_STEPS, PythonTasks
from tests.answers import answered

Form = Literal["function", "program"]
REWARD = PythonCodeReward.build(RewardContext(SandboxConfig(allow_unisolated=True)), mode="all")


@pytest.mark.some(1)
@pytest.mark.parametrize("form", ["function", "program"])
@pytest.mark.parametrize("num_steps", [1, MAX_STEPS])
async def test_gold_passes_all_tests_and_neither_a_constant_nor_the_input_does(form: Form, num_steps: int) -> None:
    source = PythonTasks(0, num_steps, 4, form=form)
    for task in islice(source.train(), 5):
        gold = source.gold_response(task)
        assert await REWARD(answered(gold), **task.fields) == {"reward": 1.0, "passed": 4.0}, gold
        returned = gold.index("def solve(numbers):\n") + len("def solve(numbers):\n")
        for wrong in ("numbers", "0", "[]"):
            cheating = f"{gold[:returned]}    return {wrong}\n{gold[returned:]}"
            assert (await REWARD(answered(cheating), **task.fields))["reward"] == 0.0, cheating


async def test_every_step_and_result_means_what_its_text_says() -> None:
    """The tests and the gold answer come from the product's code; the task of the prompt is computed here again."""
    source, bodies = PythonTasks(1, 1, 6), set()
    rng = random.Random(0)
    for _ in range(150):
        row = source.draw(rng)
        kind = tuple(line.translate(str.maketrans("", "", "-0123456789")) for line in row["body"])
        if kind in bodies:
            continue
        bodies.add(kind)
        for test in row["tests"]:
            given, wanted = (ast.literal_eval(part) for part in test.removeprefix("assert solve(").split(") == "))
            assert meant(row["prompt"][0]["content"], given) == wanted, row
        lines = "\n".join(["def solve(numbers):", *(f"    {line}" for line in row["body"])])
        passed = await REWARD(answered(f"```python\n{lines}\n```"), tests=row["tests"])
        assert passed["reward"] == 1.0, row
    assert len(bodies) >= 36, "of 12 steps with 4 results, some of which never differ"


STEPS: dict[str, Callable[[list[int], int], list[int]]] = {
    "keep only multiples of K": lambda numbers, k: [n for n in numbers if not n % k],
    "drop all numbers below K": lambda numbers, k: [n for n in numbers if not n < k],
    "add K to each number": lambda numbers, k: [k + n for n in numbers],
    "multiply each number by K": lambda numbers, k: [k * n for n in numbers],
    "replace each number by its absolute value": lambda numbers, _: [max(n, -n) for n in numbers],
    "keep only the first K numbers": lambda numbers, k: list(islice(numbers, k)),
    "keep every second number, beginning with the first": lambda numbers, _: list(islice(numbers, 0, None, 2)),
    "reverse the order": lambda numbers, _: list(reversed(numbers)),
    "sort in ascending order": lambda numbers, _: sorted(numbers),
    "remove repeated numbers, keeping the first of each": lambda numbers, _: sorted(set(numbers), key=numbers.index),
    "replace each number by the sum of all numbers up to and including it": lambda numbers, _: [*accumulate(numbers)],
    "replace the list by the differences of neighbours, each number minus the one before it": lambda numbers, _: [
        b - a for a, b in pairwise(numbers)
    ],
}
RESULTS: dict[str, Callable[[list[int]], int | list[int]]] = {
    "the list": list,
    "the sum of the numbers, 0 if none are left": sum,
    "how many numbers are left": len,
    "the largest number, 0 if none are left": lambda numbers: max([*numbers] or [0]),
}


def meant(prompt: str, numbers: list[int]) -> int | list[int]:
    """What a reader of the prompt would answer."""
    for step in re.findall(r"^\d+\. (.*)$", prompt, re.MULTILINE):
        found = re.search(r"-?\d+", step)
        numbers = STEPS[re.sub(r"-?\d+", "K", step)](numbers, int(found[0]) if found else 0)
    result = re.search(r"Then it returns (.*?)\. Answer with", prompt)
    assert result is not None
    return RESULTS[result[1]](numbers)


def test_tasks_are_the_same_for_a_seed_and_their_programs_in_one_split_only() -> None:
    first, again, other = (list(islice(PythonTasks(seed).train(), 30)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    held_out = {repr(task.fields["body"]) for task in PythonTasks(0).held_out(50)}
    assert len(held_out) == 50
    assert not held_out & {repr(task.fields["body"]) for task in islice(PythonTasks(2, num_tests=2).train(), 2000)}
    assert PythonTasks(0).held_out(5) == PythonTasks(1).held_out(5)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_difficulty_is_the_number_of_steps(num_steps: int) -> None:
    task = next(PythonTasks(0, num_steps).train())
    assert isinstance(task.prompt, list)
    assert f"\n{num_steps}. " in task.prompt[0]["content"]
    assert f"\n{num_steps + 1}. " not in task.prompt[0]["content"]
    assert len(task.fields["body"]) == num_steps + 1


@pytest.mark.parametrize(
    ("args", "problem"),
    [({"num_steps": 9}, "num_steps=9 is outside 1..8"), ({"num_tests": 1}, "num_tests=1"), ({"form": "x"}, "form='x'")],
)
def test_arguments_out_of_range_are_refused(args: dict[str, object], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        load_task_source(EnvConfig(factory="python_code", args=args), 0)


@pytest.mark.full
async def test_penstock_env_check_finds_nothing_wrong() -> None:
    reward = RewardConfig(fn="tests.unit.envs.test_python_tasks:REWARD", timeout_s=30)
    findings = await check_environment(EnvConfig(factory="python_code"), reward)
    assert [finding.name for finding in findings if finding.is_good is not True] == []
    assert "gold gets full reward" in {finding.name for finding in findings}
