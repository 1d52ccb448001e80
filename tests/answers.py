"""Trajectories as reward functions get them."""

from __future__ import annotations

import numpy as np

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import FinishReason, Trajectory
from penstock.dataflow.versions import Span


def answered(response: str, num_sampled: int = 1, finish_reason: FinishReason = "stop") -> Trajectory:
    """An answer of so many sampled tokens, after a prompt of one; unscored."""
    is_sampled = np.arange(1 + num_sampled) > 0
    return Trajectory(
        trajectory_id=TrajectoryId("0/0"),
        task_id=TaskId("t/0"),
        token_ids=np.arange(1 + num_sampled, dtype=np.int32),
        loss_mask=is_sampled,
        behavior_logprobs=np.zeros(1 + num_sampled, dtype=np.float32),
        spans=(Span(0, num_sampled),),
        prompt="?",
        response=response,
        finish_reason=finish_reason,
    )


def pair(response: str, **fields: object) -> tuple[Task, Trajectory]:
    """A task with fields, and an answer to it."""
    return Task(TaskId("t/0"), "?", fields), answered(response)
