"""The engines as one pool: least-loaded routing with a hard limit of requests per engine.

Consumes: leases. Waits for: an engine with a free slot. Unblocked by: a lease given back, an engine
that joins, the loss of the last engine (then every waiter gets the error). A lease is a context
manager, so a slot cannot leak.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine

logger = logging.getLogger(__name__)


class EnginePool:
    """Routes requests to the engine with the fewest requests; ties are broken at random.

    Attributes:
        max_per_engine: Requests one engine holds at once; more wait here, not yet bound to a version.
    """

    def __init__(self, engines: Sequence[Engine], max_per_engine: int, seed: int = 0) -> None:
        self.max_per_engine = max_per_engine
        self._engines = {engine.engine_id: engine for engine in engines}
        self._in_use = dict.fromkeys(self._engines, 0)
        self._fenced: dict[EngineId, str] = {}
        self._changed = asyncio.Condition()
        self._idle = asyncio.Event()
        self._idle.set()
        self._random = random.Random(seed)

    def engines(self) -> list[Engine]:
        """Engines that may serve, in the order they were given."""
        return [engine for engine_id, engine in self._engines.items() if engine_id not in self._fenced]

    @property
    def fenced(self) -> dict[EngineId, str]:
        """Engines taken out of service, with the reason."""
        return dict(self._fenced)

    async def fence(self, engine_id: EngineId, reason: str) -> None:
        """Take an engine out of service; nothing new is routed to it."""
        async with self._changed:
            if engine_id not in self._fenced:
                self._fenced[engine_id] = reason
                logger.warning("%s is fenced off and gets no more work: %s", engine_id, reason)
            self._changed.notify_all()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Engine]:
        """Hold one slot of the least-loaded engine.

        Raises:
            EngineLostError: If no engine is left.
        """
        engine = await self._acquire()
        try:
            yield engine
        finally:
            self._in_use[engine.engine_id] -= 1
            if not any(self._in_use.values()):
                self._idle.set()
            async with self._changed:
                self._changed.notify()

    async def idle(self) -> None:
        """Wait until no request holds a slot."""
        await self._idle.wait()

    async def _acquire(self) -> Engine:
        async with self._changed:
            while True:
                serving = self.engines()
                if not serving:
                    raise EngineLostError(f"no rollout engine is left in service: {self._fenced}")
                fewest = min(self._in_use[engine.engine_id] for engine in serving)
                if fewest < self.max_per_engine:
                    idlest = [engine for engine in serving if self._in_use[engine.engine_id] == fewest]
                    engine = self._random.choice(idlest)
                    self._in_use[engine.engine_id] += 1
                    self._idle.clear()
                    return engine
                await self._changed.wait()
