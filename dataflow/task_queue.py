"""The task queue: selects the next task to admit from several task streams, by weights, quotas and curricula.

All rules act at admission; admitted groups are never delayed. Symbols: w_i weight of stream i, a_i groups admitted from
it since the weights last changed, l_i its live groups, q_i its quota, W the admission window.

    next stream = argmin (a_i + ½) / w_i   over streams with   l_i < ceil(q_i · W)

This is the Sainte-Laguë method on absolute counters: after n admissions, every stream that never reached its quota has
received its share of n up to about one group. A requeued task waits until a whole window of other tasks has been
admitted and then goes first, regardless of the weight of its stream. It can neither starve other tasks nor be starved.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory

MIN_GROUP_SIZE = 2
MAX_SKIPPED_SHARE = 0.5
"""A larger share of skipped tasks stops the run: most of the data would not be trained on."""
NUM_TAKEN_TO_JUDGE = 1024
"""Tasks that are taken from a stream before its share of skipped ones counts."""
REWARDS_KEPT = 64
"""Number of newest groups of each stream whose rewards a curriculum receives."""


@dataclass(frozen=True, slots=True)
class TaskStream:
    """One source of tasks."""

    name: str
    tasks: Iterator[Task]
    """Endless iterator over the tasks."""
    weight: float = 1.0
    """Share of admissions, relative to the other streams; ≥ 0."""
    quota: float = 1.0
    """Maximum share of the admission window for its live groups; in (0, 1]."""


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A task that is about to be admitted."""

    task: Task
    stream: str
    group_size: int
    requeues: int = 0
    """Number of earlier groups of this task that were dropped as too old."""
    max_new_tokens: int | None = None
    """Maximum number of tokens per turn for this task; None is the limit of the run."""


GroupListener = Callable[[Task, str, Sequence[Trajectory]], None]
"""`group_scored` of a hook that has this method. Task, stream and members of every scored group, including groups that
are filtered afterwards."""


@runtime_checkable
class StatefulHook(Protocol):
    """A hook whose memory a checkpoint keeps. Without these methods it is empty after a resume."""

    def state_dict(self) -> Any:
        """Its memory, as JSON types or tuples; what is in them must not change later."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


class Curriculum(Protocol):
    """Determines the weights of the task streams; called after every publish."""

    def weights(self, version: int, rewards: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        """Return the new weights by stream name.

        Args:
            version: The version that was just published.
            rewards: For each stream with scored groups, the mean rewards of its newest groups, oldest first, at most
                `REWARDS_KEPT`. Groups that were filtered afterwards are included.
        """
        ...


class GroupSizing(Protocol):
    """Determines the number of trajectories of a task: 2 to `dataflow.group_size`, for which memory is reserved."""

    def group_size(self, task: Task, stream: str) -> int: ...


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Limits on the turn length of individual tasks."""

    longest: int
    """The limit of the run, in tokens."""
    limiting: LengthLimiting
    """Determines the limit of each task."""

    def of(self, task: Task, stream: str) -> int:
        """Return the limit of one task, in tokens.

        Raises:
            PenstockError: If `limiting` returns a limit outside of 1..`longest`.
        """
        limit = self.limiting.max_new_tokens(task, stream)
        if not 1 <= limit <= self.longest:
            raise PenstockError(
                f"dataflow: max_new_tokens({task.task_id}) gave {limit}; a turn has at least one token, and memory is "
                f"reserved for rollout.sampling.max_new_tokens={self.longest}. Return 1..{self.longest}."
            )
        return limit


class LengthLimiting(Protocol):
    """Determines the maximum number of tokens of a task's turns: 1 to `rollout.sampling.max_new_tokens`."""

    def max_new_tokens(self, task: Task, stream: str) -> int: ...


@dataclass(slots=True)
class TaskQueue:
    """The queue of tasks in front of the admission gate."""

    streams: Sequence[TaskStream]
    window: int
    """W, the admission window in groups."""
    group_size: int
    """Trajectories per group; the upper limit if `sizing` is set."""
    sizing: GroupSizing | None = None
    lengths: LengthLimits | None = None
    """Turn length limits of individual tasks; None applies the limit of the run to all tasks."""
    curriculum: Curriculum | None = None
    fits: Callable[[Task], bool] | None = None
    """Whether a task can be answered; others are skipped: taken from their stream, and never admitted, so that the
    ledger does not know them. None admits all."""
    num_taken: Counter[str] = field(init=False, default_factory=Counter)
    """Number of tasks that were taken from each stream, skipped ones included; requeued tasks count once."""
    num_skipped: Counter[str] = field(init=False, default_factory=Counter)
    """Number of skipped tasks of each stream."""
    first_skipped: TaskId | None = field(init=False, default=None)
    """The first skipped task."""
    _weights: dict[str, float] = field(init=False)
    _listeners: tuple[GroupListener, ...] = field(init=False)
    _base: Counter[str] = field(default_factory=Counter)
    _rewards: dict[str, deque[float]] = field(default_factory=dict)
    _requeued: deque[tuple[int, QueuedTask]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._weights = {stream.name: stream.weight for stream in self.streams}
        hooks: tuple[object, ...] = (self.sizing, None if self.lengths is None else self.lengths.limiting)
        self._listeners = tuple(hook.group_scored for hook in hooks if hasattr(hook, "group_scored"))
        violations = list(stream_violations(self.streams))
        if violations:
            raise ConfigError(violations)

    def next(self, ledger: Ledger) -> QueuedTask | None:
        """Return the task to admit now; None while every stream with a weight above 0 is at its quota.

        Raises:
            PenstockError: If the selected stream is exhausted, most of its tasks are skipped, or a hook returns a group
                size out of range.
        """
        eligible = [stream for stream in self.streams if self._is_below_quota(stream, ledger)]
        if self._requeued and self._requeued[0][0] <= ledger.num_admitted:
            requeued = self._requeued[0][1]
            if any(stream.name == requeued.stream for stream in eligible):
                self._requeued.popleft()
                return requeued
        stream, lowest = None, math.inf
        for candidate in eligible:
            if self._weights[candidate.name] > 0 and (quotient := self._quotient(candidate.name, ledger)) < lowest:
                stream, lowest = candidate, quotient
        if stream is None:
            return None
        task = self._take(stream, ledger)
        size = self.group_size if self.sizing is None else self.sizing.group_size(task, stream.name)
        if self.sizing is not None and not MIN_GROUP_SIZE <= size <= self.group_size:
            raise PenstockError(
                f"dataflow: group_size({task.task_id}) gave {size}; memory is reserved for dataflow.group_size="
                f"{self.group_size} trajectories, and fewer than {MIN_GROUP_SIZE} have no common baseline. "
                f"Return {MIN_GROUP_SIZE}..{self.group_size}."
            )
        return QueuedTask(task, stream.name, size, max_new_tokens=self._limit(task, stream.name))

    def _take(self, stream: TaskStream, ledger: Ledger) -> Task:
        """The next task of a stream that fits.

        Raises:
            PenstockError: As `next`.
        """
        of_stream = f" {stream.name}" if stream.name else ""
        for task in stream.tasks:
            self.num_taken[stream.name] += 1
            if self.fits is None or self.fits(task):
                return task
            self.num_skipped[stream.name] += 1
            self.first_skipped = self.first_skipped or task.task_id
            taken, skipped = self.num_taken[stream.name], self.num_skipped[stream.name]
            if taken >= NUM_TAKEN_TO_JUDGE and skipped > MAX_SKIPPED_SHARE * taken:
                raise PenstockError(
                    f"env: {skipped} of the first {taken} tasks of the source{of_stream} have prompts that leave no "
                    f"space for an answer, {self.first_skipped} first, which is more than half. Use a larger "
                    "model.max_context_tokens, a smaller rollout.sampling.max_new_tokens, or shorter rows."
                )
        raise PenstockError(
            f"env: the task source{of_stream} ended after {ledger.admitted_by_stream[stream.name]} tasks. The run "
            "needs more: train() has to be endless (start over when the data ends), or lower total_steps."
        )

    def requeue(self, queued: QueuedTask, ledger: Ledger, *, is_charged: bool = True) -> None:
        """Queue the task of a dropped group again, to be admitted after a window of other tasks.

        Args:
            queued: What was admitted.
            ledger: Of the run.
            is_charged: Whether it counts against `dataflow.max_requeues`.
        """
        requeued = replace(queued, requeues=queued.requeues + is_charged)
        self._requeued.append((ledger.num_admitted + self.window, requeued))

    def state_dict(self) -> dict[str, Any]:
        """Weights, waiting requeued tasks, curriculum and the memory of the hooks, as JSON types.

        The position in each stream is `num_taken`.
        """
        return {
            "weights": dict(self._weights),
            "base": dict(self._base),
            "skipped": [dict(self.num_skipped), self.first_skipped],
            "rewards": {name: list(kept) for name, kept in self._rewards.items()},
            "requeued": [
                {"due": due, "task_id": queued.task.task_id, "stream": queued.stream, "group_size": queued.group_size}
                | {"requeues": queued.requeues, "max_new_tokens": queued.max_new_tokens}
                for due, queued in self._requeued
            ],
            # A shallow copy, since a checkpoint is written while hooks go on; a deep one of 100,000 tasks takes 0.5 s.
            "hooks": {
                name: copy.copy(hook.state_dict()) for name, hook in self._hooks() if isinstance(hook, StatefulHook)
            },
        }

    def load_state_dict(
        self, state: Mapping[str, Any], num_taken: Mapping[str, int], wanted: Collection[tuple[str, TaskId]] = ()
    ) -> dict[tuple[str, TaskId], Task]:
        """Continue where `state_dict` was taken: the tasks that were taken from the streams are taken again.

        Args:
            state: Result of `state_dict`.
            num_taken: The attribute, at that time.
            wanted: Stream and id of tasks that are needed again, those of live groups.

        Returns:
            The wanted tasks.

        Raises:
            PenstockError: If a wanted or requeued task is no longer in its stream.
        """
        self.num_taken.update(num_taken)
        requeued = [(entry["stream"], TaskId(entry["task_id"])) for entry in state["requeued"]]
        missing = {*wanted, *requeued}
        found: dict[tuple[str, TaskId], Task] = {}
        for stream in self.streams:
            for taken in itertools.islice(stream.tasks, self.num_taken[stream.name]):
                if (stream.name, taken.task_id) in missing:
                    found[stream.name, taken.task_id] = taken
        if lost := missing - found.keys():
            name, task_id = min(lost)
            raise PenstockError(
                f"env: {len(lost)} tasks of the checkpoint, {task_id} among them, are not among the first "
                f"{self.num_taken[name]} tasks of their source{f' {name}' if name else ''}. Their unfinished "
                "groups could not be scored. Resume with the same data in the same order, or start a new run."
            )
        num_skipped, self.first_skipped = state["skipped"]
        self.num_skipped.update(num_skipped)
        self._weights |= state["weights"]
        self._base = Counter(state["base"])
        self._rewards = {name: deque(kept, maxlen=REWARDS_KEPT) for name, kept in state["rewards"].items()}
        for key, entry in zip(requeued, state["requeued"], strict=True):
            queued = QueuedTask(
                found[key], entry["stream"], entry["group_size"], entry["requeues"], entry["max_new_tokens"]
            )
            self._requeued.append((entry["due"], queued))
        for name, hook in self._hooks():
            if isinstance(hook, StatefulHook) and name in state["hooks"]:
                hook.load_state_dict(state["hooks"][name])
        return found

    def _hooks(self) -> Iterator[tuple[str, object]]:
        yield "group_sizing", self.sizing
        yield "length_limiting", None if self.lengths is None else self.lengths.limiting
        yield "curriculum", self.curriculum

    def group_scored(self, queued: QueuedTask, members: Sequence[Trajectory]) -> None:
        """Record the rewards of a scored group for the curriculum and pass the group to the listening hooks."""
        for group_scored in self._listeners:
            group_scored(queued.task, queued.stream, members)
        if self.curriculum is not None:
            rewards = self._rewards.setdefault(queued.stream, deque(maxlen=REWARDS_KEPT))
            rewards.append(sum(member.reward or 0.0 for member in members) / len(members))

    @property
    def weights(self) -> Mapping[str, float]:
        """Current weight of each stream."""
        return self._weights

    def follow_curriculum(self, version: int, ledger: Ledger) -> None:
        """Update the weights from the curriculum. They apply from now on: earlier admissions are not compensated for.

        Raises:
            PenstockError: If the curriculum names an unknown stream, or no weight is above 0.
        """
        if self.curriculum is None:
            return
        rewards = {name: tuple(kept) for name, kept in self._rewards.items()}
        weights = dict(self.curriculum.weights(version, rewards))
        if not weights.keys() <= self._weights.keys() or not any(weight > 0 for weight in weights.values()):
            raise PenstockError(
                f"dataflow: the curriculum returned the weights {weights} at v{version}; the streams are "
                f"{sorted(self._weights)}, and at least one weight must be above 0, or nothing could be admitted."
            )
        weights = {name: weights.get(name, 0.0) for name in self._weights}
        if weights != self._weights:
            self._weights = weights
            self._base = Counter(ledger.admitted_by_stream)

    def _limit(self, task: Task, stream: str) -> int | None:
        return None if self.lengths is None else self.lengths.of(task, stream)

    def _is_below_quota(self, stream: TaskStream, ledger: Ledger) -> bool:
        return ledger.live_by_stream[stream.name] < math.ceil(stream.quota * self.window)

    def _quotient(self, name: str, ledger: Ledger) -> float:
        """The Sainte-Laguë quotient (a_i + ½) / w_i of a stream; the smallest one is admitted next."""
        return (ledger.admitted_by_stream[name] - self._base[name] + 0.5) / self._weights[name]


def stream_violations(streams: Sequence[TaskStream]) -> Iterator[str]:
    """Yield the problems of a set of streams, one sentence each."""
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
