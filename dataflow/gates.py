"""The two gates: the admission gate gives credits, the consumption gate decides which ready groups train next.

Symbols as in dataflow/staleness.py: B groups per batch, v published version, η max_staleness. The admission gate is a
function of absolute counters, `free_credits`. The consumption gate is maintained incrementally. A group's deadline is
its oldest version + η. The gate counts live groups by deadline, so the feasibility rule

    for every k = 0..η:   need(k) = #{live outside with deadline ≤ v + k} − k·B  ≤  0

is O(η) to check, independent of the number of live groups. While a batch is filled one group at a time and has capacity
for r more, the rule is need(k) ≤ r for every k: all groups that must still join the batch fit into it. The sets are
nested, so the largest need decides.

Ready groups wait in a heap ordered by (deadline, admission number). A group that was not dispatched yet has no version.
It counts as due at v + η, the earliest deadline that it can get. Under `on_expiry` other than `wait` (`ExpiryPolicy`)
batches wait for no group; dataflow/core.py trims or drops those past their deadline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from itertools import accumulate

from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import GroupRecord
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits


def free_credits(
    limits: FlowLimits,
    *,
    admitted: int,
    returned: int,
    trained: int,
    version: int,
    waiting: int = 0,
    surplus: int = 0,
) -> int:
    """Number of groups that may start now.

    Args:
        limits: Limits of the flow.
        admitted: Number of groups ever admitted.
        returned: Number of groups that ended untrained and returned their credit.
        trained: Number of trained groups.
        version: v, the published version.
        waiting: Number of groups outside the batch that were not dispatched yet or are ready.
        surplus: Number of redundant groups that may be live now.

    Returns:
        min(window − live, max(0, (total_steps − v)·B − live), max(0, 2·B + surplus − waiting)). Never negative while
        I6 holds.
    """
    live = admitted - returned - trained
    window = (limits.max_staleness + 1) * limits.batch_groups + surplus
    needed = (limits.total_steps - version) * limits.batch_groups
    # Fewer may be needed than are live: `penstock set total_steps=…`.
    return min(window - live, max(0, needed - live), max(0, limits.max_waiting - waiting))


def _order(record: GroupRecord) -> tuple[float, GroupId]:
    """Sort key: deadline, then admission number; groups without a deadline come last."""
    return (math.inf if record.deadline is None else record.deadline, record.group_id)


class ConsumptionGate:
    """Live groups outside the batch, by deadline.

    Invariant: each group is in exactly one of `_unready` and `_ready`, under the deadline of its record (None until it
    has one). Deadlines without groups are removed, so the cost of counting is bounded by the distinct deadlines.
    """

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._unready: dict[int | None, dict[GroupId, GroupRecord]] = {}
        self._ready: dict[int | None, dict[GroupId, GroupRecord]] = {}
        self._ready_queue: list[tuple[int, GroupId]] = []

    @property
    def num_ready(self) -> int:
        return sum(map(len, self._ready.values()))

    @property
    def num_waiting(self) -> int:
        """Number of groups that were not dispatched yet or are ready."""
        return len(self._unready.get(None, ())) + self.num_ready

    def __len__(self) -> int:
        return self.num_ready + sum(map(len, self._unready.values()))

    def add(self, record: GroupRecord) -> None:
        """Add an admitted group."""
        self._unready.setdefault(None, {})[record.group_id] = record

    def update_deadline(self, record: GroupRecord, oldest_version: int) -> None:
        """Set the deadline of an unready group from a new bound on its oldest version."""
        deadline = oldest_version + self._limits.max_staleness
        if record.deadline != deadline:
            self.remove(record)
            record.deadline = deadline
            self._unready.setdefault(deadline, {})[record.group_id] = record

    def mark_ready(self, record: GroupRecord) -> None:
        """Move a group to the ready groups: all its surviving trajectories are scored."""
        assert record.deadline is not None, "a ready group has sampled tokens"
        assert record.group_id in self._unready[record.deadline], "a group becomes ready once"
        self.remove(record)
        self._ready.setdefault(record.deadline, {})[record.group_id] = record
        heapq.heappush(self._ready_queue, (record.deadline, record.group_id))

    def remove(self, record: GroupRecord) -> None:
        """Remove a group that ended or joined the batch. Its heap entry is discarded lazily, by `next_ready`."""
        by_deadline = self._ready if record.group_id in self._ready.get(record.deadline, ()) else self._unready
        del by_deadline[record.deadline][record.group_id]
        if not by_deadline[record.deadline]:
            del by_deadline[record.deadline]

    def due_counts(self, version: int) -> list[int]:
        """For k = 0..η, count the groups outside the batch with deadline ≤ version + k. O(η + distinct deadlines)."""
        return [
            sum(due) for due in zip(self._due(self._unready, version), self._due(self._ready, version), strict=True)
        ]

    def overdue(self, version: int) -> list[GroupRecord]:
        """Groups whose deadline has passed, ordered by deadline, then admission number."""
        late = [
            record
            for by_deadline in (self._unready, self._ready)
            for deadline, groups in by_deadline.items()
            if deadline is not None and deadline < version
            for record in groups.values()
        ]
        return sorted(late, key=_order)

    def next_ready(self) -> GroupRecord | None:
        """The ready group with the earliest deadline, then the lowest admission number."""
        while self._ready_queue:
            deadline, group_id = self._ready_queue[0]
            if group_id in self._ready.get(deadline, ()):
                return self._ready[deadline][group_id]
            heapq.heappop(self._ready_queue)
        return None

    def first_unready(self) -> GroupRecord | None:
        """The unready group with the earliest deadline; None if all groups are ready. O(distinct deadlines)."""
        deadline = min((deadline for deadline in self._unready if deadline is not None), default=None)
        return next(iter(self._unready.get(deadline, {}).values()), None)

    def can_take(self, version: int, num_remaining: int) -> bool:
        """Whether the next ready group may join a batch with capacity for `num_remaining` more, closing at `version`.

        Under `wait`, it may only if all groups that must still join fit into the remaining capacity. Under `trim` and
        `drop`, batches do not wait for unfinished groups.
        """
        first = self.next_ready()
        if first is None or num_remaining < 1:
            return False
        if self._limits.on_expiry is not ExpiryPolicy.WAIT:
            return True
        assert first.deadline is not None, "a ready group has sampled tokens"
        for k, due in enumerate(self.due_counts(version)):
            is_due = first.deadline <= version + k
            if due - is_due - k * self._limits.batch_groups > num_remaining - 1:
                return False
        return True

    def shortfall(self, version: int) -> int | None:
        """Number of groups that must be dropped before the B ready groups due first may be a batch at `version`.

        Returns:
            0 if the batch may close now; None if fewer than B groups are ready.
        """
        batch = self._limits.batch_groups
        if self.num_ready < batch:
            return None
        if self._limits.on_expiry is not ExpiryPolicy.WAIT:
            return 0
        counts = zip(self.due_counts(version), self._due(self._ready, version), strict=False)
        return max(0, *(due - min(batch, ready) - k * batch for k, (due, ready) in enumerate(counts)))

    def redundant(self, count: int) -> list[GroupRecord]:
        """The `count` groups due first among those outside the next batch.

        Ties in the deadline: unready groups before ready ones, then the last admitted first. O(live log live), needed
        only while `shortfall` > 0.
        """
        ready = [record for groups in self._ready.values() for record in groups.values()]
        batch = {record.group_id for record in heapq.nsmallest(self._limits.batch_groups, ready, key=_order)}
        outside = [(record, False) for groups in self._unready.values() for record in groups.values()]
        outside += [(record, True) for record in ready if record.group_id not in batch]
        outside.sort(key=lambda entry: (_order(entry[0])[0], entry[1], -entry[0].group_id))
        return [record for record, _ in outside[:count]]

    def _due(self, groups: Mapping[int | None, Mapping[GroupId, GroupRecord]], version: int) -> list[int]:
        """For k = 0..η, count the groups in `groups` with deadline ≤ version + k."""
        eta = self._limits.max_staleness
        counts = [0] * (eta + 1)
        for deadline, due in groups.items():
            slack = eta if deadline is None else deadline - version
            if slack <= eta:
                counts[max(slack, 0)] += len(due)
        return list(accumulate(counts))
