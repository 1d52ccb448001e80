"""The ledger as an append-only journal of events, from which a run resumes after its driver has died.

    admit, ready, …, trained × B, mark v1, admit, …, trained × B, mark v2, …

A run resumes from a checkpoint of version v. Entries after mark v are ignored, because the weights that they refer to
are lost. Groups that were live at mark v end as dropped(rollback), because their samples were lost with the driver, and
their tasks start again. The ledger therefore balances (I3) and no group is trained twice into one policy (I5).

An entry is one line of JSON, preceded by its CRC-32. A truncated or damaged line ends the journal: that line and all
following ones are ignored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from penstock.dataflow.errors import CheckpointError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import TERMINAL, GroupState, JournalEntry, Ledger, LedgerEvent, Reason, VersionMark


@dataclass(frozen=True, slots=True)
class Resumed:
    """A ledger restored to a version, and the final events of the groups whose tasks start again, oldest first."""

    ledger: Ledger
    restarts: tuple[LedgerEvent, ...]


def resume(entries: Iterable[JournalEntry], version: int, max_requeues: int = 0) -> Resumed:
    """Replay a journal up to the mark of `version` and end all live groups as dropped(rollback).

    Args:
        entries: The journal.
        version: Version of the checkpoint; 0 is the start of the run.
        max_requeues: As in `FlowLimits`. Tasks that were waiting for a restart are queued again.

    Raises:
        CheckpointError: If the journal does not reach that version, or entries are missing.
    """
    pending = _PendingRestarts(max_requeues)
    ledger = Ledger(on_event=pending.observe)
    for event in _events_before_mark(entries, version):
        if event.state is GroupState.GENERATING:
            record = ledger.admit(event.task_id, event.group_size, event.stream, event.requeues)
            if record.group_id != event.group_id:
                raise CheckpointError(
                    f"ledger: the journal admits group {event.group_id} where {record.group_id} is next: entries are "
                    "missing. Resume from an older checkpoint, or start a new run."
                )
        elif event.reason is None:
            ledger.move(event.group_id, event.state)
        else:
            ledger.end(event.group_id, event.state, event.reason)
    for record in tuple(ledger.live()):
        ledger.end(record.group_id, GroupState.DROPPED, Reason.ROLLBACK)
    ledger.on_event = None
    return Resumed(ledger, pending.in_order())


def _events_before_mark(entries: Iterable[JournalEntry], version: int) -> Iterator[LedgerEvent]:
    """Yield the events before the mark of `version`."""
    newest = 0
    if newest == version:
        return
    for entry in entries:
        if isinstance(entry, LedgerEvent):
            yield entry
            continue
        newest = entry.version
        if newest == version:
            return
    raise CheckpointError(
        f"ledger: the journal ends at v{newest}, the checkpoint is of v{version}. Groups trained since v{newest} are "
        f"unknown and might be trained twice. Resume from a checkpoint of v{newest} or older."
    )


class _PendingRestarts:
    """Tasks whose group was dropped and that have not been admitted again."""

    def __init__(self, max_requeues: int) -> None:
        self._max_requeues = max_requeues
        self._events: dict[tuple[str, TaskId, int], list[LedgerEvent]] = {}

    def observe(self, event: JournalEntry) -> None:
        """Event callback of the replayed ledger."""
        if isinstance(event, VersionMark):
            return
        if event.state is GroupState.GENERATING and event.requeues:
            key = (event.stream, event.task_id, event.requeues - 1)
            if len(self._events.get(key, ())) > 1:
                self._events[key].pop(0)
            else:
                self._events.pop(key, None)
        elif event.reason is Reason.ROLLBACK or (event.reason is Reason.STALE and event.requeues < self._max_requeues):
            self._events.setdefault((event.stream, event.task_id, event.requeues), []).append(event)

    def in_order(self) -> tuple[LedgerEvent, ...]:
        """Pending restarts in the order of their groups' admission."""
        events = (event for pending in self._events.values() for event in pending)
        return tuple(sorted(events, key=lambda event: event.group_id))


def encode(entry: JournalEntry) -> bytes:
    """Encode an entry as one line with its checksum, newline included."""
    if isinstance(entry, VersionMark):
        body: list[object] = ["v", entry.version]
    elif entry.state is GroupState.GENERATING:
        body = ["a", entry.group_id, entry.task_id, entry.stream, entry.group_size, entry.requeues]
    else:
        body = ["s", entry.group_id, entry.state, entry.reason]
    line = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %b\n" % (zlib.crc32(line), line)


def decode(lines: Iterable[bytes]) -> Iterator[JournalEntry]:
    """Decode entries up to the first truncated or damaged line."""
    admissions: dict[int, LedgerEvent] = {}
    for line in lines:
        checksum, _, body = line.partition(b" ")
        if not body.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body[:-1]):
            return
        kind, *fields = json.loads(body)
        if kind == "v":
            yield VersionMark(fields[0])
        elif kind == "a":
            group_id, task_id, stream, size, requeues = fields
            event = LedgerEvent(GroupId(group_id), GroupState.GENERATING, TaskId(task_id), stream, size, requeues)
            admissions[group_id] = event
            yield event
        else:
            group_id, state, reason = fields
            admission = admissions.pop(group_id) if state in TERMINAL else admissions[group_id]
            yield replace(admission, state=GroupState(state), reason=None if reason is None else Reason(reason))
