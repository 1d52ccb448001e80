"""The tasks of a simulated run. A task is a number, which decides stream, filter and size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.dataflow.filters import FilterChain, user
from penstock.dataflow.ids import TaskId
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.streams import MIN_GROUP_SIZE, TaskLine, TaskStream
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.world import HASH, Promises, task_of

EVALUATION_TASKS = 1_000_000
"""Evaluation tasks are numbered from here, away from those that train."""
MAX_REFILLS = 1_000_000
_NO_FIELDS: Mapping[str, Any] = {}


def make_task(number: int, environment: str | None = None) -> Task:
    return Task(TaskId(f"simulated/{number}"), str(number), _NO_FIELDS, environment)


def number_of(task_id: TaskId) -> int:
    """The number it was made from."""
    return int(task_id.rpartition("/")[2])


def held_out_tasks(count: int, environment: str | None = None) -> list[Task]:
    return [make_task(EVALUATION_TASKS + number, environment) for number in range(count)]


def environment_of(config: SimulationConfig) -> str | None:
    """What answers the policy between turns; tasks of one turn have none."""
    return "simulated" if config.turns > 1 else None


def task_streams(config: SimulationConfig) -> list[TaskStream]:
    """Endless streams: of n, the one numbered i has every n-th task from i on."""
    n, environment = config.streams, environment_of(config)
    if n == 1:
        return [TaskStream("", training_tasks(environment=environment))]
    return [
        TaskStream(f"stream-{i}", training_tasks(i, n, environment), weight=1.0 + i, quota=_quota(n)) for i in range(n)
    ]


def make_task_line(config: SimulationConfig, limits: FlowLimits, line: type[TaskLine] = TaskLine) -> TaskLine:
    """The line before the admission gate."""
    sizing = VariedSizes(config.group_size) if config.sizing else None
    return line(task_streams(config), limits.window, config.group_size, sizing)


def make_filters(config: SimulationConfig) -> FilterChain:
    """One filter: the user's."""

    def keep(members: Sequence[Trajectory]) -> bool:
        return not is_refused(task_of(int(members[0].token_ids[0])), config.filter_share)

    return FilterChain([user(keep)] if config.filter_share else [], MAX_REFILLS)


def promises(config: SimulationConfig, limits: FlowLimits) -> Promises:
    """What the checks hold the run to, beside I1 to I9."""
    room = math.ceil(_quota(config.streams) * limits.window)
    quotas = {stream.name: room for stream in task_streams(config)} if config.streams > 1 else {}
    return Promises(quotas, config.filter_share, config.gang)


def is_refused(number: int, share: float) -> bool:
    """Whether the user's filter refuses a task."""
    return number * HASH % 2**32 < share * 2**32


class VariedSizes:
    """`GroupSizing`: 2 to `largest` trajectories, by the task."""

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def group_size(self, task: Task, _stream: str) -> int:
        return size_of(number_of(task.task_id), self._largest)


def size_of(number: int, largest: int) -> int:
    """Trajectories that a task gets."""
    return largest - number % (largest - MIN_GROUP_SIZE + 1)


def training_tasks(first: int = 0, step: int = 1, environment: str | None = None) -> Iterator[Task]:
    """Every `step`-th task from `first` on, endless."""
    return (make_task(number, environment) for number in itertools.count(first, step))


def _quota(num_streams: int) -> float:
    return min(1.0, 1.2 / num_streams)
