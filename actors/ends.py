"""The ends of a crossing, as the driver has them: a landing on every node with engines, or the engines themselves.

Consumes: a crossing to join, versions to receive. Waits for: those processes. Unblocked by: their answers; who does not
answer is given up with its engines, and the run goes on with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.engine_client import RemoteEngine
from penstock.actors.landing import LandingActor
from penstock.actors.locations import Locations
from penstock.actors.ray_errors import ray_boundary, together
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.rollout.pool import EnginePool
from penstock.weights.config import WeightsConfig
from penstock.weights.transport.crossing import End
from penstock.weights.transport.shared_memory import remove_directories_of

PING_S = 30.0
SHUTDOWN_S = 5.0


class Ends(Protocol):
    """Where versions arrive.

    Attributes:
        on_devices: In memory of the engines' devices; else in files that the engines of a node share.
    """

    on_devices: bool

    def present(self) -> tuple[End, ...]:
        """Those of the engines in service now, in relay order: the node of the first training rank first."""
        ...

    async def prepare(self) -> None:
        """Start those that are new, end those that no engine needs any more."""
        ...

    def join(self, crossing: Any, end: End, place: int) -> Awaitable[Any]:
        """Let one join a crossing (a handle of it), as its `place`-th end."""
        ...

    def receive(self, end: End, version: int) -> Awaitable[Any]:
        """Let one receive a version; its answer is for `payload`."""
        ...

    def payload(self, answers: Mapping[End, Any]) -> Any:
        """What engines are given beside the manifest to find it."""
        ...

    async def give_up_silent_ones(self, why: str) -> None:
        """Fence off the engines of those that do not answer."""
        ...

    async def close(self) -> None:
        """End what was started."""
        ...


def _on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class Landings:
    """One process on every node with engines."""

    on_devices = False

    def __init__(self, pool: EnginePool, first_node: str, config: WeightsConfig) -> None:
        self._pool = pool
        self._first_node = first_node
        self._config = config
        self._type = ray.remote(concurrency_groups={"beside": 1})(LandingActor)
        self._landings: dict[str, Any] = {}
        self._pids: dict[str, int] = {}

    def present(self) -> tuple[End, ...]:
        nodes = {engine.node_id for engine in cast("list[RemoteEngine]", self._pool.engines())}
        return tuple(
            End(f"landing on node {node[:8]}", node)
            for node in sorted(nodes, key=lambda node: (node != self._first_node, node))
        )

    async def prepare(self) -> None:
        nodes = [end.node for end in self.present()]
        for node in self._landings.keys() - set(nodes):
            await self._end(node)
        fresh = [node for node in nodes if node not in self._landings]
        for node in fresh:
            self._landings[node] = self._type.options(**_on(node)).remote(self._config.directory)
        asked = [self._landings[node].pid.remote() for node in fresh]
        pids = await together("weights: starting landings", self._config.timeout_s, *asked)
        self._pids |= dict(zip(fresh, pids, strict=True))

    def join(self, crossing: Any, end: End, place: int) -> Awaitable[Any]:  # noqa: ARG002 - a landing knows its node
        joined: Awaitable[Any] = self._landings[end.node].join.remote(crossing, end.node)
        return joined

    def receive(self, end: End, version: int) -> Awaitable[Any]:
        received: Awaitable[Any] = self._landings[end.node].receive.remote(version)
        return received

    def payload(self, answers: Mapping[End, Any]) -> Locations:
        return Locations({end.node: folder for end, folder in answers.items()})

    async def give_up_silent_ones(self, why: str) -> None:
        for node, landing in list(self._landings.items()):
            try:
                with ray_boundary(WeightSyncError, "ping"):
                    await asyncio.wait_for(landing.pid.remote(), PING_S)
            except (WeightSyncError, TimeoutError):
                await self._end(node)
                for engine in cast("list[RemoteEngine]", self._pool.engines()):
                    if engine.node_id == node:
                        await self._pool.fence(engine.engine_id, f"the landing on its node is lost. {why}")

    async def close(self) -> None:
        """End the landings, and free what they hold in shared memory."""
        calls = {asyncio.ensure_future(landing.shutdown.remote()): node for node, landing in self._landings.items()}
        if calls:
            _, busy = await asyncio.wait(calls, timeout=SHUTDOWN_S)
            for call in busy:  # a version is on its way to them
                call.cancel()
                await self._end(calls[call])

    async def _end(self, node: str) -> None:
        """End a landing that may not answer, and remove what it leaves in shared memory."""
        ray.kill(self._landings.pop(node))
        sweep = ray.remote(remove_directories_of).options(**_on(node), max_retries=0)
        with suppress(ray.exceptions.RayError, TimeoutError):  # the node may be gone too
            await asyncio.wait_for(sweep.remote([self._pids.pop(node, 0)], self._config.directory), PING_S)


class EngineSlots:
    """The engines themselves: every rank receives into a slot on its own device, or into its live parameters.

    Attributes:
        lacking: A version that only those engines are to get that have not acknowledged it; None: all are.
    """

    on_devices = True

    def __init__(self, pool: EnginePool, first_node: str) -> None:
        self.lacking: int | None = None
        self._pool = pool
        self._first_node = first_node

    def present(self) -> tuple[End, ...]:
        some = [one for one in self._engines().values() if self.lacking is None or one.version != self.lacking]
        engines = sorted(some, key=lambda one: (one.node_id != self._first_node, one.node_id))
        return tuple(End(engine.engine_id, engine.node_id) for engine in engines)

    async def prepare(self) -> None:
        """They are there already."""

    def join(self, crossing: Any, end: End, place: int) -> Awaitable[Any]:
        return self._engines()[end.name].join_crossing(crossing, place)

    def receive(self, end: End, version: int) -> Awaitable[Any]:
        return self._engines()[end.name].receive(version)

    def payload(self, answers: Mapping[End, Any]) -> None:
        """The manifest says it all: it is in their slots."""

    async def give_up_silent_ones(self, why: str) -> None:
        for engine in self._engines().values():
            try:
                await asyncio.wait_for(engine.load(), PING_S)
            except (EngineLostError, TimeoutError):
                await self._pool.fence(engine.engine_id, f"it does not answer. {why}")

    async def close(self) -> None:
        """They are not ended here."""

    def _engines(self) -> dict[str, RemoteEngine]:
        return {engine.engine_id: engine for engine in cast("list[RemoteEngine]", self._pool.engines())}
