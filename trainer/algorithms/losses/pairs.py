"""Losses of pairs of answers to one task, a better and a worse one.

The two members of a pair are in one micro-batch (units). Each token of either member gets half of the pair's loss and
the weight 1 / (P n_i), so the total is the mean over the P pairs of the batch.

Shape legend: T loss tokens, P pairs, G members of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock.dataflow.trajectory import rounding_error
from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped

if TYPE_CHECKING:
    from torch import Tensor


class PairsConfig(Named):
    """What all losses of pairs of answers to one task have."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Which pairs of a group are compared: the best with the worst answer, or all of different reward."""
    margin: float = Field(default=0.0, ge=0)
    """A pair needs rewards that differ by more than this, and by more than rounding does."""
    beta: float = Field(default=0.1, gt=0)
    """β: how strongly the policy is kept close to the reference (DPO's paper, appendix B: 0.1)."""


class DpoConfig(PairsConfig):
    """A loss of pairs of answers to one task."""

    type: Literal["online_dpo"] = "online_dpo"
    """Always `online_dpo`."""
    length: Literal["mean", "sum"] = "sum"
    """Whether an answer counts by the sum or by the mean of the logprobs of its tokens."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """ε: probability that the worse answer of a pair is the better one."""


class IpoConfig(PairsConfig):
    """A loss of pairs that aims at a finite margin."""

    type: Literal["ipo"] = "ipo"
    """Always `ipo`."""
    beta: float = Field(default=0.1, gt=0)
    """β: the goal is a margin of 1 / (2 β) (OAIF's runs of IPO, arXiv 2402.04792: 1.0, with sums)."""
    length: Literal["mean", "sum"] = "mean"
    """Whether an answer counts by the mean or by the sum of the logprobs of its tokens."""


@Entry("loss", DpoConfig, source="2402.04792", level="pair", takes_weight=False, has_ratio=False)
def online_dpo(tokens: LossTokens, config: DpoConfig) -> PolicyLoss:
    """`−(1 − ε) log σ(β Δ) − ε log σ(−β Δ), Δ = (Σc⁺ − Σr⁺) − (Σc⁻ − Σr⁻)`. DPO, arXiv 2305.18290.

    Online, with pairs of the policy's own answers: arXiv 2402.04792. ε is `label_smoothing`: conservative DPO, for
    preferences that are wrong in a share ε of the pairs (Mitchell, 2023). `length: mean` has means in place of the
    sums, so that a long answer has no larger margin for its length.
    """
    from torch.nn.functional import logsigmoid

    logits = config.beta * pair_margins(tokens, per_token=config.length == "mean")
    agree, disagree = logsigmoid(logits), logsigmoid(-logits)
    smoothing = config.label_smoothing
    return _spread_pair_losses(tokens, -(1.0 - smoothing) * agree - smoothing * disagree)


@Entry("loss", IpoConfig, source="2310.12036", level="pair", takes_weight=False, has_ratio=False)
def ipo(tokens: LossTokens, config: IpoConfig) -> PolicyLoss:
    """`(Δ − 1/(2β))², Δ of means over tokens or of sums`: the goal is a finite margin, where a pair has no gradient.

    `length`: `mean`, Δ of per-token means, so that the goal means the same for answers of any length (the authors'
    reading; TRL and AReaL do so); `sum`, Δ of sums as in DPO, the paper to the letter.
    """
    margins = pair_margins(tokens, per_token=config.length == "mean")
    return _spread_pair_losses(tokens, (margins - 1.0 / (2.0 * config.beta)).square())


def pair_margins(tokens: LossTokens, *, per_token: bool = False) -> Tensor:
    """`[P] float64` Δ: how much more than the reference the policy prefers the better member.

    Differences of each token are summed, in float64: the logprobs of a long answer add up to some ten thousand nats, of
    which float32 keeps two decimals, and the margin is the difference of four such sums.

    Args:
        tokens: With pairs.
        per_token: Divide each member's sum by its number of tokens.
    """
    drift = tokens.target.double() - tokens.reference.double()
    of_member = tokens.segment_mean(drift) if per_token else tokens.segment_sum(drift)
    return of_member[tokens.pairs[:, 0]] - of_member[tokens.pairs[:, 1]]


def _spread_pair_losses(tokens: LossTokens, pair_losses: Tensor) -> PolicyLoss:
    """`[P] float64` -> `[T]`: at each token half the losses of all pairs of its sequence."""
    members = tokens.pairs.T.flatten()
    halves = pair_losses.new_zeros(tokens.num_segments).index_add(0, members, 0.5 * pair_losses.repeat(2))
    return unclipped(tokens.spread(halves).to(tokens.target.dtype))


def preference_pairs(
    rewards: NDArray[np.float64], eligible: Sequence[int], config: PairsConfig
) -> list[tuple[int, int]]:
    """Pairs (better, worse) whose rewards differ by more than `max(margin, rounding_error)`.

    Args:
        rewards: `[G]`.
        eligible: Members that can be compared: those with loss tokens.
        config: `pairs: best_worst` gives at most one pair, the first best and the first worst; `all` every one.
    """
    members = list(eligible)
    if not members:
        return []
    least = max(config.margin, rounding_error(rewards[members]))
    if config.pairs == "best_worst":
        members = [max(members, key=lambda one: rewards[one]), min(members, key=lambda one: rewards[one])]
    gaps = [(better, worse, float(rewards[better] - rewards[worse])) for better in members for worse in members]
    return [(better, worse) for better, worse, gap in gaps if gap > least]
