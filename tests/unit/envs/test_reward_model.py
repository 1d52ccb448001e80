"""Scores of a reward model are those of Hugging Face, however many answers wait together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.trajectory import Thread
from penstock.envs.config import RewardConfig
from penstock.envs.contract import RewardContext
from penstock.envs.rewards.reward_model import RewardModelReward
from penstock.envs.workers.scoring import RewardRunner
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.models.value_model import load_value_model
from tests.tiny_policy import SPECIAL_TOKENS
from tests.unit.trainer.torch_trainer import MODEL, VOCAB, trajectory


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    policy, path = (str(tmp_path_factory.mktemp(name)) for name in ("policy", "judge"))
    create_policy(MODEL, SPECIAL_TOKENS, policy, seed=1)
    model = load_value_model(policy, MODEL, gradient_checkpointing=False).classifier
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("max_batch", [1, 3, 32])
def test_scores_are_those_of_the_classifier_alone(judge, max_batch, monkeypatch) -> None:
    from transformers import AutoModelForSequenceClassification

    rng = np.random.default_rng(0)
    members = [
        trajectory(str(n), [2, 3], rng.integers(2, VOCAB, int(rng.integers(1, 12))).tolist(), rng, None)
        for n in range(7)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    with torch.no_grad():
        expected = [float(model(torch.tensor(one.token_ids.astype(np.int64))[None]).logits) for one in members]
    reward = RewardModelReward.build(RewardContext(is_serving=True), path=judge, max_batch=max_batch)
    sizes, plain = [], reward._scores
    monkeypatch.setattr(reward, "_scores", lambda rows: sizes.append(len(rows)) or plain(rows))

    async def all_at_once() -> list[float]:
        return await asyncio.gather(*(reward(one, answer="ignored") for one in members))

    np.testing.assert_allclose(asyncio.run(all_at_once()), expected, atol=1e-5)
    assert sizes == {1: [1] * 7, 3: [3, 3, 1], 32: [7]}[max_batch]


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be loaded; tests/gpu/test_reward_model.py compares it")
async def test_the_model_goes_where_its_pool_is(judge) -> None:
    config = RewardConfig(fn="penstock.envs.rewards.reward_model:RewardModelReward", args={"path": judge})
    runner = RewardRunner(config.model_copy(update={"max_memory_gib": None}), device="cuda")
    try:
        with pytest.raises(ConfigError, match=r"(?i)its build raised .*(cuda|nvidia)"):
            await runner.start()
    finally:
        await runner.shutdown()


def test_a_failure_is_raised_for_every_answer_that_waited(judge) -> None:
    reward = RewardModelReward.build(RewardContext(is_serving=True), path=judge)
    bad = [trajectory("x", [2], [VOCAB + 5], np.random.default_rng(0), None) for _ in range(2)]

    async def all_at_once() -> list[object]:
        return await asyncio.gather(*map(reward, bad), return_exceptions=True)

    assert all(isinstance(one, IndexError) for one in asyncio.run(all_at_once()))


def test_several_threads_are_refused_with_the_reason(judge) -> None:
    one = trajectory("x", [2, 3], [4, 5], np.random.default_rng(0), None)
    several = replace(one, threads=(Thread("a", 1), Thread("b", 3)))
    with pytest.raises(ValueError, match=r"t has 2 threads; a reward model scores one sequence"):
        asyncio.run(RewardModelReward.build(RewardContext(), path=judge)(several))


def test_a_missing_model_is_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        RewardModelReward.build(RewardContext(), path=str(tmp_path))
