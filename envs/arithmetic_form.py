"""What a reader who does not add sees in a worked sum: that it follows from the problem and from itself.

Every step takes the next column and the carry of the step before, and the answer is read from the steps. Whether
`7+5+0=12` is true is not asked. It is easy to judge and half of what the warm start samples gets it wrong, which makes
it a preference that a small reward model can learn (docs/algorithms.md, the RLHF chain).
"""

from __future__ import annotations

import re

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.arithmetic import Problem
from penstock.envs.contract import pure


@pure
def follows_its_steps(trajectory: Trajectory, **_: object) -> float:
    """1 if a sum's worked answer ended by itself and follows from its own steps, else 0."""
    if trajectory.finish_reason != "stop":
        return 0.0
    return float(is_consistent(Problem.from_prompt(trajectory.prompt), trajectory.response))


def is_consistent(problem: Problem, response: str) -> bool:
    """Whether `response` copies the columns of a sum, hands on its own carries and reads the answer from its steps."""
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
