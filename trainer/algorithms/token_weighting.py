"""Which tokens count, and how much, for reasons other than the behavior policy's probability of them.

Shape legend: T loss tokens, S sequences of one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lag_factors(lags: Tensor, decay: float) -> Tensor:
    """`decay^lag`, `[T] float64`: staler tokens count less. Lag is the staleness in versions, `[T] int64` ≥ 0."""
    return torch.as_tensor(decay, dtype=torch.float64, device=lags.device).pow(lags.clamp(min=0))


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
