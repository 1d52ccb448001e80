"""From groups (RL) or examples (supervised) to the sequences of one optimizer step, with all that is global in them.

Advantages and normalisers are computed here, over the whole batch, before any split into ranks or micro-batches (I9).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.equal_rewards import are_equal
from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ids import POLICY, PolicyId
from penstock.dataflow.trajectory import Episode, GroupPayload, Trajectory, compared_rewards
from penstock.dataflow.versions import versions_per_token
from penstock.trainer.algorithms import aggregation
from penstock.trainer.algorithms.batch_advantages import gae_returns, token_advantages
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.metrics import OF_ANOTHER_POLICY
from penstock.trainer.batches.collate import TrainingSequence
from penstock.trainer.batches.members import batch_members, batch_pairs, group_rewards, is_new_enough, reward_batch
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
    version: int = 0,
    values: Sequence[NDArray[np.float32]] = (),
    teachers: Sequence[NDArray[np.float32]] = (),
    policy_id: PolicyId = POLICY,
    proximals: Sequence[NDArray[np.float32] | None] = (),
) -> list[TrainingSequence]:
    """One sequence per thread, with the advantages and the aggregation weight of its tokens.

    Args:
        payloads: The groups of the batch.
        algorithm: Which advantage and aggregation.
        max_new_tokens: The sampling limit, tokens.
        min_versions: Per group, tokens sampled before this version carry no loss weight and do not count in
            the normaliser; None: all sampled tokens do.
        normaliser: Of the aggregation, if these groups are not the whole batch; None: theirs.
        references: Per group `[n] float32`, the reference policy's logprobs of its n sampled tokens; empty: none.
        version: Policy version before the step, from which staleness is counted.
        values: Per group `[n] float32`, V of a critic before each of its n sampled tokens; empty: there is none.
        policy_id: Who is trained. What another policy sampled has no staleness: its lags are `OF_ANOTHER_POLICY`.
        teachers: As `references`, of a teacher.
        proximals: Per group `[n] float32`, proximal logprobs of its n sampled tokens where they are there already.

    Raises:
        TrainingError: If there is no group, a trajectory has no reward, or a named part of it is missing.
        ShapeError: If the reference or the teacher did not score every sampled token.
    """
    members = batch_members(payloads, algorithm, min_versions, references, values, teachers, proximals)
    rewards = reward_batch(members, algorithm, max_new_tokens)
    advantages = token_advantages(rewards, algorithm)
    returns = gae_returns(rewards, algorithm) if rewards.values else None
    preferred = batch_pairs(members, rewards, algorithm)
    compared = {*preferred, *(worse for others in preferred.values() for worse in others)}
    sequences = []
    for index, (member, advantage) in enumerate(zip(members, advantages, strict=True)):
        is_trained = not algorithm.compares_pairs or index in compared
        keep = member.carries_loss if is_trained else np.zeros_like(member.carries_loss)
        sequences.append(
            TrainingSequence(
                token_ids=member.trajectory.token_ids,
                targets=np.flatnonzero(member.trajectory.loss_mask)[keep],
                behavior_logprobs=member.behavior[keep],
                advantages=advantage[keep],
                lags=_lags(member.trajectory, version, policy_id)[keep],
                reference_logprobs=None if member.reference is None else member.reference[keep],
                preferred_to=preferred.get(index, ()),
                unit=member.group if index in compared else None,
                group=member.group,
                prompt_length=prompt_length(member.trajectory),
                old_values=None if member.values is None else member.values[keep],
                returns=None if returns is None else returns[index][keep],
                teacher_logprobs=None if member.teacher is None else member.teacher[keep],
                proximal_logprobs=None if member.proximal is None else member.proximal[keep],
            )
        )
    return weigh(sequences, algorithm, max_new_tokens, normaliser)


def _lags(trajectory: Trajectory, version: int, policy_id: PolicyId) -> NDArray[np.int64]:
    """`[n] int64`: staleness of each sampled token, versions."""
    if trajectory.policy_id != policy_id:
        return np.full(trajectory.num_sampled_tokens, OF_ANOTHER_POLICY)
    return np.asarray(version - versions_per_token(trajectory.spans), np.int64)


def mini_batches(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, max_new_tokens: int, version: int
) -> Iterator[list[TrainingSequence]]:
    """The sequences of every optimizer step of a batch: `epochs` times all groups, in `mini_batches` equal shares.

    Advantages are those of the whole batch, normalisers those of the mini-batch. Groups arrive shortest answers first,
    so they are shuffled, by version and epoch: alike on every rank.

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
            yield weigh(_of_groups(sequences, {int(group) for group in chosen}), algorithm, max_new_tokens, None)


def _of_groups(sequences: Sequence[TrainingSequence], groups: set[int]) -> list[TrainingSequence]:
    """The sequences of these groups; pairs, which are within a group, are counted anew."""
    kept = [index for index, one in enumerate(sequences) if one.group in groups]
    place = {index: position for position, index in enumerate(kept)}
    return [
        replace(one, preferred_to=tuple(place[worse] for worse in one.preferred_to))
        for one in (sequences[index] for index in kept)
    ]


def has_signal(sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig) -> bool:
    """Whether any gradient of the loss can differ from 0: a pair, an advantage that is not 0, or a loss without them.

    Also if a logprob is not finite: such a step is a bad one, and is to be taken for that.
    """
    loss = find("loss", algorithm.loss)
    if algorithm.kl_in_loss or loss.is_own or not loss.needs_advantages:
        return True
    if algorithm.compares_pairs:
        return any(one.preferred_to for one in sequences)
    return any(
        (one.advantages is not None and np.any(one.advantages)) or not _has_finite_logprobs(one) for one in sequences
    )


def _has_finite_logprobs(sequence: TrainingSequence) -> bool:
    recorded = (
        sequence.behavior_logprobs,
        sequence.reference_logprobs,
        sequence.proximal_logprobs,
        sequence.teacher_logprobs,
    )
    return all(bool(np.isfinite(one).all()) for one in recorded if one is not None)


def batch_normaliser(sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig) -> float:
    """What the weights of a whole batch are divided by; those of its parts add up to it."""
    if algorithm.compares_pairs:
        return float(sum(len(sequence.preferred_to) for sequence in sequences))
    return aggregation.batch_normaliser(_counts(sequences), algorithm.aggregation)


def weigh(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, max_new_tokens: int, normaliser: float | None
) -> list[TrainingSequence]:
    """The same with their token weights; a term of a pair stands at every token of its members, so these are means."""
    mode = "seq_mean_token_mean" if algorithm.compares_pairs else algorithm.aggregation
    total = max(batch_normaliser(sequences, algorithm), 1.0) if normaliser is None else normaliser
    weights = aggregation.token_weights(_counts(sequences), mode, max_new_tokens, total)
    return [replace(one, token_weight=float(weight)) for one, weight in zip(sequences, weights, strict=True)]


def _counts(sequences: Sequence[TrainingSequence]) -> NDArray[np.int64]:
    return np.array([len(sequence.targets) for sequence in sequences], dtype=np.int64)


def prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one; of a thread these are all that it began with."""
    return int(trajectory.loss_mask.argmax())


def loss_tokens(trajectory: Trajectory, min_version: int = 0) -> NDArray[np.int64]:
    """Positions of the sampled tokens that are not older than `min_version`, `[n] int64`."""
    return np.flatnonzero(trajectory.loss_mask)[is_new_enough(trajectory, min_version)]


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


def batch_metrics(payloads: Sequence[GroupPayload]) -> dict[str, float]:
    """Reward and length statistics over all trajectories of the batch; they are the same on every rank."""
    rewards = [group_rewards(payload) for payload in payloads]
    trajectories = [trajectory for payload in payloads for trajectory in payload.trajectories]
    everyone = np.concatenate(rewards)
    return {
        **_reward_parts(trajectories),
        **_reasoning_share(trajectories),
        **_episode_means([one.episode for one in trajectories if one.episode is not None]),
        "reward/mean": float(everyone.mean()),
        "reward/std": float(everyone.std()),
        "reward/zero_variance_share": float(np.mean([_is_silent(payload) for payload in payloads])),
        "length/mean_tokens": float(np.mean([trajectory.num_sampled_tokens for trajectory in trajectories])),
        "length/max_tokens": float(max(trajectory.num_sampled_tokens for trajectory in trajectories)),
        "length/truncated_share": float(np.mean([one.finish_reason == "length" for one in trajectories])),
    }


def _is_silent(payload: GroupPayload) -> bool:
    """Whether nobody of a group did better than whom it is compared with."""
    return all(are_equal(rewards) for rewards in compared_rewards(payload.trajectories).values())


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each named reward over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            values.setdefault(f"reward/part/{name}", []).append(value)
    return {name: float(np.mean(part)) for name, part in values.items()}


def _reasoning_share(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of the sampled characters that stand before the answer; nothing where nobody thought."""
    thought = sum(len(one.reasoning) for one in trajectories)
    answered = sum(len(one.response) for one in trajectories)
    return {"length/reasoning_share": thought / (thought + answered)} if thought else {}


def _episode_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the multi-turn trajectories of the batch; nothing without any."""
    if not episodes:
        return {}
    names = sorted({name for episode in episodes for name in episode.counts})
    return {
        "env/turns": float(np.mean([len(episode.turns) for episode in episodes])),
        "env/threads": float(np.mean([len({turn.thread for turn in episode.turns}) for episode in episodes])),
        "env/done_share": float(np.mean([episode.end == "done" for episode in episodes])),
        "env/observation_tokens": float(
            np.mean([sum(turn.num_observation_tokens for turn in episode.turns) for episode in episodes])
        ),
        **{
            f"env/count/{name}": float(np.mean([episode.counts.get(name, 0.0) for episode in episodes]))
            for name in names
        },
    }
