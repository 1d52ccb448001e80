"""Polls the load of the engines once a second: measures their idle share and adapts their concurrency limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine, EngineLoad
from penstock.rollout.engine_pool.concurrency import ConcurrencyLimit
from penstock.rollout.engine_pool.pool import EnginePool

logger = logging.getLogger(__name__)

WINDOW_POLLS = 6


class EngineMonitor:
    """Computes rates from absolute counters over the newest polls, so a missed poll loses no data.

    The counters belong to the engine's process and restart at 0 with it. Only differences between two polls of the same
    process are accumulated.

    Attributes:
        idle_share: 1 − busy seconds ÷ wall seconds, both summed over the engines, 0..1.
        num_preemptions: Preemptions of all engines since the run began; absolute.
    """

    def __init__(self, pool: EnginePool, period_s: float = 1.0, *, adapts_concurrency: bool = False) -> None:
        self._pool = pool
        self._period_s = period_s
        self._adapts_concurrency = adapts_concurrency
        self._last_load: dict[EngineId, tuple[float, EngineLoad]] = {}
        self._observed_s = self._busy_s = 0.0
        self._polls: deque[tuple[float, float]] = deque([(0.0, 0.0)], maxlen=WINDOW_POLLS)
        self._limits: dict[EngineId, ConcurrencyLimit] = {}
        self.idle_share = 0.0
        self.num_preemptions = 0

    @property
    def num_engines(self) -> int:
        """Engines in service now."""
        return len(self._pool.engines())

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines since the run began; absolute."""
        return self._pool.num_returned

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EngineMonitor]:
        """Poll for as long as the context is open."""
        job = asyncio.create_task(self.poll_forever(), name="engine monitor")
        job.add_done_callback(_log_failure)
        try:
            yield self
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    async def poll(self) -> None:
        """Query every engine once. An engine that does not answer is skipped; detecting its loss is the pool's task."""
        answers = await asyncio.gather(*(_query_load(engine) for engine in self._pool.engines()))
        loads = {engine_id: load for engine_id, load in answers if load is not None}
        self._update(asyncio.get_running_loop().time(), loads)
        if self._adapts_concurrency:
            for view in self._pool.views():
                if (load := loads.get(view.engine_id)) is None:
                    continue
                limit = self._limits.get(view.engine_id)
                if limit is None:
                    limit = self._limits[view.engine_id] = ConcurrencyLimit.starting(view.max_slots)
                self._pool.set_limit(view.engine_id, limit.observe(load))

    async def poll_forever(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._period_s)

    def _update(self, now: float, loads: Mapping[EngineId, EngineLoad]) -> None:
        for engine_id, load in loads.items():
            polled_at, before = self._last_load.get(engine_id, (now, None))
            self._last_load[engine_id] = now, load
            if before is None or _has_restarted(before, load):
                self.num_preemptions += load.num_preemptions
                continue
            self.num_preemptions += load.num_preemptions - before.num_preemptions
            self._busy_s += load.busy_s - before.busy_s
            self._observed_s += now - polled_at
        self._polls.append((self._observed_s, self._busy_s))
        observed_s, busy_s = self._observed_s - self._polls[0][0], self._busy_s - self._polls[0][1]
        if observed_s > 0:
            self.idle_share = min(max(1 - busy_s / observed_s, 0.0), 1.0)


def _has_restarted(before: EngineLoad, now: EngineLoad) -> bool:
    """Whether a counter has decreased, which happens only if the engine's process was replaced."""
    counters = ((load.busy_s, load.tokens_generated, load.num_preemptions) for load in (before, now))
    return any(later < earlier for earlier, later in zip(*counters, strict=True))


def _log_failure(polling: asyncio.Task[None]) -> None:
    """Log an exception that ended polling; without the log, metrics and limits would silently keep their values."""
    if not polling.cancelled() and (error := polling.exception()) is not None:
        logger.error(
            "engine monitor: polling has failed, so idle/engine_share and adaptive concurrency are no longer updated. "
            "The run continues.",
            exc_info=error,
        )


async def _query_load(engine: Engine) -> tuple[EngineId, EngineLoad | None]:
    try:
        return engine.engine_id, await engine.load()
    except EngineLostError:
        return engine.engine_id, None
