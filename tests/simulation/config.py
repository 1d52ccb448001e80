"""Configuration of a simulated run with faults: the keys of `penstock simulate`, and those that only tests have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from penstock.platform.simulator.config import SimulationConfig, parse_as


class FaultLevel(StrEnum):
    """Amount of simulated faults."""

    NONE = "none"
    LIGHT = "light"
    HEAVY = "heavy"
    STALLS = "stalls"
    """Only stalls of the driver's event loop, for which nobody may be declared lost."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Frequencies of faults.

    Attributes:
        engine_steps: Mean time between two faults of one engine, in expected step times.
        kinds: Relative frequency of crash, hang of an engine, hang of its whole process, and slowness.
        outage_steps: Mean duration of such a fault, and of the start of a process, in expected step times.
        all_lost_steps: Mean time between two losses of all engines at once, in expected step times.
        scale_steps: Mean time between two changes of the number of engines, in expected step times.
        drain_steps: Mean time between two nodes that are drained and then lost, in expected step times.
        start_fails: Probability that an engine process does not come up.
        refusals: Probability per engine and version that its first update is refused.
        memory_kills: Probability per engine and version that the process is killed for memory while it updates.
        reward_raises: Probability per score that the reward raises an error.
        reward_hangs: Probability per score that the reward hangs.
        scores_lost: Probability per score that its worker stops answering before it is delivered.
        reward_death_steps: Mean time between two deaths of reward workers, in expected step times.
        environment_raises: Probability per turn that the environment raises an error.
        environment_hangs: Probability per turn that the environment hangs.
        bad_steps: Probability per step that its loss or gradient is not finite.
        trainer_crashes: Probability per step that a rank dies.
        rank_hangs: Probability per step that it never returns.
        lost: Probability per delta that this and all later messages of its request are lost.
        acks_lost: Probability per engine and version that its first acknowledgement is lost.
        delayed: Probability per completion that it arrives late.
        duplicated: Probability per completion that it arrives a second time, later.
        stray_steps: Mean time between two duplicated, late or invalid reports, in expected step times.
        driver_steps: Mean number of trained steps after which the driver dies.
        disk_deaths: Probability per driver that it dies at one of its first file operations.
        full_disk_steps: Mean time until the disk is full, in expected step times.
        poison: Share of the tasks whose prompt every engine refuses.
        stall_steps: Mean time between two stalls of the driver's event loop, in expected step times.
        num_stalls: Stalls of one driver.
        speed_spread: Largest relative deviation of an engine's speed from its nominal speed.
        skew: Largest relative error of the rate of an engine's clock.
    """

    engine_steps: float = math.inf
    kinds: tuple[float, float, float, float] = (0, 0, 0, 0)
    outage_steps: float = 0.0
    all_lost_steps: float = math.inf
    scale_steps: float = math.inf
    drain_steps: float = math.inf
    start_fails: float = 0.0
    refusals: float = 0.0
    memory_kills: float = 0.0
    reward_raises: float = 0.0
    reward_hangs: float = 0.0
    scores_lost: float = 0.0
    reward_death_steps: float = math.inf
    environment_raises: float = 0.0
    environment_hangs: float = 0.0
    bad_steps: float = 0.0
    trainer_crashes: float = 0.0
    rank_hangs: float = 0.0
    lost: float = 0.0
    acks_lost: float = 0.0
    delayed: float = 0.0
    duplicated: float = 0.0
    stray_steps: float = math.inf
    driver_steps: float = math.inf
    disk_deaths: float = 0.0
    full_disk_steps: float = math.inf
    poison: float = 0.0
    stall_steps: float = math.inf
    num_stalls: int = 0
    speed_spread: float = 0.0
    skew: float = 0.0


RATES: dict[FaultLevel, FaultRates] = {
    FaultLevel.LIGHT: FaultRates(
        engine_steps=20.0,
        kinds=(1, 1, 1, 2),
        outage_steps=1.0,
        all_lost_steps=100.0,
        scale_steps=20.0,
        drain_steps=50.0,
        start_fails=0.01,
        refusals=0.005,
        memory_kills=0.005,
        reward_raises=0.01,
        reward_hangs=0.002,
        scores_lost=0.001,
        reward_death_steps=40.0,
        environment_raises=0.005,
        environment_hangs=0.001,
        bad_steps=0.02,
        trainer_crashes=0.005,
        rank_hangs=0.002,
        lost=0.0005,
        acks_lost=0.01,
        delayed=0.01,
        duplicated=0.01,
        stray_steps=2.0,
        driver_steps=20.0,
        disk_deaths=0.2,
        full_disk_steps=30.0,
        poison=0.01,
        stall_steps=10.0,
        num_stalls=1,
        speed_spread=0.01,
        skew=0.01,
    ),
    FaultLevel.HEAVY: FaultRates(
        engine_steps=5.0,
        kinds=(2, 1, 1, 1),
        outage_steps=1.5,
        all_lost_steps=25.0,
        scale_steps=4.0,
        drain_steps=15.0,
        start_fails=0.05,
        refusals=0.05,
        memory_kills=0.03,
        reward_raises=0.05,
        reward_hangs=0.01,
        scores_lost=0.005,
        reward_death_steps=4.0,
        environment_raises=0.02,
        environment_hangs=0.005,
        bad_steps=0.1,
        trainer_crashes=0.05,
        rank_hangs=0.02,
        lost=0.003,
        acks_lost=0.03,
        delayed=0.05,
        duplicated=0.05,
        stray_steps=0.3,
        driver_steps=4.0,
        disk_deaths=0.8,
        full_disk_steps=12.0,
        poison=0.05,
        stall_steps=5.0,
        num_stalls=2,
        speed_spread=0.05,
        skew=0.05,
    ),
    FaultLevel.STALLS: FaultRates(stall_steps=1.0, num_stalls=8),
}


class FaultyConfig(SimulationConfig):
    """Configuration of a simulated run with faults and checks.

    Attributes:
        faults: Amount of simulated faults.
        checkpoint_every: Steps between checkpoints, from which a driver that died goes on.
        check_every: Events between two checks of every live group; the cheap checks run after each event.
    """

    faults: FaultLevel = FaultLevel.NONE
    checkpoint_every: int = Field(default=2, ge=1)
    check_every: int = Field(default=64, ge=1)


def parse_faulty(overrides: list[str]) -> FaultyConfig:
    """`parse_simulation` with the keys of faults."""
    return parse_as(FaultyConfig, overrides)
