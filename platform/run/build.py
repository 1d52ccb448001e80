"""Builds a run: starts its actors, connects the engines of each policy to its trainer, and makes the flow.

start_parts    what outlives a trainer: all processes, the tokenizer, the held-out tasks
build_run      what a rollback builds again: the flow, the publishers, the checkpoints, the files of the run
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import cast

from penstock.actors.cluster import draining_nodes
from penstock.actors.frozen_policies import FrozenPolicyClient
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.ids import PARTNER
from penstock.dataflow.task import Task
from penstock.envs.loading import load_task_source
from penstock.envs.streams import load_held_out
from penstock.platform.cluster.actor_factory import RunActors, model_path, start_actors
from penstock.platform.config.schema import FrozenRole, RunConfig
from penstock.platform.metrics.anomalies import Anomalies
from penstock.platform.metrics.evaluation_table import EvaluationTable
from penstock.platform.metrics.flow_stats import EventTail, FlowStats, sampled_every
from penstock.platform.metrics.instruments import Instruments
from penstock.platform.metrics.timeline import Timeline
from penstock.platform.run.checkpoint import (
    Checkpoint,
    Checkpointer,
    CheckpointFolder,
    next_incarnation,
)
from penstock.platform.run.checkpoint_upload import CheckpointUpload, Place
from penstock.platform.run.colocation import engines_asleep
from penstock.platform.run.control import served_control
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.engine_restarts import EngineRestarts
from penstock.platform.run.evaluation import Evaluator, load_sets
from penstock.platform.run.fleet import Fleet
from penstock.platform.run.flow import Flow, FlowPorts
from penstock.platform.run.flow_builder import flow_limits, make_filters, make_task_queue
from penstock.platform.run.ledger_log import LedgerLog
from penstock.platform.run.live_settings import LiveSettings
from penstock.platform.run.logprob_parity import NUM_PARITY_PROMPTS, LogprobParityCheck
from penstock.platform.run.run import PolicyRuntime, Run
from penstock.platform.run.serving import (
    answer_questions,
    episode_player,
    make_runner,
    parser_choice,
    prompt_limit,
    rollout_sampling,
)
from penstock.platform.run.two_policies import combine_policies
from penstock.rollout.tokenization.tokenizers import TokenCodec, load_codec
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.runner import TrajectoryRunner


@dataclass(frozen=True, slots=True)
class RunParts:
    """What outlives the loss of a trainer rank."""

    held_out: list[Task]
    sets: dict[str, list[Task]]
    actors: RunActors
    codec: TokenCodec
    episodes: EpisodePlayer


@asynccontextmanager
async def start_parts(
    config: RunConfig, instruments: Instruments, resumed: Checkpoint | None, pending: set[str] | None = None
) -> AsyncIterator[RunParts]:
    """Start all processes of a run; they are ended on exit."""
    held_out = load_held_out(config.env, config.seed, config.evaluation.num_tasks)
    sets = load_sets(config)
    instruments.note("starting Ray, the engines, the trainer and the reward workers …")
    restore_from = None if resumed is None else str(resumed.path.absolute())
    async with start_actors(config, restore_from, pending) as actors:
        codec = load_codec(model_path(config), config.env)
        async with episode_player(config, codec) as episodes:
            yield RunParts(held_out, sets, actors, codec, episodes)


@asynccontextmanager
async def build_run(
    config: RunConfig, parts: RunParts, instruments: Instruments, events: EventTail, resumed: Checkpoint | None = None
) -> AsyncIterator[Run]:
    """Connect the parts of a run and yield it. Its components are closed in reverse order on exit."""
    actors, codec, episodes, held_out = parts.actors, parts.codec, parts.episodes, parts.held_out
    async with AsyncExitStack() as stack:
        instruments.trajectories.token_texts = codec.token_texts
        sampling = rollout_sampling(config, codec)
        limit = prompt_limit(config, codec)
        fitting = [task for task in held_out if limit is None or limit.fits(task)]
        # A run without evaluations takes the prompts of its first training tasks.
        asked = fitting or islice(load_task_source(config.env, config.seed).train(), 1024)
        probed = islice((task for task in asked if limit is None or limit.fits(task)), NUM_PARITY_PROMPTS)
        probes = [codec.encode_prompt(task.prompt) for task in probed]
        runner = make_runner(config, actors.engines, codec, episodes)
        table = EvaluationTable(instruments.run_dir, token_texts=codec.token_texts)
        runtime = await stack.enter_async_context(policy_runtime(config, actors, runner, probes, table))
        # With two policies it refuses every change, so the publisher is always that of a single policy.
        publisher = cast("ActorWeightPublisher", runtime.publisher)
        fleet = Fleet(config, runner.pool, publisher, actors, instruments.note)
        episodes.read_calls_by(parser_choice(config, codec, runner.pool, instruments.note))
        await answer_questions(config, episodes, runner, sampling)
        if actors.partner is not None:
            view = config.partner_view
            runner = make_runner(view, actors.partner.engines, codec, episodes)
            table = EvaluationTable(instruments.run_dir, PARTNER, codec.token_texts)
            partner = await stack.enter_async_context(policy_runtime(view, actors.partner, runner, probes, table))
            runtime = combine_policies(runtime, partner, config.trainer.max_bad_steps)
        bounds = config.dataflow
        core = Dataflow(flow_limits(config), GroupRules(bounds.group_size, bounds.fewest_members, bounds.max_retries))
        incarnation = next_incarnation(instruments.run_dir)
        log = LedgerLog(instruments.run_dir, incarnation, 0 if resumed is None else resumed.version)
        stack.callback(close_file, log, "the ledger's log", instruments)
        timeline = Timeline(instruments.run_dir, bounds.batch_groups, config.total_steps)
        stack.callback(close_file, timeline, "the timeline", instruments)
        core.ledger.listeners = (events, log, timeline)
        forward = cast("TrainerClient", runtime.trainer).early_logprobs if config.computes_logprobs_early else None
        accumulate = cast("TrainerClient", runtime.trainer).accumulate if bounds.stream_micro_batches else None
        flow = Flow(
            core,
            make_task_queue(config, instruments.note, None if limit is None else limit.fits),
            make_filters(bounds, config.algorithm.reward_weights.keys()),
            FlowPorts(
                runtime.runner,
                actors.rewards,
                actors.store,
                sampling,
                reference=None if actors.reference is None else actors.reference.logprobs,
                teacher=None if actors.teacher is None else actors.teacher.logprobs,
                forward=forward,
                accumulate=accumulate,
            ),
            FlowStats(
                sampled_every=sampled_every(bounds.batch_groups, bounds.group_size),
                anomalies=Anomalies(instruments.note),
            ),
            bounds.batch_timeout_s,
            # A micro-batch of every rank.
            tokens_per_part=config.trainer.data_parallel_size * config.trainer.max_group_tokens,
        )
        folder = CheckpointFolder(instruments.run_dir)
        upload = None
        if (place := config.checkpoint.upload) is not None:
            upload = CheckpointUpload(Place(place, instruments.run_dir), instruments.run_dir, instruments.note)
        checkpointer = Checkpointer(
            config.checkpoint,
            folder,
            runtime.trainer,
            actors.store,
            instruments.note,
            resumed,
            incarnation,
            on_cut=log.rotate,
            on_written=partial(checkpoint_written, timeline, upload),
        )
        run = Run(config, runtime, held_out, flow, instruments, checkpointer, timeline, upload, parts.sets, episodes)
        stack.push_async_callback(run.close)
        if resumed is not None:
            await restore(run, flow, folder, resumed)
        if config.cluster.address != "local":  # a cluster of this machine alone has no node to drain
            await stack.enter_async_context(fleet.following(draining_nodes))
        settings = LiveSettings(run, instruments.run_dir, instruments.note)
        commands = {"scale": fleet.scale, "set": settings.set}
        await stack.enter_async_context(served_control(instruments.run_dir, commands, instruments.note))
        yield run


def close_file(file: LedgerLog | Timeline, what: str, instruments: Instruments) -> None:
    """Write the rest of a file, and note on the console if it is incomplete."""
    file.close()
    if file.error is not None:
        instruments.note(f"{what} is not complete, since it could not be written: {file.error}")


async def checkpoint_written(timeline: Timeline, upload: CheckpointUpload | None, version: int, seconds: float) -> None:
    """Callback of the checkpointer, when one is complete."""
    now = time.time()
    timeline.add("checkpoint", f"checkpoint v{version}", now - seconds, now)
    if upload is not None:
        await upload.start(version)


async def restore(run: Run, flow: Flow, folder: CheckpointFolder, resumed: Checkpoint) -> None:
    """Continue a run from a checkpoint: its groups, counters and history. The trainer ranks have read their part."""
    saved, payloads = await asyncio.to_thread(folder.flow_snapshot, resumed)
    await flow.restore(saved, payloads)
    run.load_state_dict(resumed.version, resumed.manifest["run"])
    await asyncio.to_thread(
        folder.prune,
        run.config.checkpoint.keep,
        resumed.version,
        run.evaluations.spared_versions(run.config.checkpoint.keep_best),
        run.config.checkpoint.keep_every,
    )


@asynccontextmanager
async def policy_runtime(
    config: RunConfig,
    actors: RunActors,
    runner: TrajectoryRunner,
    probes: Sequence[tuple[int, ...]],
    table: EvaluationTable,
) -> AsyncIterator[PolicyRuntime]:
    """Connect the engines and the trainer of one policy; they are in service until the context exits.

    Args:
        config: Configuration of the policy.
        actors: Its trainer and engines.
        runner: Samples trajectories on the engines.
        probes: Prompts of the logprob parity check, token ids.
        table: Stores the answers of its evaluations.
    """
    pool, rollout = runner.pool, config.rollout
    sampling = rollout_sampling(config, runner.codec)
    parity_check = LogprobParityCheck(
        pool, actors.trainer, probes, sampling, config.model.dtype, rollout.request_timeout_s
    )
    publisher = await actors.publisher(pool, config, parity_check.check)
    policies: dict[FrozenRole, FrozenPolicyClient | None] = {"reference": actors.reference, "teacher": actors.teacher}
    frozen = [policy for role, policy in policies.items() if policy is not None and config.takes_turns(role)]
    if config.cluster.colocated:
        actors.trainer.turn = partial(engines_asleep, pool, frozen)
    limit = rollout.max_engine_restarts_per_hour
    restarts = EngineRestarts(pool, partial(actors.restarted, config), publisher.catch_up, limit)
    # Colocated roles take turns on the devices, and a model may load only during the engines' turn. Lost engines are
    # therefore not restarted there.
    restarting = nullcontext() if config.cluster.colocated else restarts.running()
    try:
        are_equal = not config.cluster.extra_rollout_pools
        watching = EngineMonitor(pool, adapts_concurrency=True, has_equal_engines=are_equal)
        async with restarting, watching.running() as monitor:
            yield PolicyRuntime(
                runner,
                trainer=actors.trainer,
                publisher=publisher,
                evaluator=Evaluator(
                    runner,
                    actors.rewards,
                    sampling,
                    config.evaluation,
                    config.dataflow.pass_reward,
                    table,
                    prompt_limit(config, runner.codec),
                ),
                monitor=monitor,
            )
    finally:
        await publisher.close()
