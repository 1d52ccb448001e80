"""One simulated run: the shipping loop, flow, core, pool, runner, evaluator and publisher over simulated ports.

Nothing of the platform is replaced but its ports; what is simulated is what ships.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from penstock.actors.exports import GatherExport
from penstock.actors.publisher import ActorWeightPublisher
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.ids import EngineId
from penstock.dataflow.journal import Resumed
from penstock.dataflow.ledger import Ledger, LedgerCounts
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.streams import TaskLine
from penstock.platform import controller
from penstock.platform.colocation import TakesTurns
from penstock.platform.engine_monitor import EngineMonitor
from penstock.platform.evaluation import Evaluator
from penstock.platform.flow import Flow, FlowOptions, FlowPorts
from penstock.platform.observability.flow_stats import FlowStats
from penstock.platform.run import Parts, Run, Side
from penstock.platform.simulator.around_run import describe, rare_collections
from penstock.platform.simulator.checks import CheckedDataflow
from penstock.platform.simulator.config import FaultLevel, SimulationConfig
from penstock.platform.simulator.costs import engine_cost, episode_budget, expected_step_s, tool_times, trainer_cost
from penstock.platform.simulator.decoding import Counters
from penstock.platform.simulator.durable import DurableState, Restored
from penstock.platform.simulator.engine import SimulatedEngine
from penstock.platform.simulator.environments import SimulatedEnvironments
from penstock.platform.simulator.faults import RATES, FaultInjector, Targets
from penstock.platform.simulator.lengths import LengthTable
from penstock.platform.simulator.parts import (
    RankDiedError,
    SimulatedCodec,
    SimulatedRewards,
    SimulatedStore,
    SimulatedTrainer,
    Trained,
)
from penstock.platform.simulator.publishing import WatchedPublisher
from penstock.platform.simulator.quiet_run import HELD_OUT_TASKS, instruments, run_config
from penstock.platform.simulator.tasks import environment_of, held_out_tasks, make_filters, make_task_line, promises
from penstock.platform.simulator.virtual_loop import DeadlockError, VirtualTimeLoop
from penstock.platform.simulator.world import InvariantError, Trace, World
from penstock.rollout.episodes import EpisodePlayer
from penstock.rollout.pool import EnginePool
from penstock.rollout.routing import LeastLoaded, PrefixAware
from penstock.rollout.runner import TrajectoryRunner
from penstock.weights.config import WeightsConfig

SILENCE_S = 120.0
PUBLISH_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 36_000.0
MAX_REQUEUES = 3
EVALUATION_RESUMES = 1000
"""A run whose held-out tasks cannot be answered is supposed to stop, which is no finding here."""


@dataclass(frozen=True, slots=True)
class Seams:
    """Classes that a planted bug replaces (tests/simulation/test_mutants.py)."""

    core: type[CheckedDataflow] = CheckedDataflow
    flow: type[Flow] = Flow
    engine: type[SimulatedEngine] = SimulatedEngine
    trainer: type[SimulatedTrainer] = SimulatedTrainer
    runner: type[TrajectoryRunner] = TrajectoryRunner
    pool: type[EnginePool] = EnginePool
    publisher: type[ActorWeightPublisher] = ActorWeightPublisher
    disk: type[DurableState] = DurableState
    line: type[TaskLine] = TaskLine
    player: type[EpisodePlayer] = EpisodePlayer
    rewards: type[SimulatedRewards] = SimulatedRewards


@dataclass(slots=True)
class Outcome:
    """What one simulated run came to.

    Attributes:
        violation: The invariant that broke, or the error that stopped the run; None if it completed.
        virtual_s: Length of the run in virtual seconds; `train_s` of it from the first admission to the last publish.
        engines: Counters summed over the engines.
        environment_s: Seconds that environments were open for training, summed over them.
    """

    seed: int
    violation: str | None
    trace_hash: str
    tail: list[str]
    virtual_s: float
    train_s: float
    counts: LedgerCounts | None
    trained: Trained
    engines: Counters
    faults: Counter[str]
    ignored: int
    num_callbacks: int
    max_staleness: int = 0
    tokens_generated: int = 0
    environment_s: float = 0.0


@dataclass(slots=True)
class Simulation:
    """A run that is put together inside its virtual-time loop."""

    config: SimulationConfig
    seed: int
    seams: Seams = field(default_factory=Seams)
    is_checked: bool = True
    world: World = field(init=False)
    disk: DurableState = field(init=False)
    engines: list[SimulatedEngine] = field(default_factory=list)
    trainer: SimulatedTrainer | None = None
    core: Dataflow | None = None
    monitor: EngineMonitor | None = None
    run: Run | None = None

    def __post_init__(self) -> None:
        config = self.config
        lengths = LengthTable(config.lengths, config.group_size, self.seed, config.grain, config.turns)
        trace = Trace() if self.is_checked else None
        self.disk = self.seams.disk(MAX_REQUEUES)
        prompt_tokens = math.ceil(config.prompt_tokens / config.grain)
        told = promises(config, flow_limits(config))
        self.world = World(lengths, prompt_tokens, self.seed, trace, promises=told)

    async def main(self) -> None:
        """Train to the end; a driver that dies is followed by one that resumes from what is on disk."""
        restored = Restored(0, Trained(), Resumed(Ledger(), ()), ())
        while not await self._live(self._assemble(restored)):
            restored = self.disk.restore()

    def _assemble(self, restored: Restored) -> Targets:
        """One incarnation of the run, around what was restored."""
        config, world = self.config, self.world
        cost = engine_cost(config)
        speeds = config.engine_speeds
        engines = [
            self.seams.engine(EngineId(f"engine-{index}"), cost, world, speeds[index % len(speeds)])
            for index in range(config.engines)
        ]
        self.engines += engines
        policy = PrefixAware(self.seed) if config.routing == "prefix_aware" else LeastLoaded(self.seed)
        pool = self.seams.pool(engines, config.slots, self.seed, policy=policy)
        world.is_fenced = lambda engine_id: engine_id in pool.fenced
        codec = SimulatedCodec(world.prompt_tokens, math.ceil(config.observation_tokens / config.grain))
        environments = SimulatedEnvironments(world, tool_times(config), config.environments)
        player = self.seams.player(environments, codec, episode_budget(config))
        runner = self.seams.runner(pool, codec, SILENCE_S, episodes=player)
        examined = self.seams.runner(pool, codec, SILENCE_S, EVALUATION_RESUMES, episodes=player)
        rewards = self.seams.rewards(world, config.reward_mean_s, config.reward_workers)
        trainer = self.trainer = self.seams.trainer(
            world,
            trainer_cost(config),
            config.eta,
            is_checked=self.is_checked,
            version=restored.version,
            trained=restored.trained,
        )
        if config.faults is not FaultLevel.NONE:
            trainer.checkpoint = self.disk.checkpoint
        self.core = core = self._make_core(restored)
        ports = FlowPorts(runner, rewards, SimulatedStore(), SamplingParams(world.lengths.max_length))

        def make_flow(stats: FlowStats) -> Flow:
            line = make_task_line(config, core.limits, self.seams.line)
            line.resume(core.ledger, restored.resumed.restarts)
            options = FlowOptions(config.batch_timeout_s, config.stream, config.gang)
            return self.seams.flow(core, line, make_filters(config), ports, stats, options)

        weights = weights_config(config)
        export = GatherExport(cast("TrainerClient", trainer), pool, weights)
        publisher = WatchedPublisher(self.seams.publisher(pool, weights, export), weights, world)
        self.monitor = EngineMonitor(pool, adapts_concurrency=config.adaptive_concurrency)
        side = Side(
            runner,
            trainer=TakesTurns(trainer, pool) if config.colocated else trainer,
            publisher=publisher,
            evaluator=Evaluator(examined, rewards, world.lengths.max_length),
            monitor=self.monitor,
        )
        parts = Parts(side, held_out_tasks(HELD_OUT_TASKS, environment_of(config)), make_flow)
        self.run = Run(run_config(config), parts, instruments())
        self.run.version = restored.version
        return Targets(engines, pool, rewards, environments, trainer, publisher.catch_up)

    async def _live(self, targets: Targets) -> bool:
        """Train until the end (True) or until the driver or a rank of the trainer dies (False)."""
        assert self.run is not None
        training = asyncio.create_task(self._run_loop(self.run), name="controller")
        jobs = [training, *self._beside(targets)]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            written = self.disk.length
            has_rank_died = training in done and isinstance(training.exception(), RankDiedError)
            for job in done:
                if job is not training or not has_rank_died:
                    job.result()
        finally:
            for job in jobs:
                job.cancel()
            ends = await asyncio.gather(*jobs, return_exceptions=True)
        for end in ends:
            if isinstance(end, InvariantError):
                raise end
        is_over = training in done and not has_rank_died
        if not is_over:
            await self._bury(targets, written, is_torn=not has_rank_died)
        return is_over

    def _beside(self, targets: Targets) -> list[asyncio.Task[None]]:
        """What goes on beside training: the engines' monitor, faults, and the death of the driver."""
        start, jobs = asyncio.create_task, []
        if self.config.adaptive_concurrency:
            assert self.monitor is not None
            jobs.append(start(self.monitor.poll_on(), name="engine monitor"))
        rates = RATES.get(self.config.faults)
        if rates is not None:
            injector = FaultInjector(rates, self.world, targets, expected_step_s(self.config))
            injector.arm()
            assert isinstance(self.core, CheckedDataflow)
            jobs.append(start(injector.run(self.core), name="faults"))
            jobs.append(start(injector.driver_dies(), name="death of the driver"))
        return jobs

    async def _bury(self, targets: Targets, written: int, *, is_torn: bool) -> None:
        """The driver ended when its journal had `written` lines; every process it started ends with it."""
        assert self.run is not None
        await self.run.close()
        for engine in targets.engines:
            engine.crash()
        if is_torn:
            self.disk.tear(written, self.world.rng("torn"))
        self.world.begin_again()

    async def _run_loop(self, run: Run) -> None:
        await controller.train(run)
        if isinstance(self.core, CheckedDataflow):
            self.core.check_end()

    def _make_core(self, restored: Restored) -> Dataflow:
        config = self.config
        limits, rules = flow_limits(config), group_rules(config)
        if not self.is_checked:
            return Dataflow(limits, rules)
        return self.seams.core(limits, rules, self.world, config.check_every, self.disk, restored)


def flow_limits(config: SimulationConfig) -> FlowLimits:
    """The bounds of the flow."""
    return FlowLimits(
        batch_groups=config.batch,
        max_staleness=config.eta,
        total_steps=config.steps,
        surplus=config.surplus,
        on_expiry=ExpiryPolicy(config.on_expiry),
        max_requeues=MAX_REQUEUES,
        max_live_trajectories=config.max_live,
    )


def weights_config(config: SimulationConfig) -> WeightsConfig:
    """How weights reach the engines."""
    return WeightsConfig(
        update_mode=config.update_mode,
        overlap=config.overlap,
        timeout_s=PUBLISH_TIMEOUT_S,
        drain_timeout_s=DRAIN_TIMEOUT_S,
    )


def group_rules(config: SimulationConfig) -> GroupRules:
    """How groups are formed."""
    return GroupRules(config.group_size, config.min_group_size, config.max_retries, config.max_retries)


def simulate(config: SimulationConfig, seed: int, seams: Seams | None = None, *, is_checked: bool = True) -> Outcome:
    """Run one seed to its end. A violation or a failed run is an outcome, not an exception."""
    simulation = Simulation(config, seed, seams or Seams(), is_checked)
    loop = VirtualTimeLoop()
    violation: str | None = None
    runner_context = asyncio.Runner(loop_factory=lambda: loop)
    with rare_collections(), contextlib.suppress(DeadlockError), runner_context as runner:
        try:
            runner.run(simulation.main())
        except (BaseExceptionGroup, Exception) as error:  # noqa: BLE001 - whatever stops a simulated run is what it found
            violation = describe(error)
    return outcome_of(simulation, loop, violation)


def outcome_of(simulation: Simulation, loop: VirtualTimeLoop, violation: str | None) -> Outcome:
    """Gather what is known after the end."""
    total = Counters()
    for engine in simulation.engines:
        total.add(engine.counters)
    world, run = simulation.world, simulation.run
    core, trained = simulation.core, simulation.trainer.trained if simulation.trainer else Trained()
    return Outcome(
        seed=simulation.seed,
        violation=violation,
        trace_hash=world.trace.digest if world.trace else "",
        tail=list(world.trace.tail) if world.trace else [],
        virtual_s=loop.time(),
        train_s=trained.steps[-1][0] if trained.steps else 0.0,
        counts=core.ledger.counts() if core and violation is None else None,
        trained=trained,
        engines=total,
        faults=world.faults,
        ignored=core.ignored.total() if core else 0,
        num_callbacks=loop.num_callbacks,
        max_staleness=run.stats.total.max_versions if run else 0,
        tokens_generated=run.stats.tokens_generated if run else 0,
        environment_s=world.environment_s,
    )
