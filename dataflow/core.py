"""The dataflow core: it decides who may start, who trains next and what everything ends as.

Sans-I/O: it never waits, sleeps or logs, and has no clock. A driver (platform/run/flow.py over Ray
actors, or the simulator in virtual time) tells it what happened and asks what may happen next. The cost
of an event does not grow with the number of live groups.

Reports may come twice, late or for groups that never were: they are counted in `ignored` and change nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from penstock.dataflow.errors import AccountingError, FailureKind, StalenessError
from penstock.dataflow.gate import ConsumptionGate
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import LIVE, UNREADY, GroupRecord, GroupState, Ledger, LedgerCounts, Reason
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits, free_credits
from penstock.dataflow.trajectory import GroupRef

Ignored = Literal["unknown", "ended", "repeated", "out_of_order"]
"""Why a report changed nothing."""
WaitReason = Literal["too_few", "generating", "scoring"]
"""What holds a batch open: too few groups are ready; or enough are, and one that must still be in is not."""
MAX_LISTED = 8
"""Groups that a time-out names."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """How groups are formed.

    Attributes:
        group_size: Trajectories per group, unless `admit` says otherwise.
        min_group_size: A group whose failed members are gone still trains with this many.
        max_retries: Retries of one trajectory after its environment or reward failed (data).
        max_engine_retries: Retries of one trajectory after its engine failed (infrastructure).
    """

    group_size: int
    min_group_size: int
    max_retries: int
    max_engine_retries: int = 3

    def retry_limit(self, kind: FailureKind) -> int:
        """Retries of one trajectory after failures of this kind."""
        return self.max_engine_retries if kind == "engine" else self.max_retries


class Cancelled(NamedTuple):
    """A group the core has ended: its running work is to be cancelled, and its task may start again."""

    group_id: GroupId
    may_requeue: bool


class Dataflow:
    """State machine over all groups of a run.

    Invariants checked here: I1 (staleness of what is trained), I2, I3, I5 (in the ledger), I6 (credits).

    Attributes:
        retries: Retries granted, by kind of failure.
        ignored: Reports that changed nothing, by why.
        newest_ignored: The group that the newest of them was about.
    """

    def __init__(self, limits: FlowLimits, rules: GroupRules, version: int = 0, ledger: Ledger | None = None) -> None:
        self.limits = limits
        self.rules = rules
        self.version = version
        self.ledger = ledger or Ledger()
        self.retries: Counter[FailureKind] = Counter()
        self.ignored: Counter[Ignored] = Counter()
        self.newest_ignored: GroupId | None = None
        self._gate = ConsumptionGate(limits)
        self._in_training: list[GroupRef] = []
        self._cancelled: list[Cancelled] = []

    @property
    def free_credits(self) -> int:
        """Groups that may be admitted now (I6: never negative)."""
        ledger = self.ledger
        # Redundant groups must be back before v advances: once a batch is full, there is no surplus until it trained.
        surplus = 0 if self.is_batch_complete else self.limits.surplus
        free = free_credits(
            self.limits,
            admitted=ledger.num_admitted,
            returned=ledger.num_returned,
            trained=ledger.num_trained,
            surplus=surplus,
        )
        if free < 0:
            raise AccountingError(f"dataflow: {free} free credits with {ledger.counts()} (I6)")
        if self.limits.max_live_trajectories is not None:
            places = self.limits.max_live_trajectories - ledger.live_trajectories
            free = min(free, max(0, places) // self.rules.group_size)
        return free

    @property
    def num_ready(self) -> int:
        return self._gate.num_ready

    def find_ready(self, group_id: GroupId) -> GroupRef | None:
        """A group that waits for its batch; None if it is in a batch, not ready, or ended."""
        record = self.ledger.get(group_id)
        return None if record is None else record.ready

    def admit(self, task_id: TaskId, *, group_size: int | None = None, stream: str = "", requeues: int = 0) -> GroupId:
        """Start a group. Ask `free_credits` first."""
        if self.free_credits < 1:
            raise AccountingError(f"dataflow: no credit to admit {task_id} (I6)")
        record = self.ledger.admit(task_id, group_size or self.rules.group_size, stream, requeues)
        self._gate.add(record)
        return record.group_id

    def record_version(self, group_id: GroupId, member: int, version: int) -> None:
        """A member was dispatched to an engine at `version`, or its first token came, sampled at `version`."""
        record = self.ledger.get(group_id)
        if record is None or record.state not in UNREADY:
            self._ignore(group_id, record)
            return
        record.trajectory_versions[member] = version
        self._gate.update_deadline(record, min(known for known in record.trajectory_versions if known is not None))

    def grant_retry(self, kind: FailureKind, attempts: int) -> bool:
        """Count a failed attempt and say whether the trajectory gets another one.

        Args:
            kind: Which part failed.
            attempts: Attempts that failed in this way so far, this one included.
        """
        if attempts > self.rules.retry_limit(kind):
            return False
        self.retries[kind] += 1
        return True

    def generated(self, group_id: GroupId) -> None:
        """Every member has its tokens; some scores are still out."""
        if self._expect(group_id, (GroupState.GENERATING,)) is not None:
            self.ledger.move(group_id, GroupState.SCORING)

    def ready(self, group: GroupRef) -> bool:
        """Every member that did not fail is scored and its payload stored. False if the report was ignored.

        Raises:
            StalenessError: I8: no engine serves a version that was not published when it was dispatched, or not
                published at all.
        """
        record = self._expect(group.group_id, (GroupState.SCORING,))
        if record is None:
            return False
        oldest, dispatched = group.oldest_version, record.oldest_version
        if group.newest_version > self.version + 1 or (dispatched is not None and oldest < dispatched):
            raise StalenessError(
                f"dataflow: group {group.group_id} carries versions {oldest}..{group.newest_version}, "
                f"but it was dispatched at v{dispatched} and v{self.version} is published (I8)"
            )
        self.ledger.move(group.group_id, GroupState.READY)
        record.trajectory_versions = [oldest]
        record.ready = group
        self._gate.update_deadline(record, oldest)
        self._gate.mark_ready(record)
        if self.limits.on_expiry is not ExpiryPolicy.WAIT and self._is_too_old(group):
            self._cancel(record, Reason.STALE)
        return True

    def end(self, group_id: GroupId, state: GroupState, reason: Reason) -> None:
        """End a group untrained; its credit is free at once."""
        record = self._expect(group_id, LIVE)
        if record is None:
            return
        if record.state is not GroupState.TRAINING:
            self._gate.remove(record)
        self.ledger.end(group_id, state, reason)

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        """Take the next batch if it may close now, in deadline order; None while it has to wait.

        With surplus groups under way, those that hold the batch back are given up as dropped(redundant).

        Raises:
            StalenessError: If a chosen group is over-age (I1), which the gate must have prevented.
        """
        assert not self._in_training, "one batch at a time"
        shortfall = self._gate.shortfall(self.version)
        if shortfall is None or shortfall > self.limits.surplus:
            return None
        for record in self._gate.redundant(shortfall) if shortfall else ():
            self._cancel(record, Reason.REDUNDANT)
        for _ in range(self.limits.batch_groups):
            self._take_next()
        return tuple(self._in_training)

    def take_one(self) -> GroupRef | None:
        """Put the next ready group into the batch before the batch is complete; None while it has to wait.

        For trainers that begin before the batch is complete. The batch that comes out keeps the bound as
        `close_batch` does.
        """
        places = self.limits.batch_groups - len(self._in_training)
        return self._take_next() if self._gate.can_take(self.version, places) else None

    @property
    def is_batch_complete(self) -> bool:
        return len(self._in_training) == self.limits.batch_groups

    @property
    def in_training(self) -> tuple[GroupRef, ...]:
        """The batch that the trainer has, until `advance` or `skip`."""
        return tuple(self._in_training)

    def advance(self, version: int) -> None:
        """The batch in training was trained and published as `version`: its credits are free."""
        if version != self.version + 1:
            raise AccountingError(f"dataflow: version goes from {self.version} to {version}, expected +1")
        for group in self._in_training:
            self.ledger.move(group.group_id, GroupState.TRAINED)
        self._in_training = []
        self.version = version
        self.ledger.mark(version)
        if self.limits.on_expiry is not ExpiryPolicy.WAIT:
            self._expire_overdue()

    def skip(self, reason: Reason = Reason.BAD_STEP) -> None:
        """The step over the batch in training was not taken: its groups end untrained, the version stays."""
        state = GroupState.FILTERED if reason is Reason.ZERO_VARIANCE else GroupState.DROPPED
        for group in self._in_training:
            self.ledger.end(group.group_id, state, reason)
        self._in_training = []

    def take_cancelled(self) -> list[Cancelled]:
        """Groups that ended by the core's own decision since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def finish(self) -> LedgerCounts:
        """The run is over: whatever lives is dropped(run_end)."""
        for record in list(self.ledger.live()):
            self.end(record.group_id, GroupState.DROPPED, Reason.RUN_END)
        self._in_training = []
        return self.ledger.counts()

    def wait_reason(self, num_needed: int) -> WaitReason:
        """What the trainer waits for, of which `num_needed` groups would be enough if nobody fell due."""
        awaited = self._gate.first_unready()
        if self.num_ready < num_needed or awaited is None:
            return "too_few"
        return "scoring" if awaited.state is GroupState.SCORING else "generating"

    def describe_wait(self) -> str:
        """One sentence for time-outs: what the next batch waits for."""
        unready = [r for r in self.ledger.live() if r.state in UNREADY]
        listed = ", ".join(f"{r.group_id}:{r.state}(oldest v{r.oldest_version})" for r in unready[:MAX_LISTED])
        more = f" and {len(unready) - MAX_LISTED} more" if len(unready) > MAX_LISTED else ""
        return (
            f"{self.num_ready} of {self.limits.batch_groups} groups ready at v{self.version}; "
            f"unfinished: {listed or 'none'}{more}"
        )

    def _expect(self, group_id: GroupId, states: tuple[GroupState, ...]) -> GroupRecord | None:
        """The record if the group is in one of `states`; else the report is counted and None."""
        record = self.ledger.get(group_id)
        if record is not None and record.state in states:
            return record
        self._ignore(group_id, record)
        return None

    def _ignore(self, group_id: GroupId, record: GroupRecord | None) -> None:
        self.newest_ignored = group_id
        if record is None:
            self.ignored["ended" if self.ledger.was_admitted(group_id) else "unknown"] += 1
        else:
            self.ignored["out_of_order" if record.state is GroupState.GENERATING else "repeated"] += 1

    def _take_next(self) -> GroupRef:
        record = self._gate.next_ready()
        assert record is not None, "the gate said that a group is ready"
        assert record.ready is not None, "it is"
        group, record.ready = record.ready, None
        self._gate.remove(record)
        self.ledger.move(record.group_id, GroupState.TRAINING)
        min_version = self.version - self.limits.max_staleness
        if self.limits.on_expiry is ExpiryPolicy.TRIM and group.oldest_version < min_version:
            group = replace(group, min_version=min_version)
        age = group.staleness(self.version)
        if not 0 <= age <= self.limits.max_staleness:
            raise StalenessError(
                f"dataflow: group {group.group_id} would train at staleness {age}, "
                f"max_staleness is {self.limits.max_staleness} (I1)"
            )
        self._in_training.append(group)
        return group

    def _expire_overdue(self) -> None:
        for record in self._gate.overdue(self.version):
            group = record.ready
            if self.limits.on_expiry is ExpiryPolicy.DROP or (group is not None and self._is_too_old(group)):
                self._cancel(record, Reason.STALE)

    def _is_too_old(self, group: GroupRef) -> bool:
        """Whether nothing of a ready group may train any more."""
        oldest_allowed = self.version - self.limits.max_staleness
        newest_needed = group.newest_version if self.limits.on_expiry is ExpiryPolicy.TRIM else group.oldest_version
        return newest_needed < oldest_allowed

    def _cancel(self, record: GroupRecord, reason: Reason) -> None:
        self.end(record.group_id, GroupState.DROPPED, reason)
        may_requeue = reason is Reason.STALE and record.requeues < self.limits.max_requeues
        self._cancelled.append(Cancelled(record.group_id, may_requeue))
