"""`timeline.json`: what a run did when, in the trace-event format of Perfetto and chrome://tracing.

    process "run"       trainer | publish | evaluation | checkpoint      one slice per step, publish, …
    process "groups"    lane 0 | lane 1 | …                              generate, score, wait, train of each group

A group occupies the lowest free lane from its admission to its end. Groups come from the events of the ledger, so this
file and the ledger cannot differ.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import TERMINAL, GroupState, JournalEntry, VersionMark
from penstock.platform.metrics.run_files import TIMELINE_FILE

Track = Literal["trainer", "publish", "evaluation", "checkpoint"]

RUN, GROUPS = 1, 2
"""Process ids of the trace."""
BATCHES_SHOWN = 256
"""Batches whose groups are in the file: blocks of `BLOCK` batches in a row, evenly spread over the run."""
BLOCK = 16
GROUPS_PER_BATCH = 64
_PHASES = {
    GroupState.GENERATING: "generate",
    GroupState.SCORING: "score",
    GroupState.READY: "wait",
    GroupState.TRAINING: "train",
}


class Timeline:
    """Writes the timeline; a callback of `Ledger`. The disk is used by a thread of its own.

    The file is an array of events that is closed when the run ends; the format allows one that is not closed. It is
    bounded: groups of about `BATCHES_SHOWN` batches are in it, of each at most `GROUPS_PER_BATCH`.

    Attributes:
        error: The first error of the disk, after which nothing is written; None if there was none.
    """

    def __init__(
        self, run_dir: Path, batch_groups: int, total_steps: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the timeline of a run that starts or is resumed.

        Args:
            run_dir: Directory of the run.
            batch_groups: Groups per batch.
            total_steps: Batches of the run.
            clock: Unix time, seconds.
        """
        self.error: OSError | None = None
        self._path = run_dir / TIMELINE_FILE
        self._clock = clock
        self._batch_groups = batch_groups
        self._every_block = -(-total_steps // BATCHES_SHOWN)
        self._every_group = -(-batch_groups // GROUPS_PER_BATCH)
        self._open: dict[GroupId, tuple[int, GroupState, float, TaskId]] = {}
        self._free_lanes: list[int] = []
        self._num_lanes = 0
        self._lines: list[str] = []
        self._thread = ThreadPoolExecutor(1, "timeline")
        self._thread.submit(self._begin)
        self._name(RUN, None, "run")
        self._name(GROUPS, None, "groups")
        for index, track in enumerate(get_args(Track)):
            self._name(RUN, index, track)

    def __call__(self, entry: JournalEntry) -> None:
        """Note an event of the ledger."""
        now = self._clock()
        if isinstance(entry, VersionMark):
            self._flush()
        elif entry.state is GroupState.GENERATING:
            if self._is_shown(entry.group_id):
                self._open[entry.group_id] = (self._take_lane(), entry.state, now, entry.task_id)
        elif (group := self._open.pop(entry.group_id, None)) is not None:
            lane, state, since, task_id = group
            arguments = {"group": entry.group_id, "task": task_id}
            if entry.reason is not None:
                arguments["ended"] = f"{entry.state}({entry.reason})"
            self._slice(GROUPS, lane, _PHASES[state], since, now, arguments)
            if entry.state in TERMINAL:
                heapq.heappush(self._free_lanes, lane)
            else:
                self._open[entry.group_id] = (lane, entry.state, now, task_id)

    def add(self, track: Track, name: str, since: float, until: float, **arguments: Any) -> None:
        """Add a slice of the run.

        Args:
            track: Where it is shown.
            name: Its label.
            since: Begin, Unix time in seconds.
            until: End, likewise.
            **arguments: What a click on it shows.
        """
        self._slice(RUN, get_args(Track).index(track), name, since, until, arguments)

    def close(self) -> None:
        """Write what is left, and close the array."""
        for group_id in list(self._open):
            lane, state, since, task_id = self._open.pop(group_id)
            arguments = {"group": group_id, "task": task_id, "ended": "with the run"}
            self._slice(GROUPS, lane, _PHASES[state], since, self._clock(), arguments)
        self._lines.append('{"ph":"M","pid":1,"tid":0,"ts":0,"name":"process_sort_index","args":{"sort_index":0}}\n]\n')
        self._flush().result()
        self._thread.shutdown()

    def _is_shown(self, group_id: GroupId) -> bool:
        batch, position = divmod(group_id, self._batch_groups)
        return (batch // BLOCK) % self._every_block == 0 and position % self._every_group == 0

    def _take_lane(self) -> int:
        if self._free_lanes:
            return heapq.heappop(self._free_lanes)
        lane, self._num_lanes = self._num_lanes, self._num_lanes + 1
        self._name(GROUPS, lane, f"lane {lane}")
        return lane

    def _slice(self, process: int, lane: int, name: str, since: float, until: float, arguments: dict[str, Any]) -> None:
        times = {"ts": round(since * 1e6), "dur": max(0, round((until - since) * 1e6))}
        self._append({"ph": "X", "pid": process, "tid": lane, "name": name, **times, "args": arguments})

    def _name(self, process: int, lane: int | None, name: str) -> None:
        kind = "process_name" if lane is None else "thread_name"
        self._append({"ph": "M", "pid": process, "tid": lane or 0, "ts": 0, "name": kind, "args": {"name": name}})

    def _append(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event, separators=(",", ":"), default=str) + ",\n")

    def _flush(self) -> Future[None]:
        text, self._lines = "".join(self._lines), []
        return self._thread.submit(self._write, text)

    def _begin(self) -> None:
        """Open the array, or again the one that an earlier process has closed or left open in the middle of a line."""
        try:
            if not self._path.exists():
                self._path.write_text("[\n", encoding="utf-8")
                return
            with self._path.open("rb+") as file:
                text = file.read()
                if not text.startswith(b"[\n"):  # the earlier process ended before its first write
                    text = b"[\n"
                    file.seek(0)
                    file.write(text)
                whole = text.removesuffix(b"\n]\n")
                file.truncate(len(whole) if whole != text else text.rfind(b"\n") + 1)
                file.seek(0, 2)
                if whole != text:
                    file.write(b",\n")
        except OSError as error:
            self.error = error

    def _write(self, text: str) -> None:
        if self.error is not None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self.error = error


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """Read the events of a timeline, also of a run that has not ended."""
    lines = path.read_text(encoding="utf-8").splitlines()
    events = []
    for line in lines[1:]:
        text = line.removesuffix(",")
        if text == "]":
            break
        try:
            events.append(json.loads(text))
        except ValueError:  # the end of a killed run
            break
    return events
