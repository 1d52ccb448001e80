"""What goes wrong in a simulated run, from its seed: engines, rewards, the trainer, messages, clocks.

Rates are relative to the expected time of a step, so that a short run sees as much as a long one. At least one engine
is left alone at any time: a run without engines is supposed to stop, and that has its own test.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.trajectory import GroupRef
from penstock.platform.simulator.config import FaultLevel
from penstock.platform.simulator.engine import SimulatedEngine
from penstock.platform.simulator.parts import SimulatedRewards, SimulatedTrainer
from penstock.platform.simulator.stream import TokenStream
from penstock.platform.simulator.world import World

if TYPE_CHECKING:
    from penstock.platform.simulator.checks import CheckedDataflow
    from penstock.rollout.pool import EnginePool


MAX_DRIVER_DEATHS = 2


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often what fails.

    Attributes:
        engine_steps: Mean time between two faults of one engine, in expected step times.
        kinds: Relative frequency of crash, hang and slowness.
        outage_steps: Mean time an engine stays so, in expected step times.
        reward_raises: Probability per score.
        reward_hangs: Probability per score.
        trainer_crashes: Probability per step.
        lost: Probability per delta that this and all later messages of its request are lost.
        delayed: Probability per completion that it arrives late.
        stray_steps: Mean time between two duplicated, late or senseless reports, in expected step times.
        driver_steps: Mean time until the driver dies, in expected step times.
        skew: Largest relative error of an engine's clock, so of its speed.
    """

    engine_steps: float
    kinds: tuple[float, float, float]
    outage_steps: float
    reward_raises: float
    reward_hangs: float
    trainer_crashes: float
    lost: float
    delayed: float
    stray_steps: float
    driver_steps: float
    skew: float


RATES: dict[FaultLevel, FaultRates] = {
    FaultLevel.LIGHT: FaultRates(20.0, (1, 1, 2), 1.0, 0.01, 0.002, 0.02, 0.0005, 0.01, 2.0, 100.0, 0.01),
    FaultLevel.HEAVY: FaultRates(5.0, (2, 2, 1), 1.5, 0.05, 0.01, 0.1, 0.003, 0.05, 0.3, 25.0, 0.05),
}


@dataclass(frozen=True, slots=True)
class Targets:
    """What faults are planted into."""

    engines: Sequence[SimulatedEngine]
    pool: EnginePool
    rewards: SimulatedRewards
    trainer: SimulatedTrainer
    catch_up: Callable[[SimulatedEngine], Awaitable[None]]


class FaultInjector:
    """Plants faults for as long as `run` is not cancelled."""

    def __init__(self, rates: FaultRates, world: World, targets: Targets, step_s: float) -> None:
        self._rates = rates
        self._world = world
        self._targets = targets
        self._step_s = step_s
        self._rng = world.rng("faults")
        self._sick: set[str] = set()

    def arm(self) -> None:
        """Set the probabilities of the parts that fail on their own."""
        rates, targets = self._rates, self._targets
        targets.rewards.faults.raises = rates.reward_raises
        targets.rewards.faults.hangs = rates.reward_hangs
        targets.trainer.crash_rate = rates.trainer_crashes
        for engine in targets.engines:
            engine.set_speed(engine.speed * (1 + rates.skew * (2 * self._rng.random() - 1)))
        self._world.deliver = self._deliver

    async def driver_dies(self) -> None:
        """Return when the driver dies; one that came back `MAX_DRIVER_DEATHS` times lives."""
        if self._world.incarnation >= MAX_DRIVER_DEATHS:
            await asyncio.Event().wait()
        await asyncio.sleep(self._rng.expovariate(1 / (self._rates.driver_steps * self._step_s)))
        self._world.faults["driver crash"] += 1

    async def run(self, core: CheckedDataflow) -> None:
        """Let engines fail and stray reports arrive."""
        async with asyncio.TaskGroup() as jobs:
            for engine in self._targets.engines:
                jobs.create_task(self._trouble(engine, self._world.rng(f"faults/{engine.engine_id}")))
            jobs.create_task(self._stray_reports(core, self._world.rng("stray")))

    async def _trouble(self, engine: SimulatedEngine, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / (self._rates.engine_steps * self._step_s)))
            kind = rng.choices(("crash", "hang", "slow"), self._rates.kinds)[0]
            outage_s = rng.expovariate(1 / (self._rates.outage_steps * self._step_s))
            if len(self._sick) + 1 >= len(self._targets.engines):
                continue
            self._sick.add(engine.engine_id)
            self._world.faults[f"engine {kind}"] += 1
            self._world.note(f"{engine.engine_id} {kind} for {outage_s:.3f} s")
            if kind == "slow":
                await self._slow_down(engine, outage_s, 2 + 6 * rng.random())
            elif kind == "hang":
                await self._hang(engine, outage_s)
            else:
                await self._crash(engine, outage_s)
            self._sick.discard(engine.engine_id)

    async def _slow_down(self, engine: SimulatedEngine, outage_s: float, factor: float) -> None:
        speed = engine.speed
        engine.set_speed(speed / factor)
        await asyncio.sleep(outage_s)
        engine.set_speed(speed)

    async def _hang(self, engine: SimulatedEngine, outage_s: float) -> None:
        engine.hang()
        await asyncio.sleep(outage_s)
        engine.recover()
        if engine.engine_id in self._targets.pool.fenced:
            await self._rejoin(engine)

    async def _crash(self, engine: SimulatedEngine, outage_s: float) -> None:
        engine.crash()
        await self._targets.pool.fence(engine.engine_id, "it died")  # the death of an actor is reported at once
        await asyncio.sleep(outage_s)
        await self._rejoin(engine)

    async def _rejoin(self, engine: SimulatedEngine) -> None:
        """As a supervisor does: restart, catch up with the published version, join the pool."""
        engine.crash()
        engine.restart()
        try:
            await self._targets.catch_up(engine)
        except EngineLostError:
            return
        self._targets.pool.add(engine)
        self._world.note(f"{engine.engine_id} rejoins at v{engine.version}")

    def _deliver(self, stream: TokenStream, delta: TokenDelta) -> None:
        if self._rng.random() < self._rates.lost:
            self._world.faults["message lost"] += 1
            stream.cut()
        elif delta.finish_reason is not None and self._rng.random() < self._rates.delayed:
            self._world.faults["completion delayed"] += 1
            delay_s = self._rng.expovariate(1 / self._step_s)
            asyncio.get_running_loop().call_later(delay_s, stream.deliver, delta)
        else:
            stream.deliver(delta)

    async def _stray_reports(self, core: CheckedDataflow, rng: random.Random) -> None:
        """Completions that arrive twice, out of order or for groups that never were."""
        while True:
            await asyncio.sleep(rng.expovariate(1 / (self._rates.stray_steps * self._step_s)))
            known = core.recent[rng.randrange(len(core.recent))] if core.recent else None
            self._world.faults["stray report"] += 1
            stray_report(core, rng.randrange(6), known)


def stray_report(core: CheckedDataflow, kind: int, known: GroupRef | None) -> None:
    """Send the core one report that must change nothing."""
    unknown = GroupId(core.ledger.num_admitted + 1000)
    if kind == 0 or known is None:
        core.generated(unknown)
    elif kind == 1:
        core.generated(known.group_id)
    elif kind == 2:
        core.member_at(unknown, 0, core.version)
    else:
        core.ready(known)
