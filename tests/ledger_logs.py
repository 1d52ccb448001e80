"""Reads the ledger on disk (platform/run/ledger_log.py): what a run did, over all its incarnations."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import TERMINAL, GroupState, JournalEntry, LedgerEvent, Reason, VersionMark
from penstock.platform.run.ledger_log import LEDGER


def decode(lines: Iterable[bytes]) -> Iterator[JournalEntry]:
    """Decode entries up to the first truncated or damaged line.

    A segment may begin in the middle of a run. Events of groups that were admitted before have no task and no size.
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


def surviving(run_dir: Path) -> Iterator[JournalEntry]:
    """Yield the events of the lineage that survives, in order."""
    segments: dict[int, list[int]] = {}
    for path in (run_dir / LEDGER).glob("*-v*.log"):
        name, _, begin = path.stem.partition("-v")
        segments.setdefault(int(name), []).append(int(begin))
    # An incarnation begins at its first segment. It replaces what older ones wrote from that version on.
    first = {incarnation: min(versions) for incarnation, versions in segments.items()}
    for incarnation in sorted(segments):
        resumed_from = min((first[other] for other in first if other > incarnation), default=math.inf)
        for version in sorted(segments[incarnation]):
            if version < resumed_from:
                with (run_dir / LEDGER / f"{incarnation}-v{version}.log").open("rb") as file:
                    yield from decode(file)
