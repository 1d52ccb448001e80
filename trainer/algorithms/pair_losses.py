"""Preference losses of pairs of one group: `(LossTokens, AlgorithmConfig) -> PolicyLoss`, and which pairs there are.

The two members of a pair lie in one micro-batch (batches/packing.py, units). Half of a pair's loss stands at each token
of either member, to be weighed 1 / (P n_i), so all of it sums to the mean over the P pairs of the batch.

Shape legend: T loss tokens, S sequences, P pairs, G members of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.equal_rewards import rounding_error
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped
from penstock.trainer.config import AlgorithmConfig


def online_dpo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−log σ(β Δ)`, `Δ = (Σc⁺ − Σr⁺) − (Σc⁻ − Σr⁻)`. DPO, arXiv 2305.18290; online, arXiv 2402.04792."""
    return _at_the_tokens(tokens, -torch.nn.functional.logsigmoid(config.pair_beta * pair_margins(tokens)))


def ipo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`(Δ − 1/(2β))²`: the goal is a finite margin, so a pair that has reached it stops pushing. arXiv 2310.12036.

    `ipo_length`: `mean`, Δ of per-token means, so that the goal means the same for answers of any length (the authors'
    reading; TRL and AReaL do so); `sum`, Δ of sums as in DPO, the paper to the letter.
    """
    margins = pair_margins(tokens, per_token=config.ipo_length == "mean")
    return _at_the_tokens(tokens, (margins - 1.0 / (2.0 * config.pair_beta)).square())


def pair_margins(tokens: LossTokens, *, per_token: bool = False) -> Tensor:
    """`[P] float64` Δ: how much more than the reference the policy prefers the better member.

    Differences of each token are summed, in float64: the logprobs of a long answer add up to some ten thousand nats, of
    which float32 keeps two decimals, and the margin is what is left of four such sums.

    Args:
        tokens: With pairs.
        per_token: Divide each member's sum by its number of tokens.
    """
    drift = tokens.target.double() - tokens.reference.double()
    of_member = tokens.segment_mean(drift) if per_token else tokens.segment_sum(drift)
    return of_member[tokens.pairs[:, 0]] - of_member[tokens.pairs[:, 1]]


def preference_pairs(
    rewards: NDArray[np.float64], eligible: Sequence[int], config: AlgorithmConfig
) -> list[tuple[int, int]]:
    """Pairs (better, worse) whose rewards differ by more than `max(pair_margin, rounding_error)`: rounding makes none.

    Args:
        rewards: `[G]`.
        eligible: Members that can be compared: those with loss tokens.
        config: `pairs: best_worst` gives at most one pair, the first best and the first worst; `all` every one.
    """
    members = list(eligible)
    if not members:
        return []
    least = max(config.pair_margin, rounding_error(rewards[members]))
    if config.pairs == "best_worst":
        members = [max(members, key=lambda one: rewards[one]), min(members, key=lambda one: rewards[one])]
    gaps = [(better, worse, float(rewards[better] - rewards[worse])) for better in members for worse in members]
    return [(better, worse) for better, worse, gap in gaps if gap > least]


def _at_the_tokens(tokens: LossTokens, pair_losses: Tensor) -> PolicyLoss:
    """`[P] float64` -> `[T]`: at each token half the losses of all pairs of its sequence."""
    members = tokens.pairs.T.flatten()
    halves = pair_losses.new_zeros(tokens.num_segments).index_add(0, members, 0.5 * pair_losses.repeat(2))
    return unclipped(tokens.spread(halves).to(tokens.target.dtype))
