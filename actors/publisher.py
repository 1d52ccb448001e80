"""Publishing a version: export once, hand it to the engines, take no answer but the right checksum.

Consumes: a new version of the trainer. Waits for: the engines to acknowledge, as the update mode has it. Unblocked
by: the acknowledgements; or the time limit, after which the late engine gets the version once more and is then
fenced off, so that one slow engine never stops the run (DESIGN §12).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import PlacementError, WeightSyncError
from penstock.dataflow.ports import PublishReport, WeightManifest
from penstock.rollout.pool import EnginePool
from penstock.rollout.update_modes import make_updater
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import DType
from penstock.weights.transport.shards import ShardTransfer

Export = Callable[[int], Awaitable[WeightManifest]]


class DirectExport:
    """Training ranks write each version into shared memory in the engines' own layout, by a plan made at the first."""

    def __init__(
        self, trainer: TrainerClient, engines: Sequence[RemoteEngine], layout: EngineSide, dtype: DType
    ) -> None:
        """Connect both sides.

        Raises:
            PlacementError: If they are not on one node.
        """
        if not trainer.is_on_one_node or any(engine.node_id != trainer.node_id for engine in engines):
            raise PlacementError(
                "weights: weights.mode=direct goes through the shared memory of one node, but the trainer and the "
                "engines are on several. Set weights=object_store, which gathers whole tensors."
            )
        self._trainer = trainer
        self._layout = layout
        self._dtype: DType = dtype
        self._transfer: ShardTransfer | None = None

    async def __call__(self, version: int) -> WeightManifest:
        """Write a version, and say what engines have to find."""
        if self._transfer is None:
            self._transfer = await self._trainer.share_weights(self._layout, self._dtype)
        return await self._trainer.write_shards(version, self._transfer)


class ActorWeightPublisher:
    """`WeightPublisher` over trainer rank 0 and the engines of a pool.

    Attributes:
        last: Report of the newest publish.
    """

    def __init__(self, trainer: TrainerClient, pool: EnginePool, config: WeightsConfig, export: Export) -> None:
        """Connect both sides.

        Args:
            trainer: Has the weights.
            pool: Engines that take them.
            config: How they travel.
            export: Puts a version where engines find it: `trainer.export`, or a `DirectExport`.
        """
        self._trainer = trainer
        self._pool = pool
        self._config = config
        self._export = export
        self._updater = make_updater(pool, config)
        self.last: PublishReport | None = None

    async def publish(self, version: int) -> PublishReport:
        """Make `version` what new requests are sampled from.

        Raises:
            WeightSyncError: If no engine took it.
        """
        started = time.monotonic()
        await self._updater.settle()  # the export removes the version before
        manifest = await self._export(version)
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
        if manifest.num_shards:
            return None
        engines = cast("list[RemoteEngine]", self._pool.engines())
        elsewhere = [engine for engine in engines if engine.node_id != self._trainer.node_id]
        if elsewhere or self._config.transport == "object_store":
            return self._trainer.read_back(manifest)
        return None
