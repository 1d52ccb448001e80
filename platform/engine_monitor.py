"""Polls the engines' counters once a second: tokens per second and idle share over the newest interval."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ports import EngineLoad
from penstock.rollout.pool import EnginePool


class EngineMonitor:
    """Rates from absolute counters, so a missed poll loses nothing.

    Attributes:
        tokens_per_s: Tokens sampled by all engines per second, evaluation included.
        idle_share: 1 − busy seconds ÷ (wall seconds · engines), 0..1.
    """

    def __init__(self, pool: EnginePool, period_s: float = 1.0) -> None:
        self._pool = pool
        self._period_s = period_s
        self._last: tuple[float, int, float] | None = None
        self.tokens_per_s = 0.0
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
            with contextlib.suppress(EngineLostError, TimeoutError, ConnectionError):
                loads = await asyncio.gather(*(engine.load() for engine in self._pool.engines()))
                self._update(time.monotonic(), loads)
            await asyncio.sleep(self._period_s)

    def _update(self, now: float, loads: Sequence[EngineLoad]) -> None:
        tokens = sum(load.tokens_generated for load in loads)
        busy_s = sum(load.busy_s for load in loads)
        if self._last is not None and loads and now > self._last[0]:
            then, tokens_then, busy_then = self._last
            self.tokens_per_s = max(tokens - tokens_then, 0) / (now - then)
            self.idle_share = min(max(1 - (busy_s - busy_then) / ((now - then) * len(loads)), 0.0), 1.0)
        self._last = (now, tokens, busy_s)
