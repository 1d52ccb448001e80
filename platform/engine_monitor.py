"""Polls the engines' counters once a second: the share of time they had nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ports import EngineLoad
from penstock.rollout.pool import EnginePool

WINDOW_POLLS = 6


class EngineMonitor:
    """Rates from absolute counters over the newest polls, so a missed poll loses nothing.

    Attributes:
        idle_share: 1 − busy seconds ÷ (wall seconds · engines), 0..1.
    """

    def __init__(self, pool: EnginePool, period_s: float = 1.0) -> None:
        self._pool = pool
        self._period_s = period_s
        self._polls: deque[tuple[float, float]] = deque(maxlen=WINDOW_POLLS)
        self.idle_share = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EngineMonitor]:
        """Poll for as long as the context is open."""
        job = asyncio.create_task(self._run(), name="engine monitor")
        try:
            yield self
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(EngineLostError):
                loads = await asyncio.gather(*(engine.load() for engine in self._pool.engines()))
                self._update(time.monotonic(), loads)
            await asyncio.sleep(self._period_s)

    def _update(self, now: float, loads: Sequence[EngineLoad]) -> None:
        busy_s = sum(load.busy_s for load in loads)
        self._polls.append((now, busy_s))
        then, busy_then = self._polls[0]
        if loads and now > then:
            self.idle_share = min(max(1 - (busy_s - busy_then) / ((now - then) * len(loads)), 0.0), 1.0)
