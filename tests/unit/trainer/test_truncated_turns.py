"""`length/truncated_share` counts turns, also of episodes that their environment has ended."""

from __future__ import annotations

from dataclasses import replace

from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Episode, GroupPayload, Trajectory, Turn
from penstock.envs.scripted_check import scripted_answer, scripted_trajectory
from penstock.trainer.optimizer_steps import batch_metrics

TASK = Task(TaskId("t"), "1+1=", {}, "")


def truncated_share(*trajectories: Trajectory) -> float:
    for trajectory in trajectories:
        trajectory.score(1.0, {})
    return batch_metrics([GroupPayload(GroupId(0), trajectories)])["length/truncated_share"]


def test_turns_that_were_cut_off_count_in_episodes_that_are_done() -> None:
    cut, whole = Turn("lo", "length", 2), Turn("look", "stop", 4)
    turns = (cut, cut, cut, whole)
    assert truncated_share(scripted_trajectory(TASK, turns, Episode(turns, "done"))) == 0.75
    assert truncated_share(scripted_trajectory(TASK, (whole,), Episode((whole,), "max_turns"))) == 0.0


def test_an_answer_without_an_environment_is_one_turn() -> None:
    assert (
        truncated_share(scripted_answer(TASK, "2"), replace(scripted_answer(TASK, "2"), finish_reason="length")) == 0.5
    )
