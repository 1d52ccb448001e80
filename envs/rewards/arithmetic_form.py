"""A preference for the RLHF chain (docs/algorithms.md): worked sums whose steps lead to the answer are preferred.

`follows_its_steps` checks that every step takes the next column and the carry of the previous step, and that the answer
is read from the steps. It does not check whether `7+5+0=12` is true, so a small reward model can learn it. The chain
starts from the answers of `MixedWriters`, most of which have no steps.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import pure
from penstock.envs.tasks.arithmetic import ArithmeticTasks, Problem


class MixedWriters(ArithmeticTasks):
    """Column sums of several writers: some answer `47+85=` with `7+5+0=12;4+8+1=13;132` and the others with `132`.

    A hash of the prompt decides the writer, in both splits and for every seed. The prompt does not show the writer, so
    a policy that learns from these answers mixes both styles.

    Args:
        seed: As in `ArithmeticTasks`.
        brief_share: Share of the prompts that are answered without steps; in [0, 1].
        args: Arguments of `ArithmeticTasks`.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, seed: int, brief_share: float = 0.6, **args: Any) -> None:
        super().__init__(seed, **args)
        if not 0 <= brief_share <= 1:
            raise ValueError(f"brief_share={brief_share} is outside 0..1: it is a share of the prompts")
        self._brief_share = brief_share

    def gold_response(self, task: Task) -> str:
        """The correct answer, with or without its steps."""
        worked = super().gold_response(task)
        digest = blake2b(f"arithmetic/writer/{task.prompt}".encode(), digest_size=8).digest()
        is_brief = int.from_bytes(digest, "big") < self._brief_share * 2**64
        return worked.rpartition(";")[2] if is_brief else worked


@pure
def follows_its_steps(trajectory: Trajectory, **_: object) -> float:
    """1 if a sum's worked answer ended by itself and follows from its own steps, else 0."""
    if trajectory.finish_reason != "stop":
        return 0.0
    return float(is_consistent(Problem.from_prompt(trajectory.prompt), trajectory.response))


def is_consistent(problem: Problem, response: str) -> bool:
    """Whether `response` copies the columns of a sum, propagates its carries and takes the answer from its steps."""
    left, right = str(problem.left), str(problem.right)
    width = max(len(left), len(right))
    columns = zip(reversed(left.zfill(width)), reversed(right.zfill(width)), strict=True)
    *steps, answer = response.split(";")
    if problem.operator != "+" or len(steps) != width:
        return False
    carry, read = 0, ""
    for (a, b), step in zip(columns, steps, strict=True):
        found = re.fullmatch(rf"{a}\+{b}\+{carry}=(1?\d)", step)
        if found is None:
            return False
        total = int(found[1])
        carry, read = total // 10, f"{total % 10}{read}"
    return answer == (f"{carry}{read}" if carry else read)
