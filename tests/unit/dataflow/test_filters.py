"""Which groups each filter removes, and when too many filtered groups stop the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.filters import FilterChain, has_parts, overlong, user, zero_variance
from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.ledger import Reason
from penstock.dataflow.trajectory import FinishReason, Trajectory
from penstock.dataflow.versions import Span
from penstock.platform.config.schema import DataflowConfig, FilterConfig
from penstock.platform.run.flow_builder import make_filters


def member(reward: float, *, correct: float = 0.0, finish_reason: FinishReason = "stop") -> Trajectory:
    return Trajectory(
        trajectory_id=TrajectoryId("0/0"),
        task_id=TaskId("t"),
        token_ids=np.array([5, 6], np.int32),
        loss_mask=np.array([False, True]),
        behavior_logprobs=np.array([0.0, -1.0], np.float32),
        spans=(Span(0, 1),),
        prompt="",
        response="",
        finish_reason=finish_reason,
        reward=reward,
        reward_parts={"correct": correct},
    )


def test_zero_variance_takes_out_groups_without_a_difference() -> None:
    assert zero_variance()([member(0.5), member(0.5)]) is Reason.ZERO_VARIANCE
    assert zero_variance()([member(0.5), member(1.0)]) is None


def test_rounding_does_not_keep_a_group_without_a_difference() -> None:
    judge, of_part = zero_variance(), zero_variance("correct")
    assert judge([member(0.3), member(0.1 + 0.2)]) is Reason.ZERO_VARIANCE
    assert of_part([member(0.0, correct=0.3), member(1.0, correct=0.1 + 0.2)]) is Reason.ZERO_VARIANCE
    assert judge([member(0.3), member(0.3 + 1e-6)]) is None, "a difference that is meant"
    assert judge([member(0.0), member(-0.0)]) is Reason.ZERO_VARIANCE


def test_a_reward_that_is_not_finite_is_left_to_the_trainer_which_skips_the_step() -> None:
    for reward in (np.nan, np.inf):
        assert zero_variance()([member(reward), member(reward)]) is None


def test_zero_variance_of_a_part_looks_at_nothing_else() -> None:
    judge = zero_variance("correct")
    assert judge([member(0.1), member(0.2)]) is Reason.ZERO_VARIANCE
    assert judge([member(0.5, correct=0.0), member(0.5, correct=1.0)]) is None


def test_a_difference_in_one_head_keeps_a_group_whose_sums_are_equal() -> None:
    def rewarded(**parts: float) -> Trajectory:
        return replace(member(sum(parts.values())), reward_parts=parts)

    group = [rewarded(right=1.0, short=0.0), rewarded(right=0.0, short=1.0)]
    assert zero_variance()(group) is Reason.ZERO_VARIANCE
    filters = FilterConfig(zero_variance=True)
    flow = DataflowConfig(batch_groups=1, group_size=2, max_staleness=1, filters=filters)
    assert make_filters(flow, ("right", "short")).judge(group) is None
    assert zero_variance(heads=("right", "short"))([group[0], group[0]]) is Reason.ZERO_VARIANCE


def test_a_reward_without_the_part_is_a_failure_of_the_reward_that_names_what_is_there() -> None:
    for judge, key in ((zero_variance("right"), "zero_variance_part"), (has_parts(["right"]), "reward_weights")):
        with pytest.raises(
            TrajectoryError, match=rf"{key} asks for right: .* 0/0 has no such part.* It has: correct\."
        ) as raised:
            judge([member(0.0), member(1.0)])
        assert raised.value.kind == "reward"


@pytest.mark.parametrize(("num_cut", "reason"), [(0, None), (1, None), (2, None), (3, Reason.OVERLONG)])
def test_overlong_takes_out_groups_with_more_than_the_share_cut_off(num_cut: int, reason: Reason | None) -> None:
    members = [member(0.0, finish_reason="length" if index < num_cut else "stop") for index in range(4)]
    assert overlong(0.5)(members) is reason


def test_user_takes_out_what_the_users_function_does_not_want() -> None:
    judge = user(lambda members: members[0].reward == 1.0)
    assert judge([member(1.0)]) is None
    assert judge([member(0.0)]) is Reason.USER


def test_the_first_reason_counts_and_refills_end_with_the_batch() -> None:
    chain = FilterChain([zero_variance(), user(lambda _members: False)], max_refills=2)
    assert chain.judge([member(0.0), member(0.0)]) is Reason.ZERO_VARIANCE
    assert chain.judge([member(0.0), member(1.0)]) is Reason.USER
    chain.batch_closed()
    assert chain.judge([member(0.0), member(1.0)]) is Reason.USER
    assert chain.judge([member(0.0), member(1.0)]) is Reason.USER
    with pytest.raises(PenstockError, match=r"3 groups were filtered .*the limit is 2; 3 of them by the filter user"):
        chain.judge([member(0.0), member(1.0)])
