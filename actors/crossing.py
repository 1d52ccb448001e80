"""Publishing across nodes: the driver's side of weights/transport/crossing.py.

Consumes: a new version of the trainer. Waits for: the training ranks to hold it, then for every end to have it.
Unblocked by: those; or a time-out of a leg, which ends the crossing for everyone. Then ends that do not answer are
given up with their engines, and the rest meets anew and gets the version once more.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import ray

from penstock.actors.ends import Ends
from penstock.actors.exports import Departure, Parcel
from penstock.actors.ray_errors import together
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import WeightSyncError
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import DType
from penstock.weights.transport.crossing import Crossing, changed_share
from penstock.weights.transport.group import TransferGroup
from penstock.weights.transport.links import serve_store
from penstock.weights.transport.shards import ShardTransfer

logger = logging.getLogger(__name__)

ATTEMPTS = 2
GRACE_S = 10.0
"""What a call may take beyond the time-outs of what it does."""


class GroupExport:
    """Training ranks send each version to the ends, in a group of their own."""

    def __init__(
        self, trainer: TrainerClient, ends: Ends, layout: EngineSide, dtype: DType, config: WeightsConfig
    ) -> None:
        self._trainer = trainer
        self._ends = ends
        self._layout = layout
        self._dtype: DType = dtype
        self._config = config
        self._store = serve_store(ray.util.get_node_ip_address())
        self._crossing: Crossing | None = None
        self._generation = self._num_sent = 0
        self._transfer: ShardTransfer | None = None
        self._begun: int | None = None
        self._is_streamed = config.staging == "bucket" and ends.on_devices
        self._leg_s = config.timeout_s

    async def begin(self, version: int) -> Departure:
        await self._get_ready(version)
        await self._trainer.ask("hold_weights", self._config.overlap)
        return self._deliver(version)

    async def _get_ready(self, version: int) -> Crossing:
        """Be in a crossing with every end that is to get a version."""
        if version == self._begun:
            self._crossing = None  # it is damaged somewhere: codecs begin anew, so that all of it is sent
        self._begun = version
        if self._crossing is not None and set(self._crossing.ends) == set(self._ends.present()):
            return self._crossing
        try:
            return await self._meet()
        except WeightSyncError as error:
            await self._ends.give_up_silent_ones(str(error))
            return await self._meet()

    async def close(self) -> None:
        await self._ends.close()

    async def _deliver(self, version: int) -> Parcel:
        for attempt in range(ATTEMPTS):
            try:
                if self._crossing is None:
                    await self._meet()
                return await self._cross(version)
            except WeightSyncError as error:
                self._crossing = None
                if attempt == ATTEMPTS - 1:
                    raise
                logger.warning("%s What is left meets anew, and gets v%d once more", error, version)
                await self._ends.give_up_silent_ones(str(error))
        raise AssertionError("unreachable")

    async def _cross(self, version: int) -> Parcel:
        crossing = self._crossing
        assert crossing is not None
        limit = self._config.timeout_s + GRACE_S
        receiving = [self._ends.receive(end, version) for end in crossing.ends]
        num_before, self._num_sent = self._num_sent, self._num_sent + 1

        def interrupt(cause: str) -> None:
            TransferGroup.interrupt(self._store, crossing.generation, num_before, crossing.members, cause)

        sending = self._trainer.ask("send_weights", version, timeout_s=limit)
        sent, *answers = await together(f"publish v{version}", limit, sending, *receiving, interrupt=interrupt)
        manifest = crossing.transfer.manifest(version, [part for one in sent for part in one.sums])
        payload = self._ends.payload(dict(zip(crossing.ends, answers, strict=True)))
        share = None if self._config.codec == "int8_delta" else changed_share(sent)
        return Parcel(manifest, payload, sum(one.num_bytes for one in sent), share)

    async def _meet(self) -> Crossing:
        """Make a crossing of the ends that are there now."""
        ends = self._ends.present()
        if not ends:
            raise WeightSyncError("weights: no engine is left to publish to; the log says why each was fenced off.")
        await self._ends.prepare()
        self._generation += 1
        timeout_s, codec = self._leg_s, self._config.codec
        crossing = Crossing(
            transfer=self._transfer or await self._plan(ends[0].node),
            num_training=len(self._trainer.nodes),
            ends=ends,
            on_devices=self._ends.on_devices,
            store_at=(ray.util.get_node_ip_address(), self._store.port),
            generation=self._generation,
            timeout_s=timeout_s,
            codec=codec,
            is_streamed=self._is_streamed,
        )
        limit = timeout_s + GRACE_S
        shared = ray.put(crossing)
        await together(
            "weights: meeting",
            limit,
            self._trainer.ask("join_crossing", shared, timeout_s=limit),
            *(self._ends.join(shared, end, place) for place, end in enumerate(ends)),
        )
        self._crossing, self._num_sent = crossing, 0
        return crossing

    async def _plan(self, first_node: str) -> ShardTransfer:
        planned = await self._trainer.plan_transfer(self._layout, self._dtype, first_node)
        folder = None if self._ends.on_devices else planned.directory
        self._transfer = replace(planned, directory=folder, num_slots=self._config.num_slots)
        return self._transfer
