"""The ledger: every admitted group is in exactly one state, and ends in exactly one way.

    generating ─▶ scoring ─▶ ready ◀─▶ training ─▶ trained
         └───────────┴─────────┴─────────┴──────▶ dropped(reason) | filtered(reason) | failed(reason)

A group goes back from training to ready if the step was ended before it changed the weights.

I2: terminal states are final. I3: admitted = trained + dropped + filtered + failed + live. I5: a
group is trained at most once. Records are kept for live groups only. Ended groups are only counted, so memory is
bounded by the admission window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.dataflow.errors import AccountingError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.trajectory import GroupRef


class GroupState(StrEnum):
    """State of a group."""

    GENERATING = "generating"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"
    FILTERED = "filtered"
    FAILED = "failed"


TERMINAL = frozenset({GroupState.TRAINED, GroupState.DROPPED, GroupState.FILTERED, GroupState.FAILED})
_NEXT = {
    GroupState.GENERATING: {GroupState.SCORING},
    GroupState.SCORING: {GroupState.READY},
    GroupState.READY: {GroupState.TRAINING},
    GroupState.TRAINING: {GroupState.TRAINED, GroupState.READY},
}
LIVE = (GroupState.GENERATING, GroupState.SCORING, GroupState.READY, GroupState.TRAINING)
UNREADY = (GroupState.GENERATING, GroupState.SCORING)


class Reason(StrEnum):
    """Why a group ended untrained."""

    STALE = "stale"
    REDUNDANT = "redundant"
    BAD_STEP = "bad_step"
    ROLLBACK = "rollback"
    RUN_END = "run_end"
    ZERO_VARIANCE = "zero_variance"
    OVERLONG = "overlong"
    PASS_RATE = "pass_rate"  # noqa: S105  of groups
    USER = "user"
    ABSTAINED = "abstained"
    ENV = "env"
    LONG_PROMPT = "long_prompt"
    REWARD = "reward"
    ENGINE = "engine"


REASONS = {
    GroupState.DROPPED: {
        Reason.STALE,
        Reason.REDUNDANT,
        Reason.BAD_STEP,
        Reason.ROLLBACK,
        Reason.RUN_END,
    },
    GroupState.FILTERED: {
        Reason.ZERO_VARIANCE,
        Reason.OVERLONG,
        Reason.PASS_RATE,
        Reason.USER,
        Reason.ABSTAINED,
    },
    GroupState.FAILED: {Reason.ENV, Reason.LONG_PROMPT, Reason.REWARD, Reason.ENGINE},
}


@dataclass(slots=True, eq=False)
class GroupRecord:
    """The record of a live group."""

    group_id: GroupId
    task_id: TaskId
    group_size: int
    """Number of trajectories at admission."""
    stream: str = ""
    """The task stream that the task comes from."""
    requeues: int = 0
    """Number of earlier groups of this task that were dropped as too old."""
    state: GroupState = GroupState.GENERATING
    trajectory_versions: list[int | None] = field(init=False)
    """For each trajectory a lower bound on the version of its oldest token: the engine's acknowledged version at
    dispatch, then the version of its first token; None before dispatch."""
    deadline: int | None = None
    """The last version at which the group may train (gates.py); None before the first dispatch."""
    ready: GroupRef | None = None
    """The group's metadata while it is ready and not in a batch."""

    def __post_init__(self) -> None:
        self.trajectory_versions = [None] * self.group_size

    @property
    def oldest_version(self) -> int | None:
        """Lower bound on the version of the group's oldest token; None before the first dispatch."""
        return min((version for version in self.trajectory_versions if version is not None), default=None)


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """A group entered `state`; `generating` is its admission."""

    group_id: GroupId
    state: GroupState
    task_id: TaskId
    stream: str
    group_size: int
    requeues: int = 0
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class VersionMark:
    """All earlier events belong to policy version `version`, which was trained and published."""

    version: int


JournalEntry = LedgerEvent | VersionMark


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Absolute counts since the start of the run."""

    admitted: int
    trained: int
    dropped: int
    filtered: int
    failed: int
    live: int

    @property
    def returned(self) -> int:
        """Number of groups that ended untrained and returned their credit."""
        return self.dropped + self.filtered + self.failed

    @property
    def is_balanced(self) -> bool:
        """I3: every admitted group is accounted for."""
        return self.admitted == self.trained + self.returned + self.live


@dataclass(slots=True)
class Ledger:
    """All groups of a run."""

    reasons: Counter[tuple[GroupState, Reason]] = field(default_factory=Counter)
    """Number of groups by (terminal state, reason)."""
    live_trajectories: int = 0
    """Number of trajectories of all live groups, as admitted."""
    live_by_stream: Counter[str] = field(default_factory=Counter)
    """Number of live groups of each task stream."""
    admitted_by_stream: Counter[str] = field(default_factory=Counter)
    """Number of groups ever admitted of each task stream."""
    listeners: Sequence[Callable[[JournalEntry], None]] = ()
    """Called with every event, in order: the log of the run (platform/run/ledger_log.py), its timeline."""
    _live: dict[GroupId, GroupRecord] = field(default_factory=dict)
    _ended: Counter[GroupState] = field(default_factory=Counter)
    _admitted: int = 0

    def admit(self, task_id: TaskId, group_size: int, stream: str = "", requeues: int = 0) -> GroupRecord:
        """Open a record under the next admission number."""
        record = GroupRecord(GroupId(self._admitted), task_id, group_size, stream, requeues)
        self._live[record.group_id] = record
        self._admitted += 1
        self.live_trajectories += group_size
        self.live_by_stream[stream] += 1
        self.admitted_by_stream[stream] += 1
        self._emit(record)
        return record

    def mark(self, version: int) -> None:
        """Record that the groups trained so far are published as `version`."""
        for listener in self.listeners:
            listener(VersionMark(version))

    @property
    def num_admitted(self) -> int:
        """Number of groups ever admitted."""
        return self._admitted

    @property
    def num_trained(self) -> int:
        """Number of trained groups."""
        return self._ended[GroupState.TRAINED]

    @property
    def num_returned(self) -> int:
        """Number of groups that ended untrained and returned their credit."""
        return self.reasons.total()

    def live(self) -> Iterator[GroupRecord]:
        """Live groups in admission order."""
        return iter(self._live.values())

    def get(self, group_id: GroupId) -> GroupRecord | None:
        """The record of a live group; None if it was never admitted or has ended."""
        return self._live.get(group_id)

    def was_admitted(self, group_id: GroupId) -> bool:
        return 0 <= group_id < self._admitted

    def find(self, group_id: GroupId) -> GroupRecord:
        """The record of a live group.

        Raises:
            AccountingError: If the group was never admitted or has already ended (I2).
        """
        record = self._live.get(group_id)
        if record is None:
            problem = "has already ended" if self.was_admitted(group_id) else "was never admitted"
            raise AccountingError(f"ledger: group {group_id} {problem}; {self._admitted} were admitted (I2)")
        return record

    def move(self, group_id: GroupId, state: GroupState) -> None:
        """Move a group to its next state along the main path.

        Raises:
            AccountingError: If the group is not live or `state` is not its next state (I2).
        """
        record = self.find(group_id)
        if state not in _NEXT[record.state]:
            raise AccountingError(f"ledger: group {group_id} cannot go from {record.state} to {state} (I2)")
        record.state = state
        if state in TERMINAL:
            self._end(record)
        self._emit(record)

    def end(self, group_id: GroupId, state: GroupState, reason: Reason) -> None:
        """End a group untrained, from any live state.

        Raises:
            AccountingError: If the group is not live, or `reason` does not belong to `state`.
        """
        record = self.find(group_id)
        if reason not in REASONS.get(state, ()):
            raise AccountingError(f"ledger: group {group_id} cannot end as {state}({reason})")
        record.state = state
        self.reasons[state, reason] += 1
        self._end(record)
        self._emit(record, reason)

    def counts(self) -> LedgerCounts:
        """Absolute counts, balanced (I3).

        Raises:
            AccountingError: If they do not balance.
        """
        counts = LedgerCounts(
            admitted=self._admitted,
            trained=self._ended[GroupState.TRAINED],
            dropped=self._ended[GroupState.DROPPED],
            filtered=self._ended[GroupState.FILTERED],
            failed=self._ended[GroupState.FAILED],
            live=len(self._live),
        )
        if not counts.is_balanced:
            raise AccountingError(f"ledger: does not balance: {counts} (I3)")
        return counts

    def state_dict(self) -> dict[str, Any]:
        """All counters, as JSON types. Live groups are part of the core's state."""
        return {
            "admitted": self._admitted,
            "ended": {str(state): count for state, count in self._ended.items()},
            "reasons": [[str(state), str(reason), count] for (state, reason), count in self.reasons.items()],
            "admitted_by_stream": dict(self.admitted_by_stream),
        }

    def load_state_dict(self, state: Mapping[str, Any], live: Iterable[GroupRecord]) -> None:
        """Continue an empty ledger where `state_dict` was taken.

        Args:
            state: Result of `state_dict`.
            live: The live groups, in admission order.

        Raises:
            AccountingError: If they do not balance (I3).
        """
        self._admitted = state["admitted"]
        self._ended.update({GroupState(end): count for end, count in state["ended"].items()})
        self.reasons.update({(GroupState(end), Reason(reason)): count for end, reason, count in state["reasons"]})
        self.admitted_by_stream.update(state["admitted_by_stream"])
        for record in live:
            self._live[record.group_id] = record
            self.live_trajectories += record.group_size
            self.live_by_stream[record.stream] += 1
        self.counts()

    def _end(self, record: GroupRecord) -> None:
        del self._live[record.group_id]
        self._ended[record.state] += 1
        self.live_trajectories -= record.group_size
        self.live_by_stream[record.stream] -= 1

    def _emit(self, record: GroupRecord, reason: Reason | None = None) -> None:
        if not self.listeners:
            return
        event = LedgerEvent(
            record.group_id, record.state, record.task_id, record.stream, record.group_size, record.requeues, reason
        )
        for listener in self.listeners:
            listener(event)
