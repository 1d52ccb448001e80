"""Which task is admitted next: several task streams, mixed by weight, held to quotas, with hooks for curricula.

Everything acts at admission; what was admitted is never held back. Symbols: w_i weight of stream i, a_i groups
admitted of it since the weights last changed, l_i its live groups, q_i its quota, W the admission window.

    next stream = argmin (a_i + ½) / w_i   over streams with   l_i < ceil(q_i · W)

These are Sainte-Laguë's divisors, from absolute counters: after n admissions every stream that was never at its
quota has had its share of n, up to about one group. A requeued task waits until a whole window of other
tasks was admitted after it, and not for the weight of its stream: it never starves them and is never forgotten.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ledger import Ledger, LedgerEvent
from penstock.dataflow.trajectory import Task, Trajectory

MIN_GROUP_SIZE = 2
REWARDS_KEPT = 64
"""Groups of each stream whose rewards a curriculum sees."""


@dataclass(frozen=True, slots=True)
class TaskStream:
    """One source of tasks.

    Attributes:
        tasks: Endless.
        weight: Share of admissions, relative to the other streams; ≥ 0.
        quota: Largest share of the admission window that its live groups take; in (0, 1].
    """

    name: str
    tasks: Iterator[Task]
    weight: float = 1.0
    quota: float = 1.0


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A task on its way to admission.

    Attributes:
        max_new_tokens: Longest turn, if that is shorter than the run's; None is the run's.
    """

    task: Task
    stream: str
    group_size: int
    requeues: int = 0
    max_new_tokens: int | None = None


@runtime_checkable
class GroupListener(Protocol):
    """A hook of `TaskQueue` that is told of every scored group, also of those that are filtered afterwards."""

    def group_scored(self, task: Task, stream: str, members: Sequence[Trajectory]) -> None: ...


class Curriculum(Protocol):
    """Says how streams are mixed from now on; asked after every publish."""

    def weights(self, version: int, rewards: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        """New weights by stream name.

        Args:
            version: Just published.
            rewards: Of each stream that has scored groups: the mean reward of each, oldest first, the newest
                `REWARDS_KEPT` at most. Groups that were filtered afterwards count as well.
        """
        ...


class GroupSizing(Protocol):
    """Says how many trajectories a task gets: 2 to `dataflow.group_size`, for which room is reserved."""

    def group_size(self, task: Task, stream: str) -> int: ...


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """How long the turns of single tasks may get.

    Attributes:
        longest: The run's limit, tokens.
        limiting: Says which tasks have a shorter one.
    """

    longest: int
    limiting: LengthLimiting

    def of(self, task: Task, stream: str) -> int:
        """The limit of one task.

        Raises:
            PenstockError: If it is none that can be kept.
        """
        limit = self.limiting.max_new_tokens(task, stream)
        if not 1 <= limit <= self.longest:
            raise PenstockError(
                f"dataflow: max_new_tokens({task.task_id}) gave {limit}; a turn has at least one token, and room is "
                f"planned for rollout.sampling.max_new_tokens={self.longest}. Return 1..{self.longest}."
            )
        return limit


class LengthLimiting(Protocol):
    """Says how many tokens a turn of a task may have: 1 to `rollout.sampling.max_new_tokens`."""

    def max_new_tokens(self, task: Task, stream: str) -> int: ...


@dataclass(slots=True)
class TaskQueue:
    """The line of tasks before the admission gate.

    Attributes:
        window: W, groups; the admission gate's.
        group_size: Trajectories per group; at most so many where `sizing` decides.
        lengths: Of single tasks; None: all have the run's limit.
    """

    streams: Sequence[TaskStream]
    window: int
    group_size: int
    sizing: GroupSizing | None = None
    lengths: LengthLimits | None = None
    curriculum: Curriculum | None = None
    _weights: dict[str, float] = field(init=False)
    _listeners: tuple[GroupListener, ...] = field(init=False)
    _base: Counter[str] = field(default_factory=Counter)
    _rewards: dict[str, deque[float]] = field(default_factory=dict)
    _requeued: deque[tuple[int, QueuedTask]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._weights = {stream.name: stream.weight for stream in self.streams}
        hooks: tuple[object, ...] = (self.sizing, None if self.lengths is None else self.lengths.limiting)
        self._listeners = tuple(hook for hook in hooks if isinstance(hook, GroupListener))
        violations = list(stream_violations(self.streams))
        if violations:
            raise ConfigError(violations)

    def next(self, ledger: Ledger) -> QueuedTask | None:
        """The task to admit now; None while every stream that may go on is at its quota.

        Raises:
            PenstockError: If the chosen stream has ended.
        """
        with_room = [stream for stream in self.streams if self._has_room(stream, ledger)]
        if self._requeued and self._requeued[0][0] <= ledger.num_admitted:
            requeued = self._requeued[0][1]
            if any(stream.name == requeued.stream for stream in with_room):
                self._requeued.popleft()
                return requeued
        stream, lowest = None, math.inf
        for one in with_room:
            if self._weights[one.name] > 0 and (position := self._position(one.name, ledger)) < lowest:
                stream, lowest = one, position
        if stream is None:
            return None
        try:
            task = next(stream.tasks)
        except StopIteration:
            raise PenstockError(
                f"env: the task source{f' {stream.name}' if stream.name else ''} ended after "
                f"{ledger.admitted_by_stream[stream.name]} tasks. The run needs more: train() has to be endless "
                "(start over when the data ends), or lower total_steps."
            ) from None
        size = self.group_size if self.sizing is None else self.sizing.group_size(task, stream.name)
        if self.sizing is not None and not MIN_GROUP_SIZE <= size <= self.group_size:
            raise PenstockError(
                f"dataflow: group_size({task.task_id}) gave {size}; room is reserved for dataflow.group_size="
                f"{self.group_size} trajectories, and fewer than {MIN_GROUP_SIZE} share no baseline. "
                f"Return {MIN_GROUP_SIZE}..{self.group_size}."
            )
        return QueuedTask(task, stream.name, size, max_new_tokens=self._limit(task, stream.name))

    def requeue(self, queued: QueuedTask, ledger: Ledger) -> None:
        """Put a task whose group was dropped behind a window of others."""
        again = replace(queued, requeues=queued.requeues + 1)
        self._requeued.append((ledger.num_admitted + self.window, again))

    def resume(self, ledger: Ledger, restarts: Sequence[LedgerEvent]) -> None:
        """Go on where the run stood that wrote this ledger (dataflow/journal.py).

        The streams begin anew, so the tasks that were taken from them are taken again; those that are to start again
        are next in line.

        Raises:
            PenstockError: If a task is not in its stream any more.
        """
        waited_for = {(event.stream, event.task_id) for event in restarts}
        found: dict[tuple[str, TaskId], Task] = {}
        for stream in self.streams:
            for taken in itertools.islice(stream.tasks, ledger.tasks_by_stream[stream.name]):
                if (stream.name, taken.task_id) in waited_for:
                    found[stream.name, taken.task_id] = taken
        for event in restarts:
            task = found.get((event.stream, event.task_id))
            if task is None:
                raise PenstockError(
                    f"env: task {event.task_id} was under way when the run stopped, and is not among the first "
                    f"{ledger.tasks_by_stream[event.stream]} tasks of its source any more. Resume with the same data "
                    "in the same order, or start a new run."
                )
            limit = self._limit(task, event.stream)
            queued = QueuedTask(task, event.stream, event.group_size, event.requeues + 1, limit)
            self._requeued.append((ledger.num_admitted, queued))

    def group_scored(self, queued: QueuedTask, members: Sequence[Trajectory]) -> None:
        """Remember how a stream does, for the curriculum; hooks that measure difficulty hear it too."""
        for hook in self._listeners:
            hook.group_scored(queued.task, queued.stream, members)
        if self.curriculum is not None:
            rewards = self._rewards.setdefault(queued.stream, deque(maxlen=REWARDS_KEPT))
            rewards.append(sum(member.reward or 0.0 for member in members) / len(members))

    @property
    def weights(self) -> Mapping[str, float]:
        """Of the streams, now."""
        return self._weights

    def follow_curriculum(self, version: int, ledger: Ledger) -> None:
        """Mix as the curriculum says from now on; what was admitted before is not made up for."""
        if self.curriculum is None:
            return
        rewards = {name: tuple(kept) for name, kept in self._rewards.items()}
        weights = dict(self.curriculum.weights(version, rewards))
        if not weights.keys() <= self._weights.keys() or not any(weight > 0 for weight in weights.values()):
            raise PenstockError(
                f"dataflow: the curriculum gave the weights {weights} at v{version}; streams are "
                f"{sorted(self._weights)}, and one weight at least must be above 0, or nothing could be admitted."
            )
        weights = {name: weights.get(name, 0.0) for name in self._weights}
        if weights != self._weights:
            self._weights = weights
            self._base = Counter(ledger.admitted_by_stream)

    def _limit(self, task: Task, stream: str) -> int | None:
        return None if self.lengths is None else self.lengths.of(task, stream)

    def _has_room(self, stream: TaskStream, ledger: Ledger) -> bool:
        return ledger.live_by_stream[stream.name] < math.ceil(stream.quota * self.window)

    def _position(self, name: str, ledger: Ledger) -> float:
        return (ledger.admitted_by_stream[name] - self._base[name] + 0.5) / self._weights[name]


def stream_violations(streams: Sequence[TaskStream]) -> Iterator[str]:
    """What is wrong with a mix of streams, a sentence each."""
    names = [stream.name for stream in streams]
    if len(set(names)) != len(names):
        yield f"env.streams: the names {names} are not unique: their groups could not be told apart."
    for stream in streams:
        if stream.weight < 0 or not 0 < stream.quota <= 1:
            yield (
                f"env.streams.{stream.name}: weight={stream.weight:g}, quota={stream.quota:g}; a weight is at least 0, "
                "a quota in (0, 1]."
            )
    if not any(stream.weight > 0 for stream in streams):
        yield "env.streams: no stream has a weight above 0, so nothing could be admitted."
    total = sum(stream.quota for stream in streams if stream.weight > 0)
    if total < 1 - 1e-9:
        yield (
            f"env.streams: the quotas sum to {total:g}, below 1: part of the admission window could never be filled. "
            "Raise one of them."
        )
