"""Segmented reverse scan over packed sequences, y_t = x_t + d_t · y_{t+1}, for generalized advantage estimation.

The scan takes ⌈log₂ L⌉ vectorized doubling steps for sequences of up to L tokens, without a loop over tokens. After the
step of width w, `result[t]` covers the 2w tokens from t on, and `carry[t]` is the product of their decays, by which
contributions of later tokens are multiplied. Not differentiable. Source: Hillis and Steele 1986, doi
10.1145/7902.7903.

Shape legend: T packed tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError


@torch.no_grad()
def reverse_scan(values: Tensor, decay: Tensor, bounds: Tensor) -> Tensor:
    """Compute `y_t = values_t + decay_t · y_{t+1}` from the end of each sequence to its start.

    Args:
        values: `[T]` float32 or float64.
        decay: `[T]`, of the same dtype; the value at a sequence's last token is ignored.
        bounds: `[S + 1] int64`: 0, where each sequence ends, T. Empty sequences are allowed.

    Returns:
        `[T]`.

    Raises:
        ShapeError: If the shapes do not match or `bounds` do not ascend from 0 to T.
    """
    if values.shape != decay.shape or values.dim() != 1 or len(bounds) == 0:
        raise ShapeError(
            f"reverse_scan: values are {list(values.shape)}, decay {list(decay.shape)}, bounds {list(bounds.shape)}. "
            "They must be [T], [T] and [S + 1]: flatten the packed tokens first."
        )
    if int(bounds[0]) != 0 or int(bounds[-1]) != len(values) or bool((bounds.diff() < 0).any()):
        raise ShapeError(
            f"reverse_scan: bounds run from {int(bounds[0])} to {int(bounds[-1])} over {len(values)} tokens. Tokens "
            "outside of every sequence would get no result: bounds must ascend from 0 to the number of tokens."
        )
    lengths = bounds.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    carry = decay.clone()
    carry[bounds[1:][lengths > 0] - 1] = 0.0
    result, width = values.clone(), 1
    while width < longest:
        result[:-width] += carry[:-width] * result[width:].clone()
        # Windows that reach past the last token are complete, so their carry is 0.
        carry = torch.cat([carry[:-width] * carry[width:], torch.zeros_like(carry[-width:])])
        width *= 2
    return result
