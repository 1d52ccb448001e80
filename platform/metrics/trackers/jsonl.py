"""`metrics.jsonl`: the tracker that is always enabled, and whose file reports and tests read."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import boundary
from penstock.platform.metrics.atomic_file import write_atomically
from penstock.platform.metrics.run_files import METRICS_FILE
from penstock.platform.metrics.trackers.base import TrackerError

logger = logging.getLogger(__name__)

MAX_UNWRITTEN = 1024
"""Records that are kept in memory while the file cannot be written, some kB each."""


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """One line of `metrics.jsonl`."""

    step: int
    """Training step; 0 is before the first one."""
    time_s: float
    """Unix time, seconds."""
    metrics: Mapping[str, float]
    """`family/name -> value`."""


def _line(step: int, time_s: float, metrics: Mapping[str, float]) -> str:
    numbers = {name: float(value) for name, value in metrics.items()}
    shown = {name: number if math.isfinite(number) else str(number) for name, number in numbers.items()}
    return json.dumps({"step": step, "time_s": time_s, "metrics": shown}, allow_nan=False) + "\n"


class JsonlTracker:
    """Appends one JSON object per call and flushes each line, so that a killed run loses at most its last line.

    A full disk does not end the run: lines that cannot be written are kept in memory and written before the next one.
    The first failure is a warning, and so is the number of lines that are lost in the end. The file always ends with a
    whole line, because what was written of a line is cut off when the rest fails.

    NaN and infinities, which JSON does not support, are written as the strings "nan", "inf" and "-inf".
    The figures of the summary have their own file (`summary.json`), so `log_summary` writes nothing here.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        with boundary(TrackerError, f"{self._path}: cannot be opened for appending"):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = os.fstat(self._file.fileno()).st_size
        self._unwritten: deque[bytes] = deque()
        self._num_lost = 0
        self._is_failing = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, or keep it for later if the file cannot be written now."""
        line = _line(step, round(time.time(), 3), metrics)
        self._unwritten.append(line.encode())
        if len(self._unwritten) > MAX_UNWRITTEN:
            self._unwritten.popleft()
            self._num_lost += 1
        self._write_all()

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Do nothing, because `summary.json` has the figures."""

    def close(self) -> None:
        """Close the file, after a last attempt to write what is missing in it."""
        if self._file.closed:
            return
        self._write_all()
        self._num_lost += len(self._unwritten)
        if self._num_lost:
            logger.warning("%s lacks %d records, which could not be written to the end.", self._path, self._num_lost)
        self._file.close()

    def _write_all(self) -> None:
        """Write all kept lines in order, until one fails."""
        try:
            while self._unwritten:
                self._write(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                logger.warning(
                    "%s cannot be written: %s. Training goes on. The newest %d records are kept in memory and written "
                    "once it is possible. Free some space on this disk.",
                    self._path,
                    error.strerror or error,
                    MAX_UNWRITTEN,
                )
        else:
            if self._is_failing:
                self._is_failing = False
                logger.warning("%s is written again; %d records were lost meanwhile.", self._path, self._num_lost)

    def _write(self, line: bytes) -> None:
        """Append a line as a whole.

        Raises:
            OSError: The rest of it cannot be written.
        """
        number = self._file.fileno()
        if os.fstat(number).st_size > self._size:
            os.ftruncate(number, self._size)  # the beginning of a line whose rest could not be written
        left = line
        while left:
            left = left[self._file.write(left) :]
        self._size += len(line)


def drop_later_records(run_dir: Path, first_step: int) -> int:
    """Drop the records from `first_step` on, which a resumed run writes again.

    Returns:
        The last step that had been logged; -1 if none was.
    """
    logged_to = -1

    def write(temporary: Path) -> None:
        nonlocal logged_to
        with temporary.open("w", encoding="utf-8") as file:  # line by line: the file of a long run is large
            for record in read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else ():
                logged_to = record.step
                if record.step < first_step:
                    file.write(_line(record.step, record.time_s, record.metrics))
            file.flush()
            os.fsync(file.fileno())

    write_atomically(run_dir / METRICS_FILE, write)
    return logged_to


def read_metrics(run_dir: Path) -> Iterator[MetricsRecord]:
    """Yield the records of a run in file order. A truncated last line, left by a killed run, is skipped.

    Raises:
        TrackerError: If a line before the last one is not a record.
    """
    path = run_dir / METRICS_FILE
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                metrics = {name: float(value) for name, value in record["metrics"].items()}
                yield MetricsRecord(int(record["step"]), float(record["time_s"]), metrics)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if not line.endswith("\n"):
                    return
                raise TrackerError(f"{path}:{number}: not a metrics record ({error}). Was it edited?") from error
