"""Restarts engines that the pool has fenced: a new process, the current weights, then back into the pool.

Consumes: engines fenced for any reason. Waits for: the new process to load its model, a running publish to end, the
engine to receive the current version. Unblocked by: these events or their time limits. Each engine is restarted at most
`rollout.max_engine_restarts_per_hour` times within an hour, with growing pauses, and then stays out of service. While a
restart is running the pool keeps waiting requests queued, so a run survives the loss of its only engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import EngineId
from penstock.rollout.pool.pool import EnginePool

logger = logging.getLogger(__name__)

HOUR_S = 3600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before the second restart of an engine within an hour, doubled for each one after it; seconds. Each pause is
shortened by a random part of up to a half, so that engines that were lost together do not start together."""


class EngineRestarts:
    """Restarts lost engines, each in its own asyncio task."""

    def __init__(
        self,
        pool: EnginePool,
        start: Callable[[EngineId], Awaitable[RemoteEngine]],
        catch_up: Callable[[RemoteEngine], Awaitable[None]],
        max_restarts_per_hour: int,
    ) -> None:
        """Create the supervisor; `running` activates it.

        Args:
            pool: Pool of the engines.
            start: Kills the remains of an engine and starts a new process for it.
            catch_up: Sends the current version to the engine and adds it to the pool.
            max_restarts_per_hour: Maximum number of restarts of one engine within an hour.
        """
        self._pool = pool
        self._start = start
        self._catch_up = catch_up
        self._max_restarts = max_restarts_per_hour
        self._restarts: defaultdict[EngineId, deque[float]] = defaultdict(deque)
        self._jobs: dict[EngineId, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restart engines while the context is open."""
        self._pool.set_restart_hook(self._request_restart)
        try:
            yield
        finally:
            self._pool.set_restart_hook(lambda _engine_id: False)
            jobs = list(self._jobs.values())
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _request_restart(self, engine_id: EngineId) -> bool:
        """Start a restart unless the limit is reached. Returns whether the engine may come back.

        Only an engine that has served since is forgiven the restarts of more than an hour ago. So one that never comes
        up is given up after `max_restarts_per_hour` attempts, however long each of them takes.
        """
        # An engine that is fenced again before it has caught up is handled by the loop of its running job.
        if engine_id in self._jobs:
            return True
        restarts, now = self._restarts[engine_id], asyncio.get_running_loop().time()
        while restarts and restarts[0] <= now - HOUR_S:
            restarts.popleft()
        if len(restarts) >= self._max_restarts:
            return False
        self._jobs[engine_id] = asyncio.create_task(self._restart(engine_id), name=f"restart {engine_id}")
        return True

    async def _restart(self, engine_id: EngineId) -> None:
        """Restart an engine until it serves or the limit is reached.

        All exceptions are caught, so that the pool always learns of an abandoned restart and fails what waits for it.
        """
        is_back, restarts = False, self._restarts[engine_id]
        while not is_back and len(restarts) < self._max_restarts:
            await asyncio.sleep(_pause_s(len(restarts)))
            restarts.append(asyncio.get_running_loop().time())
            number = f"restart {len(restarts)} of {self._max_restarts} within an hour"
            try:
                await self._catch_up(await self._start(engine_id))
            except Exception as error:  # noqa: BLE001 - includes errors of Ray and the operating system
                cause = error if isinstance(error, PenstockError) else repr(error)
                logger.warning("%s: %s failed: %s", engine_id, number, cause)
                continue
            is_back = engine_id not in self._pool.fenced
            logger.warning("%s %s (%s)", engine_id, "is back in service" if is_back else "was fenced again", number)
        del self._jobs[engine_id]
        if not is_back:
            self._pool.abandon_return(engine_id)


def _pause_s(num_restarts: int) -> float:
    """Pause before the next restart of an engine that has had `num_restarts`; the first one comes at once."""
    if not num_restarts:
        return 0.0
    longest_s: float = min(FIRST_PAUSE_S * 2 ** (num_restarts - 1), LONGEST_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)
