"""Injects faults into a simulated run by its seed: engines, rewards, environments, trainer, messages, clocks.

Rates are relative to the expected time of a step, so they do not depend on the length of a step. At least one engine
has no fault at any time, because a run without engines stops, which has its own test.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.dataflow.ids import GroupId
from penstock.dataflow.ports import TokenDelta
from penstock.platform.simulator.config import FaultRates
from penstock.platform.simulator.disk import ModelledDisk
from penstock.platform.simulator.engine import SimulatedEngine, TokenStream
from penstock.platform.simulator.parts import SimulatedEnvironments
from penstock.platform.simulator.rewards import SimulatedRewards
from penstock.platform.simulator.trainer import SimulatedTrainer
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop
from penstock.platform.simulator.world import World

if TYPE_CHECKING:
    from penstock.platform.simulator.checks import CheckedDataflow
    from penstock.rollout.pool.pool import EnginePool


OPERATIONS_OF_CHECKPOINTS = 60
"""File operations of the first two or three checkpoints of a small run."""
FULL_STEPS = 3.0
"""Mean time that a disk is full, in expected step times."""
STALL_S = (60.0, 300.0)
"""Shortest and longest stall of the driver, seconds."""
MAX_DEATHS = 4
"""Maximum number of drivers that die early."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The components into which faults are injected."""

    engines: Sequence[SimulatedEngine]
    pool: EnginePool
    rewards: SimulatedRewards
    environments: SimulatedEnvironments
    trainer: SimulatedTrainer
    catch_up: Callable[[SimulatedEngine], Awaitable[bool]]


class FaultInjector:
    """Injects faults until `run` is cancelled."""

    def __init__(self, rates: FaultRates, world: World, targets: Targets, step_s: float) -> None:
        self._rates = rates
        self._world = world
        self._targets = targets
        self._step_s = step_s
        self._rng = world.rng("faults")
        self._sick: set[str] = set()

    def arm(self) -> None:
        """Set the fault probabilities of the simulated components."""
        rates, targets = self._rates, self._targets
        targets.rewards.faults = targets.environments.faults = rates
        targets.trainer.bad_step_rate = rates.bad_steps
        targets.trainer.death_rate = rates.trainer_crashes if self._may_die else 0.0
        targets.trainer.hang_rate = rates.rank_hangs if self._may_die else 0.0
        for engine in targets.engines:
            engine.set_speed(engine.speed * (1 + rates.speed_spread * (2 * self._rng.random() - 1)))
            engine.clock_rate = 1 + rates.skew * (2 * self._rng.random() - 1)
            engine.lost_acks = rates.acks_lost
            engine.deliver = self._deliver
            self._world.faults["clock skewed"] += 1

    async def driver_dies(self) -> None:
        """Return when the driver dies."""
        if not self._may_die:
            await asyncio.Event().wait()
        await self._pause(self._rng, self._rates.driver_steps)
        self._world.faults["driver crash"] += 1

    def plant_death_at_the_disk(self, disk: ModelledDisk) -> None:
        """Let the driver die at one of the next file operations, with the same probability as anywhere else."""
        if self._may_die and self._rng.random() < self._rates.disk_deaths:
            disk.dies_at = disk.num_operations + self._rng.randrange(1, OPERATIONS_OF_CHECKPOINTS)
            self._world.faults["driver crash at the disk"] += 1

    @property
    def _may_die(self) -> bool:
        return self._world.incarnation < MAX_DEATHS

    async def run(self, core: CheckedDataflow) -> None:
        """Inject engine faults and stray reports."""
        async with asyncio.TaskGroup() as jobs:
            for engine in self._targets.engines:
                jobs.create_task(self._trouble(engine, self._world.rng(f"faults/{engine.engine_id}")))
            jobs.create_task(self._stray_reports(core, self._world.rng("stray")))
            jobs.create_task(self._reward_deaths(self._world.rng("deaths of reward workers")))

    async def _pause(self, rng: random.Random, mean_steps: float) -> None:
        """Sleep for an exponentially distributed time; without end if its mean is infinite."""
        if math.isinf(mean_steps):
            await asyncio.Event().wait()
        await asyncio.sleep(rng.expovariate(1 / (mean_steps * self._step_s)))

    async def _trouble(self, engine: SimulatedEngine, rng: random.Random) -> None:
        while True:
            await self._pause(rng, self._rates.engine_steps)
            kind = rng.choices(("crash", "hang", "slow"), self._rates.kinds)[0]
            outage_s = rng.expovariate(1 / (self._rates.outage_steps * self._step_s))
            if len(self._sick) + 1 >= len(self._targets.engines):
                continue
            self._sick.add(engine.engine_id)
            self._world.faults[f"engine {kind}"] += 1
            self._world.note(f"{engine.engine_id} {kind} for {outage_s:.3f} s")
            if kind == "slow":
                speed = engine.speed
                engine.set_speed(speed / (2 + 6 * rng.random()))
                await asyncio.sleep(outage_s)
                engine.set_speed(speed)
            elif kind == "hang":
                engine.hang()
                await asyncio.sleep(outage_s)
                engine.recover()
                if engine.engine_id in self._targets.pool.fenced:
                    await self._rejoin(engine)
            else:
                engine.crash()
                self._targets.pool.fence(engine.engine_id, "it died")  # the death of an actor is reported at once
                await asyncio.sleep(outage_s)
                await self._rejoin(engine)
            self._sick.discard(engine.engine_id)

    async def _rejoin(self, engine: SimulatedEngine) -> None:
        """Restart an engine, send it the published version and add it to the pool."""
        engine.crash()
        engine.restart()
        if await self._targets.catch_up(engine):
            self._targets.pool.add(engine)
            self._world.note(f"{engine.engine_id} rejoins at v{engine.version}")

    def _deliver(self, stream: TokenStream, delta: TokenDelta) -> None:
        rates, draw = self._rates, self._rng.random()
        if self._rng.random() < rates.lost:
            self._world.faults["message lost"] += 1
            stream.cut()
            return
        if delta.finish_reason is not None and draw < rates.delayed + rates.duplicated:
            is_late = draw < rates.delayed
            self._world.faults["completion delayed" if is_late else "completion duplicated"] += 1
            delay_s = self._rng.expovariate(1 / self._step_s)
            asyncio.get_running_loop().call_later(delay_s, stream.deliver, delta)
            if is_late:
                return
        stream.deliver(delta)

    async def fill_disk(self, disk: ModelledDisk) -> None:
        """Let the disk be full for a while, again and again. It counts if a write has failed meanwhile."""
        rng = self._world.rng("full disks")
        while True:
            await self._pause(rng, self._rates.full_disk_steps)
            disk.is_full, num_refused = True, disk.num_refused
            try:
                await self._pause(rng, FULL_STEPS)
            finally:
                disk.is_full = False
                self._world.faults["full disk"] += disk.num_refused > num_refused

    async def stall(self, loop: VirtualTimeLoop) -> None:
        """Let the driver's event loop stand still for some minutes. Each stall renews the limits of all calls."""
        rng = self._world.rng("stalls")
        for _ in range(self._rates.num_stalls):
            await self._pause(rng, self._rates.stall_steps)
            self._world.faults["stall of the driver"] += 1
            stall_s = rng.uniform(*STALL_S)
            self._world.note(f"the driver stands still for {stall_s:.0f} s")
            loop.stall(stall_s)
        await asyncio.Event().wait()

    async def _reward_deaths(self, rng: random.Random) -> None:
        while True:
            await self._pause(rng, self._rates.reward_death_steps)
            self._targets.rewards.lose_worker(rng)

    async def _stray_reports(self, core: CheckedDataflow, rng: random.Random) -> None:
        """Send reports that must have no effect: duplicated, out of order or for unknown groups."""
        while True:
            await self._pause(rng, self._rates.stray_steps)
            known = core.recent[rng.randrange(len(core.recent))] if core.recent else None
            self._world.faults["stray report"] += 1
            unknown, kind = GroupId(core.ledger.num_admitted + 1000), rng.randrange(6)
            if kind == 0 or known is None:
                core.generated(unknown)
            elif kind == 1:
                core.generated(known.group_id)
            elif kind == 2:
                core.record_version(unknown, 0, core.version)
            else:
                core.ready(known)
