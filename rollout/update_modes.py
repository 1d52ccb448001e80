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

Every engine gets two attempts. If one has refused its first, what it found may be damaged where all read it: while the
trainer still has the version, it is written once more before anyone's second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

from penstock.dataflow.errors import EngineLostError, PenstockError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck, WeightManifest
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

WriteAgain = Callable[[], Awaitable[tuple[WeightManifest, Any]]]
"""Has the trainer write a version once more; returns what engines are told of it, manifest and payload."""


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

    async def update(
        self, manifest: WeightManifest, payload: Any, write_again: WriteAgain | None = None
    ) -> list[WeightAck]:
        """Bring the engines to a version; returns when new work is sampled from it, with those that have it by then.

        Args:
            manifest: The version.
            payload: What else engines need to fetch it.
            write_again: Called at most once, and not after the return; None if the trainer has it no more.
        """
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

    async def update(
        self, manifest: WeightManifest, payload: Any, write_again: WriteAgain | None = None
    ) -> list[WeightAck]:
        engines, timeout_s = in_service(self._pool), self._config.timeout_s
        answers = await asyncio.gather(*(attempt(engine, manifest, payload, timeout_s) for engine in engines))
        acks = [answer for answer in answers if isinstance(answer, WeightAck)]
        failed = [engine for engine, answer in zip(engines, answers, strict=True) if not isinstance(answer, WeightAck)]
        if write_again is not None and is_refused(answers):
            manifest, payload = await write_again()
        last = (last_attempt(engine, manifest, payload, self._pool, timeout_s) for engine in failed)
        acks += [ack for ack in await asyncio.gather(*last) if ack is not None]
        if acks:
            self._pool.raise_floor(manifest.version)
        return acks

    async def close(self) -> None:
        pass


class Drain(InFlight):
    """All engines at once, after their requests have ended. Waits for: the requests, at most `drain_timeout_s`."""

    async def update(
        self, manifest: WeightManifest, payload: Any, write_again: WriteAgain | None = None
    ) -> list[WeightAck]:
        names = [engine.engine_id for engine in in_service(self._pool)]
        for name in names:
            self._pool.pause(name)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await asyncio.gather(*(self._pool.quiet(name) for name in names))
        except TimeoutError:
            self.drain_timeouts += _report_late(self._pool, names, manifest, self._config)
        try:
            return await super().update(manifest, payload, write_again)
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

    async def update(
        self, manifest: WeightManifest, payload: Any, write_again: WriteAgain | None = None
    ) -> list[WeightAck]:
        await self.settle()
        self._taken_over.clear()
        first: asyncio.Future[WeightAck | None] = asyncio.get_running_loop().create_future()
        roll = self._run(manifest, payload, first, write_again)
        self._roll = asyncio.create_task(roll, name=f"roll to v{manifest.version}")
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

    async def _run(
        self,
        manifest: WeightManifest,
        payload: Any,
        first: asyncio.Future[WeightAck | None],
        write_again: WriteAgain | None,
    ) -> None:
        now = asyncio.get_running_loop().time
        drained_by = now() + self._config.drain_timeout_s
        asked: set[EngineId] = set()
        while (engine := self._next(manifest.version, asked)) is not None:
            asked.add(engine.engine_id)
            self._pool.pause(engine.engine_id)
            try:
                if not await self._drained(engine, manifest, drained_by - now()):
                    return
                answer = await attempt(engine, manifest, payload, self._config.timeout_s)
                if write_again is not None and not first.done() and is_refused([answer]):
                    manifest, payload = await write_again()
                    write_again = None
                ack = (
                    answer
                    if isinstance(answer, WeightAck)
                    else await last_attempt(engine, manifest, payload, self._pool, self._config.timeout_s)
                )
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


async def attempt(
    engine: UpdatableEngine, manifest: WeightManifest, payload: Any, timeout_s: float
) -> WeightAck | PenstockError:
    """Update one engine; its acknowledgement, or why there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            return await engine.update_weights(manifest, payload)
    except TimeoutError:
        return EngineLostError(f"publish v{manifest.version} took longer than {timeout_s:.0f} s")
    except (WeightSyncError, EngineLostError) as error:
        logger.warning("%s has not taken v%d: %s", engine.engine_id, manifest.version, error)
        return error


async def last_attempt(
    engine: UpdatableEngine, manifest: WeightManifest, payload: Any, pool: EnginePool, timeout_s: float
) -> WeightAck | None:
    """Update one engine; if that fails it is fenced off, and the run goes on with the rest."""
    answer = await attempt(engine, manifest, payload, timeout_s)
    if isinstance(answer, WeightAck):
        return answer
    await pool.fence(engine.engine_id, str(answer))
    return None


def is_refused(answers: Sequence[WeightAck | PenstockError]) -> bool:
    """Whether an engine has seen the version and would not take it."""
    return any(isinstance(answer, WeightSyncError) for answer in answers)


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
