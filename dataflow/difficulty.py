"""Difficulty as it was measured: how many answers to a task passed when it was asked last, and how long they were.

    p = share of the group's rewards that are at least `dataflow.pass_reward`
    group size   G · min(1, 2 · (1 − p)), at least 2      a task that half passed, or was never asked, gets all G
    turn limit   2 · longest answer that passed, if p ≥ ½; else the run's

For tasks that come again: rows, not what is drawn anew each time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task_queue import MIN_GROUP_SIZE
from penstock.dataflow.trajectory import Task, Trajectory

BY_SUCCESS = "by_success"
"""What `dataflow.group_sizing` and `dataflow.length_limiting` may be instead of an import path."""
MAX_TASKS = 1_000_000
"""Tasks that are remembered, the newest."""
LENGTH_SLACK = 2.0


class Measured(NamedTuple):
    """The newest group of a task.

    Attributes:
        pass_rate: Share of its answers that passed.
        longest_pass: Sampled tokens of the longest of those; 0 if there is none.
    """

    pass_rate: float
    longest_pass: int


class _Memory:
    """What was measured, by stream and task."""

    def __init__(self, pass_reward: float) -> None:
        self._pass_reward = pass_reward
        self._measured: OrderedDict[tuple[str, TaskId], Measured] = OrderedDict()

    def group_scored(self, task: Task, stream: str, members: Sequence[Trajectory]) -> None:
        """Remember the newest group of a task."""
        passed = [one.num_sampled_tokens for one in members if passes(one, self._pass_reward)]
        self._measured[stream, task.task_id] = Measured(len(passed) / len(members), max(passed, default=0))
        self._measured.move_to_end((stream, task.task_id))
        if len(self._measured) > MAX_TASKS:
            self._measured.popitem(last=False)

    def measured(self, task: Task, stream: str) -> Measured | None:
        """What is known of a task; None if it was never asked."""
        return self._measured.get((stream, task.task_id))


class SizeBySuccess(_Memory):
    """Fewer trajectories for tasks that mostly pass (a `GroupSizing`)."""

    def __init__(self, group_size: int, pass_reward: float) -> None:
        super().__init__(pass_reward)
        self._largest = group_size

    def group_size(self, task: Task, stream: str) -> int:
        known = self.measured(task, stream)
        if known is None:
            return self._largest
        share = min(1.0, 2 * (1 - known.pass_rate))
        return max(MIN_GROUP_SIZE, math.ceil(self._largest * share))


class LengthBySuccess(_Memory):
    """Shorter turns for tasks that mostly pass (a `LengthLimiting`)."""

    def __init__(self, longest: int, pass_reward: float) -> None:
        super().__init__(pass_reward)
        self._longest = longest

    def max_new_tokens(self, task: Task, stream: str) -> int:
        known = self.measured(task, stream)
        if known is None or known.pass_rate < 0.5:
            return self._longest
        return min(self._longest, math.ceil(LENGTH_SLACK * known.longest_pass))


def passes(trajectory: Trajectory, pass_reward: float) -> bool:
    """Whether its reward counts as a success."""
    return trajectory.reward is not None and trajectory.reward >= pass_reward
