"""One simulated run: the production loop, flow, core, pool, runner, evaluator and publisher over simulated ports.

Only the ports are simulated; all other code is that of real runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.transports import GatherTransport
from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ledger import LedgerCounts
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.task_queue import TaskQueue, TaskStream
from penstock.platform.config.schema import CheckpointConfig, EvaluationConfig, RunConfig
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.metrics.hub import MetricsHub
from penstock.platform.metrics.memory_sampler import MemorySampler
from penstock.platform.metrics.trajectory_table import BadBatches, TrajectoryTable
from penstock.platform.run.checkpoint import Checkpoint, Checkpointer, CheckpointFolder
from penstock.platform.run.colocation import TimeSharedTrainer
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.evaluation import Evaluator
from penstock.platform.run.flow import Flow, FlowOptions, FlowPorts
from penstock.platform.run.launch import RanksLostError, Rollbacks, RunParts, roll_back, train_to_end
from penstock.platform.run.lifecycle import Stop
from penstock.platform.run.run import Instruments, PolicyRuntime, Run
from penstock.platform.simulator.checks import CheckedDataflow, Lineage
from penstock.platform.simulator.config import RATES, FaultLevel, FaultRates, SimulationConfig
from penstock.platform.simulator.disk import DriverDiedError, ModelledDisk
from penstock.platform.simulator.engine import Counters, EngineCost, SimulatedEngine
from penstock.platform.simulator.engine_faults import EngineFaults
from penstock.platform.simulator.engine_processes import (
    EngineClasses,
    EngineService,
    SimulatedActors,
    service_config,
)
from penstock.platform.simulator.faults import FaultInjector, Targets
from penstock.platform.simulator.parts import (
    SimulatedCodec,
    SimulatedEnvironments,
    SimulatedStore,
    TrainingTasks,
    make_task,
)
from penstock.platform.simulator.progress import PROGRESS_S, watch_progress
from penstock.platform.simulator.resume_check import check_resumed, memory_of
from penstock.platform.simulator.rewards import SimulatedRewards
from penstock.platform.simulator.trainer import SimulatedTrainer, Trained
from penstock.platform.simulator.virtual_loop import DeadlockError, VirtualTimeLoop
from penstock.platform.simulator.world import (
    EVALUATION_TASKS,
    POISON,
    InvariantError,
    LengthTable,
    Trace,
    World,
    stop_run,
)
from penstock.rollout.pool.pool import EnginePool
from penstock.rollout.pool.routing import make_policy
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.weights.config import WeightsConfig

SILENCE_S = 120.0
PUBLISH_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 36_000.0
MAX_REQUEUES = 3
HELD_OUT_TASKS = 2
RUN_DIR = Path("run")
MAX_REFILLS = 1_000_000
STEP_TIMEOUT_S = 600.0
TRAINER_START_S = 300.0
LONG_STEPS = 4.0
"""A step may take this much longer than expected, if that is more than `STEP_TIMEOUT_S`, or for it `PROGRESS_S`."""
EVALUATION_RESUMES = 1000
"""Evaluations have a long time limit, because a run stops if its held-out tasks cannot be answered."""


def environment_of(config: SimulationConfig) -> str | None:
    """Name of the environment; None for single-turn tasks."""
    return "simulated" if config.turns > 1 else None


def make_task_queue(config: SimulationConfig, limits: FlowLimits) -> TaskQueue:
    """One stream of tasks before the admission gate."""
    return TaskQueue([TaskStream("", TrainingTasks(environment_of(config)))], limits.window, config.group_size)


@dataclass(frozen=True, slots=True)
class Seams:
    """Classes that tests with planted bugs (tests/simulation/test_mutants.py) and benchmarks replace."""

    core: type[CheckedDataflow] = CheckedDataflow
    flow: type[Flow] = Flow
    engines: EngineClasses = field(default_factory=EngineClasses)
    trainer: type[SimulatedTrainer] = SimulatedTrainer
    pool: type[EnginePool] = EnginePool
    disk: type[ModelledDisk] = ModelledDisk
    checkpoints: type[CheckpointFolder] = CheckpointFolder
    task_queue: Callable[[SimulationConfig, FlowLimits], TaskQueue] = make_task_queue
    filters: Callable[[], FilterChain] = lambda: FilterChain([], MAX_REFILLS)
    player: type[EpisodePlayer] = EpisodePlayer
    rewards: type[SimulatedRewards] = SimulatedRewards


@dataclass(slots=True)
class Outcome:
    """Result of one simulated run.

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
    num_turns: int
    environment_s: float


@dataclass(slots=True)
class Simulation:
    """A run, assembled inside its virtual-time loop."""

    config: SimulationConfig
    seed: int
    seams: Seams = field(default_factory=Seams)
    is_checked: bool = True
    world: World = field(init=False)
    disk: ModelledDisk = field(init=False)
    lineage: Lineage = field(init=False)
    engines: list[SimulatedEngine] = field(default_factory=list)
    trainer: SimulatedTrainer | None = None
    runners: list[TrajectoryRunner] = field(default_factory=list)
    core: Dataflow | None = None
    monitor: EngineMonitor | None = None
    actors: SimulatedActors | None = None
    service: EngineService | None = None
    client: TrainerClient | None = None
    run: Run | None = None
    lost: RanksLostError | None = None
    checkpointer: Checkpointer | None = None

    def __post_init__(self) -> None:
        config = self.config
        lengths = LengthTable(config.lengths, config.group_size, self.seed, config.grain, config.turns)
        trace = Trace() if self.is_checked else None
        self.disk = self.seams.disk(random.Random(f"{self.seed}/disk"))
        self.disk.make_folder(RUN_DIR)
        self.disk.sync(RUN_DIR.parent)  # as `prepare_run_dir` does
        self.lineage = Lineage()
        prompt_tokens = math.ceil(config.prompt_tokens / config.grain)
        poison_share = RATES[config.faults].poison if config.faults in RATES else 0.0
        self.world = World(lengths, prompt_tokens, self.seed, trace, poison_share=poison_share)

    async def main(self) -> None:
        """Train to the end. If the driver dies, a new one resumes; without a trainer rank, the run goes back."""
        resumed: Checkpoint | None = None
        rollbacks = Rollbacks()
        while not await self._serve(await self._build(resumed)):
            if self.disk.is_dead:
                self.lost = None
            if self.lost is None:
                self.disk.crash()
            self.disk.dies_at = None  # planted for an incarnation that has ended
            folder = CheckpointFolder(RUN_DIR, self.disk)
            versions = folder.versions()
            resumed = folder.read(versions[-1]) if versions else None
            acknowledged = None if self.checkpointer is None else self.checkpointer.newest
            if acknowledged is not None and (resumed is None or resumed.version < acknowledged):
                raise InvariantError("durability", f"v{acknowledged} was complete, and there are {versions}")
            if resumed is not None and (damage := folder.damage(resumed)) is not None:
                raise InvariantError("durability", f"the newest checkpoint is not complete: {damage}")
            await self._go_back(resumed, rollbacks)

    async def _build(self, resumed: Checkpoint | None) -> Targets:
        """One incarnation of the run, from a checkpoint."""
        config, world, grain = self.config, self.world, self.config.grain
        rates = RATES.get(config.faults, FaultRates())
        actors = self.actors = self.actors or self._start_engines(rates)
        pool = self.seams.pool(actors.engines, config.slots, self.seed, policy=make_policy(config.routing, self.seed))
        watch_exits(pool, may_fence=config.faults is not FaultLevel.STALLS)
        codec = SimulatedCodec(world.prompt_tokens, math.ceil(config.observation_tokens / grain))
        environments = SimulatedEnvironments(world, config)
        turns = 2 * config.turns  # the longest episode, so that none is truncated
        told = config.prompt_tokens + turns * config.observation_tokens
        budget = EpisodeBudget(max_turns=turns, max_tokens=told + config.lengths.cap + turns + 1)
        player = self.seams.player(environments, codec, budget)
        runner = TrajectoryRunner(pool, codec, SILENCE_S, episodes=player)
        examined = TrajectoryRunner(pool, codec, SILENCE_S, EVALUATION_RESUMES, episodes=player)
        self.runners = [runner, examined]
        rewards = self.seams.rewards(world, config.reward_mean_s, config.reward_workers)
        trainer = self.trainer = self.seams.trainer(world, config, self.disk, is_checked=self.is_checked)
        if resumed is not None:
            trainer.restore(resumed.path)
        step_timeout_s = max(STEP_TIMEOUT_S, LONG_STEPS * expected_step_s(config))
        self.client = client = TrainerClient(trainer.ranks, step_timeout_s)
        await client.start(TRAINER_START_S)
        actors.trainer = client
        limits = flow_limits(config)
        rules = GroupRules(config.group_size, config.min_group_size, config.max_retries, config.max_retries)
        self.core = core = (
            self.seams.core(limits, rules, world, config.check_every, self.lineage)
            if self.is_checked
            else Dataflow(limits, rules)
        )
        store = SimulatedStore()
        accumulate = client.accumulate if config.stream else None
        ports = FlowPorts(runner, rewards, store, SamplingParams(world.lengths.max_length), accumulate=accumulate)
        queue = self.seams.task_queue(config, core.limits)
        options = FlowOptions(config.batch_timeout_s, tokens_per_part=1)
        flow = self.seams.flow(core, queue, self.seams.filters(), ports, FlowStats(), options)
        weights = WeightsConfig(
            update_mode=config.update_mode,
            overlap=config.overlap,
            timeout_s=PUBLISH_TIMEOUT_S,
            drain_timeout_s=DRAIN_TIMEOUT_S,
        )
        export = GatherTransport(client, pool)
        publisher = self.seams.engines.publisher(pool, weights, export, client)
        publisher.world = world
        serving = service_config(weights, rates, expected_step_s(config), colocated=config.colocated)
        self.service = EngineService(actors, pool, publisher, serving, self.seams.engines, world)
        self.monitor = EngineMonitor(pool, adapts_concurrency=config.adaptive_concurrency)
        runtime = PolicyRuntime(
            runner,
            trainer=TimeSharedTrainer(client, pool) if config.colocated else client,
            publisher=publisher,
            evaluator=Evaluator(examined, rewards, ports.sampling, run_config(config).evaluation, pass_reward=1.0),
            monitor=self.monitor,
        )
        held_out = [make_task(EVALUATION_TASKS + number, environment_of(config)) for number in range(HELD_OUT_TASKS)]
        settings, outputs = run_config(config), instruments()
        folder = self.seams.checkpoints(RUN_DIR, self.disk)
        checkpointer = Checkpointer(
            settings.checkpoint,
            folder,
            runtime.trainer,
            store,
            world.note,
            resumed,
            world.incarnation,
            at_once,
            on_cut=lambda _version: self._remember(run, flow),
        )
        self.checkpointer = checkpointer
        self.run = run = Run(settings, runtime, held_out, flow, outputs, checkpointer)
        if resumed is not None:
            saved, payloads = folder.flow_snapshot(resumed)
            await flow.restore(saved, payloads)
            self.run.load_state_dict(resumed.version, resumed.manifest["run"])
            if self.is_checked:
                check_resumed(self.lineage.memories[resumed.version], memory_of(run, flow))
            folder.prune(settings.checkpoint.keep, resumed.version)
        return Targets(rewards, environments, trainer)

    def _start_engines(self, rates: FaultRates) -> SimulatedActors:
        """Start the engines that a driver begins with."""
        config, world, grain = self.config, self.world, self.config.grain
        cost = EngineCost(
            base_s=config.decode_base_s * grain,
            per_sequence_s=config.decode_per_sequence_s * grain,
            prefill_s=config.prefill_s_per_token * grain,
            slots=config.slots,
            kv_tokens=config.kv_tokens // grain,
            stage_s=config.weight_bytes / config.publish_bytes_per_s,
            swap_s=config.swap_s,
            recomputes_kv=config.update_mode == "recompute_kv",
        )
        speeds, classes = config.engine_speeds, self.seams.engines

        def make(index: int) -> SimulatedEngine:
            engine = classes.engine(EngineId(f"engine-{index}"), cost, world, speeds[index % len(speeds)])
            self.engines.append(engine)
            return engine

        return SimulatedActors(make, classes.client, config.engines, rates, expected_step_s(config), world)

    async def _serve(self, targets: Targets) -> bool:
        """Train with the engines in service; returns whether the run is complete."""
        assert self.service is not None
        async with self.service.running(follows_nodes=self.config.faults in RATES):
            return await self._live(targets)

    async def _go_back(self, resumed: Checkpoint | None, rollbacks: Rollbacks) -> None:
        """After the loss of a rank, roll back as `launch` does. Otherwise the next driver starts all processes."""
        assert self.actors is not None
        assert self.service is not None
        if self.lost is not None and resumed is not None:
            parts, outputs = cast("RunParts", SimpleNamespace(actors=self.actors)), instruments()
            reached = 0 if self.run is None else self.run.version
            with contextlib.suppress(RanksLostError):  # too many of them: the run ends, and is resumed
                await roll_back(self.service.config, parts, outputs, self.lost, resumed, rollbacks, reached)
                self.world.begin_again()
                return
        self.actors.kill()
        self.actors = None
        self.world.begin_again()

    def _remember(self, run: Run, flow: Flow) -> None:
        """Called by the checkpointer at each cut."""
        if self.is_checked:
            self.lineage.memories[run.version] = memory_of(run, flow)

    async def _live(self, targets: Targets) -> bool:
        """Train until the end (True) or until the driver or a rank of the trainer dies (False)."""
        assert self.run is not None
        assert self.service is not None
        self.lost = None
        start = asyncio.create_task
        training = start(self._run_loop(self.run), name="controller")
        jobs = [training]
        if self.is_checked:
            jobs.append(start(self._watch_progress(), name="watch of the progress"))
        if self.config.adaptive_concurrency:
            assert self.monitor is not None
            jobs.append(start(self.monitor.poll_forever(), name="engine monitor"))
        rates = RATES.get(self.config.faults)
        if rates is not None:
            injector = FaultInjector(rates, self.world, targets, expected_step_s(self.config))
            injector.arm()
            assert isinstance(self.core, CheckedDataflow)
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
            await targets.rewards.close()
        for end in ends:
            if isinstance(end, InvariantError):
                raise end
        with contextlib.suppress(DriverDiedError):
            await self.run.close()
        if training in done and not has_died:
            self._check_end(targets)
            return True
        assert self.trainer is not None
        self.trainer.end()
        return False

    def _check_end(self, targets: Targets) -> None:
        """Check that the last checkpoint was taken, unless the disk refused it, and that stalls have cost nothing."""
        assert self.core is not None
        versions = CheckpointFolder(RUN_DIR, self.disk).versions()
        is_refused = self.disk.refused_at_s >= targets.trainer.trained.steps[-1][0]
        if self.is_checked and not (is_refused or self.disk.is_dead or versions[-1:] == [self.config.steps]):
            raise InvariantError("durability", f"no checkpoint of the last step, there are {versions}")
        if self.config.faults is FaultLevel.STALLS:
            interruptions = sum((runner.stats.interruptions for runner in self.runners), Counter[str]())
            lost = [interruptions, self.core.retries, targets.rewards.num_killed]
            if any(lost):
                raise InvariantError("stall", f"interruptions, retries, workers ended: {lost}")

    def _is_planted(self, end: BaseException | None) -> bool:
        """Whether a run may end with this: the driver died, or ranks are lost: dead, or in a step that hangs."""
        assert self.trainer is not None
        self.lost = end if isinstance(end, RanksLostError) else None
        return isinstance(end, DriverDiedError) or (self.lost is not None and self.trainer.hangs)

    async def _watch_progress(self) -> None:
        """Check that the run gets on. A step may take long by the costs that the user has set."""
        run, core, trainer = self.run, self.core, self.trainer
        assert run is not None
        assert core is not None
        assert trainer is not None
        limit_s = max(PROGRESS_S, LONG_STEPS * expected_step_s(self.config))

        def counters() -> tuple[int, ...]:
            num_tokens = sum(runner.stats.received_tokens for runner in self.runners)
            return num_tokens, run.stats.num_scored, len(trainer.trained.steps), self.disk.num_operations

        await watch_progress(counters, core, limit_s)

    async def _death_at_the_disk(self) -> None:
        """Return when the driver dies at a file operation."""
        death = asyncio.Event()
        self.disk.on_death = death.set
        await death.wait()

    async def _run_loop(self, run: Run) -> None:
        assert self.actors is not None
        await train_to_end(run, self.actors, Stop())
        if isinstance(self.core, CheckedDataflow):
            self.core.check_end()


def flow_limits(config: SimulationConfig) -> FlowLimits:
    """Limits of the flow."""
    return FlowLimits(
        batch_groups=config.batch,
        max_staleness=config.eta,
        total_steps=config.steps,
        surplus=config.surplus,
        on_expiry=ExpiryPolicy(config.on_expiry),
        max_requeues=MAX_REQUEUES,
        max_live_trajectories=config.max_live,
    )


def expected_step_s(config: SimulationConfig) -> float:
    """Expected seconds per step with balanced generation and no waiting: the slower of generation and training."""
    tokens = config.batch * config.group_size * config.lengths.mean
    full_step_s = config.decode_base_s + config.decode_per_sequence_s * config.slots
    tools_s = config.batch * config.group_size * (config.turns - 1) * config.tool_mean_s / config.environments
    generate_s = tools_s + tokens * full_step_s / (config.slots * config.engines)
    train_s = config.train_fixed_s + tokens * config.train_s_per_token / config.trainer_devices
    return generate_s + train_s if config.colocated else max(generate_s, train_s)


def watch_exits(pool: EnginePool, *, may_fence: bool) -> None:
    """Check why engines are fenced: never for a prompt that they refuse, and not at all without faults of engines."""
    fence = pool.fence

    def fenced(engine_id: EngineId, reason: str, kind: Literal["fenced", "lost"] = "fenced") -> None:
        if POISON in reason or not may_fence:
            stop_run(InvariantError("fence", f"{engine_id} has no fault and is fenced: {reason}"))
        fence(engine_id, reason, kind)

    pool.fence = fenced  # type: ignore[method-assign]


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do what a thread does for the shipping checkpointer; a crash may come before each of its file operations."""
    await asyncio.sleep(0)
    return work(*arguments)


class NoTable(TrajectoryTable):
    """Writes nothing."""

    def drop_after(self, _step: int) -> None:
        """There is nothing to drop."""

    def write_step(self, *_arguments: Any, **_named: Any) -> Path:
        return Path()


class NoBadBatches(BadBatches):
    """Writes nothing."""

    def write(self, *_arguments: Any) -> Path:
        return Path()


def run_config(config: SimulationConfig) -> RunConfig:
    """The sections that `Run` reads. There is no model and no environment to configure."""
    return RunConfig.model_construct(  # type: ignore[call-arg] # the other sections are not read
        name="simulated",
        total_steps=config.steps,
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=1, optimizer=OptimizerConfig(lr=1.0), max_bad_steps=max(20, config.steps)
        ),
        evaluation=EvaluationConfig(every_steps=config.eval_every, num_tasks_during_training=HELD_OUT_TASKS),
        checkpoint=CheckpointConfig(every_minutes=0, every_steps=config.checkpoint_every),
    )


def instruments() -> Instruments:
    """A hub without trackers, a memory sampler that is never started, and no files."""
    memory, table, batches = MemorySampler(), NoTable(Path()), NoBadBatches(Path())
    return Instruments(MetricsHub([]), memory, table, batches, Path(), lambda _note: None)


def simulate(config: SimulationConfig, seed: int, seams: Seams | None = None, *, is_checked: bool = True) -> Outcome:
    """Run one seed to its end. A violation or a failed run is returned as an outcome, not raised."""
    simulation = Simulation(config, seed, seams or Seams(), is_checked)
    loop = VirtualTimeLoop()
    violation: str | None = None
    num_turns = 0
    random_state = random.getstate()
    random.seed(seed)  # shipping code shortens its pauses by the global generator
    runner_context = asyncio.Runner(loop_factory=lambda: loop)
    with contextlib.suppress(DeadlockError, InvariantError), runner_context as runner:  # the first one counts
        try:
            runner.run(simulation.main())
        except (BaseExceptionGroup, Exception) as error:  # noqa: BLE001 - any error of a simulated run is a finding
            violation = describe(error)
            loop.has_failed = True
            if simulation.actors is not None:
                simulation.actors.kill()  # else they would sample, and be checked, while the loop is closed
        finally:
            # Not those of closing the loop: it ends the async generators that the garbage collector has not found yet.
            num_turns = loop.num_turns
    random.setstate(random_state)
    total = Counters()
    for engine in simulation.engines:
        total.add(engine.counters)
    world, core = simulation.world, simulation.core
    trained = simulation.trainer.trained if simulation.trainer else Trained()
    return Outcome(
        seed=seed,
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
        num_turns=num_turns,
        environment_s=world.environment_s,
    )


def describe(error: BaseException) -> str:
    """Describe an error in one line; for unexpected errors with its location."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause: BaseException | None = error
    while cause is not None:
        error, cause = (cause if isinstance(cause, InvariantError) else error), cause.__context__
    if isinstance(error, InvariantError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{where}: {error}"
