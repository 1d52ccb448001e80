"""Measures the memory of a run: the sum of PSS over the driver and all its descendants.

PSS (proportional set size) divides shared pages among their users, so shared memory and forked pages
count once. Ray's raylet and workers descend from a driver that started Ray locally.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import psutil

_GIB = float(1 << 30)
_MAX_DUTY = 0.01
"""Maximum share of one core spent on sampling. The interval is extended accordingly."""

_MAX_PAUSE_S = 15.0
"""Longest time between two samples, even if that takes a larger share: on a busy machine a sample may take 0.5 s."""

_ProcessKey = tuple[int, float]


class MemorySampler:
    """Samples the total in a background thread and keeps its peak.

    A process that was seen once is counted until it ends, even if its parent has ended.

    Attributes:
        latest_gib: The last sample, GiB (`memory/pss_gib`).
        peak_gib: The largest so far, GiB.
    """

    def __init__(self, *, interval_s: float = 2.0, read_total: Callable[[], int] | None = None) -> None:
        """Create the sampler. `start` starts the thread.

        Args:
            interval_s: Shortest time between two samples, seconds.
            read_total: Returns the total in bytes; replaced in tests.
        """
        self._interval_s = interval_s
        self._read_total = read_total or self._sum_pss
        self._known: dict[_ProcessKey, psutil.Process] = {}
        self._stop = threading.Event()
        self.latest_gib = 0.0
        self.peak_gib = 0.0
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> float:
        """Stop sampling and return the peak, GiB."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        return self.peak_gib

    def sample(self) -> float:
        """Take one sample now and return it, GiB."""
        self.latest_gib = self._read_total() / _GIB
        self.peak_gib = max(self.peak_gib, self.latest_gib)
        return self.latest_gib

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            cpu_before_s = time.thread_time()
            self.sample()
            pause_s = (time.thread_time() - cpu_before_s) / _MAX_DUTY
            pause_s = max(self._interval_s, min(pause_s, _MAX_PAUSE_S))

    def _sum_pss(self) -> int:
        try:
            root = psutil.Process()
            for process in [root, *root.children(recursive=True)]:
                self._known.setdefault((process.pid, process.create_time()), process)
        except psutil.Error:
            pass  # the process tree changed while it was read; the next sample sees the new one
        total = 0
        for key, process in list(self._known.items()):
            try:
                if process.is_running():
                    total += pss_bytes(process)
                    continue
            except psutil.Error:
                pass
            del self._known[key]
        return total


def pss_bytes(process: psutil.Process) -> int:
    """PSS of one process, bytes; 0 if it has ended or belongs to another user. Without /proc, its unique set size."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:  # noqa: PTH123 - hot path
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
        return 0
    except FileNotFoundError:
        return 0 if os.path.isdir("/proc/self") else int(process.memory_full_info().uss)  # noqa: PTH112
    except (PermissionError, ProcessLookupError):
        return 0
