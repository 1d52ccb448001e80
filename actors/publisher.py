"""Publishing a version: export once, hand it to the engines, take no answer but the right checksum.

Consumes: a new version of the trainer. Waits for: the engines to acknowledge, as the update mode has it. Unblocked
by: the acknowledgements; or the time limit, after which the late engine gets the version once more and is then
fenced off, so that one slow engine never stops the run (DESIGN §12).

Overlapped, a publish returns when the version has left the training ranks: its delivery goes on beside the next step.
The bound on staleness holds all the same, because from then on no request starts below that version: those that would
start wait for the first engine to have it. The next publish waits for the delivery of the one before.

What an engine refuses may be damaged where all of them read it. While the publish is waited for, the trainer still has
the version, and writes it once more before anyone is fenced off; overlapped it has gone on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.exports import Departure, Export, Parcel
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import EngineLostError, ExportError, PenstockError, WeightSyncError
from penstock.dataflow.ports import PublishReport, WeightManifest
from penstock.rollout.pool import EnginePool
from penstock.rollout.update_modes import attempt, make_updater
from penstock.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

Probe = Callable[[int], Awaitable[float | None]]
"""What the logprobs of engines at a version differ by at most from the trainer's, nat; None if none could be asked."""


class ActorWeightPublisher:
    """`WeightPublisher` over an export and the engines of a pool.

    Attributes:
        last: Report of the newest publish that is over.
    """

    def __init__(
        self,
        pool: EnginePool,
        config: WeightsConfig,
        export: Export,
        trainer: TrainerClient | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Connect both sides.

        Args:
            pool: Engines that take them.
            config: How they travel.
            export: Puts a version where engines find it.
            trainer: Tells whether it still has a version that no engine has any more; None: it never has.
            probe: Compares the engines with the trainer at every `probe_every`-th version, from version 0 on.
        """
        self._pool = pool
        self._config = config
        self._export = export
        self._trainer = trainer
        self._probe = probe
        self._updater = make_updater(pool, config)
        self._delivery: asyncio.Task[PublishReport] | None = None
        self._publishing = asyncio.Lock()
        self._parcel: Parcel | None = None
        self.last: PublishReport | None = None

    async def catch_up(self, engine: RemoteEngine) -> None:
        """Give an engine that joins what the others serve, then let it serve. The next publish waits for it.

        What it refuses now (slots on its own device are written by a publish; a file may be damaged) it gets with the
        next version, if there is one: if another engine serves this one, or the trainer has gone on. Until then nothing
        is routed to it, because it is below the floor. Otherwise no batch would ever become complete, and the trainer
        writes the version once more. That it still has it is certain: a step waits until it is written, also
        overlapped, where what left for the delivery before was a copy.

        Raises:
            EngineLostError: If it died, or did not answer within `timeout_s`.
            WeightSyncError: If it has refused the version that was written once more, too; it is fenced off then.
        """
        async with self._publishing:
            if self._delivery is not None:
                await asyncio.wait([self._delivery])
            parcel, answer = self._parcel, None
            if parcel is not None:
                answer = await attempt(engine, parcel.manifest, parcel.payload, self._config.timeout_s)
                if isinstance(answer, EngineLostError):
                    raise answer
            self._pool.add(engine)  # before it is written again: slots are made for engines of the pool
            if parcel is not None and isinstance(answer, WeightSyncError):
                await self._write_if_none_serves(parcel.manifest.version, engine)

    async def _write_if_none_serves(self, version: int, engine: RemoteEngine) -> None:
        """Have the trainer write a version that no engine has any more, unless a step is on its way to the next one."""
        trainer, is_served = self._trainer, any(view.version >= version for view in self._pool.views())
        if is_served or trainer is None or trainer.step_lock.locked() or trainer.version != version:
            return
        logger.warning("publish v%d: no engine has it any more, so it is written for %s", version, engine.engine_id)
        try:
            async with trainer.step_lock:
                await self._updater.settle()
                departure = await self._export.begin(version)
                await self._deliver(version, departure, time.monotonic(), 0.0, may_repeat=False)
        except Exception as error:
            await self._pool.fence(engine.engine_id, str(error))
            raise

    async def publish(self, version: int) -> PublishReport:
        """Make `version` what new requests are sampled from. What no engine took waits for those that are coming back.

        Returns:
            Its report; overlapped, that of the version before, but where it is probed.

        Raises:
            ExportError: If the training ranks cannot write it.
            WeightSyncError: If no engine took it and none is coming back; overlapped, of the version before. Or if an
                engine's logprobs are not the trainer's.
        """
        while True:
            await self._pool.someone()
            try:
                async with self._publishing:
                    report = await self._publish(version)
                break
            except ExportError:
                raise
            except WeightSyncError as error:
                if not self._pool.num_returning:
                    raise
                logger.warning("%s Engines are being started anew, and get v%d then.", error, version)
            await self._pool.one_returned()
        every = self._config.probe_every
        if self._probe is None or not every or version % every:
            return report
        report = await self.delivered()
        return replace(report, probe_nat=await self._probe(version))

    async def _publish(self, version: int) -> PublishReport:
        if self._delivery is not None:
            await self.delivered()
        await self._updater.settle()  # the export removes the version before
        started = time.monotonic()
        departure = await self._export.begin(version)
        export_s = time.monotonic() - started
        if not self._config.overlap or self.last is None:
            self.last = await self._deliver(version, departure, started, export_s, may_repeat=True)
        else:
            self._pool.raise_floor(version)
            delivery = self._deliver(version, departure, started, export_s, may_repeat=False)
            self._delivery = asyncio.create_task(self._beside(delivery), name=f"deliver v{version}")
        return self.last

    async def delivered(self) -> PublishReport:
        """Wait until the engines have what was published last; its report.

        Raises:
            WeightSyncError: If none took it.
        """
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            self.last = await delivery
        assert self.last is not None, "nothing was published"
        return self.last

    async def close(self) -> None:
        """Leave engines that have not followed yet where they are."""
        if self._delivery is not None:
            self._delivery.cancel()
            await asyncio.gather(self._delivery, return_exceptions=True)
        await self._updater.close()
        await self._export.close()

    async def _beside(self, delivery: Awaitable[PublishReport]) -> PublishReport:
        """A delivery that nobody waits for: requests that wait for it get to know why it failed."""
        try:
            return await delivery
        except PenstockError as error:
            for engine in self._pool.engines():
                await self._pool.fence(engine.engine_id, str(error))
            raise

    async def _deliver(
        self, version: int, departure: Departure, started: float, export_s: float, *, may_repeat: bool
    ) -> PublishReport:
        parcel, rewrites = await departure, 0
        self._parcel = parcel

        async def write_again() -> tuple[WeightManifest, Any]:
            nonlocal rewrites
            rewrites += 1
            logger.warning("publish v%d: it was refused, so the trainer writes it once more", version)
            self._parcel = repeated = await (await self._export.begin(version))
            return repeated.manifest, repeated.payload

        acks = await self._updater.update(parcel.manifest, parcel.payload, write_again if may_repeat else None)
        if not acks:
            raise WeightSyncError(f"publish v{version}: no engine acknowledged it: {self._pool.fenced}")
        return PublishReport(
            version=version,
            num_bytes=parcel.manifest.num_bytes,
            export_s=export_s,
            total_s=time.monotonic() - started,
            acks=acks,
            drain_timeouts=self._updater.drain_timeouts,
            sent_bytes=parcel.sent_bytes,
            changed_share=parcel.changed_share,
            rewrites=rewrites,
        )
