"""`penstock eval`: greedy accuracy of a policy on held-out tasks, on the engines of the configuration."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from penstock.actors.cluster import ray_session, start_rewards
from penstock.dataflow.ports import WeightManifest
from penstock.envs.streams import load_held_out
from penstock.platform.config.schema import RunConfig
from penstock.platform.episodes import episode_player
from penstock.platform.evaluation import Evaluation, Evaluator
from penstock.platform.lifecycle import EXIT_OK, run_to_end
from penstock.platform.roles import engine_side, model_path, start_engine_group
from penstock.rollout.pool import make_pool
from penstock.rollout.runner import TrajectoryRunner
from penstock.rollout.tokenizers import load_codec
from penstock.weights.checkpoint import checkpoint_tensors
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.engine import TrainingSide
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import default_directory, write_version


def run_eval(config: RunConfig) -> int:
    """Run `penstock eval`; prints one JSON line with the figures and returns the exit code."""

    async def main() -> int:
        evaluation = await _evaluate(config)
        print(
            json.dumps(
                {
                    "model": model_path(config),
                    "accuracy": evaluation.accuracy,
                    "reward_mean": evaluation.reward_mean,
                    "tasks": evaluation.num_tasks,
                }
            )
        )
        return EXIT_OK

    return run_to_end(main)


async def _evaluate(config: RunConfig) -> Evaluation:
    tasks = load_held_out(config.env, config.seed, config.evaluation.num_tasks)
    async with ray_session(config.cluster.address):
        rewards = start_rewards(config.reward, config.sandbox)
        engines = await start_engine_group(config, "eval")
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-eval-", dir=default_directory()) as folder:
                manifest = _publish(config, folder)
                await asyncio.gather(*(engine.update_weights(manifest) for engine in engines))
            pool = make_pool(engines, config.rollout, config.seed)
            codec, limit_s = load_codec(model_path(config)), config.rollout.request_timeout_s
            async with episode_player(config, codec) as episodes:
                runner = TrajectoryRunner(pool, codec, limit_s, config.rollout.max_resumes, episodes)
                evaluator = Evaluator(runner, rewards, config.rollout.sampling.max_new_tokens)
                return await evaluator.evaluate(0, tasks)
        finally:
            await asyncio.gather(rewards.close(), *(engine.close() for engine in engines))


def _publish(config: RunConfig, folder: str) -> WeightManifest:
    """Write the checkpoint as version 0, in the way that training would."""
    tensors = checkpoint_tensors(Path(model_path(config)))
    if config.weights.mode == "gather":
        return write_version(tensors, 0, config.model.dtype, Path(folder))
    whole = {name: tensor for name, tensor in tensors if not _is_tied(name, config)}
    training = TrainingSide(tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in whole.items()))
    transfer = ShardTransfer.between(training, engine_side(config), config.model.dtype, folder)
    writer, flat = (
        ShardWriter(transfer, 0, ShardFiles(transfer)),
        {name: tensor.flatten() for name, tensor in whole.items()},
    )
    writer.write(0, flat)
    return transfer.manifest(0, writer.sums(flat))


def _is_tied(name: str, config: RunConfig) -> bool:
    return name == "lm_head.weight" and config.model.shape.tie_word_embeddings
