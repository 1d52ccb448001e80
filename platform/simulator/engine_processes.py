"""Engines of a simulated run: the shipping client and actor around a simulated engine, in a virtual process.

pool ─▶ SimulatedClient (`RemoteEngine`) ─▶ virtual handle ─▶ SimulatedEngineActor (`EngineActor`) ─▶ SimulatedEngine
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from penstock.actors.engine.actor import EngineActor
from penstock.actors.engine.client import RemoteEngine
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.platform.cluster.actor_factory import RunActors
from penstock.platform.simulator.engine import SimulatedEngine
from penstock.platform.simulator.virtual_actor import VirtualHandle, VirtualProcess
from penstock.rollout.engines.local_engine import EngineSpec, LocalEngine


class SimulatedEngineActor(EngineActor):
    """The shipping actor."""

    def __init__(self, engine: SimulatedEngine) -> None:
        unused: dict[str, Any] = {"model_path": "", "model": None, "engine": None, "device": "cpu"}
        super().__init__(EngineSpec(engine.engine_id, update_mode="keep_kv", seed=0, threads=1, **unused))
        self._engine = cast("LocalEngine", engine)  # without buffers and transfer groups, which `gather` does not need
        self._simulated = engine

    def end(self) -> None:
        """End all that it has started: its process has died."""
        for request in list(self._requests.values()):
            request.cancel()
        self._simulated.crash()


class SimulatedClient(RemoteEngine):
    """The shipping client of an engine in a virtual process."""

    @property
    def process(self) -> VirtualProcess:
        return cast("VirtualHandle", self._actor).process

    def _end_process(self) -> None:
        self.process.die()


@dataclass(frozen=True, slots=True)
class EngineClasses:
    """Classes of the engine side, which benchmarks and tests replace."""

    engine: type[SimulatedEngine] = SimulatedEngine
    client: type[SimulatedClient] = SimulatedClient
    publisher: type[ActorWeightPublisher] = ActorWeightPublisher


class SimulatedActors(RunActors):
    """The shipping bookkeeping of a run's engines, each in a virtual process."""

    def __init__(self, make: Callable[[int], SimulatedEngine], client: type[SimulatedClient], num_engines: int) -> None:
        """Start the engines that the run begins with.

        Args:
            make: Makes an engine by its index.
            client: Class of their clients.
            num_engines: How many.
        """
        self._make = make
        self._client = client
        engines = [self._new_engine(index) for index in range(num_engines)]
        none = cast("Any", None)  # reward workers and store are not used here, and the trainer comes later
        super().__init__(cast("list[RemoteEngine]", engines), none, none, none, None, None)

    def kill(self) -> None:
        """End all processes, because the run has ended."""
        for engine in self.engines:
            engine.kill()

    def _new_engine(self, index: int) -> SimulatedClient:
        actor = SimulatedEngineActor(engine := self._make(index))
        process = VirtualProcess(actor, actor.end)
        return self._client(engine.engine_id, cast("Any", process.handle), "node-0")
