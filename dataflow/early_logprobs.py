"""Who is forwarded before its batch closes (docs/concepts/dataflow.md, "Prefetch"). Pure: no clock, no waiting.

A *wait* is the time from the trainer's asking for a batch to the batch that closes.

Invariant: in one wait at most `max_groups` groups are handed out, none twice, and none that is no longer ready. What
was forwarded in one wait is of no use in the next, whose weights are others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupRef

FindReady = Callable[[GroupId], GroupRef | None]
"""`Dataflow.find_ready`."""


class EarlyLogprobsQueue:
    """Ready groups in the order in which batches take them: due first, then admitted first.

    A group that ended or trained is forgotten when it comes up. Those come up first, since batches take groups in this
    order too, so entries are at most live groups and those of one batch.
    """

    def __init__(self, max_groups: int, find_ready: FindReady) -> None:
        self._max_groups = max_groups
        self._find_ready = find_ready
        self._candidates: list[tuple[int, GroupId]] = []
        self._handed_out: list[tuple[int, GroupId]] = []

    def __len__(self) -> int:
        return len(self._candidates) + len(self._handed_out)

    def add(self, group: GroupRef) -> None:
        """A group became ready."""
        heapq.heappush(self._candidates, (group.oldest_version, group.group_id))

    def begin_wait(self) -> None:
        """The trainer waits for another batch: who was handed out and is still ready is a candidate again."""
        for entry in self._handed_out:
            heapq.heappush(self._candidates, entry)
        self._handed_out = []
        while self._candidates and self._find_ready(self._candidates[0][1]) is None:
            heapq.heappop(self._candidates)

    def next(self) -> GroupRef | None:
        """Hand out the next group; None if there is none, or enough were handed out in this wait."""
        while self._candidates and len(self._handed_out) < self._max_groups:
            entry = heapq.heappop(self._candidates)
            if (group := self._find_ready(entry[1])) is not None:
                self._handed_out.append(entry)
                return group
        return None
