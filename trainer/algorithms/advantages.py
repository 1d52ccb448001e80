"""Advantages per token, from the rewards of the groups of a batch. Numpy, float64.

An estimator of a group is `(rewards [G] float64, its settings) -> [G] float64`, one of a batch takes a
`RewardBatch`. A group whose rewards are all equal (up to rounding, dataflow/trajectory.py) gives exactly 0, never
NaN, whatever the estimator.

Shape legend: N sequences of the batch, n_i sampled tokens of one, G attempts of a group: trajectories, most of which
are one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.trajectory import are_equal
from penstock.kernels.segment_scan import reverse_scan
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.config import CentredConfig, GaeConfig, GrpoConfig, WhitenedConfig
from penstock.trainer.config import AlgorithmConfig

Tokens = Sequence[NDArray[np.float64]]
"""One array `[n_i]` per sequence."""
GroupEstimator = Callable[[NDArray[np.float64], Any], NDArray[np.float64]]
FloatArray = TypeVar("FloatArray", torch.Tensor, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Inputs of the advantage estimators.

    Attributes:
        rewards: `[N]`, already with the overlong penalty.
        groups: `[N] int`; sequences of the same number are compared with each other.
        penalties: `[n_i]` each: β · k of every sampled token (`kl.apply_to: reward`), else zeros.
        carries_loss: `[n_i] bool` each; False for trimmed and masked tokens.
        parts: Named part of the reward -> `[N]`.
        values: `[n_i]` each: V of a critic before each sampled token; empty: there is no critic.
        cut_values: `[N]`: V after the last token of a sequence that was cut off, 0 where it ended by itself; None: 0.
        attempts: `[N] int`, sequences of equal attempt share one reward, which counts once in its group; None: each has
            its own.
    """

    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    penalties: Tokens
    carries_loss: Sequence[NDArray[np.bool_]]
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    values: Tokens = ()
    cut_values: NDArray[np.float64] | None = None
    attempts: NDArray[np.int64] | None = None

    @property
    def members(self) -> list[NDArray[np.intp]]:
        """Per group, the indices of its sequences."""
        return [np.flatnonzero(self.groups == group) for group in np.unique(self.groups)]

    def attempts_of(self, members: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Of the sequences of a group: `[G]` one of each attempt, and per sequence the index of its attempt."""
        if self.attempts is None:
            return members, np.arange(len(members))
        _, first, attempt_of = np.unique(self.attempts[members], return_index=True, return_inverse=True)
        return members[first], attempt_of


def token_advantages(batch: RewardBatch, config: AlgorithmConfig) -> list[NDArray[np.float64]]:
    """`[n_i]` each: by the estimator of `config.advantage`.

    Raises:
        ShapeError: If a user's own estimator does not give one number per member.
    """
    entry = find("advantage", config.advantage.name)
    if entry.level != "group":
        return list(entry.load()(batch, config.advantage))
    estimate: GroupEstimator = entry.load()
    per_sequence = np.zeros(len(batch.rewards))
    for members in batch.members:
        attempts, attempt_of = batch.attempts_of(members)
        if config.reward_weights:
            values = per_head(estimate, {name: part[attempts] for name, part in batch.parts.items()}, config)
        else:
            penalties = np.bincount(attempt_of, [batch.penalties[one].sum() for one in members])
            values = np.asarray(estimate(batch.rewards[attempts] - penalties, config.advantage), np.float64)
        if values.shape != attempts.shape:
            raise ShapeError(
                f"algorithm.advantage={config.advantage.name}: it gave shape {values.shape} for a group of "
                f"{len(attempts)}. Return one number per member."
            )
        per_sequence[members] = values[attempt_of]
    return [np.full(len(mask), value) for mask, value in zip(batch.carries_loss, per_sequence, strict=True)]


def per_head(
    estimate: GroupEstimator, parts: Mapping[str, NDArray[np.float64]], config: AlgorithmConfig
) -> NDArray[np.float64]:
    """`Σ_h weight_h · A(R^h)`: every part of the reward is normalised in its group before they are summed.

    So a part with a small spread counts as much as one with a large spread. GDPO, arXiv 2601.05242.
    """
    heads = [weight * estimate(parts[name], config.advantage) for name, weight in config.reward_weights.items()]
    return np.sum(heads, axis=0, dtype=np.float64)


def grpo(rewards: NDArray[np.float64], config: GrpoConfig) -> NDArray[np.float64]:
    """Centre and scale: `A_i = (R_i − mean_g R) / (std_g R + ε)`. DeepSeekMath, arXiv 2402.03300.

    `std`: `sample` (ddof 1), `population` (ddof 0) or `none` (centre only).
    """
    return scaled(centred(rewards), rewards, config)


def dr_grpo(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """Centre only: `A_i = R_i − mean_g R`; pair it with `constant_length`. Dr. GRPO, arXiv 2503.20783."""
    del config
    return centred(rewards)


def centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """`R_i − mean R`, exactly 0 where all are equal."""
    if are_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def rloo(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """Leave one out: `A_i = R_i − mean_{j≠i} R_j`. Ahmadian et al., arXiv 2402.14740."""
    del config
    if are_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (rewards.size - 1)


def maxrl(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """Centre and divide by the mean: `A_i = (R_i − mean_g R) / mean_g R`. MaxRL, arXiv 2602.02710.

    With rewards 0 and 1 the gradient is that of −Σ_k (1 − p)^k / k up to k = G − 1, of which log p is the limit: a task
    that is solved in a share p of the attempts weighs about 1 / p. A_i is in [−1, G − 1], so nothing is added to the
    divisor; peers add 1e-6.

    Raises:
        TrainingError: If a reward is negative: the mean would not measure success, and its sign would turn A around.
    """
    del config
    if are_equal(rewards):
        return np.zeros_like(rewards)
    if rewards.min() < 0:
        raise TrainingError(
            f"algorithm.advantage=maxrl: a group has a reward of {rewards.min():g}, but it divides by the mean reward, "
            "so rewards must be at least 0. Use a reward of 0 for failures, or algorithm/advantage=grpo."
        )
    return rewards / rewards.mean() - 1.0


def pass_at_k(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """Leave one out of the best of G: `A_i = max R − max_{j≠i} R_j`, 0 for all but a single best. arXiv 2503.19595.

    The gradient is that of the expected best reward of G answers, pass@G for rewards 0 and 1.
    """
    del config
    if are_equal(rewards):
        return np.zeros_like(rewards)
    second, first = np.sort(rewards)[-2:]
    best = np.zeros_like(rewards)
    if not are_equal(np.array([first, second])):
        best[rewards.argmax()] = first - second
    return best


def scaled(
    deviations: NDArray[np.float64], values: NDArray[np.float64], config: GrpoConfig | WhitenedConfig | GaeConfig
) -> NDArray[np.float64]:
    """`deviations / (std values + ε)` with the configured deviation; unchanged if there is nothing to scale."""
    if config.std == "none" or not deviations.any():
        return deviations
    return deviations / (values.std(ddof=1 if config.std == "sample" else 0) + config.epsilon)


def reinforce_pp(batch: RewardBatch, config: WhitenedConfig) -> list[NDArray[np.float64]]:
    """`A_{i,t} = R_i − β Σ_{s≥t} k1_s`, whitened (`whiten: batch`). REINFORCE++, arXiv 2501.03262."""
    return whitened(_returns_to_go(batch.rewards, batch.penalties), batch.carries_loss, config)


def reinforce_pp_baseline(batch: RewardBatch, config: WhitenedConfig) -> list[NDArray[np.float64]]:
    """As `reinforce_pp`, with the mean reward of the group subtracted first.

    Members of a group of equal rewards and without penalties get exactly 0 after the whitening, as in every estimator
    with a baseline of the group.
    """
    baselined, is_silent = np.zeros_like(batch.rewards), np.zeros(len(batch.rewards), dtype=bool)
    for members in batch.members:
        attempts, attempt_of = batch.attempts_of(members)
        baselined[members] = centred(batch.rewards[attempts])[attempt_of]
        has_penalty = any(batch.penalties[one].any() for one in members)
        is_silent[members] = are_equal(batch.rewards[members]) and not has_penalty
    found = whitened(_returns_to_go(baselined, batch.penalties), batch.carries_loss, config)
    return [np.zeros_like(one) if silent else one for one, silent in zip(found, is_silent, strict=True)]


def gae(batch: RewardBatch, config: GaeConfig) -> list[NDArray[np.float64]]:
    """`δ_t = r_t + γ V_{t+1} − V_t`; `A_t = δ_t + γλ A_{t+1}`, whitened (`whiten: batch`).

    V is 0 after the end of an answer; with `bootstrap`, a cut is not an end.
    """
    return whitened(_discounted_td_errors(batch, config), batch.carries_loss, config)


def gae_returns(batch: RewardBatch, config: GaeConfig) -> list[NDArray[np.float64]]:
    """`A + V`, the targets of the critic, with A before whitening: returns are in the units of the reward."""
    advantages = _discounted_td_errors(batch, config)
    return [advantage + value for advantage, value in zip(advantages, batch.values, strict=True)]


def _discounted_td_errors(batch: RewardBatch, config: GaeConfig) -> list[NDArray[np.float64]]:
    """`A_t = Σ_k (γλ)^k δ_{t+k}`.

    Generalised advantage estimation, arXiv 1506.02438, over sampled tokens only: observation tokens between them are
    skipped, not zeros. The last sampled token gets the reward, and what follows it has the value 0, or `cut_values`
    (partial-episode bootstrapping, arXiv 1712.00378). One scan covers all sequences, concatenated.
    """
    ends = np.cumsum([len(values) for values in batch.values], dtype=np.int64)
    has_tokens = [len(values) > 0 for values in batch.values]
    lasts = ends[has_tokens] - 1
    per_token = -np.concatenate([np.zeros(0), *batch.penalties])
    per_token[lasts] += batch.rewards[has_tokens]
    values = np.concatenate([np.zeros(0), *batch.values])
    following = np.append(values[1:], 0.0)[: len(values)]
    following[lasts] = 0.0 if batch.cut_values is None else batch.cut_values[has_tokens]
    td_errors = per_token + config.gamma * following - values
    decay = np.full_like(values, config.gamma * config.lam)
    bounds = torch.from_numpy(np.append(0, ends))
    advantages = reverse_scan(torch.from_numpy(td_errors), torch.from_numpy(decay), bounds)
    return np.split(advantages.numpy(), ends[:-1])


def whitened(
    values: Tokens, carries_loss: Sequence[NDArray[np.bool_]], config: WhitenedConfig | GaeConfig
) -> list[NDArray[np.float64]]:
    """`(A − mean) / (std + ε)`, mean and deviation over all tokens of the batch that carry loss; A if `whiten: none`.

    Every rank has the whole batch here, so the statistics are those of the whole batch (I9).
    """
    if config.whiten == "none":
        return list(values)
    counted = [one[mask] for one, mask in zip(values, carries_loss, strict=True)]
    pool = np.concatenate(counted) if counted else np.zeros(0)
    if not len(pool) or are_equal(pool):
        return [np.zeros_like(one) for one in values]
    return [scaled(one - pool.mean(), pool, config) for one in values]


def with_teacher(advantages: FloatArray, teacher: FloatArray, policy: FloatArray, coefficient: float) -> FloatArray:
    """`A + coefficient · (log π_teacher − log π)`, `[T]`: reward and on-policy distillation in one advantage.

    The policy gradient of the added term is that of −coefficient · KL(π‖π_teacher) of the next token. Source: on-policy
    distillation, arXiv 2306.13649.

    Args:
        advantages: `[T]` A.
        teacher: `[T]` logprobs of the teacher.
        policy: `[T]` logprobs of the policy, without gradient.
        coefficient: Advantage per nat.
    """
    return advantages + coefficient * (teacher - policy)


def _returns_to_go(rewards: NDArray[np.float64], penalties: Tokens) -> Tokens:
    """`R_i − Σ_{s≥t} penalty_s`."""
    return [reward - penalty[::-1].cumsum()[::-1] for reward, penalty in zip(rewards, penalties, strict=True)]


def overlong_penalty(num_tokens: int, max_new_tokens: int, ramp_share: float) -> float:
    """0 up to L_max − L_cache, linear to −1 at L_max, −1 beyond. DAPO, arXiv 2503.14476, eq. 13.

    Args:
        num_tokens: Sampled tokens of the answer.
        max_new_tokens: L_max.
        ramp_share: L_cache / L_max in (0, 1], length of the ramp; the paper has 4096 of 20480 tokens.
    """
    cache_tokens = ramp_share * max_new_tokens
    excess = num_tokens - (max_new_tokens - cache_tokens)
    return -min(max(excess / cache_tokens, 0.0), 1.0)
