"""A reward worker answers every job, whatever its runner raises."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.actors.reward import RewardActor
from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.dataflow.versions import Span
from penstock.envs.config import RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.scoring import RewardRunner


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("none left"), ConfigError(["no"])])
async def test_a_job_whose_runner_fails_is_answered(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(RewardRunner, "score", fail)
    actor = RewardActor(RewardConfig(fn="penstock.envs.arithmetic:exact_match"), SandboxConfig())
    trajectory = Trajectory(
        trajectory_id=TrajectoryId("0/0"),
        task_id=TaskId("t/0"),
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        behavior_logprobs=np.zeros(2, dtype=np.float32),
        spans=(Span(0, 1),),
        prompt="?",
        response="!",
        finish_reason="stop",
    )
    await actor.submit([(7, Task(TaskId("t/0"), "?", {}), trajectory)])
    ((number, result),) = await actor.collect(wait_s=10.0)
    assert number == 7
    if isinstance(error, ConfigError):
        assert result is error
    else:
        assert isinstance(result, TrajectoryError)
        assert result.detail == f"0/0: {type(error).__name__}: {error}"
    await actor.shutdown()
