"""Seconds during which at least one request was running: the basis of an engine's idle share."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyClock:
    """Counts the seconds between `enter` and `leave`; overlapping uses count once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._total_s = 0.0
        self._since = 0.0
        self.active = 0

    def enter(self) -> None:
        if self.active == 0:
            self._since = self._now()
        self.active += 1

    def leave(self) -> None:
        assert self.active > 0, "leave without enter"
        self.active -= 1
        if self.active == 0:
            self._total_s += self._now() - self._since

    @property
    def seconds(self) -> float:
        """Absolute busy seconds so far, including the current busy period."""
        return self._total_s + (self._now() - self._since if self.active else 0.0)
