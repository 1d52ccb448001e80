"""From groups (RL) or examples (supervised) to the sequences of one optimizer step, with all that is global in them.

Advantages and normalisers are computed here, over the whole batch, before any split into ranks or micro-batches (I9).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import versions_per_token
from penstock.trainer.algorithms.advantages import advantage_estimator, is_zero_variance
from penstock.trainer.algorithms.aggregation import token_weights
from penstock.trainer.batches.collate import TrainingSequence
from penstock.trainer.config import AlgorithmConfig

Example = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, response token ids)."""


def policy_sequences(
    payloads: Sequence[GroupPayload],
    algorithm: AlgorithmConfig,
    max_new_tokens: int,
    min_versions: Sequence[int] | None = None,
    normaliser: float | None = None,
    references: Sequence[NDArray[np.float32]] = (),
) -> list[TrainingSequence]:
    """One sequence per trajectory, with its advantage and the aggregation weight of its tokens.

    Args:
        payloads: The groups of the batch.
        algorithm: Which advantage and aggregation.
        max_new_tokens: The sampling limit, tokens.
        min_versions: Per group, tokens sampled before this version carry no loss weight and do not count in
            the normaliser; None: all sampled tokens do.
        references: Per group `[n] float32`, the reference policy's logprobs of its n sampled tokens; empty: none.
        normaliser: Of the aggregation, if these groups are not the whole batch; None: theirs.

    Raises:
        TrainingError: If there is no group, or a trajectory has no finite reward.
    """
    if not payloads:
        raise TrainingError("trainer: a step was asked for with 0 groups; at least 1 is needed.")
    estimate = advantage_estimator(algorithm)
    trajectories = [trajectory for payload in payloads for trajectory in payload.trajectories]
    advantages = np.concatenate([estimate(group_rewards(payload)) for payload in payloads])
    floors = [0] * len(payloads) if min_versions is None else min_versions
    targets = [
        loss_tokens(trajectory, floor)
        for payload, floor in zip(payloads, floors, strict=True)
        for trajectory in payload.trajectories
    ]
    counts = np.array([len(index) for index in targets])
    weights = token_weights(counts, algorithm.aggregation, max_new_tokens, normaliser)
    num_sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    sampled = np.concatenate(references) if references else None
    if sampled is not None and len(sampled) != num_sampled:
        raise ShapeError(
            f"trainer: {len(sampled)} reference logprobs for {num_sampled} sampled tokens of {len(payloads)} groups. "
            "The reference scores every sampled token of every group, in order."
        )
    sequences, start = [], 0
    for trajectory, index, advantage, weight in zip(trajectories, targets, advantages, weights, strict=True):
        stop = start + trajectory.num_sampled_tokens
        sequences.append(
            TrainingSequence(
                token_ids=trajectory.token_ids,
                targets=index,
                behavior_logprobs=trajectory.behavior_logprobs[index],
                advantage=float(advantage),
                token_weight=float(weight),
                reference_logprobs=None if sampled is None else _of_targets(sampled[start:stop], trajectory, index),
            )
        )
        start = stop
    return sequences


def _of_targets(
    reference: NDArray[np.float32], trajectory: Trajectory, targets: NDArray[np.int64]
) -> NDArray[np.float32]:
    """From all sampled tokens to those that carry loss."""
    return reference[np.searchsorted(np.flatnonzero(trajectory.loss_mask), targets)]


def loss_tokens(trajectory: Trajectory, min_version: int = 0) -> NDArray[np.int64]:
    """Positions of the sampled tokens that are not older than `min_version`, `[n] int64`."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    if trajectory.oldest_version >= min_version:
        return sampled
    return sampled[versions_per_token(trajectory.spans) >= min_version]


def supervised_sequences(examples: Sequence[Example]) -> list[TrainingSequence]:
    """One sequence per example; every response token weighs 1 / (response tokens of the batch)."""
    total = max(sum(len(response) for _, response in examples), 1)
    return [
        TrainingSequence(
            token_ids=np.array([*prompt, *response], dtype=np.int64),
            targets=np.arange(len(prompt), len(prompt) + len(response)),
            behavior_logprobs=np.zeros(len(response), dtype=np.float32),
            token_weight=1.0 / total,
        )
        for prompt, response in examples
    ]


def group_rewards(payload: GroupPayload) -> NDArray[np.float64]:
    """`[G] float64` rewards of a group.

    Raises:
        TrainingError: If a member was not scored or its reward is not finite: it must never count as 0.
    """
    rewards = np.array([_reward(payload, trajectory) for trajectory in payload.trajectories], dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise TrainingError(f"trainer: group {payload.group_id} has non-finite rewards {rewards.tolist()}.")
    return rewards


def batch_metrics(payloads: Sequence[GroupPayload]) -> dict[str, float]:
    """Reward and length statistics over all trajectories of the batch; they are the same on every rank."""
    rewards = [group_rewards(payload) for payload in payloads]
    trajectories = [trajectory for payload in payloads for trajectory in payload.trajectories]
    everyone = np.concatenate(rewards)
    return {
        **_reward_parts(trajectories),
        "reward/mean": float(everyone.mean()),
        "reward/std": float(everyone.std()),
        "reward/zero_variance_share": float(np.mean([is_zero_variance(group) for group in rewards])),
        "length/mean_tokens": float(np.mean([trajectory.num_sampled_tokens for trajectory in trajectories])),
        "length/max_tokens": float(max(trajectory.num_sampled_tokens for trajectory in trajectories)),
        "length/truncated_share": float(np.mean([one.finish_reason == "length" for one in trajectories])),
    }


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each named reward over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            values.setdefault(f"reward/part/{name}", []).append(value)
    return {name: float(np.mean(part)) for name, part in values.items()}


def _reward(payload: GroupPayload, trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainingError(
            f"trainer: trajectory {trajectory.trajectory_id} of group {payload.group_id} has no reward. "
            "Only scored groups may be trained."
        )
    return trajectory.reward
