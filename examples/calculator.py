"""Arithmetic with large numbers and a calculator as a tool: a minimal task in which calling a tool pays off.

    cd examples
    penstock env check calculator:CalculatorTasks
    penstock train experiment=text env.factory=calculator:CalculatorTasks '~env.args' reward=episode \\
        rollout.sampling.max_new_tokens=128 name=calculator

The policy writes `<tool_call>{"name": "calculate", "arguments": {"expression": "12*34"}}</tool_call>`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from penstock.dataflow.task import Task
from penstock.envs.environment import Environment
from penstock.envs.tasks.generated_tasks import GeneratedTasks
from penstock.envs.tools.calculator import calculate
from penstock.envs.tools.tool_environment import ToolEnvironment

_NUMBER = re.compile(r"-?\d+(?:/\d+)?")


class CalculatorTasks(GeneratedTasks):
    """Task source of expressions.

    Args:
        seed: Order of the training stream.
        num_operands: Numbers in an expression, 2..8.
        digits: Largest number of digits of a number, 1..6.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, seed: int, num_operands: int = 4, digits: int = 3) -> None:
        if not 2 <= num_operands <= 8:
            raise ValueError(f"num_operands={num_operands} is outside 2..8")
        if not 1 <= digits <= 6:
            raise ValueError(f"digits={digits} is outside 1..6")
        super().__init__(seed)
        self._num_operands = num_operands
        self._digits = digits

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """An expression of + - *, and its value."""
        numbers = [str(rng.randint(1, 10**self._digits - 1)) for _ in range(self._num_operands)]
        signs = [rng.choice("+-*") for _ in numbers[1:]]
        expression = numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))
        question = f"What is {expression}? Use the calculator, then answer with the number alone."
        prompt = [{"role": "user", "content": question}]
        return {"prompt": prompt, "expression": expression, "answer": calculate(expression)}

    def environment(self) -> Environment:
        """A calculator."""
        return CalculatorEpisode()

    def gold_actions(self, task: Task) -> list[str]:
        """One call, then the answer."""
        call = f'{{"name": "calculate", "arguments": {{"expression": "{task.fields["expression"]}"}}}}'
        return [f"<tool_call>{call}</tool_call>", task.fields["answer"]]


class CalculatorEpisode(ToolEnvironment):
    """Reward 1 if the last number of the answer is right."""

    tools = (calculate,)

    def score(self, task: Task, answer: str) -> float:
        """1 or 0."""
        numbers = _NUMBER.findall(answer.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == task.fields["answer"])
