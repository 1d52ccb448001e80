"""Injects faults into a simulated run by its seed: rewards, environments, trainer, reports, the driver.

Rates are relative to the expected time of a step, so they do not depend on the length of a step. Those of engines are
in engine_faults.py and faulty_engines.py.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass

from penstock.dataflow.ids import GroupId
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop
from tests.simulation.checks import CheckedDataflow
from tests.simulation.config import FaultRates
from tests.simulation.disk import ModelledDisk
from tests.simulation.faulty_parts import FaultyEnvironments, FaultyRewards, FaultyTrainer
from tests.simulation.world import CheckedWorld

OPERATIONS_OF_CHECKPOINTS = 60
"""File operations of the first two or three checkpoints of a small run."""
FULL_STEPS = 3.0
"""Mean time that a disk is full, in expected step times."""
STALL_S = (60.0, 300.0)
"""Shortest and longest stall of the driver, seconds."""
POLL_STEPS = 0.25
"""Time between two looks at the number of trained steps, in expected step times."""
MAX_DEATHS = 4
"""Maximum number of drivers that die early."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The components into which faults are injected."""

    rewards: FaultyRewards
    environments: FaultyEnvironments
    trainer: FaultyTrainer


class FaultInjector:
    """Injects faults until `run` is cancelled."""

    def __init__(self, rates: FaultRates, world: CheckedWorld, targets: Targets, step_s: float) -> None:
        self._rates = rates
        self._world = world
        self._targets = targets
        self._step_s = step_s
        self._rng = world.rng("faults")

    def arm(self) -> None:
        """Set the fault probabilities of the simulated components."""
        rates, targets = self._rates, self._targets
        targets.rewards.faults = targets.environments.faults = rates
        targets.trainer.bad_step_rate = rates.bad_steps
        targets.trainer.death_rate = rates.trainer_crashes if self._may_die else 0.0
        targets.trainer.hang_rate = rates.rank_hangs if self._may_die else 0.0

    async def driver_dies(self) -> None:
        """Return when the driver dies: after a random number of trained steps, at a random moment of the next one.

        Steps are counted, since with other faults they take much longer than expected: by the time alone nearly all
        drivers would die before their first checkpoint.
        """
        if not self._may_die or math.isinf(self._rates.driver_steps):
            await asyncio.Event().wait()
        trained = self._targets.trainer.trained
        last = len(trained.steps) + int(self._rng.expovariate(1 / self._rates.driver_steps))
        while len(trained.steps) < last:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(POLL_STEPS * self._step_s)
        await self._pause(self._rng, 1.0)
        self._world.faults["driver crash"] += 1

    def plant_death_at_the_disk(self, disk: ModelledDisk) -> None:
        """Let the driver die at one of the next file operations, with the same probability as anywhere else."""
        if self._may_die and self._rng.random() < self._rates.disk_deaths:
            disk.dies_at = disk.num_operations + self._rng.randrange(1, OPERATIONS_OF_CHECKPOINTS)
            self._world.faults["driver crash at the disk"] += 1

    @property
    def _may_die(self) -> bool:
        return self._world.incarnation < MAX_DEATHS

    async def _pause(self, rng: random.Random, mean_steps: float) -> None:
        """Sleep for an exponentially distributed time; without end if its mean is infinite."""
        if math.isinf(mean_steps):
            await asyncio.Event().wait()
        await asyncio.sleep(rng.expovariate(1 / (mean_steps * self._step_s)))

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

    async def reward_deaths(self) -> None:
        """Let reward workers die."""
        rng = self._world.rng("deaths of reward workers")
        while True:
            await self._pause(rng, self._rates.reward_death_steps)
            self._targets.rewards.lose_worker(rng)

    async def stray_reports(self, core: CheckedDataflow) -> None:
        """Send reports that must have no effect: duplicated, out of order or for unknown groups."""
        rng = self._world.rng("stray")
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
