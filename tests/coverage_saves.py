"""For coverage.py: every process writes what it has run once a second, because tests and Ray kill processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import coverage

INTERVAL_S = 1.0


def coverage_init(registry: Any, options: dict[str, str]) -> None:
    """Called by coverage.py when a process begins."""
    del registry, options
    threading.Thread(target=save_every_second, name="coverage", daemon=True).start()


def save_every_second() -> None:
    while True:
        time.sleep(INTERVAL_S)
        measuring = coverage.Coverage.current()
        if measuring is not None:
            measuring.save()
