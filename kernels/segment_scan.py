"""The reverse scan over packed sequences that generalised advantage estimation is made of: y_t = x_t + d_t · y_{t+1}.

By doubling: ⌈log₂ L⌉ vectorised steps for sequences of up to L tokens, no loop over tokens. After the step of width w,
`result[t]` covers the 2w tokens from t on, and `carry[t]` is the product of their decays: what lies beyond has still to
be multiplied with it. Source: Hillis and Steele 1986, doi 10.1145/7902.7903. It carries no gradient.

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
        decay: `[T]` of the same; that of a sequence's last token is not read.
        bounds: `[S + 1] int64`: 0, where each sequence ends, T. Empty sequences are allowed.

    Returns:
        `[T]`.

    Raises:
        ShapeError: If `bounds` are not those of the tokens.
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
        # Beyond the last token nothing follows, and of what follows a last token nothing is carried.
        carry = torch.cat([carry[:-width] * carry[width:], torch.zeros_like(carry[-width:])])
        width *= 2
    return result
