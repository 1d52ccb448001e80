"""One simulated run with faults and checks: the simulator's, whose parts fail, whose driver dies and is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Literal, cast

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import EngineId
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task_queue import TaskQueue
from penstock.platform.config.schema import CheckpointConfig, RunConfig
from penstock.platform.run.build import RunParts
from penstock.platform.run.checkpoint import Checkpoint, Checkpointer, CheckpointFolder
from penstock.platform.run.flow import Flow
from penstock.platform.run.run import PolicyRuntime
from penstock.platform.run.training import RanksLostError, Rollbacks, roll_back
from penstock.platform.simulator import simulation
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.parts import SimulatedStore
from penstock.platform.simulator.simulation import (
    MAX_REFILLS,
    RUN_DIR,
    Parts,
    Simulation,
    expected_step_s,
    instruments,
    make_task_queue,
    outcome_of,
)
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.simulation.checks import CheckedDataflow, Lineage
from tests.simulation.config import RATES, FaultLevel, FaultRates, FaultyConfig
from tests.simulation.disk import DriverDiedError, ModelledDisk
from tests.simulation.engine_faults import EngineFaults
from tests.simulation.faults import FaultInjector, Targets
from tests.simulation.faulty_engines import (
    CheckedClasses,
    CheckedPublisher,
    EngineService,
    FaultyActors,
    service_config,
)
from tests.simulation.faulty_parts import FaultyEnvironments, FaultyRewards, FaultyTrainer
from tests.simulation.progress import PROGRESS_S, watch_progress
from tests.simulation.resume_check import check_resumed, memory_of
from tests.simulation.world import POISON, CheckedWorld, InvariantError, stop_run


@dataclass(frozen=True, slots=True)
class Seams:
    """Classes that tests with planted bugs (tests/simulation/test_mutants.py) replace."""

    core: type[CheckedDataflow] = CheckedDataflow
    flow: type[Flow] = Flow
    engines: CheckedClasses = field(default_factory=CheckedClasses)
    trainer: type[FaultyTrainer] = FaultyTrainer
    pool: type[EnginePool] = EnginePool
    disk: type[ModelledDisk] = ModelledDisk
    checkpoints: type[CheckpointFolder] = CheckpointFolder
    task_queue: Callable[[SimulationConfig, FlowLimits], TaskQueue] = make_task_queue
    filters: Callable[[], FilterChain] = lambda: FilterChain([], MAX_REFILLS)
    player: type[EpisodePlayer] = EpisodePlayer
    rewards: type[FaultyRewards] = FaultyRewards

    @property
    def parts(self) -> Parts:
        """Those of them that the simulator knows."""
        known = {one.name for one in fields(Parts)} & {one.name for one in fields(self)}
        replaced: dict[str, Any] = {name: getattr(self, name) for name in known}
        return Parts(world=CheckedWorld, environments=FaultyEnvironments, **replaced)


@dataclass(slots=True)
class Outcome(simulation.Outcome):
    """Result of one simulated run with faults.

    Attributes:
        violation: The invariant that broke, or the error that stopped the run; None if it completed.
        faults: Number of injected faults by name.
        ignored: Reports that had no effect.
    """

    faults: Counter[str]
    ignored: int


class CheckedSimulation(Simulation):
    """A run with faults. If the driver dies, a new one resumes; without a trainer rank, the run goes back."""

    config: FaultyConfig
    world: CheckedWorld
    actors: FaultyActors
    core: CheckedDataflow
    environments: FaultyEnvironments
    publisher: CheckedPublisher
    rewards: FaultyRewards
    trainer: FaultyTrainer

    def __init__(self, config: FaultyConfig, seed: int, seams: Seams) -> None:
        super().__init__(config, seed, seams.parts)
        self.seams = seams
        self.rates = RATES.get(config.faults, FaultRates())
        self.disk = seams.disk(random.Random(f"{seed}/disk"))
        self.disk.make_folder(RUN_DIR)
        self.disk.sync(RUN_DIR.parent)  # as `prepare_run_dir` does
        self.lineage = Lineage()
        self.world.poison_share = self.rates.poison
        self.has_engines = False
        self.resumed: Checkpoint | None = None
        self.lost: RanksLostError | None = None
        self.checkpointer: Checkpointer | None = None

    async def main(self) -> None:
        """Train to the end through all incarnations."""
        rollbacks = Rollbacks()
        while not await self._serve():
            if self.disk.is_dead:
                self.lost = None
            if self.lost is None:
                self.disk.crash()
            self.disk.dies_at = None  # planted for an incarnation that has ended
            folder = CheckpointFolder(RUN_DIR, self.disk)
            versions = folder.versions()
            self.resumed = resumed = folder.read(versions[-1]) if versions else None
            acknowledged = None if self.checkpointer is None else self.checkpointer.newest
            if acknowledged is not None and (resumed is None or resumed.version < acknowledged):
                raise InvariantError("durability", f"v{acknowledged} was complete, and there are {versions}")
            if resumed is not None and (damage := folder.damage(resumed)) is not None:
                raise InvariantError("durability", f"the newest checkpoint is not complete: {damage}")
            await self._go_back(resumed, rollbacks)

    async def build(self) -> None:
        """One incarnation of the run, from a checkpoint."""
        await super().build()
        self.runners = cast("list[TrajectoryRunner]", [self.flow.ports.runner, self.run.evaluations.evaluator.runner])
        watch_exits(self.pool, may_fence=self.config.faults is not FaultLevel.STALLS)
        self.publisher.world = self.world
        serving = service_config(
            self.weights(), self.rates, expected_step_s(self.config), colocated=self.config.colocated
        )
        self.service = EngineService(self.actors, self.pool, self.publisher, serving, self.seams.engines, self.world)
        if self.resumed is not None:
            version, folder = self.resumed.version, self.seams.checkpoints(RUN_DIR, self.disk)
            saved, payloads = folder.flow_snapshot(self.resumed)
            await self.flow.restore(saved, payloads)
            self.run.load_state_dict(version, self.resumed.manifest["run"])
            check_resumed(self.lineage.memories[version], memory_of(self.run, self.flow))
            folder.prune(self.settings().checkpoint.keep, version)

    def start_engines(self) -> FaultyActors:
        """After a rollback they are still there."""
        if self.has_engines:
            return self.actors
        self.has_engines = True
        make, step_s = cast("Any", self.make_engine), expected_step_s(self.config)
        return FaultyActors(make, self.seams.engines.client, self.config.engines, self.rates, step_s, self.world)

    def make_trainer(self) -> FaultyTrainer:
        trainer = self.seams.trainer(self.world, self.config, self.disk)
        if self.resumed is not None:
            trainer.restore(self.resumed.path)
        return trainer

    def make_core(self, limits: FlowLimits, rules: GroupRules) -> Dataflow:
        return self.seams.core(limits, rules, self.world, self.config.check_every, self.lineage)

    def make_checkpointer(
        self, config: CheckpointConfig, runtime: PolicyRuntime, store: SimulatedStore
    ) -> Checkpointer:
        self.checkpointer = Checkpointer(
            config,
            self.seams.checkpoints(RUN_DIR, self.disk),
            runtime.trainer,
            store,
            self.world.note,
            self.resumed,
            self.world.incarnation,
            at_once,
            on_cut=self._remember,
        )
        return self.checkpointer

    def settings(self) -> RunConfig:
        every = CheckpointConfig(every_minutes=0, every_steps=self.config.checkpoint_every)
        return super().settings().model_copy(update={"checkpoint": every})

    async def train(self) -> None:
        await super().train()
        self.core.check_end()

    def describe(self, error: BaseException) -> str:
        """Describe the violation in one line, if there is one."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        cause: BaseException | None = error
        while cause is not None:
            error, cause = (cause if isinstance(cause, InvariantError) else error), cause.__context__
        return str(error) if isinstance(error, InvariantError) else super().describe(error)

    async def _serve(self) -> bool:
        """Train with the engines in service; returns whether the run is complete."""
        await self.build()
        async with self.service.running(follows_nodes=self.config.faults in RATES):
            return await self._live()

    async def _go_back(self, resumed: Checkpoint | None, rollbacks: Rollbacks) -> None:
        """After the loss of a rank, roll back as `training` does. Otherwise the next driver starts all processes."""
        if self.lost is not None and resumed is not None:
            parts, outputs = cast("RunParts", SimpleNamespace(actors=self.actors)), instruments()
            reached = self.run.version
            with contextlib.suppress(RanksLostError):  # too many of them: the run ends, and is resumed
                await roll_back(self.service.config, parts, outputs, self.lost, resumed, rollbacks, reached)
                self.world.begin_again()
                return
        self.actors.kill()
        self.has_engines = False
        self.world.begin_again()

    def _remember(self, _version: int) -> None:
        """Called by the checkpointer at each cut."""
        self.lineage.memories[self.run.version] = memory_of(self.run, self.flow)

    async def _live(self) -> bool:
        """Train until the end (True) or until the driver or a rank of the trainer dies (False)."""
        self.lost = None
        start = asyncio.create_task
        training = start(self.train(), name="controller")
        jobs = [training, start(self._watch_progress(), name="watch of the progress")]
        if self.config.adaptive_concurrency:
            jobs.append(start(self.monitor.poll_forever(), name="engine monitor"))
        rates = RATES.get(self.config.faults)
        if rates is not None:
            targets = Targets(self.rewards, self.environments, self.trainer)
            injector = FaultInjector(rates, self.world, targets, expected_step_s(self.config))
            injector.arm()
            jobs.append(start(injector.stray_reports(self.core), name="stray reports"))
            engine_faults = EngineFaults(
                rates, self.world, self.service, self.config.engines, expected_step_s(self.config)
            )
            jobs.append(start(engine_faults.run(), name="faults of engines"))
            jobs.append(start(injector.driver_dies(), name="death of the driver"))
            jobs.append(start(injector.fill_disk(self.disk), name="full disks"))
            jobs.append(start(injector.stall(cast("VirtualTimeLoop", asyncio.get_running_loop())), name="stalls"))
            jobs.append(start(injector.reward_deaths(), name="deaths of reward workers"))
            injector.plant_death_at_the_disk(self.disk)
            jobs.append(start(self._death_at_the_disk(), name="death at the disk"))
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            has_died = training in done and self._is_planted(training.exception())
            for job in done:
                if job is not training or not has_died:
                    job.result()
        finally:
            for job in jobs:
                job.cancel()
            ends = await asyncio.gather(*jobs, return_exceptions=True)
            await self.rewards.close()
        for end in ends:
            if isinstance(end, InvariantError):
                raise end
        with contextlib.suppress(DriverDiedError):
            await self.run.close()
        if training in done and not has_died:
            self._check_end()
            return True
        self.trainer.end()
        return False

    def _check_end(self) -> None:
        """Check that the last checkpoint was taken, unless the disk refused it, and that stalls have cost nothing."""
        versions = CheckpointFolder(RUN_DIR, self.disk).versions()
        is_refused = self.disk.refused_at_s >= self.trainer.trained.steps[-1][0]
        if not (is_refused or self.disk.is_dead or versions[-1:] == [self.config.steps]):
            raise InvariantError("durability", f"no checkpoint of the last step, there are {versions}")
        if self.config.faults is FaultLevel.STALLS:
            interruptions = sum((runner.stats.interruptions for runner in self.runners), Counter[str]())
            lost = [interruptions, self.core.retries, self.rewards.num_killed]
            if any(lost):
                raise InvariantError("stall", f"interruptions, retries, workers ended: {lost}")

    def _is_planted(self, end: BaseException | None) -> bool:
        """Whether a run may end with this: the driver died, or ranks are lost: dead, or in a step that hangs."""
        self.lost = end if isinstance(end, RanksLostError) else None
        return isinstance(end, DriverDiedError) or (self.lost is not None and self.trainer.hangs)

    async def _watch_progress(self) -> None:
        """Check that the run gets on. A step may take long by the costs that the user has set."""
        run, core, trainer = self.run, self.core, self.trainer
        limit_s = max(PROGRESS_S, simulation.LONG_STEPS * expected_step_s(self.config))

        def counters() -> tuple[int, ...]:
            num_tokens = sum(runner.stats.received_tokens for runner in self.runners)
            return num_tokens, run.stats.num_scored, len(trainer.trained.steps), self.disk.num_operations

        await watch_progress(counters, core, limit_s)

    async def _death_at_the_disk(self) -> None:
        """Return when the driver dies at a file operation."""
        death = asyncio.Event()
        self.disk.on_death = death.set
        await death.wait()


def watch_exits(pool: EnginePool, *, may_fence: bool) -> None:
    """Check why engines are fenced: never for a prompt that they refuse, and not at all without faults of engines."""
    fence = pool.fence

    def fenced(
        engine_id: EngineId, reason: str, kind: Literal["fenced", "lost"] = "fenced", *, only_if_restarted: bool = False
    ) -> None:
        if POISON in reason or not may_fence:
            stop_run(InvariantError("fence", f"{engine_id} has no fault and is fenced: {reason}"))
        fence(engine_id, reason, kind, only_if_restarted=only_if_restarted)

    pool.fence = fenced  # type: ignore[method-assign]


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do what a thread does for the shipping checkpointer; a crash may come before each of its file operations."""
    await asyncio.sleep(0)
    return work(*arguments)


def simulate(config: FaultyConfig, seed: int, seams: Seams | None = None) -> Outcome:
    """Run one seed to its end. A violation or a failed run is returned as an outcome, not raised."""
    run = CheckedSimulation(config, seed, seams or Seams())
    found = outcome_of(run)
    known = {one.name: getattr(found, one.name) for one in fields(found)}
    return Outcome(**known, faults=run.world.faults, ignored=run.core.ignored.total() if hasattr(run, "core") else 0)
