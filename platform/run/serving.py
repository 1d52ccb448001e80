"""Serving a policy on engines: the components that `train`, `eval` and `sample` share.

The shared components are the sampling parameters, the trajectory runner, the player of multi-turn episodes, and the
endpoint that answers requests of external clients while the policy is served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.engine.answer_parser import choose_parser
from penstock.actors.engine.client import RemoteEngine
from penstock.actors.episodes import spread_episodes
from penstock.actors.ray_errors import answer_of
from penstock.dataflow.errors import ConfigError, WeightSyncError
from penstock.dataflow.ports import Engine, RewardWorker, WeightManifest
from penstock.dataflow.sampling import SamplingParams
from penstock.envs.endpoint.answer_parser import AnswerParser
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Questions
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.platform.cluster.actor_factory import (
    engine_index,
    engine_layout,
    model_path,
    reserve_run_devices,
    reward_workers,
    rewards_are_loaded,
    start_engine_group,
)
from penstock.platform.cluster.session import cluster_session, is_joined
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.progress import Progress
from penstock.rollout.engine_pool.pool import EnginePool, make_pool
from penstock.rollout.tokenization.tokenizers import TokenCodec, load_codec
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.prompt_limit import PromptLimit
from penstock.rollout.trajectory.recording import PolicyAnswers
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.weights.hf_folder import CONFIG_FILE, model_folder, transformers_config
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.policy_folder import policy_tensors
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import private_directory, write_version

logger = logging.getLogger(__name__)
STARTING = Progress("starting Ray, the engines and the reward workers")


def rollout_sampling(config: RunConfig, codec: TokenCodec) -> SamplingParams:
    """Sampling parameters of rollouts."""
    return SamplingParams(
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        temperature=config.rollout.sampling.temperature,
        top_k=config.rollout.sampling.top_k,
        top_p=config.rollout.sampling.top_p,
        min_p=config.rollout.sampling.min_p,
        stop_token_ids=(*codec.stop_token_ids, *config.rollout.sampling.stop_token_ids),
        stop=config.rollout.sampling.stop,
        # vLLM samples seeded requests one by one, and restarts their random stream when they are resumed.
        seed=config.seed if all(view.rollout.engine.type == "torch" for view in config.rollout_views) else None,
    )


def prompt_limit(config: RunConfig, codec: TokenCodec) -> PromptLimit | None:
    """Which tasks fit, if others are skipped; None: all are tried."""
    if config.env.on_long_prompt != "skip":
        return None
    return PromptLimit(codec, config.model.max_context_tokens - config.rollout.sampling.max_new_tokens)


def make_runner(
    config: RunConfig, engines: Sequence[Engine], codec: TokenCodec, episodes: EpisodePlayer
) -> TrajectoryRunner:
    """Build the runner that samples trajectories from the policy of `config` on its engines."""
    views = [config.rollout_view_of(engine_index(engine.engine_id)) for engine in engines]
    return TrajectoryRunner(
        make_pool(engines, config.rollout, config.seed, [view.rollout.engine.max_num_seqs for view in views]),
        codec,
        config.rollout.request_timeout_s,
        config.rollout.max_resumes,
        episodes,
        max_context_tokens=config.model.max_context_tokens,
        vocab_size=config.model.shape.vocab_size,
    )


@asynccontextmanager
async def episode_player(config: RunConfig, codec: TokenCodec) -> AsyncIterator[EpisodePlayer]:
    """Yield an episode player. Its processes and endpoint start with the first episode that needs them."""
    limits, context = config.env.episode, config.model.max_context_tokens
    budget = EpisodeBudget(limits.max_turns, min(limits.max_tokens or context, context), limits.max_threads)
    is_spread = is_joined(config) and config.env.episode.num_workers > 1
    host = (spread_episodes if is_spread else EpisodeHost)(config.played_env, config.seed)
    endpoint = Endpoint(config.env.endpoint, limits.timeout_s)
    try:
        yield EpisodePlayer(host.open, codec, budget, endpoint, config.env.endpoint.threads, host.usage)
    finally:
        await endpoint.close()
        await host.close()


def parser_choice(
    config: RunConfig, codec: TokenCodec, pool: EnginePool, note: Callable[[str], None]
) -> Callable[[], Awaitable[AnswerParser]]:
    """Who reads tool calls of the policy, chosen when it is called; `note` gets the line that says why."""

    async def choose() -> AnswerParser:
        parser, why = await choose_parser(config.env, codec, lambda: cast("list[RemoteEngine]", pool.engines()))
        note(why)
        return parser

    return choose


async def answer_questions(
    config: RunConfig, episodes: EpisodePlayer, runner: TrajectoryRunner, sampling: SamplingParams
) -> None:
    """Serve completion requests of external clients until the player is closed, if `env.endpoint` names an API key.

    Raises:
        ConfigError: If the key is not set or too short, or the endpoint cannot bind its address.
    """
    variable = config.env.endpoint.key_variable
    if variable is None:
        return
    assert episodes.endpoint is not None, "`episode_player` always creates one"
    answers = PolicyAnswers(runner.codec, runner.sample_turn, config.model.max_context_tokens, sampling)
    try:
        questions = Questions(os.environ.get(variable, ""), answers.answer)
    except ValueError as error:
        make_one = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise ConfigError(
            [f"env.endpoint.key_variable={variable}: {error}. Before the run: export {variable}=$({make_one})"]
        ) from error
    await episodes.endpoint.answer(questions)


class Serving(NamedTuple):
    """A served policy: the runner that samples from it and the workers that score its answers."""

    runner: TrajectoryRunner
    rewards: RewardWorker


@asynccontextmanager
async def serving(config: RunConfig, command: Command) -> AsyncIterator[Serving]:
    """Start engines that serve the checkpoint at `model.path` as version 0; all actors are stopped on exit."""
    async with cluster_session(config, command) as config:
        devices = await reserve_run_devices(config, command)
        rewards = reward_workers(config, command, devices)
        engines = await start_engine_group(config, command, devices)
        try:
            await rewards_are_loaded(config, rewards)
            await _publish(config, engines)
            codec = load_codec(model_path(config), config.env)
            async with episode_player(config, codec) as episodes:
                runner = make_runner(config, engines, codec, episodes)
                episodes.read_calls_by(parser_choice(config, codec, runner.pool, logger.info))
                await answer_questions(config, episodes, runner, rollout_sampling(config, codec))
                yield Serving(runner, rewards)
        finally:
            await asyncio.gather(rewards.close(), *(engine.close() for engine in engines))


async def _publish(config: RunConfig, engines: Sequence[RemoteEngine]) -> None:
    """Have all engines serve the checkpoint as version 0, which is written once on every node with engines."""
    receiving = None
    if config.weights.transport != "gather":
        tensors = module_tensors(transformers_config(_checkpoint(config) / CONFIG_FILE))
        receiving, _ = await engine_layout(config, engines, tensors, "shared_memory")
    by_node: dict[str, list[RemoteEngine]] = {}
    for engine in engines:
        by_node.setdefault(engine.node_id, []).append(engine)
    await asyncio.gather(*(_publish_on(node, there, config, receiving) for node, there in by_node.items()))


async def _publish_on(
    node: str, engines: Sequence[RemoteEngine], config: RunConfig, receiving: EngineLayout | None
) -> None:
    """Write version 0 into the shared memory of a node until its engines have it."""
    if node == ray.get_runtime_context().get_node_id():
        files = PolicyFiles()
        try:
            manifest = files.write(config, receiving)
            await asyncio.gather(*(engine.update_weights(manifest) for engine in engines))
        finally:
            files.close()
        return
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(PolicyFiles).options(num_cpus=0, scheduling_strategy=place).remote()
    limit_s, what = config.rollout.start_timeout_s, f"the policy on node {node}"
    try:
        manifest = await answer_of(actor.write.remote(config, receiving), limit_s, WeightSyncError, what)
        await asyncio.gather(*(engine.update_weights(manifest) for engine in engines))
        await answer_of(actor.close.remote(), limit_s, WeightSyncError, what)
    finally:
        ray.kill(actor)


class PolicyFiles:
    """The checkpoint as version 0 in shared memory, in the format in which training would publish it."""

    def __init__(self) -> None:
        self._folder = private_directory()

    def write(self, config: RunConfig, receiving: EngineLayout | None) -> WeightManifest:
        """Write it for engines of this layout; None: for `weights.transport=gather`."""
        whole = policy_tensors(_checkpoint(config), config.model.dtype)
        if receiving is None:
            return write_version(whole.items(), 0, config.model.dtype, self._folder)
        sharding = TrainingSharding(tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in whole.items()))
        transfer = ShardTransfer.between(sharding, receiving, config.model.dtype, str(self._folder))
        writer = ShardWriter(transfer, 0, ShardFiles(transfer))
        flat = {name: tensor.flatten() for name, tensor in whole.items()}
        writer.write(0, flat)
        return transfer.manifest(0, writer.sums(flat))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _checkpoint(config: RunConfig) -> Path:
    path = model_path(config)
    return model_folder(path) or Path(path)
