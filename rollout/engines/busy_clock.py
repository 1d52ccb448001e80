"""Seconds during which requests were running: the basis of an engine's idle share and of its speed."""

from __future__ import annotations

import time


class BusyClock:
    """Counts the seconds between `enter` and `leave`.

    Attributes:
        active: Requests that run now.
    """

    def __init__(self) -> None:
        self._counted_until = time.monotonic()
        self._busy_s = self._request_s = 0.0
        self.active = 0

    def enter(self) -> None:
        self._count()
        self.active += 1

    def leave(self) -> None:
        assert self.active > 0, "leave without enter"
        self._count()
        self.active -= 1

    @property
    def seconds(self) -> float:
        """Absolute seconds so far with at least one request; overlapping ones count once."""
        self._count()
        return self._busy_s

    @property
    def request_seconds(self) -> float:
        """Absolute seconds so far, summed over the requests."""
        self._count()
        return self._request_s

    def _count(self) -> None:
        now = time.monotonic()
        elapsed_s, self._counted_until = now - self._counted_until, now
        self._busy_s += elapsed_s if self.active else 0.0
        self._request_s += elapsed_s * self.active
