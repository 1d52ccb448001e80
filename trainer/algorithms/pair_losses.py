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

from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped
from penstock.trainer.config import AlgorithmConfig


def online_dpo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−log σ(β Δ)`, `Δ = (Σc⁺ − Σr⁺) − (Σc⁻ − Σr⁻)`. DPO, arXiv 2305.18290; online, arXiv 2402.04792."""
    return _at_the_tokens(tokens, -torch.nn.functional.logsigmoid(config.pair_beta * pair_margins(tokens)))


def ipo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`(Δ − 1/(2β))²`: a finite margin is the goal, so certain pairs do not push for ever. arXiv 2310.12036."""
    return _at_the_tokens(tokens, (pair_margins(tokens) - 1.0 / (2.0 * config.pair_beta)).square())


def pair_margins(tokens: LossTokens) -> Tensor:
    """`[P]` Δ: how much more than the reference the policy prefers the better member."""
    drift = tokens.segment_sum(tokens.target - tokens.reference)
    return drift[tokens.pairs[:, 0]] - drift[tokens.pairs[:, 1]]


def preference_pairs(
    rewards: NDArray[np.float64], eligible: Sequence[int], config: AlgorithmConfig
) -> list[tuple[int, int]]:
    """Pairs (better, worse) of members whose rewards differ by at least `pair_margin`, and by more than 0.

    Args:
        rewards: `[G]`.
        eligible: Members that can be compared: those with loss tokens.
        config: `pairs: best_worst` gives at most one pair, the first best and the first worst; `all` every one.
    """
    members = list(eligible)
    if config.pairs == "best_worst" and members:
        members = [max(members, key=lambda one: rewards[one]), min(members, key=lambda one: rewards[one])]
    gaps = [(better, worse, float(rewards[better] - rewards[worse])) for better in members for worse in members]
    return [(better, worse) for better, worse, gap in gaps if gap > 0 and gap >= config.pair_margin]


def _at_the_tokens(tokens: LossTokens, pair_losses: Tensor) -> PolicyLoss:
    """`[P]` -> `[T]`: at each token half the losses of all pairs of its sequence."""
    members = tokens.pairs.T.flatten()
    halves = pair_losses.new_zeros(tokens.num_segments).index_add(0, members, 0.5 * pair_losses.repeat(2))
    return unclipped(tokens.spread(halves))
