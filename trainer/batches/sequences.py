"""From groups (RL), examples (supervised) or pairs (preferences) to the sequences of one optimizer step.

A sequence is a thread of a trajectory (most trajectories have one), with its loss tokens, advantages and pairs.
Advantages and normalisers are computed here, over the whole batch, before any split into ranks or micro-batches (I9).

Shape legend: N sequences, n_i sampled tokens of one, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

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
from penstock.trainer.algorithms import aggregation
from penstock.trainer.algorithms.advantages import RewardBatch, gae_returns, overlong_penalty, token_advantages
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.config import GaeConfig, PairsConfig
from penstock.trainer.algorithms.losses import preference_pairs
from penstock.trainer.algorithms.metrics import OF_ANOTHER_POLICY
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.config import AlgorithmConfig

Example = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, response token ids)."""
ModelKind = Literal["policy", "reward"]
_PLACEHOLDER_ID = 0
"""Takes the position after the last token; the model never sees it."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence of the batch.

    Attributes:
        trajectory: The thread as a trajectory of its own (`Trajectory.split_threads`).
        group: Position of its group in the batch.
        baseline: Members of equal baseline are compared: of a group, or the threads of one name in it.
        attempt: Members of equal attempt share one reward, which counts once: threads of a trajectory.
        num_overlong: Sampled tokens that the overlong penalty counts: of the longest thread of its attempt.
        reward: As scored.
        carries_loss: `[n_i] bool`, of its sampled tokens.
        reference_logprobs: `[n_i] float32` logprobs of the reference policy; None if there is none.
        values: `[n_i] float32`, V of the critic before each sampled token; None if there is none.
        cut_value: V of the critic after the last token, if it was cut off there and `bootstrap` uses it; else 0.
        teacher_logprobs: `[n_i] float32` logprobs of a teacher; None if there is none.
        proximal_logprobs: `[n_i] float32` logprobs of a forward before the batch was complete; None if there was none.
        recorded_as: As in `TrainingSequence`.
    """

    trajectory: Trajectory
    group: int
    baseline: int
    attempt: int
    num_overlong: int
    reward: float
    carries_loss: NDArray[np.bool_]
    reference_logprobs: NDArray[np.float32] | None
    values: NDArray[np.float32] | None = None
    cut_value: float = 0.0
    teacher_logprobs: NDArray[np.float32] | None = None
    proximal_logprobs: NDArray[np.float32] | None = None
    recorded_as: tuple[TrajectoryId, int, int] | None = None

    @property
    def behavior(self) -> NDArray[np.float32]:
        """`[n_i]` behavior logprobs of the sampled tokens."""
        return self.trajectory.behavior_logprobs[self.trajectory.loss_mask]


def batch_samples(
    payloads: Sequence[GroupPayload], algorithm: AlgorithmConfig, record_every: int = 0
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
        if is_by_thread and algorithm.reward_weights:
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
            longest, shared = max(one.num_sampled_tokens for one in sequences), next(attempts)
            begin, end = 0, 0
            for one in sequences:
                begin, end = end, end + len(one.token_ids)
                reference, value, teacher, proximal = next(per_token)
                cut_value = 0.0 if payload.cut_values is None else next(cut_values)
                if is_cut and algorithm.overlong.mode == "drop":
                    continue
                thread = one.threads[0].name if one.threads else MAIN_THREAD
                is_masked = is_cut and algorithm.overlong.mode == "mask"
                samples.append(
                    TrainingSample(
                        trajectory=one,
                        group=group,
                        baseline=baselines.setdefault((group, thread if is_by_thread else None), len(baselines)),
                        attempt=next(attempts) if is_by_thread else shared,
                        num_overlong=one.num_sampled_tokens if is_by_thread else longest,
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


def all_sequences(payloads: Sequence[GroupPayload]) -> list[Trajectory]:
    """Every thread of every trajectory, in the order of all arrays of sampled tokens."""
    return [one for payload in payloads for trajectory in payload.trajectories for one in trajectory.split_threads()]


def prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one; of a thread, all tokens that it began with."""
    return int(trajectory.loss_mask.argmax())


def is_new_enough(trajectory: Trajectory, min_version: int) -> NDArray[np.bool_]:
    """`[n_i] bool`: the sampled tokens that are not older than `min_version`."""
    if trajectory.oldest_version >= min_version:
        return np.ones(trajectory.num_sampled_tokens, dtype=bool)
    return versions_per_token(trajectory.spans) >= min_version


def loss_tokens(trajectory: Trajectory, min_version: int = 0) -> NDArray[np.int64]:
    """Positions of the sampled tokens that are not older than `min_version`, `[n] int64`."""
    return np.flatnonzero(trajectory.loss_mask)[is_new_enough(trajectory, min_version)]


def alternatives_of(trajectory: Trajectory, keep: NDArray[np.bool_] | None = None) -> NDArray[np.int32] | None:
    """`[n, A]`: the alternatives of the sampled tokens, or of those to `keep`; None if there are none recorded."""
    if trajectory.alternatives is None:
        return None
    padded = trajectory.alternatives.padded()
    return padded if keep is None else padded[keep]


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


def reward_batch(members: Sequence[TrainingSample], algorithm: AlgorithmConfig, max_new_tokens: int) -> RewardBatch:
    """Return the inputs of the advantage estimators.

    Raises:
        TrainingError: If a part named by `reward_weights` is missing.
    """
    rewards = [one.reward for one in members]
    if algorithm.overlong.mode == "penalty":
        penalty = partial(overlong_penalty, max_new_tokens=max_new_tokens, ramp_share=algorithm.overlong.ramp_share)
        rewards = [one.reward + penalty(one.num_overlong) for one in members]
    behaviors = [one.behavior.astype(np.float64) for one in members]
    if not algorithm.kl_in_reward:
        penalties = [np.zeros_like(behavior) for behavior in behaviors]
    else:
        # β k(b, r): a reward concerns the sampled answer, so its divergence is that of the policy that sampled it.
        estimate, penalties = find("kl", algorithm.kl.estimator).load(), []
        for one, behavior in zip(members, behaviors, strict=True):
            assert one.reference_logprobs is not None, "the trainer refuses batches without reference logprobs"
            divergence = estimate(
                torch.from_numpy(behavior), torch.from_numpy(one.reference_logprobs.astype(np.float64))
            )
            penalties.append(algorithm.kl_in_reward * np.asarray(divergence.numpy()))
    for name in algorithm.reward_weights:
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
            for name in algorithm.reward_weights
        },
        values=[one.values.astype(np.float64) for one in members if one.values is not None],
        cut_values=np.array([one.cut_value for one in members], np.float64),
    )


def batch_pairs(
    samples: Sequence[TrainingSample], rewards: RewardBatch, algorithm: AlgorithmConfig
) -> dict[int, tuple[int, ...]]:
    """Index of a member -> indices of those that it is preferred to; empty unless the loss compares pairs.

    Raises:
        TrainingError: If the loss compares pairs, and a trajectory has several threads.
    """
    preferred: dict[int, tuple[int, ...]] = {}
    if not isinstance(algorithm.loss, PairsConfig):
        return preferred
    for one in samples:
        if one.trajectory.threads:
            raise TrainingError(
                f"algorithm.loss={algorithm.loss.name} prefers one answer to another, but "
                f"{one.trajectory.trajectory_id} of task {one.trajectory.task_id} has threads "
                f"({one.trajectory.threads[0].name!r}, ...), so it is no single answer. Use a loss of advantages, or "
                "an environment of one thread."
            )
    for members in rewards.members:
        eligible = [int(one) for one in members if rewards.carries_loss[one].any()]
        # A member without a finite reward has NaN logprobs, so any pair with it makes the step a bad step.
        bad = [one for one in eligible if math.isnan(rewards.rewards[one])]
        for better, worse in (
            [(bad[0], eligible[0])] if bad else preference_pairs(rewards.rewards, eligible, algorithm.loss)
        ):
            preferred[better] = (*preferred.get(better, ()), worse)
    return preferred


def policy_sequences(
    payloads: Sequence[GroupPayload],
    algorithm: AlgorithmConfig,
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
        gae_returns(rewards, algorithm.advantage)
        if rewards.values and isinstance(algorithm.advantage, GaeConfig)
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
                prompt_length=prompt_length(member.trajectory),
                alternatives=alternatives_of(member.trajectory, keep),
                old_values=None if member.values is None else member.values[keep],
                returns=None if returns is None else returns[index][keep],
                teacher_logprobs=None if member.teacher_logprobs is None else member.teacher_logprobs[keep],
                proximal_logprobs=None if member.proximal_logprobs is None else member.proximal_logprobs[keep],
                recorded_as=member.recorded_as,
                is_imitated=member.reward >= pass_reward,
            )
        )
    return weigh(sequences, algorithm, max_new_tokens, normaliser)


def mini_batches(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, max_new_tokens: int, version: int
) -> Iterator[list[TrainingSequence]]:
    """The sequences of every optimizer step of a batch: `epochs` times all groups, in `mini_batches` equal shares.

    Advantages are those of the whole batch, normalisers those of the mini-batch. Groups of short answers arrive first,
    so groups are shuffled, by version and epoch: in the same way on every rank.

    Raises:
        TrainingError: If there are fewer groups than mini-batches.
    """
    if algorithm.updates_per_batch == 1:
        yield list(sequences)
        return
    groups = np.unique([one.group for one in sequences])
    if len(groups) < algorithm.mini_batches:
        raise TrainingError(
            f"trainer: a batch of {len(groups)} groups with loss for algorithm.mini_batches={algorithm.mini_batches}: "
            "some would be empty. Use fewer mini-batches or larger batches."
        )
    for epoch in range(algorithm.epochs):
        shuffled = np.random.default_rng([version, epoch]).permutation(groups)
        for chosen in np.array_split(shuffled, algorithm.mini_batches):
            of_share = set(chosen.tolist())
            kept = [index for index, one in enumerate(sequences) if one.group in of_share]
            # Pairs are within a group, so both members are in the mini-batch.
            position_of = {index: position for position, index in enumerate(kept)}
            share = [
                replace(
                    sequences[index], preferred_to=tuple(position_of[worse] for worse in sequences[index].preferred_to)
                )
                for index in kept
            ]
            yield weigh(share, algorithm, max_new_tokens, None)


def has_signal(sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig) -> bool:
    """Whether the gradient can differ from 0: there is a pair, a nonzero advantage, or a term that needs neither.

    Also True if a logprob is not finite, so that the step is skipped as a bad step.
    """
    loss = find("loss", algorithm.loss.name)
    always_learns = algorithm.kl_in_loss or algorithm.entropy.coefficient or algorithm.teacher_coefficient
    if always_learns or loss.is_own or not loss.needs_advantages:
        return True
    if algorithm.compares_pairs:
        return any(one.preferred_to for one in sequences)
    for one in sequences:
        if one.nll_factor or (one.advantages is not None and np.any(one.advantages)):
            return True
        if np.any(one.selected.get("kl_cov", False)):  # it adds a divergence at these tokens, with any advantage
            return True
        recorded = (one.behavior_logprobs, one.reference_logprobs, one.proximal_logprobs, one.teacher_logprobs)
        if not all(np.isfinite(logprobs).all() for logprobs in recorded if logprobs is not None):
            return True
    return False


def split_by_signal(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """Sequences of groups with a signal (`has_signal`), then those of all others, whose gradient is 0.

    A loss of pairs trains the sequences of pairs only, so there is nothing to split.
    """
    if algorithm.compares_pairs:
        return (list(sequences), []) if has_signal(sequences, algorithm) else ([], list(sequences))
    groups: dict[int, list[TrainingSequence]] = {}
    for one in sequences:
        groups.setdefault(one.group, []).append(one)
    heard: list[TrainingSequence] = []
    silent: list[TrainingSequence] = []
    for members in groups.values():
        (heard if has_signal(members, algorithm) else silent).extend(members)
    return heard, silent


def batch_normaliser(sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig) -> float:
    """Divisor of the weights of a batch; the sum of the normalisers of its parts."""
    if algorithm.compares_pairs:
        return float(sum(len(sequence.preferred_to) for sequence in sequences))
    return aggregation.batch_normaliser(_lengths(sequences), algorithm.aggregation)


def weigh(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, max_new_tokens: int, normaliser: float | None
) -> list[TrainingSequence]:
    """Set the token weights. The term of a pair is repeated at every token of its members; the weights average it.

    Also set what makes the weights those of the mean that `nll_coefficient` is of (`negative_logprob`).
    """
    mode = "seq_mean_token_mean" if algorithm.compares_pairs else algorithm.aggregation
    total = max(batch_normaliser(sequences, algorithm), 1.0) if normaliser is None else normaliser
    weights = aggregation.token_weights(_lengths(sequences), mode, max_new_tokens, total)
    weighed = [replace(one, token_weight=float(weight)) for one, weight in zip(sequences, weights, strict=True)]
    if not algorithm.nll_coefficient:
        return weighed
    if algorithm.compares_pairs:
        return [replace(one, nll_factor=float(len(one.preferred_to))) for one in weighed]
    num_tokens = sum(len(one.targets) for one in weighed if one.is_imitated)
    return [
        replace(one, nll_factor=1.0 / (num_tokens * one.token_weight)) if one.is_imitated and len(one.targets) else one
        for one in weighed
    ]


def _lengths(sequences: Sequence[TrainingSequence]) -> aggregation.Lengths:
    counts = np.array([len(sequence.targets) for sequence in sequences], dtype=np.int64)
    return aggregation.Lengths(counts, np.array([sequence.group for sequence in sequences], dtype=np.int64))


def supervised_sequences(examples: Sequence[Example]) -> list[TrainingSequence]:
    """One sequence per example; every response token has the weight 1 / (response tokens of the batch)."""
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
                    token_ids=np.append(one.token_ids, _PLACEHOLDER_ID),
                    targets=np.array([len(one.token_ids)]),
                    behavior_logprobs=np.zeros(1, np.float32),
                    prompt_length=prompt_length(one),
                )
                if trajectory.finish_reason == "length" and is_last
                else None
            )
    return sequences


def sampled_tokens(payloads: Sequence[GroupPayload]) -> list[TrainingSequence]:
    """Every thread of every trajectory, with all its sampled tokens as targets."""
    return [
        TrainingSequence(
            token_ids=one.token_ids,
            targets=(targets := loss_tokens(one)),
            behavior_logprobs=np.zeros(len(targets), np.float32),
            prompt_length=prompt_length(one),
            alternatives=alternatives_of(one),
        )
        for one in all_sequences(payloads)
    ]


class Preference(NamedTuple):
    """Two answers to one prompt, as token ids, with their end tokens."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def preference_sequences(
    pairs: Sequence[Preference],
    kind: ModelKind,
    algorithm: AlgorithmConfig,
    reference_logprobs: Sequence[NDArray[np.float32]] | None = None,
) -> list[TrainingSequence]:
    """The chosen and the rejected answer of every pair, both in one micro-batch.

    Args:
        pairs: The pairs of the batch.
        kind: Whether the model is a policy or a reward model.
        algorithm: An algorithm with a loss of pairs.
        reference_logprobs: `[n]` per answer, chosen and rejected alternating: the reference's logprob of each of its n
            tokens, which is compared with the policy's token by token. None: 0.
    """
    sequences: list[TrainingSequence] = []
    for index, pair in enumerate(pairs):
        for answer in (pair.chosen, pair.rejected):
            token_ids = [*pair.prompt, *answer, _PLACEHOLDER_ID]
            targets = np.arange(len(pair.prompt), len(token_ids) - 1) if kind == "policy" else [len(token_ids) - 1]
            sequences.append(
                TrainingSequence(
                    token_ids=np.array(token_ids, np.int64),
                    targets=np.asarray(targets, np.int64),
                    behavior_logprobs=np.zeros(len(targets), np.float32),
                    reference_logprobs=None if reference_logprobs is None else reference_logprobs[len(sequences)],
                    preferred_to=(2 * index + 1,) if answer is pair.chosen else (),
                    unit=index,
                    prompt_length=len(pair.prompt),
                    group=index,
                )
            )
    return weigh(sequences, algorithm, max_new_tokens=1, normaliser=None)


def margins_of(per_target: Sequence[NDArray[np.float64]], *, per_token: bool) -> NDArray[np.float64]:
    """`[P]`: sum or mean of the chosen minus that of the rejected answer; `per_target` alternates between the two."""
    of_answers = np.array([values.mean() if per_token else values.sum() for values in per_target])
    return of_answers[0::2] - of_answers[1::2]
