"""The consumption gate, incrementally: which ready groups train next, at a cost that live groups do not raise.

Symbols as in dataflow/staleness.py: B groups per batch, v published version, η max_staleness. A group's
deadline is its oldest version + η. The gate counts live groups by deadline, so the feasibility rule

    for every k = 0..η:   need(k) = #{live outside with deadline ≤ v + k} − k·B  ≤  0

is O(η) to check. While a batch is being filled one group at a time, r places are left and the rule reads
need(k) ≤ r for every k: whoever must still be in fits in (sets nest, so the largest need decides).

Ready groups wait in a heap by (deadline, admission number). A group not yet dispatched has no version: it
counts as due at v + η, the earliest deadline it can get.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from itertools import accumulate

from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import GroupRecord
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits


def _order(record: GroupRecord) -> tuple[float, GroupId]:
    """By deadline, then admission number; groups without a deadline come last."""
    return (math.inf if record.deadline is None else record.deadline, record.group_id)


class ConsumptionGate:
    """Live groups outside the batch, by deadline.

    Invariant: a group stands in `_unready` or in `_ready`, under the deadline of its record; None until it has one. No
    deadline without groups is kept.
    """

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._unready: dict[int | None, dict[GroupId, GroupRecord]] = {}
        self._ready: dict[int | None, dict[GroupId, GroupRecord]] = {}
        self._ready_queue: list[tuple[int, GroupId]] = []

    @property
    def num_ready(self) -> int:
        return sum(map(len, self._ready.values()))

    def __len__(self) -> int:
        return self.num_ready + sum(map(len, self._unready.values()))

    def add(self, record: GroupRecord) -> None:
        """A group was admitted."""
        self._unready.setdefault(None, {})[record.group_id] = record

    def update_deadline(self, record: GroupRecord, oldest_version: int) -> None:
        """The oldest version of a group that is not ready is now known, or known better."""
        deadline = oldest_version + self._limits.max_staleness
        if record.deadline != deadline:
            self.remove(record)
            record.deadline = deadline
            self._unready.setdefault(deadline, {})[record.group_id] = record

    def mark_ready(self, record: GroupRecord) -> None:
        """The group can train: every member that did not fail is scored."""
        assert record.deadline is not None, "a ready group has sampled tokens"
        assert record.group_id in self._unready[record.deadline], "a group becomes ready once"
        self.remove(record)
        self._ready.setdefault(record.deadline, {})[record.group_id] = record
        heapq.heappush(self._ready_queue, (record.deadline, record.group_id))

    def remove(self, record: GroupRecord) -> None:
        """The group ended, or went into the batch. Its place in the heap is forgotten when it comes up."""
        place = self._ready if record.group_id in self._ready.get(record.deadline, ()) else self._unready
        del place[record.deadline][record.group_id]
        if not place[record.deadline]:
            del place[record.deadline]

    def due_counts(self, version: int) -> list[int]:
        """For k = 0..η: groups outside the batch with deadline ≤ version + k. O(η + distinct deadlines)."""
        return [
            sum(due) for due in zip(self._due(self._unready, version), self._due(self._ready, version), strict=True)
        ]

    def overdue(self, version: int) -> list[GroupRecord]:
        """Groups whose deadline has passed, in deadline, then admission order."""
        late = [
            record
            for place in (self._unready, self._ready)
            for deadline, groups in place.items()
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
        """The group that is due first among those that are not ready; None if all are. O(distinct deadlines)."""
        deadline = min((deadline for deadline in self._unready if deadline is not None), default=None)
        return next(iter(self._unready.get(deadline, {}).values()), None)

    def can_take(self, version: int, num_remaining: int) -> bool:
        """May the next ready group go into a batch that has `num_remaining` left, closing at `version`?

        Under `wait`: only if whoever must still be in fits in the places that remain. `trim` and `drop` do
        not wait for anybody.
        """
        first = self.next_ready()
        if first is None or num_remaining < 1:
            return False
        if self._limits.on_expiry is not ExpiryPolicy.WAIT:
            return True
        assert first.deadline is not None, "a ready group has sampled tokens"
        for k, due in enumerate(self.due_counts(version)):
            inside = first.deadline <= version + k
            if due - inside - k * self._limits.batch_groups > num_remaining - 1:
                return False
        return True

    def shortfall(self, version: int) -> int | None:
        """How many groups must be given up before the B ready groups due first can be a batch at `version`.

        Returns:
            0 if they can close as it is; None if fewer than B are ready.
        """
        batch = self._limits.batch_groups
        if self.num_ready < batch:
            return None
        if self._limits.on_expiry is not ExpiryPolicy.WAIT:
            return 0
        counts = zip(self.due_counts(version), self._due(self._ready, version), strict=False)
        return max(0, *(due - min(batch, ready) - k * batch for k, (due, ready) in enumerate(counts)))

    def redundant(self, count: int) -> list[GroupRecord]:
        """The `count` groups due first among those that the next batch leaves outside.

        Among equals the unready before the ready, then the youngest first. O(live log live), for `shortfall` > 0 only.
        """
        ready = [record for groups in self._ready.values() for record in groups.values()]
        batch = {record.group_id for record in heapq.nsmallest(self._limits.batch_groups, ready, key=_order)}
        outside = [(record, False) for groups in self._unready.values() for record in groups.values()]
        outside += [(record, True) for record in ready if record.group_id not in batch]
        outside.sort(key=lambda one: (_order(one[0])[0], one[1], -one[0].group_id))
        return [record for record, _ in outside[:count]]

    def _due(self, groups: Mapping[int | None, Mapping[GroupId, GroupRecord]], version: int) -> list[int]:
        """For k = 0..η: those of `groups` with deadline ≤ version + k."""
        eta = self._limits.max_staleness
        counts = [0] * (eta + 1)
        for deadline, due in groups.items():
            slack = eta if deadline is None else deadline - version
            if slack <= eta:
                counts[max(slack, 0)] += len(due)
        return list(accumulate(counts))
