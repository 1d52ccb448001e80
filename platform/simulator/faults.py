"""Injects faults into a simulated run by its seed: rewards, environments, trainer, reports, the driver.

Rates are relative to the expected time of a step, so they do not depend on the length of a step. Those of engines are
in engine_faults.py and engine_processes.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.dataflow.ids import GroupId
from penstock.platform.simulator.config import FaultRates
from penstock.platform.simulator.disk import ModelledDisk
from penstock.platform.simulator.parts import SimulatedEnvironments, SimulatedRewards, SimulatedTrainer
from penstock.platform.simulator.world import World

if TYPE_CHECKING:
    from penstock.platform.simulator.checks import CheckedDataflow


OPERATIONS_OF_CHECKPOINTS = 60
"""File operations of the first two or three checkpoints of a small run."""
MAX_DEATHS = 4
"""Maximum number of drivers that die early."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The components into which faults are injected."""

    rewards: SimulatedRewards
    environments: SimulatedEnvironments
    trainer: SimulatedTrainer


class FaultInjector:
    """Injects faults until `run` is cancelled."""

    def __init__(self, rates: FaultRates, world: World, targets: Targets, step_s: float) -> None:
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

    async def driver_dies(self) -> None:
        """Return when the driver dies."""
        if not self._may_die:
            await asyncio.Event().wait()
        await asyncio.sleep(self._rng.expovariate(1 / (self._rates.driver_steps * self._step_s)))
        self._world.faults["driver crash"] += 1

    def plant_death_at_the_disk(self, disk: ModelledDisk) -> None:
        """Let the driver die at one of the next file operations, with the same probability as anywhere else."""
        if self._may_die and self._rng.random() < self._rates.disk_deaths:
            disk.dies_at = disk.num_operations + self._rng.randrange(1, OPERATIONS_OF_CHECKPOINTS)
            self._world.faults["driver crash at the disk"] += 1

    @property
    def _may_die(self) -> bool:
        return self._world.incarnation < MAX_DEATHS

    async def stray_reports(self, core: CheckedDataflow) -> None:
        """Send reports that must have no effect: duplicated, out of order or for unknown groups."""
        rng = self._world.rng("stray")
        while True:
            await asyncio.sleep(rng.expovariate(1 / (self._rates.stray_steps * self._step_s)))
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
