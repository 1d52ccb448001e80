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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.dataflow.ids import GroupId
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits


@dataclass(slots=True)
class _Entry:
    deadline: int | None
    is_ready: bool = False


class ConsumptionGate:
    """Live groups outside the batch, counted by deadline.

    Invariant: `_due[d]` is the number of entries with deadline d, `_unready_due[d]` of those that are not
    ready; `_undated` counts entries without one. Each entry is in `_by_deadline` under its deadline, so
    expired groups are found without a search.
    """

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._entries: dict[GroupId, _Entry] = {}
        self._by_deadline: dict[int, dict[GroupId, None]] = {}
        self._unready_due: Counter[int] = Counter()
        self._undated = 0
        self._ready: list[tuple[int, GroupId]] = []
        self._num_ready = 0

    @property
    def num_ready(self) -> int:
        return self._num_ready

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, group_id: GroupId) -> None:
        """A group was admitted."""
        self._entries[group_id] = _Entry(None)
        self._undated += 1

    def date(self, group_id: GroupId, oldest_version: int) -> None:
        """The group's oldest version is now known, or known better."""
        entry = self._entries[group_id]
        deadline = oldest_version + self._limits.max_staleness
        if entry.deadline != deadline:
            self._forget_deadline(group_id, entry)
            entry.deadline = deadline
            self._by_deadline.setdefault(deadline, {})[group_id] = None
            self._unready_due[deadline] += not entry.is_ready

    def mark_ready(self, group_id: GroupId) -> None:
        """The group can train: every member that did not fail is scored."""
        entry = self._entries[group_id]
        assert entry.deadline is not None, "a ready group has sampled tokens"
        assert not entry.is_ready, "a group becomes ready once"
        entry.is_ready = True
        self._num_ready += 1
        self._unready_due[entry.deadline] -= 1
        heapq.heappush(self._ready, (entry.deadline, group_id))

    def remove(self, group_id: GroupId) -> None:
        """The group ended, or went into the batch. Its place in the heap is forgotten when it comes up."""
        entry = self._entries.pop(group_id)
        self._forget_deadline(group_id, entry)
        self._num_ready -= entry.is_ready

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
        while self._ready:
            _, group_id = self._ready[0]
            entry = self._entries.get(group_id)
            if entry is not None and entry.is_ready:
                return group_id
            heapq.heappop(self._ready)
        return None

    def first_unready(self) -> GroupId | None:
        """The group that is due first among those that are not ready; None if all are. O(groups due with it)."""
        for deadline in sorted(self._by_deadline):
            if self._unready_due[deadline]:
                return next(one for one in self._by_deadline[deadline] if not self._entries[one].is_ready)
        return next((one for one, entry in self._entries.items() if entry.deadline is None), None)

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
        deadline = self._entries[group_id].deadline
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
        if self._num_ready < batch:
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
            found += sorted(outside, key=lambda group_id: (self._entries[group_id].is_ready, -group_id))
            if len(found) >= count:
                return found[:count]
        undated = [group_id for group_id, entry in self._entries.items() if entry.deadline is None]
        return (found + undated[::-1])[:count]

    def _ready_entries(self) -> Iterator[tuple[int, GroupId]]:
        return (
            (entry.deadline, group_id)
            for group_id, entry in self._entries.items()
            if entry.is_ready and entry.deadline is not None
        )

    def _unready_within(self, last_deadline: int, *, is_last: bool) -> int:
        dated = sum(count for deadline, count in self._unready_due.items() if deadline <= last_deadline)
        return dated + (self._undated if is_last else 0)

    def _forget_deadline(self, group_id: GroupId, entry: _Entry) -> None:
        if entry.deadline is None:
            self._undated -= 1
            return
        groups = self._by_deadline[entry.deadline]
        del groups[group_id]
        self._unready_due[entry.deadline] -= not entry.is_ready
        if not groups:
            del self._by_deadline[entry.deadline]
            del self._unready_due[entry.deadline]
