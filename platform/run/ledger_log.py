"""The ledger on disk: every event of every group, in append-only segments of which each follows a checkpoint.

    ledger/0-v0.log   admit, ready, …, mark v1, …          written by incarnation 0 after the start
    ledger/0-v2.log   the same after the checkpoint of v2; the driver dies while it writes this segment
    ledger/1-v2.log   incarnation 1, which resumed from the checkpoint of v2

The lineage that survives is what each incarnation wrote before the cut from which the next one resumed: its segments
that begin before that version. A run resumes from a checkpoint alone; the log says what a driver did after it, and is
the evidence that nothing was trained twice (tests/ledger_logs.py reads it).

An entry is one line of JSON, preceded by its CRC-32. A truncated or damaged line ends its segment: that line and all
following ones are ignored.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.dataflow.ledger import GroupState, JournalEntry, VersionMark

LEDGER = "ledger"


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


class LedgerLog:
    """Writes the segments of one incarnation. A callback of `Ledger`; the disk is used by a thread of its own.

    Events are synced once per version. A disk that refuses them costs the log, not the run: `error` says why.

    Attributes:
        error: The first error of the disk; None if there was none.
    """

    def __init__(self, run_dir: Path, incarnation: int, version: int) -> None:
        self.error: OSError | None = None
        self._folder = run_dir / LEDGER
        self._incarnation = incarnation
        self._lines: list[bytes] = []
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._segment = self._path(version)

    def __call__(self, entry: JournalEntry) -> None:
        self._lines.append(encode(entry))
        if isinstance(entry, VersionMark):
            self._flush()

    def rotate(self, version: int) -> None:
        """Begin the segment that follows the checkpoint of `version`. Call it at the cut."""
        self._flush()
        self._segment = self._path(version)

    def close(self) -> None:
        """Write what is left."""
        self._flush().result()
        self._thread.shutdown()

    def _path(self, version: int) -> Path:
        return self._folder / f"{self._incarnation}-v{version}.log"

    def _flush(self) -> Future[None]:
        lines, self._lines = b"".join(self._lines), []
        return self._thread.submit(self._write, self._segment, lines)

    def _write(self, path: Path, data: bytes) -> None:
        if not data or self.error is not None:
            return
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.error = error
