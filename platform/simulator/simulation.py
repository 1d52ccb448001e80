"""One simulated run: the production loop, flow, core, pool, runner, evaluator and publisher over simulated ports.

Only the ports are simulated; all other code is that of real runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import GatherTransport
from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ledger import JournalEntry, LedgerCounts, VersionMark
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.task_queue import TaskQueue, TaskStream
from penstock.platform.config.pools import ClusterConfig
from penstock.platform.config.schema import CheckpointConfig, EvaluationConfig, RunConfig
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.metrics.hub import MetricsHub
from penstock.platform.metrics.instruments import Instruments
from penstock.platform.metrics.memory_sampler import MemorySampler
from penstock.platform.metrics.trajectory_table import TRAJECTORY_SCHEMA, BadBatches, StepFiles, TrajectoryTable
from penstock.platform.run.checkpoint import Checkpointer, CheckpointFolder
from penstock.platform.run.colocation import engines_asleep
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.evaluation import Evaluator
from penstock.platform.run.flow import Flow, FlowPorts
from penstock.platform.run.lifecycle import Stop
from penstock.platform.run.run import PolicyRuntime, Run
from penstock.platform.run.training import train_to_end
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.engine import Counters, EngineCost, SimulatedEngine
from penstock.platform.simulator.engine_processes import EngineClasses, SimulatedActors
from penstock.platform.simulator.parts import (
    SimulatedCodec,
    SimulatedEnvironments,
    SimulatedStore,
    TrainingTasks,
    make_task,
)
from penstock.platform.simulator.rewards import SimulatedRewards
from penstock.platform.simulator.trainer import SimulatedTrainer, Trained
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop
from penstock.platform.simulator.world import EVALUATION_TASKS, LengthTable, World
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engine_pool.routing import make_policy
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
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
"""A step may take this much longer than expected, if that is more than `STEP_TIMEOUT_S`."""
EVALUATION_RESUMES = 1000
"""Evaluations have a long time limit, because a run stops if its held-out tasks cannot be answered."""


def environment_of(config: SimulationConfig) -> str | None:
    """Name of the environment; None for single-turn tasks."""
    return "simulated" if config.turns > 1 else None


def make_task_queue(config: SimulationConfig, limits: FlowLimits) -> TaskQueue:
    """One stream of tasks before the admission gate."""
    return TaskQueue([TaskStream("", TrainingTasks(environment_of(config)))], limits.window, config.group_size)


@dataclass(frozen=True, slots=True)
class Parts:
    """Classes of a simulated run that benchmarks and tests replace."""

    world: type[World] = World
    core: Callable[[FlowLimits, GroupRules], Dataflow] = Dataflow
    flow: type[Flow] = Flow
    engines: EngineClasses = field(default_factory=EngineClasses)
    trainer: Callable[[World, SimulationConfig], SimulatedTrainer] = SimulatedTrainer
    pool: type[EnginePool] = EnginePool
    task_queue: Callable[[SimulationConfig, FlowLimits], TaskQueue] = make_task_queue
    filters: Callable[[], FilterChain] = lambda: FilterChain([], MAX_REFILLS)
    player: type[EpisodePlayer] = EpisodePlayer
    rewards: type[SimulatedRewards] = SimulatedRewards
    environments: type[SimulatedEnvironments] = SimulatedEnvironments


@dataclass(slots=True)
class Outcome:
    """Result of one simulated run."""

    seed: int
    violation: str | None
    """The error that stopped the run; None if it completed."""
    trace_hash: str
    """Hash of all events: equal for equal seeds."""
    tail: list[str]
    """The last events."""
    virtual_s: float
    """Length of the run in virtual seconds; `train_s` of it to the end of the last step, first evaluation included."""
    train_s: float
    counts: LedgerCounts | None
    trained: Trained
    engines: Counters
    """Counters summed over the engines."""
    num_turns: int
    """Iterations of the event loop."""
    environment_s: float
    """Seconds that environments were open for training, summed over them."""
    slow_parts: Mapping[str, str]
    """Rank or engine that was found to be slow -> how slow."""


class Simulation:
    """A run, assembled inside its virtual-time loop. Its parts and its methods are what tests replace."""

    actors: SimulatedActors
    client: TrainerClient
    core: Dataflow
    environments: SimulatedEnvironments
    flow: Flow
    monitor: EngineMonitor
    pool: EnginePool
    publisher: ActorWeightPublisher
    rewards: SimulatedRewards
    run: Run
    trainer: SimulatedTrainer

    def __init__(self, config: SimulationConfig, seed: int, parts: Parts) -> None:
        self.config = config
        self.seed = seed
        self.parts = parts
        self.engines: list[SimulatedEngine] = []
        lengths = LengthTable(config.lengths, config.group_size, seed, config.grain, config.turns)
        self.world = parts.world(lengths, math.ceil(config.prompt_tokens / config.grain), seed)

    async def main(self) -> None:
        """Train to the end."""
        await self.build()
        jobs = [asyncio.create_task(self.train(), name="controller")]
        if self.config.adaptive_concurrency:
            jobs.append(asyncio.create_task(self.monitor.poll_forever(), name="engine monitor"))
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self.rewards.close()
            await self.publisher.close()
        await self.run.close()

    async def build(self) -> None:
        """Connect the shipping code to simulated ports, as `build.build_run` connects it to real ones."""
        config, world, grain, parts = self.config, self.world, self.config.grain, self.parts
        self.actors = self.start_engines()
        self.pool = pool = parts.pool(self.actors.engines, config.slots, policy=make_policy(config.routing, self.seed))
        codec = SimulatedCodec(world.prompt_tokens, math.ceil(config.observation_tokens / grain))
        self.environments = parts.environments(world, config)
        turns = 2 * config.turns  # the longest episode, so that none is truncated
        told = config.prompt_tokens + turns * config.observation_tokens
        budget = EpisodeBudget(max_turns=turns, max_tokens=told + config.lengths.cap + turns + 1)
        player = parts.player(self.environments.open, codec, budget)
        runner = TrajectoryRunner(pool, codec, SILENCE_S, episodes=player)
        examined = TrajectoryRunner(pool, codec, SILENCE_S, EVALUATION_RESUMES, episodes=player)
        self.rewards = parts.rewards(world, config.reward_mean_s, config.reward_workers)
        self.trainer = self.make_trainer()
        step_timeout_s = max(STEP_TIMEOUT_S, LONG_STEPS * expected_step_s(config))
        self.client = client = TrainerClient(self.trainer.ranks, step_timeout_s)
        await client.start(TRAINER_START_S)
        self.actors.trainer = client
        limits = flow_limits(config)
        rules = GroupRules(config.group_size, config.min_group_size, config.max_retries, config.max_retries)
        self.core = self.make_core(limits, rules)
        store = SimulatedStore()
        accumulate = client.accumulate if config.stream else None
        ports = FlowPorts(runner, self.rewards, store, SamplingParams(world.lengths.max_length), accumulate=accumulate)
        queue = parts.task_queue(config, self.core.limits)
        self.flow = parts.flow(
            self.core, queue, parts.filters(), ports, FlowStats(), config.batch_timeout_s, tokens_per_part=1
        )
        self.publisher = parts.engines.publisher(pool, self.weights(), GatherTransport(client, pool), client)
        self.monitor = EngineMonitor(pool, adapts_concurrency=config.adaptive_concurrency)
        if config.colocated:
            client.turn = partial(engines_asleep, pool)
        settings = self.settings()
        runtime = PolicyRuntime(
            runner,
            trainer=client,
            publisher=self.publisher,
            evaluator=Evaluator(examined, self.rewards, ports.sampling, settings.evaluation, pass_reward=1.0),
            monitor=self.monitor,
        )
        held_out = [make_task(EVALUATION_TASKS + number, environment_of(config)) for number in range(HELD_OUT_TASKS)]
        checkpointer = self.make_checkpointer(settings.checkpoint, runtime, store)
        self.run = Run(settings, runtime, held_out, self.flow, instruments(), checkpointer)

    def make_trainer(self) -> SimulatedTrainer:
        return self.parts.trainer(self.world, self.config)

    def make_core(self, limits: FlowLimits, rules: GroupRules) -> Dataflow:
        core = self.parts.core(limits, rules)
        core.ledger.listeners = (self._note,)
        return core

    def make_checkpointer(
        self, config: CheckpointConfig, runtime: PolicyRuntime, store: SimulatedStore
    ) -> Checkpointer:
        """It takes none: nothing is lost here."""
        return Checkpointer(config, CheckpointFolder(RUN_DIR), runtime.trainer, store, self.world.note)

    def settings(self) -> RunConfig:
        return run_config(self.config)

    def weights(self) -> WeightsConfig:
        return WeightsConfig(
            update_mode=self.config.update_mode,
            overlap=self.config.overlap,
            timeout_s=PUBLISH_TIMEOUT_S,
            drain_timeout_s=DRAIN_TIMEOUT_S,
        )

    def start_engines(self) -> SimulatedActors:
        """Start the engines that the run begins with."""
        return SimulatedActors(self.make_engine, self.parts.engines.client, self.config.engines)

    def make_engine(self, index: int) -> SimulatedEngine:
        """Make an engine by its index."""
        config, grain = self.config, self.config.grain
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
        speed = config.engine_speeds[index % len(config.engine_speeds)]
        engine = self.parts.engines.engine(EngineId(f"engine-{index}"), cost, self.world, speed)
        self.engines.append(engine)
        return engine

    async def train(self) -> None:
        await train_to_end(self.run, self.actors, Stop())

    def describe(self, error: BaseException) -> str:
        """Describe the error that stopped the run in one line; unexpected ones with their location."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        return f"{type(error).__name__}{where}: {error}"

    def _note(self, event: JournalEntry) -> None:
        if isinstance(event, VersionMark):
            self.world.note(f"version {event.version}")
        else:
            self.world.note(f"group {event.group_id} {event.state} {event.reason or ''}")


def flow_limits(config: SimulationConfig) -> FlowLimits:
    """Limits of the flow."""
    return FlowLimits(
        batch_groups=config.batch,
        max_staleness=config.eta,
        total_steps=config.steps,
        surplus=config.max_surplus if config.surplus == "auto" else config.surplus,
        adapts_surplus=config.surplus == "auto",
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


class NoFiles(StepFiles):
    """There are none."""

    def drop_after(self, _step: int) -> None:
        """There is nothing to drop."""


class NoTable(TrajectoryTable):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.files = NoFiles(Path(), TRAJECTORY_SCHEMA)

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
        algorithm=AlgorithmConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=1, optimizer=OptimizerConfig(lr=1.0), max_bad_steps=max(20, config.steps)
        ),
        evaluation=EvaluationConfig(every_steps=config.eval_every, num_tasks_during_training=HELD_OUT_TASKS),
        checkpoint=CheckpointConfig(every_minutes=0, every_steps=0),
        cluster=ClusterConfig.model_construct(address="local"),  # type: ignore[call-arg]
    )


def instruments() -> Instruments:
    """A hub without trackers, a memory sampler that is never started, and no files."""
    memory, table, batches = MemorySampler(), NoTable(), NoBadBatches(Path())
    return Instruments(MetricsHub([]), memory, table, batches, Path(), lambda _note: None)


def simulate(config: SimulationConfig, seed: int, parts: Parts | None = None) -> Outcome:
    """Run one seed to its end. A failed run is returned as an outcome, not raised."""
    return outcome_of(Simulation(config, seed, parts or Parts()))


def outcome_of(simulation: Simulation) -> Outcome:
    """Run a simulation to its end."""
    loop = VirtualTimeLoop()
    violation: str | None = None
    num_turns = 0
    random_state = random.getstate()
    random.seed(simulation.seed)  # shipping code shortens its pauses by the global generator
    runner_context = asyncio.Runner(loop_factory=lambda: loop)
    with contextlib.suppress(PenstockError), runner_context as runner:  # the first error counts
        try:
            runner.run(simulation.main())
        except (BaseExceptionGroup, Exception) as error:  # noqa: BLE001 - any error of a simulated run is a finding
            violation = simulation.describe(error)
            loop.has_failed = True
            if hasattr(simulation, "actors"):
                simulation.actors.kill()  # else they would sample while the loop is closed
        finally:
            # Not those of closing the loop: it ends the async generators that the garbage collector has not found yet.
            num_turns = loop.num_turns
    random.setstate(random_state)
    total = Counters()
    for engine in simulation.engines:
        total.add(engine.counters)
    world = simulation.world
    trained = simulation.trainer.trained if hasattr(simulation, "trainer") else Trained()
    return Outcome(
        seed=simulation.seed,
        violation=violation,
        trace_hash=world.trace.digest,
        tail=list(world.trace.tail),
        virtual_s=loop.time(),
        train_s=trained.steps[-1][0] if trained.steps else 0.0,
        counts=simulation.core.ledger.counts() if violation is None else None,
        trained=trained,
        engines=total,
        num_turns=num_turns,
        environment_s=world.environment_s,
        slow_parts=dict(simulation.run.log.slow_parts.named) if hasattr(simulation, "run") else {},
    )
