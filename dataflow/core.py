"""The dataflow core: decides which groups may start, which train next and in which state each group ends.

The core is sans-I/O: it never waits, sleeps or logs, and has no clock. A driver (platform/run/flow.py over Ray actors,
or the simulator in virtual time) reports events to it and queries what may happen next. The cost of an event does not
grow with the number of live groups.

A *batch* is the B groups that `close_batch` (or B times `take_one`) takes; `in_training` holds it until `advance`.

Reports that are duplicated, late or about unknown groups are counted in `ignored` and have no other effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from penstock.dataflow.errors import AccountingError, FailureKind, StalenessError
from penstock.dataflow.gates import ConsumptionGate, free_credits
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import LIVE, UNREADY, GroupRecord, GroupState, Ledger, LedgerCounts, Reason
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.surplus import AdaptiveSurplus
from penstock.dataflow.trajectory import GroupRef

Ignored = Literal["unknown", "ended", "repeated", "out_of_order"]
"""Why a report was ignored."""
WaitReason = Literal["too_few", "generating", "scoring"]
"""Why a batch cannot close: too few groups are ready, or a group that must be in it still generates or is scored."""
MAX_LISTED = 8
"""Number of unfinished groups that a time-out message lists."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """How groups are formed."""

    group_size: int
    """Trajectories per group, unless `admit` says otherwise."""
    min_group_size: int
    """Smallest number of trajectories that a group trains with after others of it have failed."""
    max_retries: int
    """Retries of one trajectory after its environment or reward failed (data)."""
    max_engine_retries: int = 3
    """Retries of one trajectory after its engine failed (infrastructure)."""

    def retry_limit(self, kind: FailureKind) -> int:
        """Maximum number of retries of one trajectory after failures of this kind."""
        return self.max_engine_retries if kind == "engine" else self.max_retries


class Cancelled(NamedTuple):
    """A group that the core has ended. The driver cancels its running work and may requeue its task."""

    group_id: GroupId
    may_requeue: bool


class Dataflow:
    """State machine over all groups of a run.

    Invariants checked here: I1 (staleness of what is trained), I2, I3, I5 (in the ledger), I6 (credits).

    Attributes:
        retries: Number of granted retries by kind of failure.
        ignored: Number of ignored reports by reason.
        newest_ignored: The group of the newest ignored report.
        surplus_search: Chooses the number of redundant groups of the next batch; None if it is fixed.
    """

    def __init__(self, limits: FlowLimits, rules: GroupRules) -> None:
        self.limits = limits
        self.rules = rules
        self.version = 0
        self.ledger = Ledger()
        self.retries: Counter[FailureKind] = Counter()
        self.ignored: Counter[Ignored] = Counter()
        self.newest_ignored: GroupId | None = None
        self.surplus_search: AdaptiveSurplus | None = None
        self._present = limits  # those of the batch that fills now
        if limits.adapts_surplus:
            self.surplus_search = AdaptiveSurplus(limits.surplus, limits.max_staleness)
            self._present = replace(limits, surplus=self.surplus_search.surplus)
        self._gate = ConsumptionGate(limits)
        self._in_training: list[GroupRef] = []
        self._cancelled: list[Cancelled] = []

    def state_dict(self) -> dict[str, Any]:
        """The state of all groups between two batches, as JSON types; `load_state_dict` continues from it.

        Ready groups are described without their payloads. Groups that are being sampled or scored are all described as
        generating: whether each of their trajectories has its tokens is known to the driver, which reports it again.
        """
        assert not self._in_training, "the state is taken between two batches"
        groups = [
            {
                "group_id": record.group_id,
                "task_id": record.task_id,
                "group_size": record.group_size,
                "stream": record.stream,
                "requeues": record.requeues,
                "is_ready": record.ready is not None,
                "versions": list(record.trajectory_versions),
            }
            for record in self.ledger.live()
        ]
        return {
            "version": self.version,
            "ledger": self.ledger.state_dict(),
            "retries": dict(self.retries),
            "ignored": dict(self.ignored),
            "groups": groups,
            "surplus_search": None if self.surplus_search is None else self.surplus_search.state_dict(),
        }

    def set_total_steps(self, total_steps: int) -> None:
        """Train so many batches in all, from now on."""
        self.limits = replace(self.limits, total_steps=total_steps)
        self._present = replace(self._present, total_steps=total_steps)

    def load_state_dict(self, state: Mapping[str, Any], ready: Mapping[GroupId, GroupRef]) -> None:
        """Continue an unused core where `state_dict` was taken, under the same limits.

        Args:
            state: Result of `state_dict`.
            ready: The ready groups, with new handles of their payloads. One that is missing could not be stored again;
                the caller ends it.
        """
        records = []
        for group in state["groups"]:
            group_id = GroupId(group["group_id"])
            record = GroupRecord(
                group_id, TaskId(group["task_id"]), group["group_size"], group["stream"], group["requeues"]
            )
            record.trajectory_versions = list(group["versions"])
            record.ready = ready.get(group_id) if group["is_ready"] else None
            record.state = GroupState.GENERATING if record.ready is None else GroupState.READY
            records.append(record)
        self.version = state["version"]
        self.ledger.load_state_dict(state["ledger"], records)
        if self.surplus_search is not None and (search := state.get("surplus_search")) is not None:
            self.surplus_search.load_state_dict(search)
            self._present = replace(self.limits, surplus=self.surplus_search.surplus)
        self.retries.update(state["retries"])
        self.ignored.update(state["ignored"])
        for record in records:
            self._gate.add(record)
            if (oldest := record.oldest_version) is not None:
                self._gate.update_deadline(record, oldest)
            if record.ready is not None:
                self._gate.mark_ready(record)

    def roll_back(self) -> list[GroupId]:
        """End all live groups as dropped(rollback); returns them in admission order. Their tasks may start again."""
        ended = [record.group_id for record in self.ledger.live()]
        for group_id in ended:
            self.end(group_id, GroupState.DROPPED, Reason.ROLLBACK)
        return ended

    @property
    def free_credits(self) -> int:
        """Number of groups that may be admitted now (I6: never negative)."""
        ledger = self.ledger
        # Redundant groups must have ended before v advances, so none are admitted from the time the batch is complete
        # until it has been trained.
        surplus = 0 if self.is_batch_complete else self._present.surplus
        free = free_credits(
            self._present,
            admitted=ledger.num_admitted,
            returned=ledger.num_returned,
            trained=ledger.num_trained,
            version=self.version,
            waiting=self._gate.num_waiting,
            surplus=surplus,
        )
        if free < 0:
            raise AccountingError(f"dataflow: {free} free credits with {ledger.counts()} (I6)")
        if self.limits.max_live_trajectories is not None:
            remaining = self.limits.max_live_trajectories - ledger.live_trajectories
            free = min(free, max(0, remaining) // self.rules.group_size)
        return free

    @property
    def surplus(self) -> int:
        """Redundant groups of the batch that fills now. It changes only where none are live: at `adapt_surplus`."""
        return self._present.surplus

    @property
    def num_ready(self) -> int:
        return self._gate.num_ready

    def find_ready(self, group_id: GroupId) -> GroupRef | None:
        """Return a ready group that is not in a batch yet; None if it is in a batch, not ready, or has ended."""
        record = self.ledger.get(group_id)
        return None if record is None else record.ready

    def admit(self, task_id: TaskId, *, group_size: int | None = None, stream: str = "", requeues: int = 0) -> GroupId:
        """Start a group.

        Raises:
            AccountingError: If there is no free credit (I6). Check `free_credits` first.
        """
        if self.free_credits < 1:
            raise AccountingError(f"dataflow: no credit to admit {task_id} (I6)")
        record = self.ledger.admit(task_id, group_size or self.rules.group_size, stream, requeues)
        self._gate.add(record)
        return record.group_id

    def record_version(self, group_id: GroupId, member: int, version: int) -> None:
        """Record that trajectory `member` was dispatched to an engine at `version`, or that its first token has it."""
        record = self.ledger.get(group_id)
        if record is None or record.state not in UNREADY:
            self._ignore(group_id, record)
            return
        record.trajectory_versions[member] = version
        self._gate.update_deadline(record, min(known for known in record.trajectory_versions if known is not None))

    def grant_retry(self, kind: FailureKind, attempts: int) -> bool:
        """Return whether a trajectory gets another attempt after a failure, and count the retry if so.

        Args:
            kind: Kind of the failure.
            attempts: Number of attempts that have failed with this kind, including this one.
        """
        if attempts > self.rules.retry_limit(kind):
            return False
        self.retries[kind] += 1
        return True

    def generated(self, group_id: GroupId) -> None:
        """Record that every trajectory of a group has its tokens, while some are still being scored."""
        if self._expect(group_id, (GroupState.GENERATING,)) is not None:
            self.ledger.move(group_id, GroupState.SCORING)

    def ready(self, group: GroupRef) -> bool:
        """Record that all surviving trajectories of a group are scored and its payload is stored.

        Returns:
            False if the report was ignored.

        Raises:
            StalenessError: If a token has an unpublished version, or one older than at its dispatch (I8).
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
        # From here on the exact version is known, and replaces the lower bounds per trajectory.
        record.trajectory_versions = [oldest]
        record.ready = group
        self._gate.update_deadline(record, oldest)
        self._gate.mark_ready(record)
        if self.limits.on_expiry is not ExpiryPolicy.WAIT and self._is_too_old(group):
            self._cancel(record, Reason.STALE)
        return True

    def end(self, group_id: GroupId, state: GroupState, reason: Reason) -> None:
        """End a group untrained. Its credit is free immediately."""
        record = self._expect(group_id, LIVE)
        if record is None:
            return
        if record.state is not GroupState.TRAINING:
            self._gate.remove(record)
        self.ledger.end(group_id, state, reason)

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        """Take the next batch in deadline order if it may close now; None while it has to wait.

        If surplus groups are live, unfinished groups that block the batch end as dropped(redundant).

        Raises:
            StalenessError: If a chosen group is too old (I1), which the gate prevents unless it has a bug.
        """
        assert not self._in_training, "one batch at a time"
        shortfall = self._gate.shortfall(self.version)
        if shortfall is None or shortfall > self._present.surplus:
            return None
        for record in self._gate.redundant(shortfall) if shortfall else ():
            self._cancel(record, Reason.REDUNDANT)
        for _ in range(self.limits.batch_groups):
            self._take_next()
        return tuple(self._in_training)

    def take_one(self) -> GroupRef | None:
        """Add the next ready group to an incomplete batch; None while it has to wait.

        Used by trainers that start before the batch is complete. The resulting batch satisfies the same staleness bound
        as that of `close_batch`.
        """
        num_remaining = self.limits.batch_groups - len(self._in_training)
        return self._take_next() if self._gate.can_take(self.version, num_remaining) else None

    @property
    def is_batch_complete(self) -> bool:
        return len(self._in_training) == self.limits.batch_groups

    @property
    def in_training(self) -> tuple[GroupRef, ...]:
        """The groups of the batch in training, until `advance` or `skip`."""
        return tuple(self._in_training)

    def advance(self, version: int) -> None:
        """Record that the batch in training was trained and published as `version`; frees its credits."""
        if version != self.version + 1:
            raise AccountingError(f"dataflow: version goes from {self.version} to {version}, expected +1")
        for group in self._in_training:
            self.ledger.move(group.group_id, GroupState.TRAINED)
        self._in_training = []
        self.version = version
        self.ledger.mark(version)
        if self.limits.on_expiry is not ExpiryPolicy.WAIT:
            self._expire_overdue()

    def adapt_surplus(self, step_s: float, waited_s: float) -> None:
        """Choose the number of redundant groups of the next batch, if it is adapted. Call it after `advance` only.

        Args:
            step_s: Seconds from the previous version to this one.
            waited_s: Of these, seconds in which the trainer waited for its batch.
        """
        assert not self._in_training, "the number changes between two batches, when no redundant group is live"
        if self.surplus_search is not None:
            self.surplus_search.observe(step_s, waited_s)
            self._present = replace(self.limits, surplus=self.surplus_search.surplus)

    def skip(self) -> None:
        """Record that the optimizer step was skipped: the groups of the batch end untrained, the version is kept."""
        for group in self._in_training:
            self.ledger.end(group.group_id, GroupState.DROPPED, Reason.BAD_STEP)
        self._in_training = []

    def return_batch(self) -> None:
        """Make the groups of the batch in training ready again: its step was ended before it changed the weights."""
        for group in self._in_training:
            self.ledger.move(group.group_id, GroupState.READY)
            record = self.ledger.find(group.group_id)
            record.ready = replace(group, min_version=0)
            record.deadline = None
            self._gate.add(record)
            self._gate.update_deadline(record, group.oldest_version)
            self._gate.mark_ready(record)
        self._in_training = []

    def take_cancelled(self) -> list[Cancelled]:
        """Return the groups that the core itself has ended since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def finish(self) -> LedgerCounts:
        """End the run: all live groups end as dropped(run_end)."""
        for record in list(self.ledger.live()):
            self.end(record.group_id, GroupState.DROPPED, Reason.RUN_END)
        self._in_training = []
        return self.ledger.counts()

    def wait_reason(self, num_needed: int) -> WaitReason:
        """Why the trainer has to wait. `num_needed` ready groups suffice unless an unfinished one is due."""
        awaited = self._gate.first_unready()
        if self.num_ready < num_needed or awaited is None:
            return "too_few"
        return "scoring" if awaited.state is GroupState.SCORING else "generating"

    def describe_wait(self) -> str:
        """Describe what the next batch waits for, in one sentence for time-out messages."""
        unready = [r for r in self.ledger.live() if r.state in UNREADY]
        listed = ", ".join(f"{r.group_id}:{r.state}(oldest v{r.oldest_version})" for r in unready[:MAX_LISTED])
        more = f" and {len(unready) - MAX_LISTED} more" if len(unready) > MAX_LISTED else ""
        return (
            f"{self.num_ready} of {self.limits.batch_groups} groups ready at v{self.version}; "
            f"unfinished: {listed or 'none'}{more}"
        )

    def _expect(self, group_id: GroupId, states: tuple[GroupState, ...]) -> GroupRecord | None:
        """Return the record if the group is in one of `states`; otherwise count the report as ignored, return None."""
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
        assert record is not None, "the gate has reported a ready group"
        assert record.ready is not None, "a ready group has a GroupRef"
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
        """Whether no token of a ready group may be trained any more."""
        oldest_allowed = self.version - self.limits.max_staleness
        newest_needed = group.newest_version if self.limits.on_expiry is ExpiryPolicy.TRIM else group.oldest_version
        return newest_needed < oldest_allowed

    def _cancel(self, record: GroupRecord, reason: Reason) -> None:
        self.end(record.group_id, GroupState.DROPPED, reason)
        may_requeue = reason is Reason.STALE and record.requeues < self.limits.max_requeues
        self._cancelled.append(Cancelled(record.group_id, may_requeue))
