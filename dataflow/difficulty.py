"""Measured difficulty of tasks: the pass rate of a task's newest group and the length of its passing answers.

    p = share of the group's rewards that are at least `dataflow.pass_reward`
    group size   G · min(1, 2 · (1 − p)), at least 2      tasks with p ≤ ½ and new tasks get all G
    turn limit   2 · longest passing answer, if p ≥ ½; otherwise the limit of the run

This applies to tasks that recur, such as dataset rows, and not to tasks that are generated at random each time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import MIN_GROUP_SIZE
from penstock.dataflow.trajectory import Trajectory

BY_SUCCESS = "by_success"
"""Value of `dataflow.group_sizing` and `dataflow.length_limiting` that selects the built-in hooks below."""
MAX_TASKS = 1_000_000
"""Maximum number of tasks with a stored measurement; the oldest are evicted."""
LENGTH_SLACK = 2.0


class MeasuredDifficulty(NamedTuple):
    """Measurement of the newest group of a task."""

    pass_rate: float
    """Share of the answers that passed."""
    longest_pass: int
    """Number of sampled tokens of the longest passing answer; 0 if none passed."""


class _DifficultyHistory:
    """Newest measurement by stream and task."""

    def __init__(self, pass_reward: float) -> None:
        self._pass_reward = pass_reward
        self._measured: OrderedDict[tuple[str, TaskId], MeasuredDifficulty] = OrderedDict()

    def group_scored(self, task: Task, stream: str, members: Sequence[Trajectory]) -> None:
        """Store the measurement of the newest group of a task."""
        passed = [member.num_sampled_tokens for member in members if passes(member, self._pass_reward)]
        self._measured[stream, task.task_id] = MeasuredDifficulty(len(passed) / len(members), max(passed, default=0))
        self._measured.move_to_end((stream, task.task_id))
        if len(self._measured) > MAX_TASKS:
            self._measured.popitem(last=False)

    def measured(self, task: Task, stream: str) -> MeasuredDifficulty | None:
        """Return the newest measurement of a task; None for a new task."""
        return self._measured.get((stream, task.task_id))

    def state_dict(self) -> list[Any]:
        """`[[stream, task id], [pass rate, longest passing answer]]` of each measured task, oldest first."""
        return list(self._measured.items())

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        self._measured = OrderedDict(
            ((stream, TaskId(task_id)), MeasuredDifficulty(pass_rate, longest))
            for (stream, task_id), (pass_rate, longest) in state
        )


class SizeBySuccess(_DifficultyHistory):
    """Fewer trajectories for tasks that mostly pass (a `GroupSizing`)."""

    def __init__(self, group_size: int, pass_reward: float) -> None:
        super().__init__(pass_reward)
        self._max_group_size = group_size

    def group_size(self, task: Task, stream: str) -> int:
        known = self.measured(task, stream)
        if known is None:
            return self._max_group_size
        share = min(1.0, 2 * (1 - known.pass_rate))
        return max(MIN_GROUP_SIZE, math.ceil(self._max_group_size * share))


class LengthBySuccess(_DifficultyHistory):
    """Shorter turns for tasks that mostly pass (a `LengthLimiting`)."""

    def __init__(self, longest: int, pass_reward: float) -> None:
        super().__init__(pass_reward)
        self._max_new_tokens = longest

    def max_new_tokens(self, task: Task, stream: str) -> int:
        known = self.measured(task, stream)
        if known is None or known.pass_rate < 0.5:
            return self._max_new_tokens
        return min(self._max_new_tokens, math.ceil(LENGTH_SLACK * known.longest_pass))


def passes(trajectory: Trajectory, pass_reward: float) -> bool:
    """Whether its reward counts as a success."""
    return trajectory.reward is not None and trajectory.reward >= pass_reward
