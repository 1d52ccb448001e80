"""How engines take a new version: all at once in flight, all at once after draining, or one by one.

Symbols: N engines in service, v the version they serve, v + 1 the one that was exported. An engine is *frozen* from
the moment its update begins to its acknowledgement; it is *paused* while it gets no new requests.

- In flight (`keep_kv`, `recompute_kv`): every engine is frozen at once, with its requests inside.
- `drain`: every engine is paused, finishes its requests at v, is updated, resumes.
- `multi_version`: one engine after the other is paused, finishes its requests at v and is updated. At most one is
  frozen or paused, so at least N − 1 serve. From the first acknowledgement on, new requests go to v + 1 only (the
  pool's floor), so that the rest drains by itself; the publish is over, the others follow in the background. A
  publish that comes before they have all followed takes over: who is still behind goes straight to its version.

An engine that does not drain in time is frozen with its requests inside, which is what `keep_kv` does: slower
requests may then hold two versions, nothing is lost. No engine serves a version that it has not acknowledged (I8).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, cast

from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck, WeightManifest
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

ATTEMPTS = 2


class UpdatableEngine(Protocol):
    """An engine that takes weights."""

    engine_id: EngineId

    @property
    def version(self) -> int: ...

    async def update_weights(self, manifest: WeightManifest, payload: Any = None) -> WeightAck:
        """Serve `manifest.version` from the return on.

        Raises:
            WeightSyncError: The engine refused.
            EngineLostError: The engine died.
        """
        ...


class WeightUpdater(Protocol):
    """One of the modes.

    Attributes:
        drain_timeouts: Times that requests were frozen in an engine because they did not end in time.
    """

    drain_timeouts: int

    async def settle(self) -> None:
        """End what is left of the version before: its bytes are about to go."""
        ...

    async def update(self, manifest: WeightManifest, payload: Any) -> list[WeightAck]:
        """Bring the engines to a version; returns when new work is sampled from it, with those that have it by then."""
        ...

    async def close(self) -> None: ...


class InFlight:
    """All engines at once, with their requests inside."""

    def __init__(self, pool: EnginePool, config: WeightsConfig) -> None:
        self.drain_timeouts = 0
        self._pool = pool
        self._config = config

    async def settle(self) -> None:
        """Nothing is ever left."""

    async def update(self, manifest: WeightManifest, payload: Any) -> list[WeightAck]:
        sent = (send(engine, manifest, payload, self._pool, self._config) for engine in in_service(self._pool))
        acks = [ack for ack in await asyncio.gather(*sent) if ack is not None]
        if acks:
            self._pool.raise_floor(manifest.version)
        return acks

    async def close(self) -> None:
        pass


class Drain(InFlight):
    """All engines at once, after their requests have ended. Waits for: the requests, at most `drain_timeout_s`."""

    async def update(self, manifest: WeightManifest, payload: Any) -> list[WeightAck]:
        names = [engine.engine_id for engine in in_service(self._pool)]
        for name in names:
            self._pool.pause(name)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await asyncio.gather(*(self._pool.quiet(name) for name in names))
        except TimeoutError:
            self.drain_timeouts += _report_late(self._pool, names, manifest, self._config)
        try:
            return await super().update(manifest, payload)
        finally:
            for name in names:
                self._pool.resume(name)


class Rolling:
    """One engine after the other. Consumes: a version. Waits for: its next engine's requests, at most
    `drain_timeout_s` since that got its last new one. Unblocked by: their end, the time limit, the next publish.
    """

    def __init__(self, pool: EnginePool, config: WeightsConfig) -> None:
        self.drain_timeouts = 0
        self._pool = pool
        self._config = config
        self._taken_over = asyncio.Event()
        self._roll: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Let the engine that is being updated finish; the others wait for the next version."""
        roll, self._roll = self._roll, None
        if roll is not None:
            self._taken_over.set()
            await roll

    async def update(self, manifest: WeightManifest, payload: Any) -> list[WeightAck]:
        await self.settle()
        self._taken_over.clear()
        first: asyncio.Future[WeightAck | None] = asyncio.get_running_loop().create_future()
        self._roll = asyncio.create_task(self._run(manifest, payload, first), name=f"roll to v{manifest.version}")
        either: set[asyncio.Future[Any]] = {first, self._roll}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await self._roll  # it ended without an acknowledgement, or failed
            return []
        ack = first.result()
        return [] if ack is None else [ack]

    async def close(self) -> None:
        """Leave the engines as they are."""
        if self._roll is not None:
            self._roll.cancel()
            await asyncio.gather(self._roll, return_exceptions=True)

    async def _run(self, manifest: WeightManifest, payload: Any, first: asyncio.Future[WeightAck | None]) -> None:
        now = asyncio.get_running_loop().time
        drained_by = now() + self._config.drain_timeout_s
        asked: set[EngineId] = set()
        while (engine := self._next(manifest.version, asked)) is not None:
            asked.add(engine.engine_id)
            self._pool.pause(engine.engine_id)
            try:
                if not await self._drained(engine, manifest, drained_by - now()):
                    return
                ack = await send(engine, manifest, payload, self._pool, self._config)
            finally:
                self._pool.resume(engine.engine_id)
            if ack is not None:
                self._pool.raise_floor(manifest.version)
                if not first.done():
                    first.set_result(ack)
                    drained_by = now() + self._config.drain_timeout_s  # from here on all others drain

    def _next(self, version: int, asked: set[EngineId]) -> UpdatableEngine | None:
        """Of the engines that are behind, the one that has least left to do."""
        views = self._pool.views()
        behind = [view for view in views if view.version < version and view.engine_id not in asked]
        if not behind:
            return None
        nearest = min(behind, key=lambda view: (view.in_use > 0, view.outstanding_tokens))
        return cast("UpdatableEngine", nearest.engine)

    async def _drained(self, engine: UpdatableEngine, manifest: WeightManifest, timeout_s: float) -> bool:
        """Whether to go on with this engine: it is quiet, or its time is up, and no newer version has come."""
        quiet = asyncio.create_task(self._pool.quiet(engine.engine_id))
        taken_over = asyncio.create_task(self._taken_over.wait())
        try:
            done, _ = await asyncio.wait(
                (quiet, taken_over), timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            quiet.cancel()
            taken_over.cancel()
        if not done:
            self.drain_timeouts += _report_late(self._pool, [engine.engine_id], manifest, self._config)
        return not self._taken_over.is_set()


def make_updater(pool: EnginePool, config: WeightsConfig) -> WeightUpdater:
    """The mode that the configuration names."""
    if config.update_mode == "multi_version":
        return Rolling(pool, config)
    return Drain(pool, config) if config.update_mode == "drain" else InFlight(pool, config)


def in_service(pool: EnginePool) -> list[UpdatableEngine]:
    """Engines that are not fenced off."""
    return cast("list[UpdatableEngine]", pool.engines())


async def send(
    engine: UpdatableEngine, manifest: WeightManifest, payload: Any, pool: EnginePool, config: WeightsConfig
) -> WeightAck | None:
    """Update one engine, in a second attempt if need be; then it is fenced off and the run goes on with the rest."""
    failure = ""
    for _ in range(ATTEMPTS):
        try:
            async with asyncio.timeout(config.timeout_s):
                return await engine.update_weights(manifest, payload)
        except TimeoutError:
            failure = f"publish v{manifest.version} took longer than {config.timeout_s:.0f} s"
        except (WeightSyncError, EngineLostError) as error:
            failure = str(error)
    await pool.fence(engine.engine_id, failure)
    return None


def _report_late(pool: EnginePool, names: list[EngineId], manifest: WeightManifest, config: WeightsConfig) -> int:
    """Say who did not drain; returns how many."""
    late = [view for view in pool.views() if view.engine_id in names and view.in_use]
    for view in late:
        logger.warning(
            "publish v%d: %d requests on %s had not ended within weights.drain_timeout_s=%g; they are frozen for the "
            "swap and go on with the new weights",
            *(manifest.version, view.in_use, view.engine_id, config.drain_timeout_s),
        )
    return len(late)
