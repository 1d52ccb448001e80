"""Aggregation over tokens as weights: loss = Σ weight · term, over any split into ranks and micro-batches.

The normaliser is computed once over the whole batch, before any rejection (I9), so the same batch gives the same
gradient however the work is split.

Shape legend: N sequences of the whole batch (all ranks). All tokens of a sequence weigh the same.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "seq_mean_token_mean", "constant_length"]


def token_weights(num_loss_tokens: NDArray[np.int64], mode: Aggregation, max_new_tokens: int) -> NDArray[np.float64]:
    """Weight of each loss token, per sequence.

    - `token_mean`: `1 / Σ_i n_i` (DAPO, arXiv 2503.14476)
    - `seq_mean_token_mean`: `1 / (N n_i)` (DeepSeekMath, arXiv 2402.03300)
    - `constant_length`: `1 / (N max_new_tokens)` (Dr. GRPO, arXiv 2503.20783)

    Args:
        num_loss_tokens: `[N]`, n_i: tokens of sequence i with loss mask 1. May be 0.
        mode: Which of the above.
        max_new_tokens: The sampling limit, tokens; used by `constant_length` only.

    Returns:
        `[N] float64`; a sequence without loss tokens gets 0 but counts in N.
    """
    num_sequences = len(num_loss_tokens)
    counts = np.maximum(num_loss_tokens, 1).astype(np.float64)
    if mode == "token_mean":
        weights = np.full(num_sequences, 1.0 / max(int(num_loss_tokens.sum()), 1))
    elif mode == "seq_mean_token_mean":
        weights = 1.0 / (num_sequences * counts)
    else:
        weights = np.full(num_sequences, 1.0 / (num_sequences * max_new_tokens))
    return np.where(num_loss_tokens > 0, weights, 0.0)
