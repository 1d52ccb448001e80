"""Publishing across nodes: the driver's side of weights/transport/crossing.py.

Consumes: a new version of the trainer. Waits for: the training ranks to hold it, then for every landing to have it.
Unblocked by: those; or a time-out of a leg, which ends the crossing for everyone. Then landings that do not answer are
given up, the engines of their nodes are fenced off, and the rest meets anew and gets the version once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.exports import Departure, Parcel
from penstock.actors.landing import CONCURRENCY, LandingActor
from penstock.actors.locations import Locations
from penstock.actors.ray_errors import ray_boundary
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import WeightSyncError
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import DType
from penstock.weights.transport.crossing import Crossing
from penstock.weights.transport.links import serve_store
from penstock.weights.transport.shards import ShardTransfer

logger = logging.getLogger(__name__)

ATTEMPTS = 2
PING_S = 5.0
GRACE_S = 10.0
"""What a call may take beyond the time-outs of what it does."""


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
        self._landings: dict[str, Any] = {}
        self._crossing: Crossing | None = None
        self._generation = 0
        self._transfer: ShardTransfer | None = None

    async def begin(self, version: int) -> Departure:
        if self._crossing is None or set(self._crossing.nodes) != set(self._nodes()):
            await self._meet()
        await self._trainer.ask("hold_weights", self._config.overlap)
        return self._deliver(version)

    async def close(self) -> None:
        """End the landings; their processes are ended by the cluster either way."""
        calls = [landing.shutdown.remote() for landing in self._landings.values()]
        await asyncio.wait(map(asyncio.ensure_future, calls), timeout=PING_S) if calls else None

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
                logger.warning("%s. What is left meets anew, and gets v%d once more", error, version)
                await self._give_up_silent_ones(str(error))
        raise AssertionError("unreachable")

    async def _cross(self, version: int) -> Parcel:
        crossing = self._crossing
        assert crossing is not None
        limit = self._config.timeout_s + GRACE_S
        landed = {node: self._landings[node].receive.remote(version) for node in crossing.nodes}
        sent, *folders = await self._together(
            f"publish v{version}", limit, self._trainer.ask("send_weights", version, timeout_s=limit), *landed.values()
        )
        manifest = crossing.transfer.manifest(version, [part for parts, _ in sent for part in parts])
        locations = Locations(dict(zip(landed, folders, strict=True)))
        return Parcel(manifest, locations, sum(num_bytes for _, num_bytes in sent))

    async def _meet(self) -> None:
        """Make a crossing of the nodes that have engines now."""
        nodes = self._nodes()
        for node in self._landings.keys() - set(nodes):
            ray.kill(self._landings.pop(node))
        for node in nodes:
            if node not in self._landings:
                place = NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_concurrency": CONCURRENCY, "scheduling_strategy": place}
                self._landings[node] = ray.remote(LandingActor).options(**options).remote(self._config.directory)
        self._transfer = self._transfer or await self._trainer.plan_transfer(self._layout, self._dtype, nodes[0])
        self._generation += 1
        store_at = (ray.util.get_node_ip_address(), self._store.port)
        timeout_s, codec = self._config.timeout_s, self._config.codec
        crossing = Crossing(
            self._transfer, len(self._trainer.nodes), nodes, store_at, self._generation, timeout_s, codec
        )
        limit = timeout_s + GRACE_S
        shared = ray.put(crossing)
        await self._together(
            "weights: meeting",
            limit,
            self._trainer.ask("join_crossing", shared, timeout_s=limit),
            *(self._landings[node].join.remote(shared, node) for node in nodes),
        )
        self._crossing = crossing

    def _nodes(self) -> tuple[str, ...]:
        """Nodes with engines in service, that of the first training rank first."""
        nodes = {engine.node_id for engine in cast("list[RemoteEngine]", self._pool.engines())}
        return tuple(sorted(nodes, key=lambda node: (node != self._trainer.node_id, node)))

    async def _give_up_silent_ones(self, why: str) -> None:
        """End landings that do not answer, and fence off the engines of their nodes."""
        for node, landing in list(self._landings.items()):
            try:
                with ray_boundary(WeightSyncError, "ping"):
                    await asyncio.wait_for(landing.ping.remote(), PING_S)
            except (WeightSyncError, TimeoutError):
                ray.kill(self._landings.pop(node))
                for engine in cast("list[RemoteEngine]", self._pool.engines()):
                    if engine.node_id == node:
                        await self._pool.fence(engine.engine_id, f"the landing on its node is lost. {why}")

    async def _together(self, what: str, timeout_s: float, *calls: Awaitable[Any]) -> list[Any]:
        """All answers; the first failure counts, once everyone has come back or the time is up."""
        pending = [asyncio.ensure_future(call) for call in calls]
        done, late = await asyncio.wait(pending, timeout=timeout_s)
        failures = [failure for call in done if (failure := call.exception()) is not None]
        with ray_boundary(WeightSyncError, what):
            if failures:
                raise failures[0]
        if late:
            raise WeightSyncError(f"{what}: {len(late)} of {len(pending)} did not answer within {timeout_s:.0f} s")
        return [call.result() for call in pending]
