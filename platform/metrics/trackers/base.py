"""The tracker protocol, and a wrapper that keeps slow or broken trackers from delaying training.

`BackgroundTracker` puts a bounded queue and one thread in front of a sink.
Consumes: the records of `log` and `log_summary`, in order. Waits for: the sink. Unblocked by: the sink, the end of the
back-off after a failure, or `close`. The caller never waits, except in `close`: up to `close_timeout_s`, or
`files_timeout_s` after the summary of a run that has ended by itself, with which some sinks upload files. Records that
do not fit the queue, or are undelivered at the end, are counted and reported in a warning. The run directory has them
all.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.dataflow.errors import PenstockError, boundary
from penstock.platform.metrics.leaves import leaves

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 60.0


class TrackerError(PenstockError):
    """A metric sink could not be opened or written."""


class Tracker(Protocol):
    """A metric sink with one writer. Steps arrive in order; a step may arrive several times with different names."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `family/name -> value` of one training step."""
        ...

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Record the figures of the summary, which are JSON-like."""
        ...

    def close(self) -> None:
        """Flush and release all resources. Nothing may be logged afterwards."""
        ...


_Delivery = tuple[str, Callable[[Tracker], None]]
"""What is delivered, in words, and how."""


class BackgroundTracker:
    """A sink behind a bounded queue and a thread. Failures are retried, and only the first one is logged.

    Invariant: every record is delivered, queued or counted in `num_lost`, because it exists nowhere else.
    A record is delivered at least once: it is sent again if the sink fails during delivery.

    Attributes:
        name: Name of the sink in warnings.
        num_lost: Records that never reached the sink.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Tracker],
        *,
        capacity: int = 1024,
        first_backoff_s: float = 1.0,
        close_timeout_s: float = 8.0,
        files_timeout_s: float = 30.0,
        logged_to: int = -1,
    ) -> None:
        """Start the thread, which calls `open_sink`, because imports and logins are slow.

        Args:
            name: Name of the sink in warnings.
            open_sink: Opens the sink; called again after a failure.
            capacity: Maximum number of queued records.
            first_backoff_s: Seconds before the first retry; doubles up to one minute.
            close_timeout_s: Longest wait in `close`, seconds.
            files_timeout_s: The same after a summary, from `log_summary` on; not if a signal has ended the run, since
                whoever has sent it will not wait for long.
            logged_to: Last step that the sink has from before a resume. Records up to it are not sent a second time.
        """
        self.name = name
        self._logged_to = logged_to
        self._open_sink = open_sink
        self._records: queue.Queue[_Delivery | None] = queue.Queue(maxsize=capacity)
        self._first_backoff_s = first_backoff_s
        self._close_timeout_s = close_timeout_s
        self._files_timeout_s = files_timeout_s
        self._give_up_at: float | None = None
        self._delivering = "nothing"
        self._closing = threading.Event()
        self._sink: Tracker | None = None
        self._has_warned = False
        self.num_lost = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one record and return immediately."""
        copy = dict(metrics)
        if step > self._logged_to:
            self._enqueue((f"the metrics of step {step}", lambda sink: sink.log(step, copy)))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Queue the figures of the summary and return immediately."""
        copy = dict(summary)
        self._enqueue(("the summary and files", lambda sink: sink.log_summary(copy)))
        if summary.get("status") != "interrupted":
            self._close_timeout_s = self._files_timeout_s
        self._give_up_at = time.monotonic() + self._close_timeout_s

    def close(self) -> None:
        """Deliver queued records for a limited time, then count the rest and log a warning."""
        if self._closing.is_set():
            return
        now = time.monotonic()
        deadline = now + self._close_timeout_s if self._give_up_at is None else self._give_up_at
        self._closing.set()
        try:
            self._records.put(None, timeout=max(0.0, deadline - now))
        except queue.Full:
            logger.debug("tracker %s: its queue stayed full while closing", self.name)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "tracker %s: did not finish within %.0f s of closing. It was delivering %s; about %d records wait "
                "behind that. The run has ended, and its directory has everything.",
                self.name,
                self._close_timeout_s,
                self._delivering,
                max(0, self._records.qsize() - 1),
            )
        if self.num_lost:
            logger.warning(
                "tracker %s: %d records never reached it (the run directory has them all)", self.name, self.num_lost
            )

    def _enqueue(self, delivery: _Delivery) -> None:
        try:
            self._records.put_nowait(delivery)
        except queue.Full:
            if self._count_lost() == 1:
                logger.warning(
                    "tracker %s: its queue of %d records is full, so it misses records from now on; they are counted. "
                    "Training continues; metrics.jsonl has all records.",
                    self.name,
                    self._records.maxsize,
                )

    def _run(self) -> None:
        """Deliver the records in order, then close. While closing, each record is retried only once."""
        while (record := self._records.get()) is not None:
            self._delivering, deliver = record
            backoff_s, is_delivered = self._first_backoff_s, False
            while not is_delivered:
                is_last_try = self._closing.is_set()
                try:
                    with boundary(TrackerError, f"tracker {self.name}"):
                        if self._sink is None:
                            self._sink = self._open_sink()
                        deliver(self._sink)
                    is_delivered = True
                except PenstockError as error:
                    self._warn_once(error)
                    if is_last_try:
                        self._count_lost()
                        break
                    self._closing.wait(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        self._delivering = "what it has buffered"
        if self._sink is not None:
            try:
                with boundary(TrackerError, f"tracker {self.name}: close"):
                    self._sink.close()
            except PenstockError as error:
                self._warn_once(error)

    def _count_lost(self) -> int:
        with self._lock:
            self.num_lost += 1
            return self.num_lost

    def _warn_once(self, error: PenstockError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. Training continues and metrics.jsonl is complete; the sink is retried without further warnings.",
                error,
            )


def flat_summary(summary: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures of a summary as `summary/…`, and what is no number, without what is null or empty."""
    found = dict(leaves(json.loads(json.dumps(summary)), "/", "summary/"))
    figures = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return figures, {name: value for name, value in found.items() if name not in figures and value}


def kept_id(path: Path, new_id: str) -> str:
    """The id of the run in a tracker: kept in a file of the run's directory, so that a resumed run continues it."""
    if not path.exists():
        path.write_text(new_id, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def with_parent(lineage: Mapping[str, Any] | None, id_file: str) -> dict[str, Any]:
    """What a run was branched from, with the id of that run in the tracker whose ids are in `id_file`, if it has one.

    Args:
        lineage: `run` (directory of the run that this one was branched from), `step`, `restored`; None: of none.
        id_file: Name of the file in a run directory.

    Returns:
        The lineage, and the id under the name of its file; empty for a run that was not branched.
    """
    if lineage is None:
        return {}
    path = Path(str(lineage.get("run", ""))) / id_file
    return {**lineage, **({id_file: path.read_text(encoding="utf-8").strip()} if path.is_file() else {})}
