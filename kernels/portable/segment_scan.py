"""The scan of `kernels.segment_scan` by doubling: ⌈log₂ L⌉ vectorised steps, no loop over tokens.

After the step of width w, `result[t]` covers the 2w tokens from t on, and `carry[t]` is the product of their decays:
what lies beyond has still to be multiplied with it. Source: Hillis and Steele 1986, doi 10.1145/7902.7903.

Shape legend: T packed tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scan_by_doubling(values: Tensor, decay: Tensor, bounds: Tensor) -> Tensor:
    """`y_t = values_t + decay_t · y_{t+1}` within each sequence; see `kernels.segment_scan.reverse_scan`."""
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
