"""From groups to the sequences of an RL step: loss tokens, advantages, pairs.

A sequence is a thread of a trajectory (most trajectories have one). Advantages are computed here, over the whole batch,
before any split into ranks or micro-batches (I9).

Shape legend: N sequences, n_i sampled tokens of one, G members of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.ids import POLICY, PolicyId, TrajectoryId
from penstock.dataflow.trajectory import (
    MAIN_THREAD,
    THREAD_PART,
    GroupPayload,
    Trajectory,
    has_thread_rewards,
    is_recorded,
)
from penstock.dataflow.versions import versions_per_token
from penstock.trainer.algorithms.advantages import (
    GaeConfig,
    RewardBatch,
    gae_returns,
    overlong_penalty,
    token_advantages,
)
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.losses.pairs import PairsConfig, preference_pairs
from penstock.trainer.algorithms.metrics import OF_ANOTHER_POLICY
from penstock.trainer.batches.mini_batches import weigh
from penstock.trainer.batches.packing import PLACEHOLDER_ID, TrainingSequence


def policy_sequences(
    payloads: Sequence[GroupPayload],
    algorithm: Algorithm,
    max_new_tokens: int,
    version: int = 0,
    normaliser: float | None = None,
    policy_id: PolicyId = POLICY,
    record_every: int = 0,
    pass_reward: float = 1.0,
) -> list[TrainingSequence]:
    """One sequence per thread, with the advantages and the aggregation weight of its tokens.

    Args:
        payloads: The groups of the batch.
        algorithm: Which advantage and aggregation.
        max_new_tokens: The sampling limit, tokens.
        version: Policy version before the step, from which staleness is counted.
        normaliser: Normaliser of the aggregation if these groups are not the whole batch; None: theirs.
        policy_id: The policy that is trained. Tokens of another policy have the staleness `OF_ANOTHER_POLICY`.
        record_every: One group in so many is recorded; 0: none.
        pass_reward: Reward from which an answer passes and is imitated (`nll_coefficient`).

    Raises:
        TrainingError: If there is no group, a trajectory has no reward, or a named part of it is missing.
        ShapeError: If the reference or the teacher did not score every sampled token.
    """
    members = batch_samples(payloads, algorithm, record_every)
    rewards = reward_batch(members, algorithm, max_new_tokens)
    advantages = token_advantages(rewards, algorithm)
    returns = (
        gae_returns(rewards, algorithm.advantage_settings)
        if rewards.values and isinstance(algorithm.advantage_settings, GaeConfig)
        else None
    )
    preferred = batch_pairs(members, rewards, algorithm)
    compared = {*preferred, *(worse for others in preferred.values() for worse in others)}
    sequences = []
    for index, (member, advantage) in enumerate(zip(members, advantages, strict=True)):
        is_trained = not algorithm.compares_pairs or index in compared
        keep = member.carries_loss if is_trained else np.zeros_like(member.carries_loss)
        is_ours = member.trajectory.policy_id == policy_id
        staleness = (
            version - versions_per_token(member.trajectory.spans) if is_ours else np.full(len(keep), OF_ANOTHER_POLICY)
        )
        sequences.append(
            TrainingSequence(
                token_ids=member.trajectory.token_ids,
                targets=np.flatnonzero(member.trajectory.loss_mask)[keep],
                behavior_logprobs=member.behavior[keep],
                advantages=advantage[keep],
                staleness=np.asarray(staleness, np.int64)[keep],
                reference_logprobs=None if member.reference_logprobs is None else member.reference_logprobs[keep],
                preferred_to=preferred.get(index, ()),
                unit=member.group if index in compared else None,
                group=member.group,
                alternatives=alternatives_of(member.trajectory, keep),
                routes=member.trajectory.routes if is_ours else None,
                old_values=None if member.values is None else member.values[keep],
                returns=None if returns is None else returns[index][keep],
                teacher_logprobs=None if member.teacher_logprobs is None else member.teacher_logprobs[keep],
                proximal_logprobs=None if member.proximal_logprobs is None else member.proximal_logprobs[keep],
                recorded_as=member.recorded_as,
                is_imitated=member.reward >= pass_reward,
            )
        )
    return weigh(sequences, algorithm, max_new_tokens, normaliser)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence of the batch."""

    trajectory: Trajectory
    """The thread as a trajectory of its own (`Trajectory.split_threads`)."""
    group: int
    """Position of its group in the batch."""
    baseline: int
    """Members of equal baseline are compared: of a group, or the threads of one name in it."""
    attempt: int
    """Members of equal attempt share one reward, which counts once: threads of a trajectory."""
    num_overlong: int
    """Sampled tokens that the overlong penalty counts: of the longest turn of its attempt, since a turn has a limit."""
    reward: float
    """As scored."""
    carries_loss: NDArray[np.bool_]
    """`[n_i] bool`, of its sampled tokens."""
    reference_logprobs: NDArray[np.float32] | None
    """`[n_i] float32` logprobs of the reference policy; None if there is none."""
    values: NDArray[np.float32] | None = None
    """`[n_i] float32`, V of the critic before each sampled token; None if there is none."""
    cut_value: float = 0.0
    """V of the critic after the last token, if it was cut off there and `bootstrap` uses it; else 0."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """`[n_i] float32` logprobs of a teacher; None if there is none."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """`[n_i] float32` logprobs of a forward before the batch was complete; None if there was none."""
    recorded_as: tuple[TrajectoryId, int, int] | None = None
    """As in `TrainingSequence`."""

    @property
    def behavior(self) -> NDArray[np.float32]:
        """`[n_i]` behavior logprobs of the sampled tokens."""
        return self.trajectory.behavior_logprobs[self.trajectory.loss_mask]


def batch_samples(
    payloads: Sequence[GroupPayload], algorithm: Algorithm, record_every: int = 0
) -> list[TrainingSample]:
    """Return all sequences of the batch. `overlong` may mask truncated answers or leave them out.

    Raises:
        TrainingError: If there is no group, a trajectory has no reward, or `reward_weights` meet rewards by thread.
        ShapeError: If the reference or the teacher did not score every sampled token.
    """
    if not payloads:
        raise TrainingError("trainer: a step was requested with 0 groups, but at least 1 is needed.")
    samples: list[TrainingSample] = []
    attempts, baselines = count(), dict[tuple[int, str | None], int]()
    for group, payload in enumerate(payloads):
        is_by_thread = has_thread_rewards(payload.trajectories)
        if is_by_thread and algorithm.config.reward_weights:
            raise TrainingError(
                f"algorithm.reward_weights: group {payload.group_id} has rewards by thread ({THREAD_PART}NAME), which "
                "replace the reward of the trajectory, so its named parts have no baseline. Use reward_weights={}, or "
                "one reward for all threads."
            )
        per_token = zip(
            _of_sequences(payload, payload.reference, "reference logprobs"),
            _of_sequences(payload, payload.values, "values"),
            _of_sequences(payload, payload.teacher, "teacher logprobs"),
            _of_sequences(payload, payload.proximal, "proximal logprobs"),
            strict=True,
        )
        cut_values = iter(() if payload.cut_values is None else payload.cut_values)
        for trajectory, reward in zip(payload.trajectories, group_rewards(payload), strict=True):
            is_cut = trajectory.finish_reason == "length"
            sequences = trajectory.split_threads()
            # Not every loss uses the reward of each trajectory, but none may train on NaN.
            if not math.isfinite(reward):
                sequences = tuple(
                    replace(one, behavior_logprobs=np.full_like(one.behavior_logprobs, np.nan)) for one in sequences
                )
            longest, shared = max(map(_longest_turn, sequences)), next(attempts)
            begin, end = 0, 0
            for one in sequences:
                begin, end = end, end + len(one.token_ids)
                reference, value, teacher, proximal = next(per_token)
                cut_value = 0.0 if payload.cut_values is None else next(cut_values)
                if is_cut and algorithm.config.overlong.mode == "drop":
                    continue
                thread = one.threads[0].name if one.threads else MAIN_THREAD
                is_masked = is_cut and algorithm.config.overlong.mode == "mask"
                samples.append(
                    TrainingSample(
                        trajectory=one,
                        group=group,
                        baseline=baselines.setdefault((group, thread if is_by_thread else None), len(baselines)),
                        attempt=next(attempts) if is_by_thread else shared,
                        num_overlong=_longest_turn(one) if is_by_thread else longest,
                        reward=float(one.reward if is_by_thread and one.reward is not None else reward),
                        carries_loss=is_new_enough(one, payload.min_version) & (not is_masked),
                        reference_logprobs=reference,
                        values=value,
                        cut_value=float(cut_value),
                        teacher_logprobs=teacher,
                        proximal_logprobs=proximal,
                        recorded_as=(
                            (trajectory.trajectory_id, begin, len(trajectory.token_ids))
                            if is_recorded(payload.group_id, record_every)
                            else None
                        ),
                    )
                )
    return samples


def _longest_turn(sequence: Trajectory) -> int:
    """Sampled tokens of the longest turn of a thread; what has no turns is one."""
    turns = () if sequence.episode is None else sequence.episode.turns
    names = [thread.name for thread in sequence.threads] or [MAIN_THREAD]
    return max((turn.num_tokens for turn in turns if turn.thread in names), default=sequence.num_sampled_tokens)


def _of_sequences(
    payload: GroupPayload, scores: NDArray[np.float32] | None, what: str
) -> Sequence[NDArray[np.float32] | None]:
    """Split the scores of a group's sampled tokens by sequence; None for each if there are no scores."""
    counts = [one.num_sampled_tokens for one in all_sequences([payload])]
    if scores is None:
        return [None] * len(counts)
    if len(scores) != sum(counts):
        raise ShapeError(
            f"trainer: {len(scores)} {what} for {sum(counts)} sampled tokens of group {payload.group_id}. "
            "There is one for every sampled token of a group, in order."
        )
    return np.split(scores, np.cumsum(counts)[:-1])


def reward_batch(members: Sequence[TrainingSample], algorithm: Algorithm, max_new_tokens: int) -> RewardBatch:
    """Return the inputs of the advantage estimators.

    Raises:
        TrainingError: If a part named by `reward_weights` is missing.
    """
    config, rewards = algorithm.config, [one.reward for one in members]
    if config.overlong.mode == "penalty":
        penalty = partial(overlong_penalty, max_new_tokens=max_new_tokens, ramp_share=config.overlong.ramp_share)
        rewards = [one.reward + penalty(one.num_overlong) for one in members]
    behaviors = [one.behavior.astype(np.float64) for one in members]
    if not algorithm.kl_in_reward:
        penalties = [np.zeros_like(behavior) for behavior in behaviors]
    else:
        # β k(b, r): a reward concerns the sampled answer, so its divergence is that of the policy that sampled it.
        penalties = []
        for one, behavior in zip(members, behaviors, strict=True):
            assert one.reference_logprobs is not None, "the trainer refuses batches without reference logprobs"
            divergence = algorithm.kl(
                torch.from_numpy(behavior), torch.from_numpy(one.reference_logprobs.astype(np.float64))
            )
            penalties.append(algorithm.kl_in_reward * np.asarray(divergence.numpy()))
    for name in config.reward_weights:
        for trajectory in (one.trajectory for one in members):
            if name not in trajectory.reward_parts:
                raise TrainingError(
                    f"algorithm.reward_weights.{name}: trajectory {trajectory.trajectory_id} has no such part of its "
                    f"reward. It has: {', '.join(trajectory.reward_parts) or 'none'}. Return a dict from "
                    "reward.fn with it."
                )
    return RewardBatch(
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.array([one.baseline for one in members], dtype=np.int64),
        attempts=np.array([one.attempt for one in members], dtype=np.int64),
        penalties=penalties,
        carries_loss=[one.carries_loss for one in members],
        parts={
            name: np.array([one.trajectory.reward_parts[name] for one in members], np.float64)
            for name in config.reward_weights
        },
        values=[one.values.astype(np.float64) for one in members if one.values is not None],
        cut_values=np.array([one.cut_value for one in members], np.float64),
    )


def batch_pairs(
    samples: Sequence[TrainingSample], rewards: RewardBatch, algorithm: Algorithm
) -> dict[int, tuple[int, ...]]:
    """Index of a member -> indices of those that it is preferred to; empty unless the loss compares pairs.

    Raises:
        TrainingError: If the loss compares pairs, and a trajectory has several threads.
    """
    preferred: dict[int, tuple[int, ...]] = {}
    settings = algorithm.loss_settings
    if not isinstance(settings, PairsConfig):
        return preferred
    for one in samples:
        if one.trajectory.threads:
            raise TrainingError(
                f"algorithm.loss={algorithm.config.loss.name} prefers one answer to another, but "
                f"{one.trajectory.trajectory_id} of task {one.trajectory.task_id} has threads "
                f"({one.trajectory.threads[0].name!r}, ...), so it is no single answer. Use a loss of advantages, or "
                "an environment of one thread."
            )
    for members in rewards.members:
        eligible = [int(one) for one in members if rewards.carries_loss[one].any()]
        # A member without a finite reward has NaN logprobs, so any pair with it makes the step a bad step.
        bad = [one for one in eligible if math.isnan(rewards.rewards[one])]
        for better, worse in [(bad[0], eligible[0])] if bad else preference_pairs(rewards.rewards, eligible, settings):
            preferred[better] = (*preferred.get(better, ()), worse)
    return preferred


def group_rewards(payload: GroupPayload) -> NDArray[np.float64]:
    """`[G] float64` rewards of a group; those that are not finite become NaN.

    Raises:
        TrainingError: If a trajectory was not scored; it must never count as 0.
    """
    for one in payload.trajectories:
        if one.reward is None:
            raise TrainingError(
                f"trainer: trajectory {one.trajectory_id} of group {payload.group_id} has no reward. "
                "Only scored groups may be trained."
            )
    rewards = np.array([one.reward for one in payload.trajectories], dtype=np.float64)
    return np.where(np.isfinite(rewards), rewards, np.nan)


def all_sequences(payloads: Sequence[GroupPayload]) -> list[Trajectory]:
    """Every thread of every trajectory, in the order of all arrays of sampled tokens."""
    return [one for payload in payloads for trajectory in payload.trajectories for one in trajectory.split_threads()]


def sampled_tokens(payloads: Sequence[GroupPayload], policy_id: PolicyId = POLICY) -> list[TrainingSequence]:
    """Every thread of every trajectory, with all its sampled tokens as targets; routes are those of one policy."""
    return [
        TrainingSequence(
            token_ids=one.token_ids,
            targets=(targets := np.flatnonzero(one.loss_mask)),
            behavior_logprobs=np.zeros(len(targets), np.float32),
            alternatives=alternatives_of(one),
            routes=one.routes if one.policy_id == policy_id else None,
        )
        for one in all_sequences(payloads)
    ]


def after_cut(payload: GroupPayload) -> list[TrainingSequence | None]:
    """Every thread of a group, with the state after its last token as the only target; None if it was not cut off.

    Of several threads, the one with the last turn was cut off: the others had ended or were waiting.
    """
    sequences: list[TrainingSequence | None] = []
    for trajectory in payload.trajectories:
        turns = () if trajectory.episode is None else trajectory.episode.turns
        for one in trajectory.split_threads():
            is_last = not one.threads or not turns or one.threads[0].name == turns[-1].thread
            sequences.append(
                TrainingSequence(
                    token_ids=np.append(one.token_ids, PLACEHOLDER_ID),
                    targets=np.array([len(one.token_ids)]),
                    behavior_logprobs=np.zeros(1, np.float32),
                )
                if trajectory.finish_reason == "length" and is_last
                else None
            )
    return sequences


def is_new_enough(trajectory: Trajectory, min_version: int) -> NDArray[np.bool_]:
    """`[n_i] bool`: the sampled tokens that are not older than `min_version`."""
    if trajectory.oldest_version >= min_version:
        return np.ones(trajectory.num_sampled_tokens, dtype=bool)
    return versions_per_token(trajectory.spans) >= min_version


def alternatives_of(trajectory: Trajectory, keep: NDArray[np.bool_] | None = None) -> NDArray[np.int32] | None:
    """`[n, A]`: the alternatives of the sampled tokens, or of those to `keep`; None if there are none recorded."""
    if trajectory.alternatives is None:
        return None
    padded = trajectory.alternatives.padded()
    return padded if keep is None else padded[keep]
