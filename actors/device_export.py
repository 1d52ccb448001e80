"""Publishing from device to device: training ranks write each version into the engines' own memory, by CUDA IPC.

Consumes: a new version of the trainer. Waits for: engines that are new to make their slots, training ranks to open them
and to write. Unblocked by: their answers. An engine whose slot cannot be made or opened is fenced off, and the run goes
on with the rest. What several training ranks hold comes from the one on an engine rank's device, so engines have plans
of their own; those that lie to the trainer in the same way, a restarted one too, share a plan.
"""

from __future__ import annotations

import asyncio
from typing import cast

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.exports import Departure, arrived, is_one_node
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import EngineLostError, PlacementError, WeightSyncError
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.model_config import DType
from penstock.weights.planner.cache import PlanCache
from penstock.weights.transport.shards import ShardTransfer


class DeviceExport:
    """Training ranks write each version into slots in the memory of the engines' devices."""

    def __init__(
        self, trainer: TrainerClient, pool: EnginePool, layout: EngineSide, dtype: DType, config: WeightsConfig
    ) -> None:
        """Connect both sides.

        Raises:
            PlacementError: If they are not on one node.
        """
        if not is_one_node(trainer, cast("list[RemoteEngine]", pool.engines())):
            raise PlacementError(
                "weights: weights.transport=cuda_ipc goes from device to device within one node, but the trainer and "
                "the engines are on several. Set weights.transport=auto."
            )
        self._trainer = trainer
        self._pool = pool
        self._layout = layout
        self._dtype: DType = dtype
        self._timeout_s = config.timeout_s
        self._training: tuple[TrainingSide, list[str]] | None = None
        self._plans = PlanCache()
        self._transfers: dict[RemoteEngine, ShardTransfer] = {}

    async def begin(self, version: int) -> Departure:
        if self._training is None:
            training, _ = await self._trainer.training_side()
            self._training = training, await self._trainer.ask("device")
        new = [engine for engine in self._engines() if engine not in self._transfers]
        await asyncio.gather(*(self._connect(engine, *self._training) for engine in new))
        self._transfers = {engine: self._transfers[engine] for engine in self._engines() if engine in self._transfers}
        if not self._transfers:
            raise WeightSyncError(f"publish v{version}: no engine is left to write it to: {self._pool.fenced}")
        names = [engine.engine_id for engine in self._transfers]
        parts = await self._trainer.leg(f"publish v{version}", self._timeout_s, "write_slots", version, names)
        first = next(iter(self._transfers.values()))  # the sums of all are the same: only who sends what differs
        return arrived(first.manifest(version, [part for some in parts for part in some]))

    async def close(self) -> None:
        """What the slots take is freed when the processes end."""

    def _engines(self) -> list[RemoteEngine]:
        return cast("list[RemoteEngine]", self._pool.engines())

    async def _connect(self, engine: RemoteEngine, training: TrainingSide, devices: list[str]) -> None:
        """Let an engine make its slots, and every training rank open them."""
        buffers = self._layout.layout(training.tensors).buffers
        try:
            async with asyncio.timeout(self._timeout_s):
                handles = await engine.make_slots(buffers, self._dtype, len(devices))
        except TimeoutError:
            failure = f"publish: {engine.engine_id} has made no slots after {self._timeout_s:.0f} s"
        except (EngineLostError, WeightSyncError) as error:
            failure = str(error)
        else:
            engine_at = [of_writers[0].device for of_writers in handles]
            transfer = await asyncio.to_thread(
                ShardTransfer.between, training, self._layout, self._dtype, None, devices, engine_at, self._plans
            )
            what = f"publish: slots of {engine.engine_id}"
            opening = ("open_slots", engine.engine_id, transfer, handles)
            refusals = await self._trainer.leg(what, self._timeout_s, *opening)
            failure = next(filter(None, refusals), "")
            if not failure:
                self._transfers[engine] = transfer
        if failure:
            await self._pool.fence(engine.engine_id, failure)
