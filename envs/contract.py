"""What a user plugs in: a source of tasks, an environment, a reward.

A single-turn task needs a `TaskSource` and a reward function, nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from penstock.dataflow.trajectory import Task, Trajectory

RewardResult = float | Mapping[str, float]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
"""`fn(trajectory: Trajectory, **task.fields)`. A dict names parts; the reward is its `reward` entry, or their sum."""


class TaskSource(Protocol):
    """Where tasks come from. Train and held-out tasks must be disjoint."""

    def train(self) -> Iterator[Task]:
        """Endless stream of training tasks, the same for the same seed."""
        ...

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out tasks; the same for every seed of a run, so that runs compare.

        Raises:
            ValueError: If there are fewer, with both numbers.
        """
        ...


class GoldSource(TaskSource, Protocol):
    """A task source that also knows a full correct answer, worked steps included: what `penstock sft` learns from."""

    def gold_response(self, task: Task) -> str: ...


__all__ = ["Any", "GoldSource", "RewardFunction", "RewardResult", "Task", "TaskSource", "Trajectory"]
