"""A policy as it is, on the engines of the configuration, with reward workers: what `eval` and `sample` share."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.actors.cluster import ray_session
from penstock.actors.engine_client import RemoteEngine
from penstock.dataflow.ports import RewardWorker, SamplingParams, WeightManifest
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.episodes import answer_questions, episode_player
from penstock.platform.roles import model_path, reward_workers, rewards_are_loaded, start_engine_group
from penstock.rollout.pool import make_pool
from penstock.rollout.runner import TrajectoryRunner
from penstock.rollout.tokenizers import load_codec
from penstock.weights.checkpoint import checkpoint_tensors
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import default_directory, write_version


class Serving(NamedTuple):
    """What answers, and what scores the answers."""

    runner: TrajectoryRunner
    rewards: RewardWorker


@asynccontextmanager
async def serving(config: RunConfig, command: Command) -> AsyncIterator[Serving]:
    """Engines that hold the checkpoint at `model.path` as version 0; everything is ended at the exit."""
    async with ray_session(config.cluster.address):
        rewards = reward_workers(config, command)
        engines = await start_engine_group(config, command)
        try:
            await rewards_are_loaded(config, rewards)
            with tempfile.TemporaryDirectory(prefix=f"penstock-{command}-", dir=default_directory()) as folder:
                manifest = await _publish(config, folder, engines[0])
                await asyncio.gather(*(engine.update_weights(manifest) for engine in engines))
            pool = make_pool(engines, config.rollout, config.seed)
            codec = load_codec(model_path(config), config.env.reasoning)
            limit_s = config.rollout.request_timeout_s
            async with episode_player(config, codec) as episodes:
                runner = TrajectoryRunner(
                    pool,
                    codec,
                    limit_s,
                    config.rollout.max_resumes,
                    episodes,
                    max_context_tokens=config.model.max_context_tokens,
                    vocab_size=config.model.shape.vocab_size,
                )
                sampling = SamplingParams(config.rollout.sampling.max_new_tokens, stop_token_ids=codec.stop_token_ids)
                await answer_questions(config, episodes, runner, sampling)
                yield Serving(runner, rewards)
        finally:
            await asyncio.gather(rewards.close(), *(engine.close() for engine in engines))


async def _publish(config: RunConfig, folder: str, engine: RemoteEngine) -> WeightManifest:
    """Write the checkpoint as version 0, in the way that training would."""
    tensors = checkpoint_tensors(Path(model_path(config)))
    if config.weights.transport == "gather":
        return write_version(tensors, 0, config.model.dtype, Path(folder))
    tied = "lm_head.weight" if config.model.shape.tie_word_embeddings else None
    whole = {name: tensor for name, tensor in tensors if name != tied}
    training = TrainingSide(tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in whole.items()))
    side = EngineSide(config.rollout.engine.type, await engine.layout(training.tensors))
    transfer = ShardTransfer.between(training, side, config.model.dtype, folder)
    writer = ShardWriter(transfer, 0, ShardFiles(transfer))
    flat = {name: tensor.flatten() for name, tensor in whole.items()}
    writer.write(0, flat)
    return transfer.manifest(0, writer.sums(flat))
