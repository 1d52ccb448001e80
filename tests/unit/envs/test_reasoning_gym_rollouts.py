"""Twenty tasks of reasoning-gym, from the dataset to the reward of what a policy has sampled for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.dataflow.ids import EngineId
from penstock.dataflow.sampling import SamplingParams
from penstock.envs.adapters.reasoning_gym_tasks import ReasoningGymTasks, reasoning_gym_reward
from penstock.envs.config import EnvConfig
from penstock.envs.scripted_check import check_environment
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.rollout.tokenization.tokenizers import byte_tokenizer, load_codec
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shared_memory import write_version
from tests.answers import answered
from tests.tiny_policy import tiny_shape

NAMES = [
    "aiw",
    "base_conversion",
    "basic_arithmetic",
    "bitwise_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "coin_flip",
    "count_bits",
    "decimal_arithmetic",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "lcm",
    "leg_counting",
    "number_sequence",
    "power_function",
    "prime_factorization",
    "products",
    "syllogism",
    "time_intervals",
]
MODEL = ModelConfig(max_context_tokens=1024, shape=tiny_shape(vocab_size=259, hidden_size=32, head_dim=16))
NUM_TOKENS = 8


async def test_policies_answer_twenty_tasks_and_their_verifiers_score_it(tmp_path: Path) -> None:
    sources = {name: ReasoningGymTasks(0, name) for name in NAMES}
    tasks = {name: next(source.train()) for name, source in sources.items()}
    create_policy(MODEL, byte_tokenizer(), str(tmp_path), seed=0)
    engine = TorchEngine(
        EngineSpec(
            engine_id=EngineId("engine-0"),
            model_path=str(tmp_path),
            model=MODEL,
            engine=TorchEngineConfig(type="torch", max_num_seqs=len(NAMES)),
            device="cpu",
            update_mode="recompute_kv",
            seed=0,
            threads=1,
        )
    )
    codec = load_codec(tmp_path)
    sampling = SamplingParams(NUM_TOKENS, stop_token_ids=codec.stop_token_ids)
    await engine.start()
    try:
        weights = load_file(tmp_path / "model.safetensors").items()
        await engine.update_weights(write_version(weights, 0, "float32", tmp_path))
        runner = TrajectoryRunner(EnginePool([engine], len(NAMES)), codec, 60.0)
        runs = [runner.run(RolloutContext(task, name), 0, sampling) for name, task in tasks.items()]
        trajectories = await asyncio.wait_for(asyncio.gather(*runs), 60)
    finally:
        await engine.shutdown()
    for (name, task), trajectory in zip(tasks.items(), trajectories, strict=True):
        assert str(task.fields["entry"]["question"]) in trajectory.prompt
        assert 0 < np.count_nonzero(trajectory.loss_mask) <= NUM_TOKENS
        assert reasoning_gym_reward(trajectory, **task.fields) == {"reward": 0.0, "verifier_error": 0.0}
        gold = answered(sources[name].gold_response(task))
        assert reasoning_gym_reward(gold, **task.fields)["reward"] == 1.0


@pytest.mark.some(5)
@pytest.mark.parametrize("name", NAMES)
async def test_they_pass_the_check_of_environments(name: str) -> None:
    findings = await check_environment(EnvConfig(factory="reasoning_gym", args={"dataset": name}))
    assert [finding.is_good for finding in findings] == [True] * 4 + [None]
