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
from penstock.platform.metrics.run_files import METRICS_FILE
from penstock.platform.metrics.trackers.base import TrackerError

logger = logging.getLogger(__name__)

MAX_UNWRITTEN = 1024
"""Records that are kept in memory while the file cannot be written, some kB each."""


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """One line of `metrics.jsonl`.

    Attributes:
        step: Training step; 0 is before the first one.
        time_s: Unix time, seconds.
        metrics: `family/name -> value`.
    """

    step: int
    time_s: float
    metrics: Mapping[str, float]


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
            self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            TrackerError: The file cannot be written, e.g. because the disk is full.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        shown = {name: number if math.isfinite(number) else str(number) for name, number in numbers.items()}
        line = json.dumps({"step": step, "time_s": round(time.time(), 3), "metrics": shown}, allow_nan=False)
        with boundary(TrackerError, f"{self._path}: cannot be written"):
            self._file.write(line + "\n")
            self._file.flush()

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Nothing: `summary.json` holds it."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
