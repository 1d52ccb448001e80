"""The ledger as an append-only journal of events: the record of what happened to every group.

    admit, ready, …, trained × B, mark v1, admit, …, trained × B, mark v2, …

A run resumes from a checkpoint, which holds the counters of the ledger at its cut. The journal says what a driver did
after it, before it died. An entry is one line of JSON, preceded by its CRC-32. A truncated or damaged line ends the
journal: that line and all following ones are ignored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import TERMINAL, GroupState, JournalEntry, LedgerEvent, Reason, VersionMark


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
    """Decode entries up to the first truncated or damaged line.

    A journal may begin in the middle of a run. Events of groups that were admitted before have no task and no size.
    """
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
            unknown = LedgerEvent(GroupId(group_id), GroupState.GENERATING, TaskId(""), "", 0)
            admission = admissions.get(group_id, unknown)
            if state in TERMINAL:
                admissions.pop(group_id, None)
            yield replace(admission, state=GroupState(state), reason=None if reason is None else Reason(reason))
