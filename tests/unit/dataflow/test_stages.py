"""Curriculum stages follow one another when the gates of the configuration are reached."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.stages import GatedStages, Stage, stage_violations
from penstock.dataflow.task_queue import QueuedTask
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.checks.load import compose_config
from penstock.platform.run.flow_builder import make_task_queue

OVERRIDES = ["experiment=arithmetic_stages", "env.streams.easy.gate_groups=4"]


def scored(reward: float) -> Trajectory:
    trajectory = object.__new__(Trajectory)
    object.__setattr__(trajectory, "reward", reward)
    return trajectory


def test_the_configured_stages_are_admitted_one_after_the_other() -> None:
    notes: list[str] = []
    queue, ledger, versions = make_task_queue(compose_config(OVERRIDES), notes.append), Ledger(), itertools.count(1)

    def play(num_groups: int, reward: float) -> set[str]:
        played: list[QueuedTask] = []
        for _ in range(num_groups):
            queued = queue.next(ledger)
            assert queued is not None
            ledger.admit(queued.task.task_id, queued.group_size, queued.stream)
            played.append(queued)
            queue.group_scored(queued, [scored(reward)])
        queue.follow_curriculum(next(versions), ledger)
        return {queued.stream for queued in played}

    assert play(3, 1.0) == {"easy"}
    assert play(3, 0.0) == {"easy"}, "three groups were fewer than the gate asks for"
    assert play(3, 0.9) == {"easy"}, "the newest four had 0.675 in the mean, below 0.8"
    assert (notes, dict(queue.weights)) == ([], {"easy": 1.0, "hard": 0.0})
    assert play(1, 0.9) == {"easy"}, "now it is passed"
    (note,) = notes
    assert "stage hard begins at v4: the newest 4 groups of easy have a mean reward of 0.900, its gate is 0.8" in note
    assert dict(queue.weights) == {"easy": 0.0, "hard": 1.0}
    assert play(4, 0.0) == {"hard"}
    assert play(4, 0.0) == {"hard"}, "a stage that was left stays left"


def test_several_gates_are_passed_one_at_a_time_and_the_last_stage_stays() -> None:
    stages = GatedStages([Stage("a", 0.5, 1), Stage("b", 0.5, 2), Stage("c", None, 32)])
    rewards = {"a": [1.0], "b": [1.0], "c": [1.0]}
    assert [stages.weights(version, rewards) for version in range(3)] == [{"b": 1.0}, {"b": 1.0}, {"b": 1.0}]
    assert stages.weights(4, {**rewards, "b": [0.0, 1.0]}) == {"c": 1.0}, "a mean that equals the gate passes it"
    assert stages.weights(5, rewards) == {"c": 1.0}
    assert stages.current == "c"


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([Stage("a", None, 1), Stage("b", 0.5, 1), Stage("c", None, 1)], "env.streams.a.gate=null"),
        ([Stage("a", 0.5, 1), Stage("b", 0.7, 1)], "env.streams.b.gate=0.7: it is the last of a → b"),
        ([Stage("a", 0.5, 65), Stage("b", None, 1)], "gate_groups=65 is outside 1..64"),
    ],
)
def test_stages_that_could_not_follow_one_another_are_named(stages: list[Stage], problem: str) -> None:
    (found,) = stage_violations(stages)
    assert problem in found


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["env.streams.hard.gate=1.0"], "its gate opens nothing"),
        (["env.curriculum=tests.unit.dataflow.test_stages:STAGES"], "both say which stream is admitted"),
        (["env.streams.easy.gate_groups=65"], "gate_groups"),
        (["env.streams.easy.quota=0.5"], "quotas sum to 0.5, below 1"),
    ],
)
def test_a_configuration_whose_stages_do_not_fit_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_config([*OVERRIDES[:1], *overrides])
    assert any(problem in violation for violation in refused.value.violations), refused.value.violations


def test_tasks_of_streams_without_gates_are_mixed_as_before() -> None:
    config = compose_config(["experiment=arithmetic", "env=arithmetic_mixed"])
    queue: Any = make_task_queue(config)
    assert queue.curriculum is None
    assert [stream.weight for stream in queue.streams] == [1.0, 3.0]


STAGES = GatedStages([Stage("easy", 0.5, 1), Stage("hard", None, 1)])
