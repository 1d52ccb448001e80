"""Publishing a version: export once, hand it to the engines, take no answer but the right checksum.

Consumes: a new version of the trainer. Waits for: the engines to acknowledge, as the update mode has it. Unblocked
by: the acknowledgements; or the time limit, after which the late engine gets the version once more and is then
fenced off, so that one slow engine never stops the run (DESIGN §12).
"""

from __future__ import annotations

import time
from typing import Any, cast

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import PublishReport, WeightManifest
from penstock.rollout.pool import EnginePool
from penstock.rollout.update_modes import make_updater
from penstock.weights.config import WeightsConfig


class ActorWeightPublisher:
    """`WeightPublisher` over trainer rank 0 and the engines of a pool.

    Attributes:
        last: Report of the newest publish.
    """

    def __init__(self, trainer: TrainerClient, pool: EnginePool, config: WeightsConfig) -> None:
        self._trainer = trainer
        self._pool = pool
        self._config = config
        self._updater = make_updater(pool, config)
        self.last: PublishReport | None = None

    async def publish(self, version: int) -> PublishReport:
        """Make `version` what new requests are sampled from.

        Raises:
            WeightSyncError: If no engine took it.
        """
        started = time.monotonic()
        await self._updater.settle()  # the export removes the version before
        manifest = await self._trainer.export(version)
        exported = time.monotonic()
        acks = await self._updater.update(manifest, self._payload(manifest))
        if not acks:
            raise WeightSyncError(f"publish v{version}: no engine acknowledged it: {self._pool.fenced}")
        self.last = PublishReport(
            version=version,
            num_bytes=manifest.num_bytes,
            export_s=exported - started,
            total_s=time.monotonic() - started,
            acks=acks,
            drain_timeouts=self._updater.drain_timeouts,
        )
        return self.last

    async def close(self) -> None:
        """Leave engines that have not followed yet where they are."""
        await self._updater.close()

    def _payload(self, manifest: WeightManifest) -> Any:
        engines = cast("list[RemoteEngine]", self._pool.engines())
        elsewhere = [engine for engine in engines if engine.node_id != self._trainer.node_id]
        if elsewhere or self._config.transport == "object_store":
            return self._trainer.read_back(manifest)
        return None
