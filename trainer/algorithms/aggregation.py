"""Aggregation over tokens as weights: loss = Σ weight · term, over any split into ranks and micro-batches.

A weight is a share divided by a normaliser. The normaliser is computed once over the whole batch, before any rejection
(I9), so the same batch gives the same gradient however the work is split.

Shape legend: N sequences of the whole batch (all ranks), all tokens of which weigh the same; T loss tokens and S
sequences of one micro-batch, in which individual tokens may have a smaller weight or none (`staleness_factors`,
`is_low_entropy`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.algorithms.catalog import find


class Lengths(NamedTuple):
    """The sequences of a batch, or of a part of it that holds whole groups.

    Attributes:
        num_loss_tokens: `[N] int64`, n_i: tokens of sequence i with loss mask 1. May be 0.
        groups: `[N] int64`, which group each belongs to.
    """

    num_loss_tokens: NDArray[np.int64]
    groups: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.float64]:
        """`[N]`, n_i, at least 1."""
        return np.maximum(self.num_loss_tokens, 1).astype(np.float64)


def token_mean(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1, over Σ n_i. DAPO, arXiv 2503.14476."""
    del max_new_tokens
    return np.ones_like(lengths.counts)


def seq_mean_token_mean(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1 / n_i, over N. DeepSeekMath, arXiv 2402.03300."""
    del max_new_tokens
    return 1.0 / lengths.counts


def prompt_mean(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1 / Σ n_j of its group, over the number of groups: every prompt counts once. ScaleRL, arXiv 2510.13786."""
    del max_new_tokens
    _, group_of = np.unique(lengths.groups, return_inverse=True)
    return 1.0 / np.maximum(np.bincount(group_of, lengths.num_loss_tokens), 1.0)[group_of]


def seq_mean_token_sum(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1, over N: the gradient of the sequence's own log-probability."""
    del max_new_tokens
    return np.ones_like(lengths.counts)


def constant_length(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """Share 1 / max_new_tokens, over N. Dr. GRPO, arXiv 2503.20783."""
    return np.full_like(lengths.counts, 1.0 / max_new_tokens)


def token_weights(
    lengths: Lengths, mode: str, max_new_tokens: int, normaliser: float | None = None
) -> NDArray[np.float64]:
    """Weight of each loss token, per sequence.

    Args:
        lengths: Of the N sequences.
        mode: Name of an aggregation.
        max_new_tokens: The sampling limit, tokens; used by `constant_length` only.
        normaliser: Instead of `batch_normaliser` of these sequences; 1 where the gradient is divided at the end.

    Returns:
        `[N] float64`; a sequence without loss tokens gets 0 but counts in N.
    """
    shares = find("aggregation", mode).load()(lengths, max_new_tokens)
    total = max(batch_normaliser(lengths, mode), 1.0) if normaliser is None else normaliser
    return np.where(lengths.num_loss_tokens > 0, shares / total, 0.0)


def batch_normaliser(lengths: Lengths, mode: str) -> float:
    """Divisor of the shares of a batch. The normalisers of its parts add up to that of the batch."""
    if mode == "token_mean":
        return float(lengths.num_loss_tokens.sum())
    return float(len(np.unique(lengths.groups)) if mode == "prompt_mean" else len(lengths.groups))


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
