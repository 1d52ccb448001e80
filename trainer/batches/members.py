"""The sequences of a batch as they will be trained: which tokens carry loss, what they earned, in which pairs.

A sequence is a thread of a trajectory, of most the only one. All of it is over the whole batch, before any split into
ranks or micro-batches (I9).

Shape legend: N sequences, n_i sampled tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.trajectory import MAIN_THREAD, THREAD_PART, GroupPayload, Trajectory, has_thread_rewards
from penstock.dataflow.versions import versions_per_token
from penstock.trainer.algorithms.batch_advantages import RewardBatch
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.pair_losses import preference_pairs
from penstock.trainer.algorithms.shaping import overlong_penalty
from penstock.trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Member:
    """One sequence of the batch.

    Attributes:
        trajectory: It alone (`Trajectory.separate`).
        group: Position of its group in the batch.
        baseline: Members of equal baseline are compared: of a group, or the threads of one name in it.
        attempt: Members of equal attempt share one reward, which counts once: threads of a trajectory.
        num_overlong: Sampled tokens that the overlong penalty counts: of the longest thread of its attempt.
        reward: As scored.
        carries_loss: `[n_i] bool`, of its sampled tokens.
        reference: `[n_i] float32` logprobs of the reference policy; None if there is none.
        values: `[n_i] float32`, V of the critic before each sampled token; None if there is none.
        teacher: `[n_i] float32` logprobs of a teacher; None if there is none.
        proximal: `[n_i] float32` logprobs of a forward before the batch was complete; None if there was none.
    """

    trajectory: Trajectory
    group: int
    baseline: int
    attempt: int
    num_overlong: int
    reward: float
    carries_loss: NDArray[np.bool_]
    reference: NDArray[np.float32] | None
    values: NDArray[np.float32] | None = None
    teacher: NDArray[np.float32] | None = None
    proximal: NDArray[np.float32] | None = None

    @property
    def targets(self) -> NDArray[np.int64]:
        """Positions of the loss tokens."""
        return np.flatnonzero(self.trajectory.loss_mask)[self.carries_loss]

    @property
    def behavior(self) -> NDArray[np.float32]:
        """`[n_i]` behavior logprobs of the sampled tokens."""
        return self.trajectory.behavior_logprobs[self.trajectory.loss_mask]


def batch_members(
    payloads: Sequence[GroupPayload],
    algorithm: AlgorithmConfig,
    min_versions: Sequence[int] | None,
    references: Sequence[NDArray[np.float32]],
    values: Sequence[NDArray[np.float32]] = (),
    teachers: Sequence[NDArray[np.float32]] = (),
    proximals: Sequence[NDArray[np.float32] | None] = (),
) -> list[Member]:
    """Everyone who is trained; answers that were cut off are masked or left out if `overlong` says so.

    Raises:
        TrainingError: If there is no group, a trajectory has no reward, or `reward_weights` meet rewards by thread.
        ShapeError: If the reference or the teacher did not score every sampled token.
    """
    if not payloads:
        raise TrainingError("trainer: a step was asked for with 0 groups; at least 1 is needed.")
    floors = [0] * len(payloads) if min_versions is None else min_versions
    scores = _of_sequences(payloads, references, "reference logprobs")
    worths = _of_sequences(payloads, values, "values")
    lessons = _of_sequences(payloads, teachers, "teacher logprobs")
    centres = _of_sequences(payloads, proximals, "proximal logprobs")
    members: list[Member] = []
    attempts, baselines = count(), _Numbered()
    for group, (payload, floor) in enumerate(zip(payloads, floors, strict=True)):
        is_by_thread = has_thread_rewards(payload.trajectories)
        if is_by_thread and algorithm.reward_weights:
            raise _by_thread_and_by_part(payload)
        for trajectory, reward in zip(payload.trajectories, group_rewards(payload), strict=True):
            is_cut = trajectory.finish_reason == "length"
            sequences = [one if math.isfinite(reward) else _poisoned(one) for one in trajectory.separate()]
            longest, shared = max(one.num_sampled_tokens for one in sequences), next(attempts)
            for one in sequences:
                reference, value, teacher, proximal = next(scores), next(worths), next(lessons), next(centres)
                if is_cut and algorithm.overlong == "drop":
                    continue
                carries_loss = is_new_enough(one, floor) & (not (is_cut and algorithm.overlong == "mask"))
                members.append(
                    Member(
                        trajectory=one,
                        group=group,
                        baseline=baselines[group, name_of(one) if is_by_thread else None],
                        attempt=next(attempts) if is_by_thread else shared,
                        num_overlong=one.num_sampled_tokens if is_by_thread else longest,
                        reward=float(one.reward if is_by_thread and one.reward is not None else reward),
                        carries_loss=carries_loss,
                        reference=reference,
                        values=value,
                        teacher=teacher,
                        proximal=proximal,
                    )
                )
    return members


class _Numbered(dict[tuple[int, str | None], int]):
    """Numbers keys in the order in which they are asked for."""

    def __missing__(self, key: tuple[int, str | None]) -> int:
        self[key] = len(self)
        return self[key]


def _by_thread_and_by_part(payload: GroupPayload) -> TrainingError:
    return TrainingError(
        f"algorithm.reward_weights: group {payload.group_id} has rewards by thread ({THREAD_PART}NAME), which replace "
        "the reward of the trajectory, so its named parts have no baseline. Use reward_weights={}, or one reward for "
        "all threads."
    )


def all_sequences(payloads: Sequence[GroupPayload]) -> list[Trajectory]:
    """Every thread of every trajectory, in the order of all arrays of sampled tokens."""
    return [one for payload in payloads for trajectory in payload.trajectories for one in trajectory.separate()]


def name_of(sequence: Trajectory) -> str:
    """Of its thread."""
    return sequence.threads[0].name if sequence.threads else MAIN_THREAD


def is_new_enough(trajectory: Trajectory, min_version: int) -> NDArray[np.bool_]:
    """`[n_i] bool`: the sampled tokens that are not older than `min_version`."""
    if trajectory.oldest_version >= min_version:
        return np.ones(trajectory.num_sampled_tokens, dtype=bool)
    return versions_per_token(trajectory.spans) >= min_version


def reward_batch(members: Sequence[Member], algorithm: AlgorithmConfig, max_new_tokens: int) -> RewardBatch:
    """What the advantages are made of.

    Raises:
        TrainingError: If a part named by `reward_weights` is missing.
    """
    return RewardBatch(
        rewards=np.array([_shaped_reward(one, algorithm, max_new_tokens) for one in members], dtype=np.float64),
        groups=np.array([one.baseline for one in members], dtype=np.int64),
        attempts=np.array([one.attempt for one in members], dtype=np.int64),
        penalties=[_penalties(one, algorithm) for one in members],
        carries_loss=[one.carries_loss for one in members],
        parts={
            name: np.array([_part(one.trajectory, name) for one in members], np.float64)
            for name in algorithm.reward_weights
        },
        values=[one.values.astype(np.float64) for one in members if one.values is not None],
    )


def batch_pairs(
    everyone: Sequence[Member], rewards: RewardBatch, algorithm: AlgorithmConfig
) -> dict[int, tuple[int, ...]]:
    """Index of a member -> indices of those that it is preferred to; empty unless the loss compares pairs.

    Raises:
        TrainingError: If the loss compares pairs, and a trajectory is no single sequence.
    """
    preferred: dict[int, tuple[int, ...]] = {}
    if not algorithm.compares_pairs:
        return preferred
    for one in everyone:
        if one.trajectory.threads:
            raise TrainingError(
                f"algorithm.loss={algorithm.loss} prefers one answer to another, but {one.trajectory.trajectory_id} of "
                f"task {one.trajectory.task_id} has threads ({one.trajectory.threads[0].name!r}, ...), so it is no "
                "single answer. Use a loss of advantages, or an environment of one thread."
            )
    for members in rewards.members:
        eligible = [int(one) for one in members if rewards.carries_loss[one].any()]
        bad = [one for one in eligible if math.isnan(rewards.rewards[one])]  # poisoned, so any pair makes a bad step
        for better, worse in [(bad[0], eligible[0])] if bad else preference_pairs(rewards.rewards, eligible, algorithm):
            preferred[better] = (*preferred.get(better, ()), worse)
    return preferred


def group_rewards(payload: GroupPayload) -> NDArray[np.float64]:
    """`[G] float64` rewards of a group; of all that are not finite, NaN.

    Raises:
        TrainingError: If a member was not scored: it must never count as 0.
    """
    rewards = np.array([_reward(payload, trajectory) for trajectory in payload.trajectories], dtype=np.float64)
    return np.where(np.isfinite(rewards), rewards, np.nan)


def _poisoned(sequence: Trajectory) -> Trajectory:
    """The same with NaN for logprobs, which no loss may train on: not every loss reads a reward of its own."""
    return replace(sequence, behavior_logprobs=np.full_like(sequence.behavior_logprobs, np.nan))


def _reward(payload: GroupPayload, trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainingError(
            f"trainer: trajectory {trajectory.trajectory_id} of group {payload.group_id} has no reward. "
            "Only scored groups may be trained."
        )
    return trajectory.reward


def _shaped_reward(member: Member, algorithm: AlgorithmConfig, max_new_tokens: int) -> float:
    if algorithm.overlong != "penalty":
        return member.reward
    return member.reward + overlong_penalty(member.num_overlong, max_new_tokens, algorithm.overlong_cache_share)


def _penalties(member: Member, algorithm: AlgorithmConfig) -> NDArray[np.float64]:
    """`[n_i]` β k(b, r): the reward is about what was sampled, so the policy in it is the one that sampled."""
    behavior = member.behavior.astype(np.float64)
    if not algorithm.kl_in_reward:
        return np.zeros_like(behavior)
    assert member.reference is not None, "the trainer refuses batches without reference logprobs"
    estimate = find("kl", algorithm.kl_estimator).load()
    divergence = estimate(torch.from_numpy(behavior), torch.from_numpy(member.reference.astype(np.float64)))
    return algorithm.kl_in_reward * np.asarray(divergence.numpy())


def _part(trajectory: Trajectory, name: str) -> float:
    if name not in trajectory.reward_parts:
        raise TrainingError(
            f"algorithm.reward_weights.{name}: trajectory {trajectory.trajectory_id} has no such part of its reward. "
            f"It has: {', '.join(trajectory.reward_parts) or 'none'}. Let reward.fn return a dict with it."
        )
    return trajectory.reward_parts[name]


def _of_sequences(
    payloads: Sequence[GroupPayload], per_group: Sequence[NDArray[np.float32] | None], what: str
) -> Iterator[NDArray[np.float32] | None]:
    """Each sequence's part of what there is per group, in order; None for each of a group of which there is nothing."""
    counts = [[one.num_sampled_tokens for one in all_sequences([payload])] for payload in payloads]
    if not per_group:
        return iter([None] * sum(map(len, counts)))
    wanted = [sum(of_group) for of_group in counts]
    lengths = zip(wanted, per_group, strict=False)  # unequal numbers of groups are told below
    found = [length if scores is None else len(scores) for length, scores in lengths]
    if found != wanted or len(per_group) != len(payloads):
        raise ShapeError(
            f"trainer: {sum(found)} {what} for {sum(wanted)} sampled tokens of {len(payloads)} groups. "
            "There is one for every sampled token of every group, in order."
        )
    return chain.from_iterable(
        [None] * len(of_group) if scores is None else np.split(scores, np.cumsum(of_group)[:-1])
        for of_group, scores in zip(counts, per_group, strict=True)
    )
