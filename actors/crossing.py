"""Publishing across nodes: the driver's side of weights/transport/crossing.py.

Consumes: a new version of the trainer. Waits for: the training ranks to hold it, then for every landing to have it.
Unblocked by: those; or a time-out of a leg, which ends the crossing for everyone. Then landings that do not answer are
given up, the engines of their nodes are fenced off, and the rest meets anew and gets the version once more.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.exports import Departure, Parcel
from penstock.actors.landing import LandingActor
from penstock.actors.locations import Locations
from penstock.actors.ray_errors import ray_boundary, together
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import WeightSyncError
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import DType
from penstock.weights.transport.crossing import Crossing
from penstock.weights.transport.group import TransferGroup
from penstock.weights.transport.links import serve_store
from penstock.weights.transport.shards import ShardTransfer
from penstock.weights.transport.shared_memory import remove_directories_of

logger = logging.getLogger(__name__)

ATTEMPTS = 2
PING_S = 30.0
SHUTDOWN_S = 5.0
GRACE_S = 10.0
"""What a call may take beyond the time-outs of what it does."""


def _on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class GroupExport:
    """Training ranks send each version into the shared memory of every node with engines."""

    def __init__(
        self, trainer: TrainerClient, pool: EnginePool, layout: EngineSide, dtype: DType, config: WeightsConfig
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._layout = layout
        self._dtype: DType = dtype
        self._config = config
        self._store = serve_store(ray.util.get_node_ip_address())
        self._landing_type = ray.remote(concurrency_groups={"beside": 1})(LandingActor)
        self._landings: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._crossing: Crossing | None = None
        self._generation = self._num_sent = 0
        self._transfer: ShardTransfer | None = None
        self._begun: int | None = None

    async def begin(self, version: int) -> Departure:
        if version == self._begun:
            self._crossing = None  # it is damaged somewhere: codecs begin anew, so that all of it is sent
        self._begun = version
        if self._crossing is None or set(self._crossing.nodes) != set(self._nodes()):
            try:
                await self._meet()
            except WeightSyncError as error:
                await self._give_up_silent_ones(str(error))
                await self._meet()
        await self._trainer.ask("hold_weights", self._config.overlap)
        return self._deliver(version)

    async def close(self) -> None:
        """End the landings, and free what they hold in shared memory."""
        calls = {asyncio.ensure_future(landing.shutdown.remote()): node for node, landing in self._landings.items()}
        if calls:
            _, busy = await asyncio.wait(calls, timeout=SHUTDOWN_S)
            for call in busy:  # a version is on its way to them
                call.cancel()
                await self._end(calls[call])

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
                await self._give_up_silent_ones(str(error))
        raise AssertionError("unreachable")

    async def _cross(self, version: int) -> Parcel:
        crossing = self._crossing
        assert crossing is not None
        limit = self._config.timeout_s + GRACE_S
        landed = {node: self._landings[node].receive.remote(version) for node in crossing.nodes}
        num_before, self._num_sent = self._num_sent, self._num_sent + 1

        def interrupt(cause: str) -> None:
            TransferGroup.interrupt(self._store, crossing.generation, num_before, crossing.members, cause)

        sending = self._trainer.ask("send_weights", version, timeout_s=limit)
        sent, *folders = await together(f"publish v{version}", limit, sending, *landed.values(), interrupt=interrupt)
        manifest = crossing.transfer.manifest(version, [part for parts, _ in sent for part in parts])
        locations = Locations(dict(zip(landed, folders, strict=True)))
        return Parcel(manifest, locations, sum(num_bytes for _, num_bytes in sent))

    async def _meet(self) -> None:
        """Make a crossing of the nodes that have engines now."""
        nodes = self._nodes()
        if not nodes:
            raise WeightSyncError(f"weights: no engine is left to publish to: {self._pool.fenced}")
        for node in self._landings.keys() - set(nodes):
            await self._end(node)
        fresh = [node for node in nodes if node not in self._landings]
        for node in fresh:
            self._landings[node] = self._landing_type.options(**_on(node)).remote(self._config.directory)
        asked = [self._landings[node].pid.remote() for node in fresh]
        pids = await together("weights: starting landings", self._config.timeout_s, *asked)
        self._pids |= dict(zip(fresh, pids, strict=True))
        self._transfer = self._transfer or await self._trainer.plan_transfer(self._layout, self._dtype, nodes[0])
        self._generation += 1
        store_at = (ray.util.get_node_ip_address(), self._store.port)
        timeout_s, codec = self._config.timeout_s, self._config.codec
        assert codec != "lora", "adapters travel by themselves (exports.py)"
        crossing = Crossing(
            self._transfer, len(self._trainer.nodes), nodes, store_at, self._generation, timeout_s, codec
        )
        limit = timeout_s + GRACE_S
        shared = ray.put(crossing)
        await together(
            "weights: meeting",
            limit,
            self._trainer.ask("join_crossing", shared, timeout_s=limit),
            *(self._landings[node].join.remote(shared, node) for node in nodes),
        )
        self._crossing, self._num_sent = crossing, 0

    async def _end(self, node: str) -> None:
        """End a landing that may not answer, and remove what it leaves in shared memory."""
        ray.kill(self._landings.pop(node))
        sweep = ray.remote(remove_directories_of).options(**_on(node), max_retries=0)
        with suppress(ray.exceptions.RayError, TimeoutError):  # the node may be gone too
            await asyncio.wait_for(sweep.remote([self._pids.pop(node, 0)], self._config.directory), PING_S)

    def _nodes(self) -> tuple[str, ...]:
        """Nodes with engines in service, that of the first training rank first."""
        nodes = {engine.node_id for engine in cast("list[RemoteEngine]", self._pool.engines())}
        return tuple(sorted(nodes, key=lambda node: (node != self._trainer.node_id, node)))

    async def _give_up_silent_ones(self, why: str) -> None:
        """End landings that do not answer, and fence off the engines of their nodes."""
        for node, landing in list(self._landings.items()):
            try:
                with ray_boundary(WeightSyncError, "ping"):
                    await asyncio.wait_for(landing.pid.remote(), PING_S)
            except (WeightSyncError, TimeoutError):
                await self._end(node)
                for engine in cast("list[RemoteEngine]", self._pool.engines()):
                    if engine.node_id == node:
                        await self._pool.fence(engine.engine_id, f"the landing on its node is lost. {why}")
