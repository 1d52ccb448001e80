"""Scores of a reward model on a GPU are those of the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.envs.contract import Device, RewardContext
from penstock.envs.rewards.reward_model import RewardModelReward
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.models.value_model import load_value_model
from tests.tiny_policy import SPECIAL_TOKENS
from tests.unit.trainer.torch_trainer import MODEL, VOCAB, trajectory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_scores_of_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    create_policy(MODEL, SPECIAL_TOKENS, str(tmp_path / "policy"), seed=1)
    model = load_value_model(str(tmp_path / "policy"), MODEL, gradient_checkpointing=False).classifier
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "judge")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, 7)
    members = [
        trajectory(str(n), [2, 3], rng.integers(2, VOCAB, int(length)).tolist(), rng, None)
        for n, length in enumerate(lengths)
    ]

    async def scores(device: Device) -> list[float]:
        context = RewardContext(device=device, is_serving=True)
        reward = RewardModelReward.build(context, path=str(tmp_path / "judge"), max_batch=3)
        return await asyncio.gather(*(reward(one) for one in members))

    # In bfloat16, and scores vary by 2.5: in that dtype on a CPU they differ by 0.03.
    np.testing.assert_allclose(asyncio.run(scores("cuda")), asyncio.run(scores("cpu")), atol=0.1)
