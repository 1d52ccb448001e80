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


def token_weights(
    num_loss_tokens: NDArray[np.int64], mode: Aggregation, max_new_tokens: int, normaliser: float | None = None
) -> NDArray[np.float64]:
    """Weight of each loss token, per sequence.

    - `token_mean`: `1 / Σ_i n_i` (DAPO, arXiv 2503.14476)
    - `seq_mean_token_mean`: `1 / (N n_i)` (DeepSeekMath, arXiv 2402.03300)
    - `constant_length`: `1 / (N max_new_tokens)` (Dr. GRPO, arXiv 2503.20783)

    Args:
        num_loss_tokens: `[N]`, n_i: tokens of sequence i with loss mask 1. May be 0.
        mode: Which of the above.
        max_new_tokens: The sampling limit, tokens; used by `constant_length` only.
        normaliser: Instead of `batch_normaliser` of these sequences; 1 where the gradient is divided at the end.

    Returns:
        `[N] float64`; a sequence without loss tokens gets 0 but counts in N.
    """
    counts = np.maximum(num_loss_tokens, 1).astype(np.float64)
    shares = {
        "token_mean": np.ones_like(counts),
        "seq_mean_token_mean": 1.0 / counts,
        "constant_length": np.full_like(counts, 1.0 / max_new_tokens),
    }[mode]
    total = max(batch_normaliser(num_loss_tokens, mode), 1.0) if normaliser is None else normaliser
    return np.where(num_loss_tokens > 0, shares / total, 0.0)


def batch_normaliser(num_loss_tokens: NDArray[np.int64], mode: Aggregation) -> float:
    """What the weights of a whole batch are divided by; those of its parts add up to it."""
    return float(num_loss_tokens.sum() if mode == "token_mean" else len(num_loss_tokens))
