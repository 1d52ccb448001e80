"""Publishing a version: send it once, update the engines, and accept only engines that acknowledge its checksum.

Consumes: a new version of the trainer. Waits for: the engines' acknowledgements, as the update mode requires. Unblocked
by: those, or the time limit. One slow engine never stops the run: an engine that is late or refuses a version gets it
once more, and if that fails too it is *fenced*, taken out of service until it has been restarted (`catch_up`).

With `weights.overlap` a publish returns when the version has left the training ranks: its delivery continues during the
next step. The bound on staleness still holds, because from then on no request starts below that version: new requests
wait for the first engine that has it. The next publish waits for the delivery of the previous one.

How engines are updated (`weights.update_mode`). Symbols: N engines in service, v the version they serve, v + 1 the
published one. An engine that is updated fetches the version beside its decoding; then it is *frozen*, samples no token,
while it swaps the weights and reads them back (with `staging=bucket`, while it fetches them, too). An engine is
*paused* while it gets no new requests.

- In flight (`keep_kv`, `recompute_kv`): all engines at once, with their running requests. These keep their KV cache, or
  have it computed again by the new weights.
- `drain`: all engines are paused, finish their requests at v, are updated, and resume.
- `multi_version`: one engine after the other is paused, finishes its requests at v and is updated. At most one is
  frozen or paused, so at least N − 1 generate. From the first acknowledgement on, new requests go to v + 1 only (the
  pool's minimum version), so the other engines drain by themselves; the publish returns, and they are updated in the
  background. If the next publish starts before that has ended, the engines still at v go directly to its version.

An engine that does not drain in time is updated with its running requests, as with `keep_kv`: these requests may then
contain two versions, but nothing is lost. No engine serves a version that it has not acknowledged (I8).

What is done again: every engine gets two attempts. A version that an engine *refuses* may be damaged in the copy that
all engines read, so the trainer writes it once more before the second attempt (`write_again`; with overlap it has moved
on, and does not). If no engine took the version, `publish` starts again once one has been restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from penstock.actors.engine.client import RemoteEngine, in_service
from penstock.actors.ray_errors import silence_limit
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.transports import PublishedVersion, PublishHandle, WeightTransport
from penstock.dataflow.errors import EngineLostError, PenstockError, WeightSendError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import PublishReport, WeightAck
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

Probe = Callable[[int], Awaitable[float | None]]
"""Largest difference of the engines' logprobs at a version from the trainer's, nat; None if it was not measured."""
WriteAgain = Callable[[], Awaitable[PublishedVersion]]
"""Makes the trainer write a version once more."""


class ActorWeightPublisher:
    """`WeightPublisher` over a transport and the engines of a pool.

    Attributes:
        last: Report of the newest complete publish.
    """

    def __init__(
        self,
        pool: EnginePool,
        config: WeightsConfig,
        transport: WeightTransport,
        trainer: TrainerClient | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Connect transport and engines.

        Args:
            pool: The engines.
            config: Of the publishing.
            transport: Makes a version available to engines.
            trainer: Asked to write again a version that no engine has any more; None: it cannot.
            probe: Compares the engines with the trainer at every `probe_every`-th version, from version 0 on.
        """
        self._pool = pool
        self._config = config
        self._transport = transport
        self._trainer = trainer
        self._probe = probe
        self._updater = make_updater(pool, config)
        self._delivery: asyncio.Task[PublishReport] | None = None
        self._publishing = asyncio.Lock()
        self._published: PublishedVersion | None = None
        self.last: PublishReport | None = None

    async def catch_up(self, engine: RemoteEngine) -> None:
        """Update an engine that joins to the served version, then put it into service. The next publish waits for this.

        The engine may refuse the version: a buffer on its own device is only written by a publish, and a file may be
        damaged. If another engine serves this version or a step is running, it waits for the next one, and gets no
        requests until then. Otherwise nothing would generate any more, so the trainer writes the version again, which
        it still has: `step_lock` makes the next step wait for that.

        Raises:
            PlacementError: If the weight transport does not reach its node.
            EngineLostError: If it died, or did not answer within `timeout_s`.
            WeightSyncError: If it has also refused the version written once more; it is fenced then.
        """
        self._transport.check_reaches(engine)
        async with self.held_off():
            published, answer = self._published, None
            if published is not None:
                answer = await attempt(engine, published, self._config.timeout_s)
                if isinstance(answer, EngineLostError):
                    raise answer
            self._pool.add(engine)  # before the version is written again: only engines of the pool get version buffers
            if published is not None and isinstance(answer, WeightSyncError):
                await self._write_if_none_serves(published.manifest.version, engine)

    @asynccontextmanager
    async def held_off(self) -> AsyncIterator[None]:
        """Wait until the engines have what was published, and let no other publish begin within the context.

        With `multi_version` the remaining engines may still be updated one after the other.
        """
        async with self._publishing:
            if self._delivery is not None:
                await asyncio.wait([self._delivery])
            yield

    async def _write_if_none_serves(self, version: int, engine: RemoteEngine) -> None:
        """Have the trainer write a version that no engine has any more, unless a step to the next one is running."""
        trainer, is_served = self._trainer, any(view.version >= version for view in self._pool.views())
        if is_served or trainer is None or trainer.step_lock.locked() or trainer.version != version:
            return
        logger.warning("publish v%d: no engine has it any more, so it is written for %s", version, engine.engine_id)
        try:
            async with trainer.step_lock:
                await self._updater.settle()
                handle = await self._transport.send(version)
                await self._deliver(version, handle, time.monotonic(), 0.0, may_rewrite=False)
        except Exception as error:
            self._pool.fence(engine.engine_id, str(error))
            raise

    async def publish(self, version: int) -> PublishReport:
        """Publish `version`, so that new requests are sampled from it. If no engine takes it, wait for restarting ones.

        Returns:
            Its report; with overlap that of the previous version, unless this one is probed.

        Raises:
            WeightSendError: If the training ranks cannot write it.
            WeightSyncError: If no engine took it (with overlap: the previous version) and none is restarting. Or if an
                engine's logprobs differ from the trainer's.
        """
        while True:
            await self._pool.wait_available()
            if not self._pool.engines():
                raise WeightSyncError(f"publish v{version}: {self._pool.no_engine_left()}")
            try:
                async with self._publishing:
                    report = await self._publish(version)
                break
            except WeightSendError:
                raise
            except WeightSyncError as error:
                if not self._pool.num_returning:
                    raise
                logger.warning("%s Engines are being restarted and get v%d after that.", error, version)
            await self._pool.wait_one_returned()
        every = self._config.probe_every
        if self._probe is None or not every or version % every:
            return report
        report = await self.delivered()
        return replace(report, max_logprob_diff=await self._probe(version))

    async def _publish(self, version: int) -> PublishReport:
        await self._end_delivery()
        await self._updater.settle()  # the transport removes the previous version
        started = time.monotonic()
        handle = await self._transport.send(version)
        send_s = time.monotonic() - started
        if not self._config.overlap or self.last is None:  # no engine can generate before the first version
            self.last = await self._deliver(version, handle, started, send_s, may_rewrite=True)
        else:
            self._pool.set_min_version(version)
            delivery = self._deliver(version, handle, started, send_s, may_rewrite=False)
            self._delivery = asyncio.create_task(self._in_background(delivery), name=f"deliver v{version}")
        return self.last

    async def delivered(self) -> PublishReport:
        """Wait until the engines have the newest published version; returns the report of the last complete publish.

        Raises:
            WeightSyncError: If none took it, and none returns.
        """
        try:
            await self._end_delivery()
        except WeightSendError:
            raise
        except WeightSyncError:
            await self._pool.wait_available()  # a restarted engine has the version when it returns
            if not self._pool.engines():
                raise
        assert self.last is not None, "nothing was published"
        return self.last

    async def _end_delivery(self) -> None:
        """Wait for a delivery in the background.

        If no engine took the version, all were fenced (`_in_background`), and those that are in service now have been
        restarted with it. So the failure is over.

        Raises:
            WeightSyncError: If none took it, and none is in service.
        """
        delivery, self._delivery = self._delivery, None
        if delivery is None:
            return
        try:
            self.last = await delivery
        except WeightSendError:
            raise
        except WeightSyncError as error:
            if not self._pool.engines():
                raise
            logger.warning("%s Engines have been restarted since.", error)

    async def close(self) -> None:
        """End running updates; engines keep the version they have."""
        if self._delivery is not None:
            self._delivery.cancel()
            await asyncio.gather(self._delivery, return_exceptions=True)
        await self._updater.close()
        await self._transport.close()

    async def _in_background(self, delivery: Awaitable[PublishReport]) -> PublishReport:
        """A delivery with overlap. If it fails, engines are fenced, and requests that wait for it get its error."""
        try:
            return await delivery
        except PenstockError as error:
            for engine in self._pool.engines():
                self._pool.fence(engine.engine_id, str(error))
            raise

    async def _deliver(
        self, version: int, handle: PublishHandle, started: float, send_s: float, *, may_rewrite: bool
    ) -> PublishReport:
        published, rewrites = await handle, 0
        self._published = published

        async def write_again() -> PublishedVersion:
            nonlocal rewrites
            rewrites += 1
            logger.warning("publish v%d: an engine refused it, so the trainer writes it once more", version)
            self._published = repeated = await (await self._transport.send(version))
            return repeated

        acks = await self._updater.update(published, write_again if may_rewrite else None)
        if not acks:
            raise WeightSyncError(f"publish v{version}: no engine acknowledged it: {self._pool.no_engine_left()}")
        return PublishReport(
            version=version,
            num_bytes=published.manifest.num_bytes,
            send_s=send_s,
            total_s=time.monotonic() - started,
            acks=acks,
            drain_timeouts=self._updater.drain_timeouts,
            sent_bytes=published.sent_bytes,
            changed_share=published.changed_share,
            rewrites=rewrites,
        )


class InFlight:
    """Updates all engines at once, with their running requests.

    Attributes:
        drain_timeouts: Number of times an engine was frozen with requests because they did not end in time.
    """

    def __init__(self, pool: EnginePool, config: WeightsConfig) -> None:
        self.drain_timeouts = 0
        self._pool = pool
        self._config = config

    async def settle(self) -> None:
        """Wait until no engine reads the previous version, whose bytes are removed next. Here `update` has waited."""

    async def update(self, published: PublishedVersion, write_again: WriteAgain | None = None) -> list[WeightAck]:
        """Update the engines to a version.

        Args:
            published: The version.
            write_again: Called at most once, and not after the return; None if the trainer no longer has it.

        Returns:
            The acknowledgements so far, as soon as new requests are sampled from the version.
        """
        engines, timeout_s = in_service(self._pool), self._config.timeout_s
        answers = await asyncio.gather(*(self._first_attempt(engine, published) for engine in engines))
        acks = [answer for answer in answers if isinstance(answer, WeightAck)]
        failed = [engine for engine, answer in zip(engines, answers, strict=True) if not isinstance(answer, WeightAck)]
        try:
            if write_again is not None and is_refused(answers):
                published = await write_again()
            last = (last_attempt(engine, published, self._pool, timeout_s) for engine in failed)
            acks += [ack for ack in await asyncio.gather(*last) if ack is not None]
        finally:
            for engine in failed:
                self._pool.resume(engine.engine_id)
        if acks:
            self._pool.set_min_version(published.manifest.version)
        return acks

    async def _first_attempt(self, engine: RemoteEngine, published: PublishedVersion) -> WeightAck | PenstockError:
        """As `attempt`. New requests go to an engine at once if it took the version, and not until `update` has ended
        if it did not: with weights of no version it would lose each of them.
        """
        answer = await attempt(engine, published, self._config.timeout_s)
        if isinstance(answer, WeightAck):
            self._pool.refresh()
        else:
            self._pool.pause(engine.engine_id)
        return answer

    async def close(self) -> None:
        pass


class Drain(InFlight):
    """`drain`: updates all engines at once, after their requests. Waits for: these, at most `drain_timeout_s`."""

    async def update(self, published: PublishedVersion, write_again: WriteAgain | None = None) -> list[WeightAck]:
        names = [engine.engine_id for engine in in_service(self._pool)]
        for name in names:
            self._pool.pause(name)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await asyncio.gather(*(self._pool.wait_engine_idle(name) for name in names))
        except TimeoutError:
            self.drain_timeouts += _report_late(self._pool, names, published, self._config)
        try:
            return await super().update(published, write_again)
        finally:
            for name in names:
                self._pool.resume(name)


class Rolling:
    """`multi_version`: updates one engine after the other. Consumes: a version. Waits for: the running requests of the
    next engine, at most `drain_timeout_s` after its last new request. Unblocked by: their end, that limit, the next
    publish.
    """

    def __init__(self, pool: EnginePool, config: WeightsConfig) -> None:
        self.drain_timeouts = 0
        self._pool = pool
        self._config = config
        self._taken_over = asyncio.Event()
        self._roll: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Finish the update that is running; the remaining engines get the next version."""
        roll, self._roll = self._roll, None
        if roll is not None:
            self._taken_over.set()
            await roll

    async def update(self, published: PublishedVersion, write_again: WriteAgain | None = None) -> list[WeightAck]:
        await self.settle()
        self._taken_over.clear()
        first: asyncio.Future[WeightAck | None] = asyncio.get_running_loop().create_future()
        roll = self._run(published, first, write_again)
        self._roll = asyncio.create_task(roll, name=f"roll to v{published.manifest.version}")
        either: set[asyncio.Future[Any]] = {first, self._roll}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await self.settle()  # it ended without an acknowledgement, or failed
            return []
        ack = first.result()
        return [] if ack is None else [ack]

    async def close(self) -> None:
        """Cancel the update; engines keep the version they have."""
        if self._roll is not None:
            self._roll.cancel()
            await asyncio.gather(self._roll, return_exceptions=True)

    async def _run(
        self, published: PublishedVersion, first: asyncio.Future[WeightAck | None], write_again: WriteAgain | None
    ) -> None:
        now, version = asyncio.get_running_loop().time, published.manifest.version
        drained_by = now() + self._config.drain_timeout_s
        tried: set[EngineId] = set()
        while (engine := self._next(version, tried, is_first=not first.done())) is not None:
            tried.add(engine.engine_id)
            self._pool.pause(engine.engine_id)
            try:
                if not await self._drained(engine, published, drained_by - now()):
                    return
                answer = await attempt(engine, published, self._config.timeout_s)
                if write_again is not None and not first.done() and is_refused([answer]):
                    published = await write_again()
                    write_again = None
                last = partial(last_attempt, engine, published, self._pool, self._config.timeout_s)
                ack = answer if isinstance(answer, WeightAck) else await last()
            finally:
                self._pool.resume(engine.engine_id)
            if ack is not None:
                self._pool.set_min_version(version)
                if not first.done():
                    first.set_result(ack)
                    drained_by = now() + self._config.drain_timeout_s  # from now on all other engines drain

    def _next(self, version: int, tried: set[EngineId], *, is_first: bool) -> RemoteEngine | None:
        """The engine with the least outstanding work, of those below `version`."""
        left = [view for view in self._pool.views() if view.engine_id not in tried]
        behind = [view for view in left if view.version < version]
        if not behind and is_first:
            # Engines that were lost in an earlier attempt have been restarted with it: they acknowledge it again.
            behind = left
        if not behind:
            return None
        nearest = min(behind, key=lambda view: (view.in_use > 0, view.outstanding_tokens))
        return cast("RemoteEngine", nearest.engine)

    async def _drained(self, engine: RemoteEngine, published: PublishedVersion, timeout_s: float) -> bool:
        """Wait until an engine is idle or its time is up; returns whether to update it: no newer version took over."""
        idle = asyncio.create_task(self._pool.wait_engine_idle(engine.engine_id))
        taken_over = asyncio.create_task(self._taken_over.wait())
        try:
            done, _ = await asyncio.wait(
                (idle, taken_over), timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            idle.cancel()
            taken_over.cancel()
        if not done:
            self.drain_timeouts += _report_late(self._pool, [engine.engine_id], published, self._config)
        return not self._taken_over.is_set()


def make_updater(pool: EnginePool, config: WeightsConfig) -> InFlight | Rolling:
    """The updater of the configured `weights.update_mode`."""
    if config.update_mode == "multi_version":
        return Rolling(pool, config)
    return Drain(pool, config) if config.update_mode == "drain" else InFlight(pool, config)


async def attempt(engine: RemoteEngine, published: PublishedVersion, timeout_s: float) -> WeightAck | PenstockError:
    """Update one engine; returns its acknowledgement, or the error."""
    version = published.manifest.version
    try:
        async with silence_limit(timeout_s):
            return await engine.update_weights(published.manifest, published.payload)
    except TimeoutError:
        return EngineLostError(f"publish v{version} took longer than {timeout_s:.0f} s")
    except (WeightSyncError, EngineLostError) as error:
        logger.warning("%s has not taken v%d: %s", engine.engine_id, version, error)
        return error


async def last_attempt(
    engine: RemoteEngine, published: PublishedVersion, pool: EnginePool, timeout_s: float
) -> WeightAck | None:
    """Update one engine; if that fails it is fenced, and the run continues with the rest."""
    answer = await attempt(engine, published, timeout_s)
    if isinstance(answer, WeightAck):
        return answer
    pool.fence(engine.engine_id, str(answer))
    return None


def is_refused(answers: Sequence[WeightAck | PenstockError]) -> bool:
    """Whether an engine has received the version and refused it."""
    return any(isinstance(answer, WeightSyncError) for answer in answers)


def _report_late(pool: EnginePool, names: list[EngineId], published: PublishedVersion, config: WeightsConfig) -> int:
    """Log the engines that did not drain; returns how many."""
    late = [view for view in pool.views() if view.engine_id in names and view.in_use]
    for view in late:
        logger.warning(
            "publish v%d: %d requests on %s had not ended within weights.drain_timeout_s=%g; they are frozen for the "
            "swap and continue with the new weights",
            *(published.manifest.version, view.in_use, view.engine_id, config.drain_timeout_s),
        )
    return len(late)
