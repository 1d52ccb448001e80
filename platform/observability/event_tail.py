"""The newest events of the ledger: what happened just before a run broke off."""

from __future__ import annotations

import time
from collections import deque

from penstock.dataflow.ledger import JournalEntry, LedgerEvent, Reason, VersionMark

EVENTS_KEPT = 64


class EventTail:
    """Keeps the newest events; a sink of `Ledger`. What ends with the run itself says nothing, and is left out."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, JournalEntry]] = deque(maxlen=EVENTS_KEPT)

    def __call__(self, entry: JournalEntry) -> None:
        if not isinstance(entry, LedgerEvent) or entry.reason is not Reason.RUN_END:
            self._events.append((time.monotonic(), entry))

    def lines(self) -> list[str]:
        """One line per event, oldest first, with its time before now."""
        now = time.monotonic()
        return [f"{at - now:9.3f} s  {_told(entry)}" for at, entry in self._events]


def _told(entry: JournalEntry) -> str:
    if isinstance(entry, VersionMark):
        return f"v{entry.version} published"
    reason = f"({entry.reason})" if entry.reason else ""
    return f"group {entry.group_id} {entry.state}{reason}  {entry.task_id}"
