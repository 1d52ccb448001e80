"""Engines that were fenced off, brought back: a new process, the version in service, then the pool.

Consumes: engines that the pool fences off, for whatever reason. Waits for: the new process to load its model, the
publish that is under way, the version in service to be in the engine. Unblocked by: those, or their time limits. Every
engine is started anew at most `rollout.max_engine_restarts` times; then it stays out of service. While one is on its
way the pool keeps what waits, so that a run survives the loss of its only engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import EngineId
from penstock.rollout.pool.pool import EnginePool

logger = logging.getLogger(__name__)


class EngineRestarts:
    """Starts lost engines anew, each in a task of its own."""

    def __init__(
        self,
        pool: EnginePool,
        start: Callable[[EngineId], Awaitable[RemoteEngine]],
        catch_up: Callable[[RemoteEngine], Awaitable[None]],
        most: int,
    ) -> None:
        """Connect both.

        Args:
            pool: Whose engines.
            start: Ends what is left of an engine, and starts it anew.
            catch_up: Gives it the version in service, and adds it to the pool.
            most: Restarts of one engine.
        """
        self._pool = pool
        self._start = start
        self._catch_up = catch_up
        self._most = most
        self._num_restarts = Counter[EngineId]()
        self._jobs: dict[EngineId, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Bring engines back for as long as the context is open."""
        self._pool.when_fenced(self._brings_back)
        try:
            yield
        finally:
            self._pool.when_fenced(lambda _engine_id: False)
            jobs = list(self._jobs.values())
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _brings_back(self, engine_id: EngineId) -> bool:
        if engine_id in self._jobs:  # fenced off before it caught up: that job goes on with it
            return True
        if self._num_restarts[engine_id] >= self._most:
            return False
        self._jobs[engine_id] = asyncio.create_task(self._bring_back(engine_id), name=f"restart {engine_id}")
        return True

    async def _bring_back(self, engine_id: EngineId) -> None:
        """Start it until it serves. Whatever a start fails with, requests and publishes that wait hear of the end."""
        is_back = False
        while not is_back and self._num_restarts[engine_id] < self._most:
            self._num_restarts[engine_id] += 1
            number = f"restart {self._num_restarts[engine_id]} of {self._most}"
            try:
                await self._catch_up(await self._start(engine_id))
            except Exception as error:  # noqa: BLE001 - also what Ray and the system raise
                cause = error if isinstance(error, PenstockError) else repr(error)
                logger.warning("%s: %s failed: %s", engine_id, number, cause)
                continue
            is_back = engine_id not in self._pool.fenced
            logger.warning("%s %s (%s)", engine_id, "is back in service" if is_back else "was fenced off again", number)
        del self._jobs[engine_id]
        if not is_back:
            self._pool.gave_up(engine_id)
