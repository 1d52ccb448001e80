"""The dataflow core: it decides who may start, who trains next and what everything ends as.

Sans-I/O: it never waits, sleeps or logs, and has no clock. A driver (platform/flow.py over Ray
actors, or the simulator in virtual time) tells it what happened and asks what may happen next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.dataflow.errors import AccountingError, FailureKind, StalenessError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupRecord, GroupState, Ledger, LedgerCounts, Reason
from penstock.dataflow.staleness import Candidate, FlowLimits, choose_batch, free_credits
from penstock.dataflow.trajectory import GroupRef


@dataclass(frozen=True, slots=True)
class GroupRules:
    """How groups are formed.

    Attributes:
        group_size: Trajectories per group.
        min_group_size: A group whose failed members are gone still trains with this many.
        max_retries: Retries of one trajectory.
    """

    group_size: int
    min_group_size: int
    max_retries: int


class Dataflow:
    """State machine over all groups of a run.

    Invariants checked here: I1 (staleness of what is trained), I2, I3, I5 (in the ledger), I6 (credits).
    """

    def __init__(self, limits: FlowLimits, rules: GroupRules, version: int = 0) -> None:
        self.limits = limits
        self.rules = rules
        self.version = version
        self.ledger = Ledger()
        self.retries: Counter[FailureKind] = Counter()
        self._ready: dict[GroupId, GroupRef] = {}
        self._in_training: tuple[GroupRef, ...] = ()

    @property
    def free_credits(self) -> int:
        """Groups that may be admitted now (I6: never negative)."""
        counts = self.ledger.counts()
        free = free_credits(self.limits, admitted=counts.admitted, returned=counts.returned, trained=counts.trained)
        if free < 0:
            raise AccountingError(f"dataflow: {free} free credits with {counts} (I6)")
        return free

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def admit(self, task_id: TaskId) -> GroupId:
        """Start a group. Ask `free_credits` first."""
        if self.free_credits < 1:
            raise AccountingError(f"dataflow: no credit to admit {task_id} (I6)")
        return self.ledger.admit(task_id, self.rules.group_size).group_id

    def member_at(self, group_id: GroupId, member: int, version: int) -> None:
        """A member was dispatched to an engine at `version`, or its first token came, sampled at `version`."""
        self.ledger.find(group_id).member_versions[member] = version

    def may_retry(self, kind: FailureKind, attempts: int) -> bool:
        """Count a failed attempt and say whether the trajectory gets another one.

        Args:
            kind: Which part failed.
            attempts: Attempts made so far, this one included.
        """
        if attempts > self.rules.max_retries:
            return False
        self.retries[kind] += 1
        return True

    def generated(self, group_id: GroupId) -> None:
        """Every member has its tokens; some scores are still out."""
        self.ledger.move(group_id, GroupState.SCORING)

    def ready(self, group: GroupRef) -> None:
        """Every member that did not fail is scored and its payload stored."""
        self.ledger.move(group.group_id, GroupState.READY)
        record = self.ledger.find(group.group_id)
        record.member_versions = [group.oldest_version]
        self._ready[group.group_id] = group

    def end(self, group_id: GroupId, state: GroupState, reason: Reason) -> None:
        """End a group untrained; its credit is free at once."""
        self.ledger.end(group_id, state, reason)
        self._ready.pop(group_id, None)

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        """Take the next batch if it may close now, in deadline order; None while it has to wait.

        Raises:
            StalenessError: If a chosen group is over-age (I1), which the gate must have prevented.
        """
        assert not self._in_training, "one batch at a time"
        live = [self._candidate(record) for record in self.ledger.live()]
        chosen = choose_batch(self.limits, self.version, live)
        if chosen is None:
            return None
        batch = tuple(self._ready.pop(group_id) for group_id in chosen)
        for group in batch:
            self._check_age(group)
            self.ledger.move(group.group_id, GroupState.TRAINING)
        self._in_training = batch
        return batch

    def advance(self, version: int) -> None:
        """The batch in training was trained and published as `version`: its credits are free."""
        if version != self.version + 1:
            raise AccountingError(f"dataflow: version goes from {self.version} to {version}, expected +1")
        for group in self._in_training:
            self.ledger.move(group.group_id, GroupState.TRAINED)
        self._in_training = ()
        self.version = version

    def skip(self, reason: Reason = Reason.BAD_STEP) -> None:
        """The step over the batch in training was not taken: its groups end as dropped, the version stays."""
        for group in self._in_training:
            self.ledger.end(group.group_id, GroupState.DROPPED, reason)
        self._in_training = ()

    def finish(self) -> LedgerCounts:
        """The run is over: whatever lives is dropped(run_end)."""
        for record in self.ledger.live():
            self.end(record.group_id, GroupState.DROPPED, Reason.RUN_END)
        self._in_training = ()
        return self.ledger.counts()

    def waiting_for(self, most: int = 8) -> str:
        """One sentence for time-outs: what the next batch waits for."""
        unready = [record for record in self.ledger.live() if record.state is not GroupState.READY]
        listed = ", ".join(f"{r.group_id}:{r.state}(oldest v{r.oldest_version})" for r in unready[:most])
        more = f" and {len(unready) - most} more" if len(unready) > most else ""
        return (
            f"{self.num_ready} of {self.limits.batch_groups} groups ready at v{self.version}; "
            f"unfinished: {listed or 'none'}{more}"
        )

    def _candidate(self, record: GroupRecord) -> Candidate:
        oldest = record.oldest_version
        deadline = (self.version if oldest is None else oldest) + self.limits.max_staleness
        return Candidate(record.group_id, deadline, record.state is GroupState.READY)

    def _check_age(self, group: GroupRef) -> None:
        age = self.version - group.oldest_version
        if not 0 <= age <= self.limits.max_staleness:
            raise StalenessError(
                f"dataflow: group {group.group_id} would train at staleness {age}, "
                f"max_staleness is {self.limits.max_staleness} (I1)"
            )
