"""Filters of scored groups. A filtered group ends untrained with a reason, and its credit admits another group.

A filter returns None to keep a group, or the reason to filter it. Filters are applied in order and the first reason
counts. A filter whose input is missing raises a `TrajectoryError`: the group fails and the run continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from penstock.dataflow.difficulty import passes
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ledger import Reason
from penstock.dataflow.trajectory import Trajectory, are_equal, rewards_by_baseline

GroupFilter = Callable[[Sequence[Trajectory]], Reason | None]
MAX_REFILLS = 1024
"""Maximum number of groups filtered between two batches, unless the configuration allows more. Without a limit the
engines could sample without training."""


def zero_variance(reward_part: str | None = None, heads: Collection[str] = ()) -> GroupFilter:
    """Filter groups whose rewards are all equal up to rounding: their advantages are 0 (DAPO, arXiv 2503.14476).

    If threads have their own rewards, the rewards of each thread name are compared, and any difference keeps the group.
    So does one in any of the `heads`, whose advantages differ where their sum does not.

    Args:
        reward_part: Named part of the reward to compare, e.g. raw correctness, instead of the weighted sum. The filter
            raises a `TrajectoryError` of kind `reward` if the reward of an answer lacks this part.
        heads: The parts of `algorithm.reward_weights`, each of which is normalised by itself.
    """
    key = "algorithm.reward_weights" if reward_part is None else "dataflow.filters.zero_variance_part"
    names = heads if reward_part is None else [reward_part]

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        of_parts = [[reward_component(member, name, key) for member in members] for name in names]
        compared = of_parts or rewards_by_baseline(members).values()
        return Reason.ZERO_VARIANCE if all(map(are_equal, compared)) else None

    return judge


def has_parts(names: Iterable[str]) -> GroupFilter:
    """Fail groups whose rewards lack a part that `algorithm.reward_weights` names; the trainer needs all of them."""

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        for member, name in product(members, names):
            reward_component(member, name, "algorithm.reward_weights")
        return None

    return judge


def reward_component(member: Trajectory, name: str, key: str) -> float:
    """Return a named part of a trajectory's reward. `key` is the configuration key that requires it.

    Raises:
        TrajectoryError: Of kind `reward`, if the part is missing.
    """
    if name not in member.reward_parts:
        parts = ", ".join(sorted(member.reward_parts)) or "none"
        raise TrajectoryError(
            "reward",
            f"{key} asks for {name}: the reward of trajectory {member.trajectory_id} has no such part, so its group "
            f"cannot be filtered and fails. It has: {parts}. Return this part for every answer, or remove it from "
            f"{key}.",
        )
    return member.reward_parts[name]


def overlong(max_share: float) -> GroupFilter:
    """Filter groups with a share of truncated trajectories above `max_share`."""

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        cut = sum(member.finish_reason == "length" for member in members)
        return Reason.OVERLONG if cut > max_share * len(members) else None

    return judge


def pass_rate(lowest: float, highest: float, pass_reward: float) -> GroupFilter:
    """Filter groups that are too hard or too easy: keep those with a pass rate in [lowest, highest]."""

    def judge(members: Sequence[Trajectory]) -> Reason | None:
        share = sum(passes(member, pass_reward) for member in members) / len(members)
        return None if lowest <= share <= highest else Reason.PASS_RATE

    return judge


def user(keep: Callable[[Sequence[Trajectory]], bool]) -> GroupFilter:
    """Filter groups for which the user's function returns False."""
    return lambda members: None if keep(members) else Reason.USER


@dataclass(slots=True)
class FilterChain:
    """All filters of a run, with a limit on filtered groups."""

    filters: Sequence[GroupFilter]
    max_refills: int = MAX_REFILLS
    """Maximum number of groups filtered between two batches; more stop the run."""
    since_batch: Counter[Reason] = field(default_factory=Counter)
    """Number of groups filtered since the last batch closed, by reason."""

    def judge(self, members: Sequence[Trajectory]) -> Reason | None:
        """Return the reason to filter a group, or None to keep it.

        Raises:
            PenstockError: As `count`.
            TrajectoryError: If the input of a filter is missing; the group fails.
        """
        reason = next((reason for judge in self.filters if (reason := judge(members)) is not None), None)
        if reason is not None:
            self.count(reason)
        return reason

    def count(self, reason: Reason) -> None:
        """Count a filtered group.

        Raises:
            PenstockError: If too many groups were filtered since the last batch. Names the most frequent reason.
        """
        self.since_batch[reason] += 1
        if (total := self.since_batch.total()) <= self.max_refills:
            return
        worst, num_worst = self.since_batch.most_common(1)[0]
        cause, remedy = (
            f"by the filter {worst}",
            ("Use tasks of another difficulty, a larger group_size, or remove the filter from dataflow.filters."),
        )
        if worst is Reason.ABSTAINED:
            cause = "because the reward had an opinion on fewer than dataflow.min_group_size of their answers"
            remedy = "Return a number, not None (a function without `return` gives None), or leave such tasks out."
        raise PenstockError(
            f"dataflow: {total} groups were filtered since the last batch closed, and the limit is {self.max_refills}; "
            f"{num_worst} of them {cause}. The engines sample, but nothing is trained. {remedy}"
        )

    def batch_closed(self) -> None:
        self.since_batch.clear()
