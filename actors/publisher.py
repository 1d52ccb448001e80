"""Publishing a version: export once, hand it to every engine at once, take no answer but the right checksum.

Consumes: a new version of the trainer. Waits for: every engine in service to acknowledge. Unblocked
by: the acknowledgements; or the time limit, after which the late engine gets the version once more
and is then fenced off, so that one slow engine never stops the run (DESIGN §12).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ports import PublishReport, WeightAck, WeightManifest
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig

ATTEMPTS = 2


class ActorWeightPublisher:
    """`WeightPublisher` over trainer rank 0 and all engines.

    Attributes:
        last: Report of the newest publish.
    """

    def __init__(
        self, trainer: TrainerClient, engines: Sequence[RemoteEngine], pool: EnginePool, config: WeightsConfig
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._pool = pool
        self._config = config
        self.last: PublishReport | None = None

    async def publish(self, version: int) -> PublishReport:
        """Make `version` what every engine in service samples from.

        Raises:
            WeightSyncError: If no engine took it.
        """
        started = time.monotonic()
        manifest = await self._trainer.export(version)
        exported = time.monotonic()
        engines = [engine for engine in self._engines if engine.engine_id not in self._pool.fenced]
        payload = self._payload(manifest, engines)
        acks = [ack for ack in await asyncio.gather(*(self._update(e, manifest, payload) for e in engines)) if ack]
        if not acks:
            raise WeightSyncError(f"publish v{version}: no engine acknowledged it: {self._pool.fenced}")
        self.last = PublishReport(
            version=version,
            num_bytes=manifest.num_bytes,
            export_s=exported - started,
            total_s=time.monotonic() - started,
            acks=acks,
        )
        return self.last

    def _payload(self, manifest: WeightManifest, engines: list[RemoteEngine]) -> Any:
        elsewhere = [engine for engine in engines if engine.node_id != self._trainer.node_id]
        if elsewhere or self._config.transport == "object_store":
            return self._trainer.read_back(manifest)
        return None

    async def _update(self, engine: RemoteEngine, manifest: WeightManifest, payload: Any) -> WeightAck | None:
        """One engine, twice if need be; then it is fenced off and the run goes on with the rest."""
        failure = ""
        for _ in range(ATTEMPTS):
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await engine.update_weights(manifest, payload)
            except TimeoutError:
                failure = f"publish v{manifest.version} took longer than {self._config.timeout_s:.0f} s"
            except (WeightSyncError, EngineLostError) as error:
                failure = str(error)
        await self._pool.fence(engine.engine_id, failure)
        return None
