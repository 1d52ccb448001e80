"""Tasks of `fidelity.py`: two datasets of reasoning-gym in the characters of arithmetic, and one of several turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.adapters.reasoning_gym_tasks import ReasoningGymTasks, reasoning_gym_reward
from penstock.envs.contract import pure
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


Row = Mapping[str, Any]
"""What reasoning-gym tells of a question beside its text: `metadata` of an entry."""


class NumbersOnly:
    """Rows of reasoning-gym whose questions are numbers, asked without their words.

    Rows and verifier are the library's (that of number_sorting takes a number that is off by 1 as right), the split is
    that of `ReasoningGymTasks`. A policy of a million parameters reads digits, not English.

    Args:
        seed: Seed of the training rows.
        dataset: `number_sorting` or `gcd`.
        config: Settings of the dataset.
    """

    def __init__(self, seed: int, dataset: str, config: Mapping[str, Any]) -> None:
        self._rows = ReasoningGymTasks(seed, dataset, config)
        self._question, self._answer = FORMS[dataset]

    def train(self) -> Iterator[Task]:
        """Endless stream of rows."""
        return map(self._asked, self._rows.train())

    def held_out(self, num_tasks: int) -> list[Task]:
        """Rows of another seed."""
        return [self._asked(task) for task in self._rows.held_out(num_tasks)]

    def gold_response(self, task: Task) -> str:
        """The answer, after its steps if it takes some."""
        return self._answer(task.fields["entry"]["metadata"])

    def _asked(self, task: Task) -> Task:
        return replace(task, prompt=self._question(task.fields["entry"]["metadata"]))


def sorting_question(row: Row) -> str:
    """`56,25,75<` asks for ascending, `56,25,75>` for descending order."""
    numbers = ",".join(str(round(float(number))) for number in row["original_numbers"])
    return f"{numbers}{'<' if row['direction'] == 'ascending' else '>'}"


def sorting_answer(row: Row) -> str:
    """`25,56,75`."""
    return ",".join(str(round(float(number))) for number in row["sorted_numbers"])


def gcd_question(row: Row) -> str:
    """`98,58=`."""
    return f"{','.join(map(str, row['numbers']))}="


def gcd_answer(row: Row) -> str:
    """Euclid's steps, then the divisor: `98-58=40;58-40=18;40-36=4;18-16=2;4-4=0;2`."""
    left, right = sorted(row["numbers"], reverse=True)
    steps = []
    while right:
        steps.append(f"{left}-{left - left % right}={left % right}")
        left, right = right, left % right
    return ";".join([*steps, str(left)])


FORMS: Mapping[str, tuple[Callable[[Row], str], Callable[[Row], str]]] = {
    "number_sorting": (sorting_question, sorting_answer),
    "gcd": (gcd_question, gcd_answer),
}
"""Dataset -> its question and its answer in the characters of arithmetic."""


@pure
def verified_by_reasoning_gym(trajectory: Trajectory, dataset: str, entry: dict[str, Any], **_: object) -> float:
    """1 if the response ended by itself and the library's verifier gives what follows its last `;` the full score."""
    if trajectory.finish_reason != "stop":
        return 0.0
    answer = trajectory.response.rpartition(";")[2]
    if dataset == "number_sorting":
        answer = str(answer.split(","))
    tagged = replace(trajectory, response=f"<answer>{answer}</answer>")
    return float(reasoning_gym_reward(tagged, dataset, entry)["reward"] == 1.0)
