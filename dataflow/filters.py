"""Filters of ready groups: what is not worth a gradient is filtered with its reason, and its credit refilled.

A filter says None (keep) or the reason. Filters are asked in order and the first reason counts. A filter that
misses what it judges by raises a `TrajectoryError`: the group has failed, and the run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from penstock.dataflow.difficulty import passes
from penstock.dataflow.equal_rewards import are_equal
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ledger import Reason
from penstock.dataflow.trajectory import Trajectory, rewards_by_baseline

GroupFilter = Callable[[Sequence[Trajectory]], Reason | None]
MAX_REFILLS = 1024
"""Groups filtered between two batches; beyond it the engines would sample for ever and train nothing."""


def zero_variance(reward_part: str | None = None) -> GroupFilter:
    """Filter groups whose members all earned the same, up to rounding: their advantages are 0 (DAPO, arXiv 2503.14476).

    Where threads have rewards of their own, those of one name are compared, and one difference keeps the group.

    Args:
        reward_part: Compare this named part of the reward, e.g. raw correctness, instead of the shaped sum. The filter
            raises a `TrajectoryError` of kind reward where an answer's reward lacks it.
    """

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        if reward_part is not None:
            key = "dataflow.filters.zero_variance_part"
            has_signal = not are_equal([reward_component(member, reward_part, key) for member in members])
        else:
            has_signal = not all(are_equal(rewards) for rewards in rewards_by_baseline(members).values())
        return None if has_signal else Reason.ZERO_VARIANCE

    return judge


def has_parts(names: Iterable[str]) -> GroupFilter:
    """Fail groups of which a reward lacks a part that `algorithm.reward_weights` weighs; the trainer needs them all."""

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        for member, name in product(members, names):
            reward_component(member, name, "algorithm.reward_weights")
        return None

    return judge


def reward_component(member: Trajectory, name: str, key: str) -> float:
    """A named part of a reward.

    Raises:
        TrajectoryError: kind `reward`, if it is not there; `key` is the setting that asks for it.
    """
    if name not in member.reward_parts:
        parts = ", ".join(sorted(member.reward_parts)) or "none"
        raise TrajectoryError(
            "reward",
            f"{key} asks for {name}: the reward of trajectory {member.trajectory_id} has no such part, so its group "
            f"cannot be judged and is lost. It has: {parts}. Let the reward return this part for every answer, or "
            f"take it out of {key}.",
        )
    return member.reward_parts[name]


def overlong(max_share: float) -> GroupFilter:
    """Filter groups of which more than `max_share` were cut off at the length limit."""

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        cut = sum(member.finish_reason == "length" for member in members)
        return Reason.OVERLONG if cut > max_share * len(members) else None

    return judge


def pass_rate(lowest: float, highest: float, pass_reward: float) -> GroupFilter:
    """Filter groups that are too hard or too easy: keep a share of passing members in [lowest, highest]."""

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        share = sum(passes(member, pass_reward) for member in members) / len(members)
        return None if lowest <= share <= highest else Reason.PASS_RATE

    return judge


def user(keep: Callable[[Sequence[Trajectory]], bool]) -> GroupFilter:
    """Filter groups for which the user's function is not true."""
    return lambda members: None if keep(members) else Reason.USER


@dataclass(slots=True)
class FilterChain:
    """All filters of a run, with a limit on refills.

    Attributes:
        max_refills: Groups filtered since the last batch closed that stop the run.
    """

    filters: Sequence[GroupFilter]
    max_refills: int = MAX_REFILLS
    since_batch: Counter[Reason] = field(default_factory=Counter)

    def judge(self, members: Sequence[Trajectory]) -> Reason | None:
        """The reason to filter a group, or None.

        Raises:
            PenstockError: If too many were filtered since the last batch; names the filter that caused most of it.
            TrajectoryError: If a filter cannot judge the group: it has failed.
        """
        reason = next((reason for judge in self.filters if (reason := judge(members)) is not None), None)
        if reason is not None:
            self.since_batch[reason] += 1
            if (total := self.since_batch.total()) > self.max_refills:
                worst, count = self.since_batch.most_common(1)[0]
                raise PenstockError(
                    f"dataflow: {total} groups were filtered since the last batch closed, and the limit is "
                    f"{self.max_refills}; {count} of them by the filter {worst}. The engines sample and nothing is "
                    "trained. Use tasks of other difficulty, a larger group_size, or take the filter out of "
                    "dataflow.filters."
                )
        return reason

    def batch_closed(self) -> None:
        self.since_batch.clear()
