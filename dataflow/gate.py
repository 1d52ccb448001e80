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
from collections import defaultdict
from collections.abc import Iterator

from penstock.dataflow.ids import GroupId
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits


class ConsumptionGate:
    """Live groups outside the batch, counted by deadline.

    Invariant: `_by_deadline[d]` are the groups with deadline d, so expired groups are found without a search;
    `_unready_due[d]` is the number of those that are not ready, `_undated` of groups without a deadline.
    """

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._deadlines: dict[GroupId, int | None] = {}
        self._by_deadline: dict[int, dict[GroupId, None]] = {}
        self._unready_due: dict[int, int] = defaultdict(int)  # quicker to set than a Counter
        self._undated = 0
        self._ready: set[GroupId] = set()
        self._ready_queue: list[tuple[int, GroupId]] = []

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, group_id: GroupId) -> None:
        """A group was admitted."""
        self._deadlines[group_id] = None
        self._undated += 1

    def date(self, group_id: GroupId, oldest_version: int) -> None:
        """The group's oldest version is now known, or known better."""
        deadline, known = oldest_version + self._limits.max_staleness, self._deadlines[group_id]
        if known != deadline:
            self._forget_deadline(group_id, known)
            self._deadlines[group_id] = deadline
            self._by_deadline.setdefault(deadline, {})[group_id] = None
            self._unready_due[deadline] += group_id not in self._ready

    def mark_ready(self, group_id: GroupId) -> None:
        """The group can train: every member that did not fail is scored."""
        deadline = self._deadlines[group_id]
        assert deadline is not None, "a ready group has sampled tokens"
        assert group_id not in self._ready, "a group becomes ready once"
        self._ready.add(group_id)
        self._unready_due[deadline] -= 1
        heapq.heappush(self._ready_queue, (deadline, group_id))

    def remove(self, group_id: GroupId) -> None:
        """The group ended, or went into the batch. Its place in the heap is forgotten when it comes up."""
        self._forget_deadline(group_id, self._deadlines.pop(group_id))
        self._ready.discard(group_id)

    def due_counts(self, version: int) -> list[int]:
        """For k = 0..η: groups outside the batch with deadline ≤ version + k. O(η + distinct deadlines)."""
        eta = self._limits.max_staleness
        counts = [0] * (eta + 1)
        for deadline, groups in self._by_deadline.items():
            if deadline - version <= eta:
                counts[max(deadline - version, 0)] += len(groups)
        counts[eta] += self._undated
        for k in range(1, eta + 1):
            counts[k] += counts[k - 1]
        return counts

    def overdue(self, version: int) -> list[GroupId]:
        """Groups whose deadline has passed, in deadline, then admission order."""
        late = sorted(deadline for deadline in self._by_deadline if deadline < version)
        return [group_id for deadline in late for group_id in sorted(self._by_deadline[deadline])]

    def next_ready(self) -> GroupId | None:
        """The ready group with the earliest deadline, then the lowest admission number."""
        while self._ready_queue:
            _, group_id = self._ready_queue[0]
            if group_id in self._ready:
                return group_id
            heapq.heappop(self._ready_queue)
        return None

    def first_unready(self) -> GroupId | None:
        """The group that is due first among those that are not ready; None if all are. O(groups due with it)."""
        for deadline in sorted(self._by_deadline):
            if self._unready_due[deadline]:
                return next(one for one in self._by_deadline[deadline] if one not in self._ready)
        return next((one for one, deadline in self._deadlines.items() if deadline is None), None)

    def can_take(self, version: int, num_places: int) -> bool:
        """May the next ready group go into a batch that has `num_places` left, closing at `version`?

        Under `wait`: only if whoever must still be in fits in the places that remain. `trim` and `drop` do
        not wait for anybody.
        """
        group_id = self.next_ready()
        if group_id is None or num_places < 1:
            return False
        if self._limits.on_expiry is not ExpiryPolicy.WAIT:
            return True
        deadline = self._deadlines[group_id]
        assert deadline is not None
        for k, due in enumerate(self.due_counts(version)):
            inside = deadline <= version + k
            if due - inside - k * self._limits.batch_groups > num_places - 1:
                return False
        return True

    def shortfall(self, version: int) -> int | None:
        """How many groups must be given up before the B ready groups due first can be a batch at `version`.

        Returns:
            0 if they can close as it is; None if fewer than B are ready.
        """
        batch = self._limits.batch_groups
        if len(self._ready) < batch:
            return None
        if self._limits.on_expiry is not ExpiryPolicy.WAIT:
            return 0
        shortfall = 0
        for k, due in enumerate(self.due_counts(version)):
            ready = due - self._unready_within(version + k, is_last=k == self._limits.max_staleness)
            shortfall = max(shortfall, due - min(batch, ready) - k * batch)
        return shortfall

    def redundant(self, count: int) -> list[GroupId]:
        """The `count` groups due first among those that the next batch leaves outside.

        Among equals the unready before the ready, then the youngest first. O(live log live), for `shortfall` > 0 only.
        """
        batch = set(heapq.nsmallest(self._limits.batch_groups, self._ready_entries()))
        found: list[GroupId] = []
        for deadline in sorted(self._by_deadline):
            outside = [group_id for group_id in self._by_deadline[deadline] if (deadline, group_id) not in batch]
            found += sorted(outside, key=lambda group_id: (group_id in self._ready, -group_id))
            if len(found) >= count:
                return found[:count]
        undated = [group_id for group_id, deadline in self._deadlines.items() if deadline is None]
        return (found + undated[::-1])[:count]

    def _ready_entries(self) -> Iterator[tuple[int, GroupId]]:
        deadlines = ((self._deadlines[group_id], group_id) for group_id in self._ready)
        return ((deadline, group_id) for deadline, group_id in deadlines if deadline is not None)

    def _unready_within(self, last_deadline: int, *, is_last: bool) -> int:
        dated = sum(count for deadline, count in self._unready_due.items() if deadline <= last_deadline)
        return dated + (self._undated if is_last else 0)

    def _forget_deadline(self, group_id: GroupId, deadline: int | None) -> None:
        if deadline is None:
            self._undated -= 1
            return
        groups = self._by_deadline[deadline]
        del groups[group_id]
        self._unready_due[deadline] -= group_id not in self._ready
        if not groups:
            del self._by_deadline[deadline]
            del self._unready_due[deadline]
