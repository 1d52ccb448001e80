"""Selects groups whose logprobs are computed before their batch closes (docs/concepts/dataflow.md, "Early logprobs").

This is a pure state machine without a clock or waiting. A *wait* is the time from the trainer's request for a batch
until the batch closes.

Invariant: in one wait at most `max_groups` groups are returned, none of them twice, and only groups that are still
ready. Logprobs computed in one wait are invalid in the next one, because the weights have changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupRef

FindReady = Callable[[GroupId], GroupRef | None]
"""`Dataflow.find_ready`."""


class EarlyLogprobsQueue:
    """Ready groups in the order in which batches take them: by deadline, then admission number.

    Entries of groups that have ended or trained are removed when they reach the front. Batches take groups in the same
    order, so such entries reach the front first, and the queue holds at most the live groups and those of one batch.
    """

    def __init__(self, max_groups: int, find_ready: FindReady) -> None:
        self._max_groups = max_groups
        self._find_ready = find_ready
        self._candidates: list[tuple[int, GroupId]] = []
        self._handed_out: list[tuple[int, GroupId]] = []

    def __len__(self) -> int:
        return len(self._candidates) + len(self._handed_out)

    def add(self, group: GroupRef) -> None:
        """Add a group that has become ready."""
        heapq.heappush(self._candidates, (group.oldest_version, group.group_id))

    def begin_wait(self) -> None:
        """Start a new wait: groups returned in the previous wait that are still ready are candidates again."""
        for entry in self._handed_out:
            heapq.heappush(self._candidates, entry)
        self._handed_out = []
        while self._candidates and self._find_ready(self._candidates[0][1]) is None:
            heapq.heappop(self._candidates)

    def next(self) -> GroupRef | None:
        """Return the next group; None if there is none or `max_groups` were returned in this wait."""
        while self._candidates and len(self._handed_out) < self._max_groups:
            entry = heapq.heappop(self._candidates)
            if (group := self._find_ready(entry[1])) is not None:
                self._handed_out.append(entry)
                return group
        return None
