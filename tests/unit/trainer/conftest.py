"""Fixtures of the trainer tests."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.models.tiny_policy import create_policy
from tests.tiny_policy import SPECIAL_TOKENS

from .torch_trainer import MODEL, VOCAB, trajectory


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("policy"))
    create_policy(MODEL, SPECIAL_TOKENS, path, seed=1)
    return path


@pytest.fixture
def batch() -> list[GroupPayload]:
    rng = np.random.default_rng(2)
    lengths = [[1, 5, 12], [7, 3, 9], [4, 4, 20]]
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]
    return [
        GroupPayload(
            GroupId(group),
            tuple(
                trajectory(
                    f"{group}/{member}",
                    rng.integers(2, VOCAB, 3 + group).tolist(),
                    rng.integers(2, VOCAB, lengths[group][member]).tolist(),
                    rng,
                    rewards[group][member],
                )
                for member in range(3)
            ),
        )
        for group in range(3)
    ]
