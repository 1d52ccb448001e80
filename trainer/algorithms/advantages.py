"""Advantages per token, from the rewards of the groups of a batch. Numpy, float64.

An estimator of a group is `(rewards [G] float64, its settings) -> [G] float64`, one of a batch takes a
`RewardBatch`. A group whose rewards are all equal (up to rounding, dataflow/trajectory.py) gives exactly 0, never
NaN, whatever the estimator.

Shape legend: N sequences of the batch, n_i sampled tokens of one, G attempts of a group: trajectories, most of which
are one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.trajectory import are_equal
from penstock.trainer.algorithms.catalog import Entry, Named, Variant
from penstock.trainer.algorithms.conditions import ADVANTAGES, Condition, Deviation, uses_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.trainer.algorithms.algorithm import Algorithm

Tokens = Sequence[NDArray[np.float64]]
"""One array `[n_i]` per sequence."""
FloatArray = TypeVar("FloatArray", "Tensor", NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Inputs of the advantage estimators."""

    rewards: NDArray[np.float64]
    """`[N]`, already with the overlong penalty."""
    groups: NDArray[np.int64]
    """`[N] int`; sequences of the same number are compared with each other."""
    penalties: Tokens
    """`[n_i]` each: β · k of every sampled token (`kl.apply_to: reward`), else zeros."""
    carries_loss: Sequence[NDArray[np.bool_]]
    """`[n_i] bool` each; False for trimmed and masked tokens."""
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Named part of the reward -> `[N]`."""
    values: Tokens = ()
    """`[n_i]` each: V of a critic before each sampled token; empty: there is no critic."""
    cut_values: NDArray[np.float64] | None = None
    """`[N]`: V after the last token of a sequence that was cut off, 0 where it ended by itself; None: 0."""
    attempts: NDArray[np.int64] | None = None
    """`[N] int`, sequences of equal attempt share one reward, which counts once in its group; None: each has its own.
    """

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


def token_advantages(batch: RewardBatch, algorithm: Algorithm) -> list[NDArray[np.float64]]:
    """`[n_i]` each: by the estimator of the algorithm.

    Raises:
        ShapeError: If a user's own estimator does not give one number per member.
    """
    estimate, settings = algorithm.advantage, algorithm.advantage_settings
    if not algorithm.compares_groups:
        return list(estimate(batch, settings))
    per_sequence = np.zeros(len(batch.rewards))
    for members in batch.members:
        attempts, attempt_of = batch.attempts_of(members)
        if weights := algorithm.config.reward_weights:
            heads = {name: estimate(part[attempts], settings) for name, part in batch.parts.items()}
            values = per_head(heads, weights)
        else:
            penalties = np.bincount(attempt_of, [batch.penalties[one].sum() for one in members])
            values = np.asarray(estimate(batch.rewards[attempts] - penalties, settings), np.float64)
        if values.shape != attempts.shape:
            raise ShapeError(
                f"algorithm.advantage={algorithm.config.advantage.name}: it gave shape {values.shape} for a group of "
                f"{len(attempts)}. Return one number per member."
            )
        per_sequence[members] = values[attempt_of]
    return [np.full(len(mask), value) for mask, value in zip(batch.carries_loss, per_sequence, strict=True)]


@Entry("reward_shaping", name="reward_weights", source="2601.05242", level="group")
def per_head(heads: Mapping[str, NDArray[np.float64]], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """`A = Σ_h weight_h · A(R^h): each head normalised in its group`. GDPO.

    So a part with a small spread counts as much as one with a large spread.
    """
    return np.sum([weight * heads[name] for name, weight in weights.items()], axis=0, dtype=np.float64)


_WHITENS = Condition(
    lambda config: getattr(config.advantage, "whiten", "batch") == "batch",
    ("advantage.whiten",),
    "only the whitening divides by a deviation",
    "Use algorithm.advantage.whiten=batch",
)
_HAS_DEVIATION = Condition(
    lambda config: getattr(config.advantage, "std", "none") != "none",
    ("advantage.std",),
    "there is no division that it keeps finite",
    "Use algorithm.advantage.std=sample",
)
_TRAINS_CUT_ANSWERS = Condition(
    lambda config: config.overlong.mode not in ("mask", "drop"),
    ("overlong.mode",),
    "answers that were cut off have no loss, so their returns are not used",
    "Use algorithm.overlong.mode=keep",
)
_REWARDS = Condition(
    lambda config: config.overlong.mode != "penalty" or uses_rewards(config),
    ("loss",),
    "this loss uses no reward, from which the penalty is subtracted",
    "Use algorithm.overlong.mode=mask or drop",
)
_PENALTY = Condition(
    lambda config: config.overlong.mode == "penalty",
    ("overlong.mode",),
    "only the penalty has a ramp",
    "Use algorithm.overlong.mode=penalty",
)


class GrpoConfig(Named):
    """`(R − mean R) / (std R + ε)` within a group."""

    type: Literal["grpo"] = "grpo"
    """Always `grpo`."""
    std: Annotated[Literal["sample", "population", "none"], ADVANTAGES] = "sample"
    """Which standard deviation divides; `none` only subtracts the mean."""
    epsilon: Annotated[float, ADVANTAGES, _HAS_DEVIATION] = Field(default=1e-4, gt=0)
    """ε added to that deviation."""


class CentredConfig(Named):
    """A baseline of the group, without settings."""

    type: Literal["dr_grpo", "rloo", "maxrl", "pass_at_k"]
    """The mean of the group (`dr_grpo`, and `maxrl`, which also divides by it), the mean of its other members (`rloo`),
    or the best of them (`pass_at_k`)."""


class _Whitening(Named):
    """What all advantages have that are whitened over the loss tokens of the batch."""

    whiten: Annotated[Literal["none", "batch"], ADVANTAGES] = "batch"
    """`batch` subtracts the mean over all loss tokens of the batch and divides by the deviation; `none` does
    nothing."""
    std: Annotated[Literal["sample", "population", "none"], ADVANTAGES, _WHITENS] = "sample"
    """Which standard deviation divides; `none` only subtracts the mean."""
    epsilon: Annotated[float, ADVANTAGES, _WHITENS, _HAS_DEVIATION] = Field(default=1e-4, gt=0)
    """ε added to that deviation."""


class WhitenedConfig(_Whitening):
    """Returns whitened over all loss tokens of the batch."""

    type: Literal["reinforce_pp", "reinforce_pp_baseline"]
    """Without (`reinforce_pp`) or with (`reinforce_pp_baseline`) the mean of the group subtracted first."""


class GaeConfig(_Whitening):
    """Generalised advantage estimation with a critic (section `critic`)."""

    type: Literal["gae"] = "gae"
    """Always `gae`."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """γ, discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 learns from whole returns; below 1 (PPO's paper: 0.95) the critic's own estimates replace a part of them."""
    bootstrap: Annotated[bool, ADVANTAGES, _TRAINS_CUT_ANSWERS] = False
    """Where an answer was cut off at the length limit, γ V of the state at the cut is added to its reward: the limit is
    not the end of the task."""


_WITHOUT_WHITENING = Deviation(
    lambda config: getattr(config.advantage, "whiten", "batch") == "none",
    "advantage.whiten",
    ("advantage",),
    "the whitening over the batch is what REINFORCE++ adds (arXiv 2501.03262, section 3.2)",
    "Use advantage.whiten=batch, or algorithm=dr_grpo for advantages that are only centred",
)


@Entry("advantage", GrpoConfig, source="2402.03300", level="group")
def grpo(rewards: NDArray[np.float64], config: GrpoConfig) -> NDArray[np.float64]:
    """`A_i = (R_i − mean R) / (std R + ε)`: centre and scale. DeepSeekMath.

    `std`: `sample` (ddof 1), `population` (ddof 0) or `none` (centre only).
    """
    return scaled(centred(rewards), rewards, config)


@Entry("advantage", CentredConfig, source="2503.20783", level="group")
def dr_grpo(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """`A_i = R_i − mean R`: centre only; pair it with `constant_length`. Dr. GRPO."""
    del config
    return centred(rewards)


def centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """`R_i − mean R`, exactly 0 where all are equal."""
    if are_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


@Entry("advantage", CentredConfig, source="2402.14740", level="group")
def rloo(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """`A_i = R_i − mean_{j≠i} R_j`: leave one out. Ahmadian et al."""
    del config
    if are_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (rewards.size - 1)


@Entry("advantage", CentredConfig, source="2602.02710", level="group")
def maxrl(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """`A_i = (R_i − mean R) / mean R, R ≥ 0`: centre and divide by the mean. MaxRL.

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


@Entry("advantage", CentredConfig, source="2503.19595", level="group")
def pass_at_k(rewards: NDArray[np.float64], config: CentredConfig) -> NDArray[np.float64]:
    """`A_i = max R − max_{j≠i} R_j: k = G, leave one out`; 0 for all but a single best.

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
    deviations: NDArray[np.float64], values: NDArray[np.float64], config: GrpoConfig | _Whitening
) -> NDArray[np.float64]:
    """`deviations / (std values + ε)` with the configured deviation; unchanged if there is nothing to scale."""
    if config.std == "none" or not deviations.any():
        return deviations
    return deviations / (values.std(ddof=1 if config.std == "sample" else 0) + config.epsilon)


@Entry("advantage", WhitenedConfig, source="2501.03262", level="batch", deviations=(_WITHOUT_WHITENING,))
def reinforce_pp(batch: RewardBatch, config: WhitenedConfig) -> list[NDArray[np.float64]]:
    """`A_{i,t} = R_i − β Σ_{s≥t} k1_s, whitened over all loss tokens of the batch`. REINFORCE++."""
    return whitened(_returns_to_go(batch.rewards, batch.penalties), batch.carries_loss, config)


@Entry("advantage", WhitenedConfig, source="2501.03262", level="batch", deviations=(_WITHOUT_WHITENING,))
def reinforce_pp_baseline(batch: RewardBatch, config: WhitenedConfig) -> list[NDArray[np.float64]]:
    """`A_{i,t} = R_i − mean R − β Σ_{s≥t} k1_s, whitened likewise`: the mean of the group is subtracted first.

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


@Entry("advantage", GaeConfig, source="1506.02438")
def gae(batch: RewardBatch, config: GaeConfig) -> list[NDArray[np.float64]]:
    """`δ_t = r_t + γ V_{t+1} − V_t; A_t = δ_t + γλ A_{t+1}, over sampled tokens; whitened likewise`.

    V is 0 after the end of an answer; with `bootstrap`, a cut is not an end.
    """
    return whitened(_discounted_td_errors(batch, config), batch.carries_loss, config)


def gae_returns(batch: RewardBatch, config: GaeConfig) -> list[NDArray[np.float64]]:
    """`A + V`, the targets of the critic, with A before whitening: returns are in the units of the reward."""
    advantages = _discounted_td_errors(batch, config)
    return [advantage + value for advantage, value in zip(advantages, batch.values, strict=True)]


@Entry(
    "reward_shaping", name="bootstrap", source="1712.00378",
    formula="γ V of the state at the cut is added to the reward of a cut answer",
)  # fmt: skip
def _discounted_td_errors(batch: RewardBatch, config: GaeConfig) -> list[NDArray[np.float64]]:
    """`A_t = Σ_k (γλ)^k δ_{t+k}`, with `bootstrap`: γ V of the state at the cut is added to the reward of a cut answer.

    Generalised advantage estimation, arXiv 1506.02438, over sampled tokens only: observation tokens between them are
    skipped, not zeros. The last sampled token gets the reward, and what follows it has the value 0, or `cut_values`
    (partial-episode bootstrapping, arXiv 1712.00378). The sum is a reverse scan over all sequences, concatenated, in
    ⌈log₂ L⌉ doubling steps for up to L tokens (Hillis and Steele 1986): after that of width w each token has the terms
    of 2w tokens, and `carry` is what later ones are multiplied by.
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
    advantages, carry, width = td_errors, np.full_like(values, config.gamma * config.lam), 1
    carry[lasts] = 0.0
    while width < max((len(one) for one in batch.values), default=0):
        advantages[:-width] += carry[:-width] * advantages[width:]
        carry = np.append(carry[:-width] * carry[width:], np.zeros(width))
        width *= 2
    return np.split(advantages, ends[:-1])


def whitened(
    values: Tokens, carries_loss: Sequence[NDArray[np.bool_]], config: _Whitening
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


@Entry(
    "reward_shaping", name="teacher_coefficient", source="2306.13649",
    formula="A + coefficient · (log π_teacher − sg(c))",
)  # fmt: skip
def with_teacher(advantages: FloatArray, teacher: FloatArray, policy: FloatArray, coefficient: float) -> FloatArray:
    """`A + coefficient · (log π_teacher − log π)`, `[T]`: reward and on-policy distillation in one advantage.

    The policy gradient of the added term is that of −coefficient · KL(π‖π_teacher) of the next token: on-policy
    distillation.

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


class OverlongConfig(Variant):
    """What happens to answers that were cut off at the length limit."""

    mode: Annotated[Literal["keep", "penalty", "mask", "drop"], _REWARDS] = "keep"
    """`keep` treats them as any other; `penalty` lowers the reward of long answers (DAPO); `mask` gives them no loss;
    `drop` leaves them out of the baseline too."""
    ramp_share: Annotated[float, _PENALTY, _REWARDS] = Field(default=0.2, gt=0, le=1)
    """Length of the ramp of the penalty as a share of `rollout.sampling.max_new_tokens`; the paper has 4096 of 20480
    tokens (section 4.1)."""


@Entry("reward_shaping", source="2503.14476")
def overlong_penalty(num_tokens: int, max_new_tokens: int, ramp_share: float) -> float:
    """`0 up to L_max − L_cache, linear to −1 at L_max, −1 beyond`. DAPO, equation 13.

    Args:
        num_tokens: Sampled tokens of the answer.
        max_new_tokens: L_max.
        ramp_share: L_cache / L_max in (0, 1], length of the ramp; the paper has 4096 of 20480 tokens.
    """
    cache_tokens = ramp_share * max_new_tokens
    excess = num_tokens - (max_new_tokens - cache_tokens)
    return -min(max(excess / cache_tokens, 0.0), 1.0)
