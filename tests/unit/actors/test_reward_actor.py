"""A reward worker replies to every job, whatever its runner raises."""

from __future__ import annotations

import pickle

import pytest

from penstock.actors.reward.actor import RewardActor
from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.envs.config import RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import pair


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("none left"), ConfigError(["no"])])
async def test_a_job_whose_runner_fails_gets_a_reply(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(RewardRunner, "score", fail)
    actor = RewardActor(RewardConfig(fn="penstock.envs.tasks.arithmetic:exact_match"), SandboxConfig(), "cpu")
    result = await actor.score("0/0", pickle.dumps(pair("!")))
    if isinstance(error, ConfigError):
        assert isinstance(result, ConfigError)
        assert result.violations == error.violations
    else:
        assert isinstance(result, TrajectoryError)
        assert result.detail == f"0/0: {type(error).__name__}: {error}"
    await actor.shutdown()
