"""Measured difficulty: the filter on the pass rate, and group sizes and turn limits by success."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.dataflow.difficulty import LengthBySuccess, SizeBySuccess
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.filters import pass_rate
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ledger import GroupState, Ledger, Reason
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.checks.load import compose_config
from penstock.platform.run.flow_builder import make_filters, make_task_queue
from tests.answers import answered

TASK = Task(TaskId("t"), "?")


def scored(rewards: Sequence[float], num_sampled: int = 5) -> list[Trajectory]:
    members = [answered("a", num_sampled + index) for index in range(len(rewards))]
    for member, reward in zip(members, rewards, strict=True):
        member.score(reward, {})
    return members


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0, 0, 0, 0], Reason.PASS_RATE),
        ([1, 0, 0, 0], None),
        ([1, 1, 0.99, 0], None),
        ([1, 1, 1, 0], None),
        ([1, 1, 1, 1.5], Reason.PASS_RATE),
    ],
)
def test_groups_are_kept_within_the_range_bounds_included(rewards: list[float], reason: Reason | None) -> None:
    assert pass_rate(0.25, 0.75, 1.0)(scored(rewards)) is reason


def test_the_reward_from_which_a_trajectory_passes_is_configured() -> None:
    half = pass_rate(0.5, 1.0, 0.5)
    assert half(scored([0.5, 0.4])) is None
    assert half(scored([0.4, 0.4])) is Reason.PASS_RATE
    ledger = Ledger()
    record = ledger.admit(TASK.task_id, 2)
    ledger.end(record.group_id, GroupState.FILTERED, Reason.PASS_RATE)
    assert ledger.counts().filtered == 1


@pytest.mark.parametrize(
    ("rewards", "size", "limit"),
    [
        ([0, 0, 0, 0], 8, 100),  # hard: all of it
        ([1, 0, 0, 0], 8, 100),
        ([1, 1, 0, 0], 8, 12),  # half passed, of 5 and 6 tokens
        ([1, 1, 1, 0], 4, 14),
        ([1, 1, 1, 1], 2, 16),
        ([0, 1, 0, 1], 8, 16),
    ],
)
def test_what_was_measured_decides_how_many_and_how_long(rewards: list[float], size: int, limit: int) -> None:
    sizing, limiting = SizeBySuccess(8, 1.0), LengthBySuccess(100, 1.0)
    assert (sizing.group_size(TASK, "s"), limiting.max_new_tokens(TASK, "s")) == (8, 100), "never asked"
    for hook in (sizing, limiting):
        hook.group_scored(TASK, "s", scored([1, 1, 1, 1], num_sampled=40))
        hook.group_scored(TASK, "s", scored(rewards))
    assert (sizing.group_size(TASK, "s"), limiting.max_new_tokens(TASK, "s")) == (size, limit), (
        "the newest group counts"
    )
    assert sizing.group_size(TASK, "other") == 8, "streams number their tasks alike"


def test_a_limit_is_never_above_the_runs() -> None:
    limiting = LengthBySuccess(9, 1.0)
    limiting.group_scored(TASK, "", scored([1, 1]))
    assert limiting.max_new_tokens(TASK, "") == 9


def test_the_configured_hooks_hear_of_every_group_and_size_the_next_one() -> None:
    names = ["dataflow.group_sizing=by_success", "dataflow.length_limiting=by_success"]
    config = compose_config(["experiment=arithmetic", *names, "dataflow.filters.pass_rate=[0.1,0.9]"])
    queue, ledger = make_task_queue(config), Ledger()
    queued = queue.next(ledger)
    assert queued is not None
    assert (queued.group_size, queued.max_new_tokens) == (8, config.rollout.sampling.max_new_tokens)
    members = scored([1.0] * 8)
    queue.group_scored(queued, members)
    assert queue.sizing is not None
    assert queue.lengths is not None
    assert queue.sizing.group_size(queued.task, queued.stream) == 2
    assert queue.lengths.of(queued.task, queued.stream) == 24
    assert make_filters(config.dataflow).judge(members) is Reason.PASS_RATE


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("dataflow.filters.pass_rate=[0.9,0.1]", "every group would be filtered"),
        ("dataflow.filters.pass_rate=[0.26,0.3]", "no group of dataflow.group_size=8"),
        ("dataflow.filters.pass_rate=[0.5,1.5]", "every group would be filtered"),
        ("dataflow.group_sizing=by_succes", "by_succes"),
        ("env.curriculum=by_success", "by_success"),
    ],
)
def test_what_cannot_work_is_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        compose_config(["experiment=arithmetic", override])
