"""Faults of engines at random times: processes that die or hang, nodes that are drained, engines that join and leave.

What fails in messages and updates is drawn in the process (faulty_engines.py). The run survives everything that is
planted here: an engine is only taken if another one is well, or if its budget of restarts brings it back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from penstock.dataflow.errors import PenstockError
from tests.simulation.config import FaultRates
from tests.simulation.faulty_engines import (
    DEATH_NOTICED_S,
    SAFE_RESTARTS,
    CheckedEngine,
    EngineProcess,
    EngineService,
    FaultyEngine,
)
from tests.simulation.world import CheckedWorld, InvariantError

KINDS = ("crash", "hang", "process hang", "slow")
EXTRA_ENGINES = 2
"""So many more engines than at the start may be there at once."""


class EngineFaults:
    """Injects faults until `run` is cancelled."""

    def __init__(
        self, rates: FaultRates, world: CheckedWorld, service: EngineService, num_engines: int, step_s: float
    ) -> None:
        """Prepare the faults.

        Args:
            rates: Of the faults.
            world: The simulated run.
            service: The engines.
            num_engines: Engines at the start.
            step_s: Expected step time, seconds.
        """
        self._rates = rates
        self._world = world
        self._service = service
        self._num_engines = num_engines
        self._step_s = step_s
        self._rng = world.rng("faults of engines")

    async def run(self) -> None:
        rates = self._rates
        async with asyncio.TaskGroup() as jobs:
            self._jobs = jobs
            jobs.create_task(self._repeat(rates.engine_steps / self._num_engines, self._start_trouble))
            jobs.create_task(self._repeat(rates.all_lost_steps, self._lose_all))
            jobs.create_task(self._repeat(rates.scale_steps, self._scale))
            jobs.create_task(self._repeat(rates.drain_steps, self._drain))

    async def _repeat(self, mean_steps: float, fault: Callable[[], Awaitable[None]]) -> None:
        if math.isinf(mean_steps):
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / (mean_steps * self._step_s)))
            await fault()

    async def _start_trouble(self) -> None:
        if not (serving := self._service.serving()):
            return
        engine, kind = self._rng.choice(serving), self._rng.choices(KINDS, self._rates.kinds)[0]
        outage_s = self._rng.expovariate(1 / (self._rates.outage_steps * self._step_s))
        if kind != "slow" and not self._service.may_lose([engine.engine_id]):
            return
        self._world.faults[kind if kind == "process hang" else f"engine {kind}"] += 1
        self._world.note(f"{engine.engine_id} {kind} for {outage_s:.3f} s")
        # It takes effect now: several faults may come at one moment, after a stall of the driver.
        process, simulated = engine.process, engine.process.engine
        if kind == "crash":
            self._crash(engine)
        elif kind == "slow":
            factor = 2 + 6 * self._rng.random()
            simulated.set_speed(simulated.speed / factor)
            self._jobs.create_task(self._speed_up(simulated, factor, outage_s))
        else:
            simulated.hang()
            if kind == "process hang":
                process.hang()
            self._jobs.create_task(self._recover(process, outage_s))

    async def _speed_up(self, engine: FaultyEngine, factor: float, outage_s: float) -> None:
        await asyncio.sleep(outage_s)
        engine.set_speed(engine.speed * factor)

    async def _recover(self, process: EngineProcess, outage_s: float) -> None:
        await asyncio.sleep(outage_s)
        if process.is_alive:  # if it took too long, the supervisor has replaced it
            process.engine.recover()
            process.recover()

    def _crash(self, engine: CheckedEngine) -> None:
        engine.process.die(noticed_after_s=self._rng.random() * DEATH_NOTICED_S)

    async def _lose_all(self) -> None:
        """Every engine in service dies at once."""
        serving = self._service.serving()
        starts = self._service.actors.num_starts
        # The others would be enough to survive, but it is the return of these that is tested.
        if not serving or not self._service.may_lose([engine.engine_id for engine in serving]):
            return
        if min(starts[engine.engine_id] for engine in serving) > SAFE_RESTARTS:
            return
        # A prompt that two engines died on before either answered is not sent to a third one, and a run ends if all of
        # its groups fail. So these must have answered something.
        if not all(engine.process.engine.counters.tokens for engine in serving):
            return
        self._world.faults["all engines lost"] += 1
        self._world.note(f"all {len(serving)} engines die")
        for engine in serving:
            self._crash(engine)

    async def _scale(self) -> None:
        """Let engines join or leave."""
        actors, pool = self._service.actors, self._service.pool
        num_before, wanted = len(pool.views()), self._rng.randint(1, self._num_engines + EXTRA_ENGINES)
        if any(actors.num_starts[view.engine_id] > SAFE_RESTARTS for view in pool.views()):
            wanted = max(wanted, num_before)  # the one that stays might be one that cannot come back
        if wanted == num_before:
            return
        self._world.note(f"scale {num_before} -> {wanted}")
        try:
            await self._service.fleet.scale(wanted, lambda _sentence: None)
        except InvariantError:
            raise
        except PenstockError as refusal:
            self._world.faults["scale refused"] += 1
            self._world.note(str(refusal))
            return
        self._world.faults["engines joined" if wanted > num_before else "engines left"] += 1

    async def _drain(self) -> None:
        """A node is drained, and lost a while later."""
        actors = self._service.actors
        node = self._rng.choice(actors.nodes)
        if not actors.processes_on(node):
            return
        actors.drain(node)
        self._world.faults["node drained"] += 1
        self._world.note(f"{node} is drained")
        self._jobs.create_task(self._lose_node(node))

    async def _lose_node(self, node: str) -> None:
        actors = self._service.actors
        while True:
            await asyncio.sleep(self._rng.uniform(10.0, 40.0))
            processes = actors.processes_on(node)
            if not processes or self._service.may_lose([process.engine.engine_id for process in processes]):
                break
        self._world.note(f"{node} is lost with {len(processes)} engines")
        for process in processes:
            process.die(noticed_after_s=self._rng.random() * DEATH_NOTICED_S)
        actors.draining.discard(node)
