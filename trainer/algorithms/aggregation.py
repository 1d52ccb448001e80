"""Aggregation over tokens as weights: loss = Σ weight · term, over any split into ranks and micro-batches.

A weight is a share divided by a normaliser. The normaliser is computed once over the whole batch, before any rejection
(I9), so the same batch gives the same gradient however the work is split.

Shape legend: N sequences of the whole batch (all ranks), all tokens of which weigh the same; T loss tokens and S
sequences of one micro-batch, in which individual tokens may have a smaller weight or none (`staleness_factors`,
`is_low_entropy`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.algorithms.catalog import find


def token_mean(counts: NDArray[np.float64], max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1, over Σ n_i. DAPO, arXiv 2503.14476."""
    del max_new_tokens
    return np.ones_like(counts)


def seq_mean_token_mean(counts: NDArray[np.float64], max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1 / n_i, over N. DeepSeekMath, arXiv 2402.03300."""
    del max_new_tokens
    return 1.0 / counts


def seq_mean_token_sum(counts: NDArray[np.float64], max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1, over N: the gradient of the sequence's own log-probability."""
    del max_new_tokens
    return np.ones_like(counts)


def constant_length(counts: NDArray[np.float64], max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1 / max_new_tokens, over N. Dr. GRPO, arXiv 2503.20783."""
    return np.full_like(counts, 1.0 / max_new_tokens)


def token_weights(
    num_loss_tokens: NDArray[np.int64], mode: str, max_new_tokens: int, normaliser: float | None = None
) -> NDArray[np.float64]:
    """Weight of each loss token, per sequence.

    Args:
        num_loss_tokens: `[N]`, n_i: tokens of sequence i with loss mask 1. May be 0.
        mode: Name of an aggregation.
        max_new_tokens: The sampling limit, tokens; used by `constant_length` only.
        normaliser: Instead of `batch_normaliser` of these sequences; 1 where the gradient is divided at the end.

    Returns:
        `[N] float64`; a sequence without loss tokens gets 0 but counts in N.
    """
    counts = np.maximum(num_loss_tokens, 1).astype(np.float64)
    shares = find("aggregation", mode).load()(counts, max_new_tokens)
    total = max(batch_normaliser(num_loss_tokens, mode), 1.0) if normaliser is None else normaliser
    return np.where(num_loss_tokens > 0, shares / total, 0.0)


def batch_normaliser(num_loss_tokens: NDArray[np.int64], mode: str) -> float:
    """Divisor of the shares of a batch. The normalisers of its parts add up to that of the batch."""
    return float(num_loss_tokens.sum() if mode == "token_mean" else len(num_loss_tokens))


def staleness_factors(staleness: Tensor, decay: float) -> Tensor:
    """`decay^staleness`, `[T] float64`: staler tokens count less. `staleness` is `[T] int64` ≥ 0, in versions."""
    return torch.as_tensor(decay, dtype=torch.float64, device=staleness.device).pow(staleness.clamp(min=0))


def is_low_entropy(entropies: Tensor, segments: Tensor, num_segments: int, top_share: float) -> Tensor:
    """`[T] bool`: not among the ⌈q n_i⌉ tokens of highest entropy of its sequence. Source: arXiv 2506.01939.

    The paper takes the top share of a batch; a sequence's own is the same for any split into micro-batches.

    Args:
        entropies: `[T]` of the policy at each token, nats; among equals the earlier token counts.
        segments: `[T] int64`, which sequence each token belongs to.
        num_segments: S.
        top_share: q in (0, 1].
    """
    by_entropy = torch.sort(entropies.detach(), descending=True, stable=True).indices
    order = by_entropy[torch.sort(segments[by_entropy], stable=True).indices]
    counts = torch.bincount(segments, minlength=num_segments)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(segments)
    ranks[order] = torch.arange(len(segments), device=segments.device) - starts[segments[order]]
    num_kept = (counts.double() * top_share - 1e-9).ceil()
    return ranks >= num_kept[segments]
