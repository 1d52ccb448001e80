"""Polls the load of the engines once a second: measures their idle share and speed, adapts their concurrency limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine, EngineLoad
from penstock.platform.run.slow_parts import Speed
from penstock.rollout.engine_pool.concurrency import ConcurrencyLimit
from penstock.rollout.engine_pool.pool import EnginePool

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Longest wait for the load of one engine, seconds: all others wait with it for their next poll."""
SPEED_WINDOW_S, LEAST_BUSY_S, WARM_UP_S = 60.0, 20.0, 10.0
"""Over what the speed of an engine is measured: seconds, and busy seconds in them; those that do not count at first."""


class EngineMonitor:
    """Computes rates from absolute counters, so a missed poll loses no data.

    The counters belong to the engine's process and restart at 0 with it. Only differences between two polls of the same
    process are accumulated.

    Attributes:
        num_preemptions: Preemptions of all engines since the run began; absolute.
        has_equal_engines: Whether all should be equally fast.
    """

    def __init__(
        self,
        pool: EnginePool,
        period_s: float = 1.0,
        *,
        adapts_concurrency: bool = False,
        has_equal_engines: bool = True,
    ) -> None:
        self._pool = pool
        self._period_s = period_s
        self._adapts_concurrency = adapts_concurrency
        self._last_load: dict[EngineId, tuple[float, EngineLoad]] = {}
        self._observed_s = self._busy_s = 0.0
        self._limits: dict[EngineId, ConcurrencyLimit] = {}
        self._speeds: dict[EngineId, EngineSpeed] = {}
        self._cache_usage: dict[EngineId, float] = {}
        self._idle_share = 0.0
        self.num_preemptions = 0
        self.has_equal_engines = has_equal_engines

    @property
    def num_engines(self) -> int:
        """Engines in service now."""
        return len(self._pool.engines())

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines since the run began; absolute."""
        return self._pool.num_returned

    def speeds(self) -> dict[EngineId, Speed]:
        """Of the engines in service that were busy for long enough."""
        serving = [engine.engine_id for engine in self._pool.engines()]
        found = {engine_id: self._speeds[engine_id].measured() for engine_id in serving if engine_id in self._speeds}
        return {engine_id: speed for engine_id, speed in found.items() if speed is not None}

    def take_idle_share(self) -> float:
        """1 − busy seconds ÷ wall seconds since the last call, both summed over the engines, 0..1.

        Without a poll since then, it is what the last call has returned.
        """
        if self._observed_s > 0:
            self._idle_share = min(max(1 - self._busy_s / self._observed_s, 0.0), 1.0)
        self._observed_s = self._busy_s = 0.0
        return self._idle_share

    def take_cache_usage(self) -> dict[EngineId, float]:
        """Largest share of each engine's KV cache that was in use at a poll since the last call, 0..1."""
        taken, self._cache_usage = self._cache_usage, {}
        return taken

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
            self._cache_usage[engine_id] = max(load.kv_cache_usage, self._cache_usage.get(engine_id, 0.0))
            if before is None or _has_restarted(before, load):
                self._speeds[engine_id] = EngineSpeed()
                self.num_preemptions += load.num_preemptions
            else:
                self.num_preemptions += load.num_preemptions - before.num_preemptions
                self._busy_s += load.busy_s - before.busy_s
                self._observed_s += now - polled_at
            self._speeds[engine_id].observe(now, load)


class EngineSpeed:
    """Speed of one process of an engine, from its absolute counters.

    Invariant: `_polls` is the shortest newest stretch that is long enough to measure, or all of them.
    """

    def __init__(self) -> None:
        self._first: tuple[float, EngineLoad] | None = None
        self._polls: deque[tuple[float, EngineLoad]] = deque()

    def observe(self, now: float, load: EngineLoad) -> None:
        """Add what a poll has found, at `now` seconds."""
        if load.busy_s < WARM_UP_S:
            return
        self._first = self._first or (now, load)
        if self._polls and self._polls[-1][1].busy_s == load.busy_s:  # it was idle
            self._polls.pop()
        self._polls.append((now, load))
        while len(self._polls) > 1 and _rates(self._polls[1], self._polls[-1]) is not None:
            self._polls.popleft()

    def measured(self) -> Speed | None:
        """The speed in the newest stretch, and before it; None while that is too short."""
        if self._first is None or (now := _rates(self._polls[0], self._polls[-1])) is None:
            return None
        return Speed(now, _rates(self._first, self._polls[0]))


def _rates(start: tuple[float, EngineLoad], end: tuple[float, EngineLoad]) -> tuple[float, float] | None:
    """Tokens per busy second and per request second between two polls; None if that is too short."""
    (began_at, before), (ended_at, after) = start, end
    busy_s = after.busy_s - before.busy_s
    if ended_at - began_at < SPEED_WINDOW_S or busy_s < LEAST_BUSY_S:
        return None
    num_tokens = after.tokens_generated - before.tokens_generated
    return num_tokens / busy_s, num_tokens / max(after.request_s - before.request_s, 1e-9)


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
        async with asyncio.timeout(ANSWER_S):
            return engine.engine_id, await engine.load()
    except (EngineLostError, TimeoutError):
        return engine.engine_id, None
