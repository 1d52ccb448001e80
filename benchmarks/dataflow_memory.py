"""What a process tree over Ray takes. Peak memory: private pages of all processes, and shared memory once.

Shared memory is what the files in it hold, whether or not a process has mapped them: a page of Ray's object store that
a worker wrote and left counts. Everything else is PSS less its shared-memory part.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Self

import psutil

SHARED_MEMORY = "/dev/shm"


class PeakMemory:
    """The largest total while the context is open, sampled in a thread."""

    def __init__(self, interval_s: float) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, tree_bytes())
            if self._stop.wait(self._interval_s):
                return


def tree_bytes() -> int:
    """Now, of this process and all below it."""
    root = psutil.Process()
    private, shared = 0, {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            private += _private_bytes(process.pid)
            shared |= _shared_files(process.pid)
    return private + sum(shared.values())


def tree_cpu_s() -> float:
    """CPU seconds so far, of this process and all below it; unlike wall time hardly touched by other programs."""
    root, total = psutil.Process(), 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _private_bytes(pid: int) -> int:
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Pss", "Pss_Shmem"):
            fields[name] = int(rest.split()[0]) * 1024
    return fields["Pss"] - fields.get("Pss_Shmem", 0)


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """(device, inode) -> bytes held, of the open files in shared memory; deleted ones too."""
    held = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(SHARED_MEMORY):
                status = entry.stat()
                held[status.st_dev, status.st_ino] = status.st_blocks * 512
    return held
