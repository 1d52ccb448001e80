"""Aggregation over tokens as weights: loss = Σ weight · term, over any split into ranks and micro-batches.

A weight is a share divided by a normaliser. The normaliser is computed once over the whole batch, before any rejection
(I9), so the same batch gives the same gradient however the work is split.

Shape legend: N sequences of the whole batch (all ranks), all tokens of which weigh the same; T loss tokens and S
sequences of one micro-batch, in which individual tokens may have a smaller weight or none (`staleness_factors`,
`is_low_entropy`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.algorithms.catalog import Entry

if TYPE_CHECKING:
    from torch import Tensor


SEQUENCE_SUMS = ("seq_mean_token_sum", "constant_length")
"""Means over sequences of what is summed over the tokens of each."""
SEQUENCE_MEANS = ("seq_mean_token_mean", *SEQUENCE_SUMS)


class Lengths(NamedTuple):
    """The sequences of a batch, or of a part of it that holds whole groups."""

    num_loss_tokens: NDArray[np.int64]
    """`[N] int64`, n_i: tokens of sequence i with loss mask 1. May be 0."""
    groups: NDArray[np.int64]
    """`[N] int64`, which group each belongs to."""

    @property
    def counts(self) -> NDArray[np.float64]:
        """`[N]`, n_i, at least 1."""
        return np.maximum(self.num_loss_tokens, 1).astype(np.float64)


@Entry("aggregation", source="2503.14476")
def token_mean(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """`weight 1 / Σ n_i`: share 1, over Σ n_i. DAPO."""
    del max_new_tokens
    return np.ones_like(lengths.counts)


@Entry("aggregation", source="2402.03300")
def seq_mean_token_mean(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """`weight 1 / (N n_i)`: share 1 / n_i, over N. DeepSeekMath."""
    del max_new_tokens
    return 1.0 / lengths.counts


@Entry("aggregation", source="2510.13786")
def prompt_mean(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """`weight 1 / (number of groups · Σ n_j of its group)`: every prompt counts once. ScaleRL."""
    del max_new_tokens
    _, group_of = np.unique(lengths.groups, return_inverse=True)
    return 1.0 / np.maximum(np.bincount(group_of, lengths.num_loss_tokens), 1.0)[group_of]


@Entry("aggregation", source="2503.20783")
def seq_mean_token_sum(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """`weight 1 / N`: the gradient of the sequence's own log-probability."""
    del max_new_tokens
    return np.ones_like(lengths.counts)


@Entry("aggregation", source="2503.20783")
def constant_length(lengths: Lengths, max_new_tokens: int) -> NDArray[np.float64]:
    """`weight 1 / (N · max_new_tokens)`. Dr. GRPO."""
    return np.full_like(lengths.counts, 1.0 / max_new_tokens)


Aggregation = Callable[[Lengths, int], NDArray[np.float64]]
"""One of the functions above."""


def token_weights(
    lengths: Lengths, aggregation: Aggregation, max_new_tokens: int, normaliser: float | None = None
) -> NDArray[np.float64]:
    """Weight of each loss token, per sequence.

    Args:
        lengths: Of the N sequences.
        aggregation: What is averaged.
        max_new_tokens: The sampling limit, tokens; used by `constant_length` only.
        normaliser: Instead of `batch_normaliser` of these sequences; 1 where the gradient is divided at the end.

    Returns:
        `[N] float64`; a sequence without loss tokens gets 0 but counts in N.
    """
    shares = aggregation(lengths, max_new_tokens)
    total = max(batch_normaliser(lengths, aggregation), 1.0) if normaliser is None else normaliser
    return np.where(lengths.num_loss_tokens > 0, shares / total, 0.0)


def batch_normaliser(lengths: Lengths, aggregation: Aggregation) -> float:
    """Divisor of the shares of a batch. The normalisers of its parts add up to that of the batch."""
    if aggregation is token_mean:
        return float(lengths.num_loss_tokens.sum())
    return float(len(np.unique(lengths.groups)) if aggregation is prompt_mean else len(lengths.groups))


@Entry("token_weighting", name="staleness_decay")
def staleness_factors(staleness: Tensor, decay: float) -> Tensor:
    """`term · decay^staleness`; `[T] float64` factors. `staleness` is `[T] int64` ≥ 0, in versions."""
    import torch

    return torch.as_tensor(decay, dtype=torch.float64, device=staleness.device).pow(staleness.clamp(min=0))


@Entry("token_weighting", name="entropy_top_share", source="2506.01939", level="sequence")
def is_low_entropy(entropies: Tensor, segments: Tensor, num_segments: int, top_share: float) -> Tensor:
    """`only the ⌈q n_i⌉ tokens of highest entropy of each sequence`; `[T] bool`, True for the others.

    The paper takes the top share of a batch; a sequence's own is the same for any split into micro-batches.

    Args:
        entropies: `[T]` of the policy at each token, nats; among equals the earlier token counts.
        segments: `[T] int64`, which sequence each token belongs to.
        num_segments: S.
        top_share: q in (0, 1].
    """
    import torch

    by_entropy = torch.sort(entropies.detach(), descending=True, stable=True).indices
    order = by_entropy[torch.sort(segments[by_entropy], stable=True).indices]
    counts = torch.bincount(segments, minlength=num_segments)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(segments)
    ranks[order] = torch.arange(len(segments), device=segments.device) - starts[segments[order]]
    num_kept = (counts.double() * top_share - 1e-9).ceil()
    return ranks >= num_kept[segments]
