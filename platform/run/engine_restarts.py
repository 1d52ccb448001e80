"""Restarts engines that the pool has fenced: a new process, the current weights, then back into the pool.

Consumes: engines fenced for any reason. Waits for: the new process to load its model, a running publish to end, the
engine to receive the current version. Unblocked by: these events or their time limits. Each engine is restarted at most
`rollout.max_engine_restarts_per_hour` times within an hour, with growing pauses, and then stays out of service. While a
restart is running the pool keeps waiting requests queued, so a run survives the loss of its only engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from penstock.actors.engine.client import RemoteEngine
from penstock.actors.restart_budget import RestartBudget
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import EngineId
from penstock.rollout.engine_pool.pool import EnginePool

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineRestarts:
    """Restarts lost engines, each in its own asyncio task; `running` activates it."""

    pool: EnginePool
    """Pool of the engines."""
    start: Callable[[EngineId], Awaitable[RemoteEngine]]
    """Kills the remains of an engine and starts a new process for it."""
    catch_up: Callable[[RemoteEngine], Awaitable[None]]
    """Sends the current version to the engine and adds it to the pool."""
    max_restarts_per_hour: int
    """Maximum number of restarts of one engine within an hour."""
    _budgets: dict[EngineId, RestartBudget] = field(default_factory=dict)
    _jobs: dict[EngineId, asyncio.Task[None]] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restart engines while the context is open."""
        self.pool.set_restart_hook(self._request_restart, self.max_restarts_per_hour)
        try:
            yield
        finally:
            self.pool.set_restart_hook(lambda _engine_id: False, self.max_restarts_per_hour)
            jobs = list(self._jobs.values())
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _request_restart(self, engine_id: EngineId) -> bool:
        """Start a restart unless the limit is reached. Returns whether the engine may come back."""
        # An engine that is fenced again before it has caught up is handled by the loop of its running job.
        if engine_id in self._jobs:
            return True
        pause_s = self._budgets.setdefault(engine_id, RestartBudget(self.max_restarts_per_hour)).take()
        if pause_s is None:
            return False
        self._jobs[engine_id] = asyncio.create_task(self._restart(engine_id, pause_s), name=f"restart {engine_id}")
        return True

    async def _restart(self, engine_id: EngineId, pause_s: float | None) -> None:
        """Restart an engine until it serves or the limit is reached.

        All exceptions are caught, so that the pool always learns of an abandoned restart and fails what waits for it.
        """
        is_back, budget = False, self._budgets[engine_id]
        while not is_back and pause_s is not None:
            await asyncio.sleep(pause_s)
            try:
                await self.catch_up(await self.start(engine_id))
                is_back = engine_id not in self.pool.fenced
                logger.warning("%s %s (%s)", engine_id, "is back in service" if is_back else "was fenced again", budget)
            except Exception as error:  # noqa: BLE001 - includes errors of Ray and the operating system
                cause = error if isinstance(error, PenstockError) else repr(error)
                logger.warning("%s: %s failed: %s", engine_id, budget, cause)
            if not is_back:
                pause_s = budget.take(has_served=False)
        del self._jobs[engine_id]
        if not is_back:
            self.pool.abandon_return(engine_id)
