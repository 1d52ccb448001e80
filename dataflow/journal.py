"""The ledger as an append-only journal: what happened, in order, so that a run goes on after its driver died.

    admit, ready, …, trained × B, mark v1, admit, …, trained × B, mark v2, …

A run resumes from a checkpoint of version v. Entries after mark v are void: the weights that they speak of are
lost. The groups that lived at mark v are dropped(rollback), because what they had sampled died with the
driver, and their tasks start again. So the books balance (I3) and nothing is trained twice into one policy (I5).

One entry is one line of JSON with a CRC-32 before it. A torn or damaged line ends the journal: it and what
follows are void.
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
    """A ledger as it was at a version, and the tasks that start again, oldest first, by how their groups ended."""

    ledger: Ledger
    restarts: tuple[LedgerEvent, ...]


def resume(entries: Iterable[JournalEntry], version: int, max_requeues: int = 0) -> Resumed:
    """Replay a journal up to the mark of `version` and end what lived as dropped(rollback).

    Args:
        entries: The journal.
        version: Of the checkpoint; 0 is the start of the run.
        max_requeues: As in `FlowLimits`: dropped tasks that waited for their next start wait for it again.

    Raises:
        CheckpointError: If the journal does not reach that version.
    """
    waiting = _Waiting(max_requeues)
    ledger = Ledger(on_event=waiting.follow)
    for event in _until(entries, version):
        if event.state is GroupState.GENERATING:
            record = ledger.admit(event.task_id, event.group_size, event.stream, event.requeues)
            if record.group_id != event.group_id:
                raise CheckpointError(
                    f"ledger: the journal admits group {event.group_id} where {record.group_id} is next: entries are "
                    "missing. Resume from an older checkpoint, or start anew."
                )
        elif event.reason is None:
            ledger.move(event.group_id, event.state)
        else:
            ledger.end(event.group_id, event.state, event.reason)
    for record in tuple(ledger.live()):
        ledger.end(record.group_id, GroupState.DROPPED, Reason.ROLLBACK)
    ledger.on_event = None
    return Resumed(ledger, waiting.in_order())


def _until(entries: Iterable[JournalEntry], version: int) -> Iterator[LedgerEvent]:
    """Events before the mark of `version`."""
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
        f"ledger: the journal ends at v{newest}, the checkpoint is of v{version}. Groups trained since v{newest} could "
        f"not be told from others and might be trained twice. Resume from a checkpoint of v{newest} or before."
    )


class _Waiting:
    """Tasks whose group was given up and that have not started again."""

    def __init__(self, max_requeues: int) -> None:
        self._max_requeues = max_requeues
        self._events: dict[tuple[str, TaskId, int], list[LedgerEvent]] = {}

    def follow(self, event: JournalEntry) -> None:
        """A sink of the ledger that is replayed."""
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
        events = (event for waiting in self._events.values() for event in waiting)
        return tuple(sorted(events, key=lambda event: event.group_id))


def encode(entry: JournalEntry) -> bytes:
    """One line, with its checksum and the end of line."""
    if isinstance(entry, VersionMark):
        body: list[object] = ["v", entry.version]
    elif entry.state is GroupState.GENERATING:
        body = ["a", entry.group_id, entry.task_id, entry.stream, entry.group_size, entry.requeues]
    else:
        body = ["s", entry.group_id, entry.state, entry.reason]
    line = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %b\n" % (zlib.crc32(line), line)


def decode(lines: Iterable[bytes]) -> Iterator[JournalEntry]:
    """Entries up to the first line that is torn or damaged."""
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
