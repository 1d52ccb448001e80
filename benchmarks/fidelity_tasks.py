"""The task of several turns of `fidelity.py`: a running total over two additions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from penstock.dataflow.trajectory import Task
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.tasks.arithmetic import Problem, worked_response
from penstock.envs.tasks.generated_tasks import GeneratedTasks

_SMALLEST, _LARGEST = 100, 999


class RunningTotal(GeneratedTasks):
    """Three numbers of three digits; the sum of the first two also has three.

    The first turn adds two of them, the second adds the third to what the policy itself has answered. Each turn is a
    thread of its own, so a policy that was warm-started on single sums can answer it.
    """

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """The numbers; the prompt is the first sum."""
        left = rng.randint(_SMALLEST, _LARGEST - _SMALLEST)
        right, last = rng.randint(_SMALLEST, _LARGEST - left), rng.randint(_SMALLEST, _LARGEST)
        return {"prompt": f"{left}+{right}=", "last": last, "total": left + right + last}

    def environment(self) -> Environment:
        """A fresh total."""
        return RunningTotalEpisode()

    def gold_actions(self, task: Task) -> list[str]:
        """Both sums with worked columns."""
        assert isinstance(task.prompt, str)
        first = Problem.from_prompt(task.prompt)
        return [worked_response(first), worked_response(Problem(first.answer, "+", task.fields["last"]))]


class RunningTotalEpisode(Environment):
    """Reward 0.5 for each right sum; the second is right only if it is the sum of all three numbers."""

    def __init__(self) -> None:
        self._reward = 0.0
        self._is_second = False

    def reset(self, task: Task) -> Observation:
        """Ask for the first sum."""
        self.task = task
        return Observation(task.prompt, thread="first")

    def step(self, action: Action) -> Observation | Done:
        """Take the text after the last `;` as the answer."""
        last, total = self.task.fields["last"], self.task.fields["total"]
        answer = "" if action.is_truncated else action.text.rpartition(";")[2]
        self._reward += 0.5 * (answer == str(total if self._is_second else total - last))
        if self._is_second or not (answer.isdecimal() and len(answer) == 3):
            return Done(self._reward)
        self._is_second = True
        return Observation(f"{answer}+{last}=", thread="second")
