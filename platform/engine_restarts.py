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
from typing import TypeVar

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import EngineId
from penstock.rollout.pool import EnginePool

logger = logging.getLogger(__name__)
Started = TypeVar("Started")


class EngineRestarts:
    """Starts lost engines anew, each in a task of its own."""

    def __init__(
        self,
        pool: EnginePool,
        start: Callable[[EngineId], Awaitable[Started]],
        catch_up: Callable[[Started], Awaitable[None]],
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
        self._jobs: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Bring engines back for as long as the context is open."""
        self._pool.when_fenced(self._brings_back)
        try:
            yield
        finally:
            self._pool.when_fenced(lambda _engine_id: False)
            for job in self._jobs:
                job.cancel()
            await asyncio.gather(*self._jobs, return_exceptions=True)

    def _brings_back(self, engine_id: EngineId) -> bool:
        if self._num_restarts[engine_id] >= self._most:
            return False
        job = asyncio.create_task(self._bring_back(engine_id), name=f"restart {engine_id}")
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return True

    async def _bring_back(self, engine_id: EngineId) -> None:
        while self._num_restarts[engine_id] < self._most:
            self._num_restarts[engine_id] += 1
            number = f"restart {self._num_restarts[engine_id]} of {self._most}"
            try:
                await self._catch_up(await self._start(engine_id))
            except PenstockError as error:
                logger.warning("%s: %s failed: %s", engine_id, number, error)
            else:
                logger.warning("%s is back in service (%s)", engine_id, number)
                return
        self._pool.gave_up(engine_id)
