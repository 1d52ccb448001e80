"""Engines of a simulated run with faults: messages, updates, processes and nodes are lost.

    pool ─▶ CheckedEngine (`RemoteEngine`) ─▶ virtual handle ─▶ FaultyEngineActor (`EngineActor`) ─▶ FaultyEngine

Restarts, joins and leaves go through the shipping `RunActors`, `EngineRestarts` and `Fleet`. Only the start of a
process is simulated.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import ray

from penstock.actors.engine.actor import EngineOutput
from penstock.actors.engine.client import RemoteEngine, in_service
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.dataflow.errors import EngineLostError, TrajectoryError, WeightSyncError
from penstock.dataflow.ids import EngineId, PolicyId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, PublishReport, TokenDelta, WeightAck, WeightManifest
from penstock.dataflow.versions import Spans
from penstock.platform.config.pools import ClusterConfig
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.engine_restarts import EngineRestarts
from penstock.platform.run.fleet import Fleet
from penstock.platform.simulator.engine import EngineCost, Sequence, SimulatedEngine, TokenStream
from penstock.platform.simulator.engine_processes import SimulatedActors, SimulatedClient, SimulatedEngineActor
from penstock.platform.simulator.world import task_of
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.config import WeightsConfig
from tests.simulation.config import FaultRates
from tests.simulation.processes import FaultyProcess
from tests.simulation.world import POISON, CheckedWorld, InvariantError, stop_run

NUM_NODES = 3
MAX_RESTARTS_PER_HOUR = 12
"""Of one engine. The default of a run, 6, would be used up by heavy faults."""
SAFE_RESTARTS = 5
"""An engine that was restarted at most so often can be lost: the rest of its budget brings it back."""
LEAVE_STEPS = 0.5
"""How long the requests of a leaving engine may go on there, in expected step times; then they move."""
SETTLING_S = 1e-3
"""A request may end some ticks after its slot is free, when its generator is closed; seconds."""
DEATH_NOTICED_S = 1.0
"""Longest time until Ray has noticed the death of a process, seconds."""


class FaultyEngine(SimulatedEngine):
    """An engine that can hang and change its speed, refuses poisoned prompts, and whose tokens are checked.

    Attributes:
        clock_rate: Rate of its clock relative to the driver's, which scales all durations that it reports.
    """

    world: CheckedWorld

    def __init__(self, engine_id: EngineId, cost: EngineCost, world: CheckedWorld, speed: float = 1.0) -> None:
        super().__init__(engine_id, cost, world, speed)
        self.clock_rate = 1.0
        self._responds = asyncio.Event()
        self._responds.set()

    def generate(self, request: GenerateRequest) -> TokenStream:
        if self.version < 0 or not self.world.is_poison(task_of(request.prompt_token_ids[0])):
            return super().generate(request)
        self.world.faults["poison prompt"] += 1
        stream = TokenStream()
        stream.put(TrajectoryError("engine", f"{self.engine_id}: {request.request_id}: {POISON}", is_final=True))
        return stream

    @property
    def responds(self) -> bool:
        """Whether it is not hanging."""
        return self._responds.is_set()

    @property
    def update_s(self) -> float:
        """Seconds that an update takes."""
        return self._batch.cost.stage_s + self._batch.cost.swap_s

    async def load(self) -> EngineLoad:
        await self._responds.wait()
        load = await super().load()
        return replace(load, busy_s=load.busy_s * self.clock_rate)

    async def update_weights(self, manifest: WeightManifest) -> WeightAck:
        """As of an engine without faults. It stays frozen while it hangs."""
        ack = await super().update_weights(manifest)
        return replace(ack, stage_s=ack.stage_s * self.clock_rate, stall_s=ack.stall_s * self.clock_rate)

    async def forget_versions(self) -> None:
        """Lose all requests, their KV and the weights."""
        async with self._updating:
            await self._responds.wait()
            self._advance()
            self._batch.clear()
            self.version = -1
            self._reschedule()

    def hang(self) -> None:
        """Stop making progress and responding, without dying."""
        self._settle()
        self._responds.clear()
        self._reschedule()

    def recover(self) -> None:
        """Continue after a hang."""
        self._advance()
        self._responds.set()
        self._touch()

    def set_speed(self, speed: float) -> None:
        """Change the relative speed: throttling, a noisy neighbour."""
        self._advance()
        self.speed = speed
        self._touch()

    def stamp(self, spans: Spans) -> Spans:
        """Label tokens with their versions. Mutants replace it."""
        return spans

    async def _work(self, work_s: float) -> None:
        await super()._work(work_s)
        await self._responds.wait()

    @property
    def _is_working(self) -> bool:
        return super()._is_working and self._responds.is_set()

    def _deliver(self, sequence: Sequence, delta: TokenDelta) -> None:
        delta = delta._replace(spans=self.stamp(delta.spans))
        self.world.on_tokens(self.engine_id, self.version, delta.spans)
        super()._deliver(sequence, delta)


class EngineProcess(FaultyProcess):
    """A process that runs one engine.

    Attributes:
        engine: The engine in it.
        node: Node that it runs on.
        may_die: Whether the run survives its death now.
    """

    def __init__(
        self, engine: FaultyEngine, node: str, rates: FaultRates, step_s: float, world: CheckedWorld, *, joins: bool
    ) -> None:
        """Start a process.

        Args:
            engine: The engine.
            node: Node.
            rates: How often its messages and updates fail.
            step_s: Expected step time, to which delays are relative; seconds.
            world: The simulated run.
            joins: Whether it starts while the run trains.
        """
        actor = FaultyEngineActor(engine, rates, step_s, world, joins=joins)
        super().__init__(actor, actor.end)
        actor.run_out_of_memory = self._run_out_of_memory
        self.engine = engine
        self.node = node
        self.may_die: Callable[[], bool] = lambda: False
        self._world = world

    def _run_out_of_memory(self, after_s: float) -> bool:
        """Let it be killed for memory soon, if the run survives that."""
        if not self.may_die():
            return False
        error = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory. Planted.")

        def kill() -> None:
            if self.may_die():  # others may have died since
                self.die(error)

        asyncio.get_running_loop().call_later(after_s, kill)
        return True


class FaultyEngineActor(SimulatedEngineActor):
    """The shipping actor. Its messages may be late, doubled or lost, and its updates may fail.

    Attributes:
        run_out_of_memory: Lets the process be killed after some seconds; returns whether it will.
    """

    def __init__(
        self, engine: FaultyEngine, rates: FaultRates, step_s: float, world: CheckedWorld, *, joins: bool
    ) -> None:
        super().__init__(engine)
        self.run_out_of_memory: Callable[[float], bool] = lambda _after_s: False
        self._rates = rates
        self._step_s = step_s
        self._world = world
        self._joins = joins
        world.num_processes += 1
        self._rng = world.rng(f"process {world.num_processes}")
        self._tried = -1
        self._cut: set[RequestId] = set()
        self._arrived_late: list[EngineOutput] = []
        self._late: list[asyncio.TimerHandle] = []

    async def collect(self, wait_s: float) -> list[EngineOutput]:
        outputs = await super().collect(wait_s)
        if not self._rates.lost:
            return outputs
        late, self._arrived_late = self._arrived_late, []
        return [*(output for output in outputs if self._arrives(*output)), *late]

    def _arrives(self, request_id: RequestId, answer: object) -> bool:
        """Whether a message arrives now."""
        rates, rng, faults = self._rates, self._rng, self._world.faults
        if request_id in self._cut:
            return False
        if not isinstance(answer, TokenDelta):
            return True
        if rng.random() < rates.lost:
            faults["message lost"] += 1
            self._cut.add(request_id)
            return False
        draw = rng.random()
        if answer.finish_reason is None or draw >= rates.delayed + rates.duplicated:
            return True
        is_late = draw < rates.delayed
        faults["completion delayed" if is_late else "completion duplicated"] += 1
        wait_s, loop = rng.expovariate(1 / self._step_s), asyncio.get_running_loop()
        self._late.append(loop.call_later(wait_s, self._arrive_late, (request_id, answer)))
        return not is_late

    def _arrive_late(self, output: EngineOutput) -> None:
        self._arrived_late.append(output)
        self._outbox._has_answers.set()

    async def update_weights(self, manifest: WeightManifest, payload: Any = None) -> WeightAck:
        """As shipped. The first attempt to take a version may be refused, kill the process, or not be acknowledged."""
        is_first, self._tried = self._tried != manifest.version, manifest.version
        rates, faults, draw = self._rates, self._world.faults, self._rng.random() if is_first else 1.0
        work_s = self._rng.random() * self._simulated.update_s
        if draw < rates.refusals:
            faults["catch-up refused" if self._joins and self._simulated.version < 0 else "publish refused"] += 1
            await asyncio.sleep(work_s)
            raise WeightSyncError(f"{self._simulated.engine_id}: v{manifest.version} is damaged: planted")
        draw -= rates.refusals
        if draw < rates.memory_kills and self.run_out_of_memory(work_s):
            faults["engine killed for memory"] += 1
        ack = await super().update_weights(manifest, payload)
        if rates.memory_kills <= draw < rates.memory_kills + rates.acks_lost:
            faults["acknowledgement lost"] += 1
            await asyncio.Event().wait()  # until the caller times out and sends the version again
        return ack

    async def forget_versions(self) -> None:
        await super().forget_versions()
        self._tried = -1
        self._drop_late()

    def end(self) -> None:
        """End all that it has started: its process has died."""
        self._drop_late()
        super().end()

    def _drop_late(self) -> None:
        for timer in self._late:
            timer.cancel()
        self._late.clear()
        self._arrived_late.clear()


class CheckedEngine(SimulatedClient):
    """The client. Requests are checked against what the process has (I8)."""

    @property
    def process(self) -> EngineProcess:
        return cast("EngineProcess", super().process)

    @property
    def num_requests(self) -> int:
        """Requests whose answers are waited for."""
        return len(self._inboxes)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        engine = self.process.engine
        if self._lost is None:
            engine.world.on_request(self.engine_id, self.version, engine.version, request.request_id)
        return super().generate(request)

    def _end_process(self) -> None:
        self.process.die()


class CheckedPublisher(ActorWeightPublisher):
    """The shipping publisher; published versions are recorded in the world (I8)."""

    world: CheckedWorld

    async def publish(self, version: int) -> PublishReport:
        report = await super().publish(version)
        self.world.published = version
        self.world.note(f"published v{version} to {len(report.acks)} engines")
        return report


@dataclass(frozen=True, slots=True)
class CheckedClasses:
    """Classes of the engine side that tests with planted bugs replace."""

    engine: type[FaultyEngine] = FaultyEngine
    client: type[CheckedEngine] = CheckedEngine
    publisher: type[CheckedPublisher] = CheckedPublisher
    restarts: type[EngineRestarts] = EngineRestarts
    fleet: type[Fleet] = Fleet


class FaultyActors(SimulatedActors):
    """Engines are restarted, join and leave; a start makes a virtual process.

    Attributes:
        draining: Nodes that are about to be lost.
        num_starts: Starts of each engine that this driver has asked for.
        may_lose: Whether the run survives the loss of these engines now.
    """

    engines: list[CheckedEngine]  # type: ignore[assignment] # all are made here

    def __init__(
        self,
        make: Callable[[int], FaultyEngine],
        client: type[CheckedEngine],
        num_engines: int,
        rates: FaultRates,
        step_s: float,
        world: CheckedWorld,
    ) -> None:
        """Start the engines that the run begins with.

        Args:
            make: Makes an engine by its index.
            client: Class of their clients.
            num_engines: How many.
            rates: Of faults.
            step_s: Expected step time, seconds.
            world: The simulated run.
        """
        self.draining: set[str] = set()
        self.num_starts: Counter[EngineId] = Counter()
        self.may_lose: Callable[[Iterable[EngineId]], bool] = lambda _engine_ids: False
        self._nodes = [f"node-{index}" for index in range(NUM_NODES)]
        self._num_nodes = NUM_NODES
        self._processes: list[EngineProcess] = []
        self._rates = rates
        self._step_s = step_s
        self._world = world
        self._rng = world.rng("starts of engines")
        super().__init__(make, client, num_engines)

    async def _restart_trainer(self, _config: RunConfig, _policy_id: PolicyId, _restore_from: str) -> None:
        """The ranks of the next incarnation restore themselves."""

    async def start_engine(self, _config: RunConfig, index: int, _near: str | None = None) -> CheckedEngine:
        """Start a virtual process, after the time that loading takes."""
        rates, engine_id = self._rates, EngineId(f"engine-{index}")
        self.num_starts[engine_id] += 1
        if rates.outage_steps:
            await asyncio.sleep(self._rng.expovariate(1 / (rates.outage_steps * self._step_s)))
        if self._rng.random() < rates.start_fails:
            self._world.faults["engine start failed"] += 1
            raise EngineLostError(f"cluster: starting the engines failed: {engine_id}: planted")
        return self._new_engine(index, joins=True)

    async def ended(self, engine: RemoteEngine) -> None:
        """As shipped; checks that the engine has nothing left to do."""
        assert isinstance(engine, CheckedEngine)
        await asyncio.sleep(SETTLING_S)
        if engine.num_requests:
            stop_run(InvariantError("fleet", f"{engine.engine_id} is ended with {engine.num_requests} requests on it"))
        await super().ended(engine)

    async def draining_nodes(self) -> set[str]:
        """What Ray says of the nodes."""
        return set(self.draining)

    def processes_on(self, node: str) -> list[EngineProcess]:
        """Living processes on a node."""
        return [process for process in self._processes if process.is_alive and process.node == node]

    def drain(self, node: str) -> None:
        """Say that a node will be lost; a new one is there at once."""
        self.draining.add(node)
        self._nodes[self._nodes.index(node)] = f"node-{self._num_nodes}"
        self._num_nodes += 1

    @property
    def nodes(self) -> list[str]:
        """Nodes that are not being drained."""
        return list(self._nodes)

    def kill(self) -> None:
        """End all processes, because the driver has died or the run has ended."""
        super().kill()
        for process in self._processes:
            if process.is_alive:
                process.die()

    def _new_engine(self, index: int, *, joins: bool = False) -> CheckedEngine:
        rates, world, engine = self._rates, self._world, self._make(index)
        process = EngineProcess(engine, self._nodes[index % NUM_NODES], rates, self._step_s, world, joins=joins)
        process.may_die = lambda: self.may_lose([engine.engine_id])
        self._processes.append(process)
        if rates.skew:
            engine.speed *= 1 + rates.speed_spread * (2 * self._rng.random() - 1)
            engine.clock_rate = 1 + rates.skew * (2 * self._rng.random() - 1)
            world.faults["clock skewed"] += 1
        return self._client(engine.engine_id, cast("Any", process.handle), process.node)


class EngineService:
    """What keeps the engines of one policy in service, as `build.policy_runtime` and `build.build_run` connect it.

    Attributes:
        actors: The engines.
        pool: Routes requests to them.
        publisher: Sends versions to them.
        config: What fleet and restarts read of a run's configuration.
        fleet: Changes their number.
    """

    def __init__(
        self,
        actors: FaultyActors,
        pool: EnginePool,
        publisher: CheckedPublisher,
        config: RunConfig,
        classes: CheckedClasses,
        world: CheckedWorld,
    ) -> None:
        self.actors = actors
        self.pool = pool
        self.publisher = publisher
        self.config = config
        self.fleet = classes.fleet(config, pool, publisher, actors, world.note)
        # As in `policy_runtime`: colocated engines are not restarted.
        self._max_restarts = 0 if config.cluster.colocated else MAX_RESTARTS_PER_HOUR
        start = cast("Callable[[EngineId], Any]", lambda engine_id: actors.restarted(config, engine_id))
        self._restarts = classes.restarts(pool, start, publisher.catch_up, self._max_restarts)
        actors.num_starts.clear()
        actors.may_lose = self.may_lose

    @asynccontextmanager
    async def running(self, *, follows_nodes: bool) -> AsyncIterator[None]:
        """Restart engines; with `follows_nodes`, let those on draining nodes leave."""
        try:
            async with self._restarts.running():
                if follows_nodes:
                    async with self.fleet.following(self.actors.draining_nodes):
                        yield
                else:
                    yield
        finally:
            await self.publisher.close()

    def serving(self) -> list[CheckedEngine]:
        """Engines in service whose process is well."""
        engines = cast("list[CheckedEngine]", in_service(self.pool))
        return [engine for engine in engines if engine.process.responds and engine.process.engine.responds]

    def may_lose(self, engine_ids: Iterable[EngineId]) -> bool:
        """Whether another engine is well, or one of these will come back. A run without engines ends."""
        lost = set(engine_ids)
        if any(engine.engine_id not in lost for engine in self.serving()):
            return True
        return bool(self._max_restarts) and any(self.actors.num_starts[one] <= SAFE_RESTARTS for one in lost)


@cache
def _some_config() -> RunConfig:
    # Imported here since it loads Hydra, which only runs with faults need.
    from penstock.platform.checks.load import compose_config

    overrides = ("experiment=arithmetic", "rollout/engine=torch", "model.path=policy")
    return compose_config([*overrides, "cluster.pools.cpu.memory_gib=1000000"])


def service_config(weights: WeightsConfig, rates: FaultRates, step_s: float, *, colocated: bool) -> RunConfig:
    """What fleet and restarts read of a run's configuration: a cluster on which any number of engines fits."""
    if math.isinf(rates.engine_steps):
        cluster = ClusterConfig.model_construct(colocated=colocated)  # type: ignore[call-arg] # nothing joins or leaves
        return RunConfig.model_construct(cluster=cluster)  # type: ignore[call-arg] # so the rest is not read
    config = _some_config()
    cluster = config.cluster.model_copy(update={"colocated": colocated})
    leaves = weights.model_copy(update={"drain_timeout_s": LEAVE_STEPS * step_s})
    return config.model_copy(update={"cluster": cluster, "weights": leaves})
