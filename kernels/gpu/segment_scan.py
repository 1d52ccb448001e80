"""The scan of `kernels.segment_scan`: one program per sequence, from its last block of tokens to its first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = (256, 1024)
"""Tokens per block: the first serves sequences no longer than itself."""


@triton.jit
def combine(right_decay, right_value, decay, value):
    """The affine map of a token after that of the tokens to its right."""
    return right_decay * decay, value + decay * right_value


@triton.jit
def reverse_scan_kernel(values, decay, result, bounds, BLOCK: tl.constexpr):
    """One program: one sequence. `bounds` is int64, everything else float32."""
    start = tl.load(bounds + tl.program_id(0))
    stop = tl.load(bounds + tl.program_id(0) + 1)
    carry = 0.0
    for block in range(tl.cdiv(stop - start, BLOCK)):
        token = stop - (block + 1) * BLOCK + tl.arange(0, BLOCK)
        is_inside = token >= start
        value = tl.load(values + token, mask=is_inside, other=0.0)
        factor = tl.load(decay + token, mask=is_inside, other=1.0)  # in front of the first token: the carry passes
        product, scanned = tl.associative_scan((factor, value), 0, combine, reverse=True)
        scanned += product * carry
        tl.store(result + token, scanned, mask=is_inside)
        carry = tl.sum(tl.where(tl.arange(0, BLOCK) == 0, scanned, 0.0))


def scan_by_sequence(values: Tensor, decay: Tensor, bounds: Tensor) -> Tensor:
    """`y_t = values_t + decay_t · y_{t+1}` within each sequence; see `kernels.segment_scan.reverse_scan`."""
    result = torch.empty_like(values)
    num_sequences = len(bounds) - 1
    if num_sequences and values.numel():
        mean_length = values.numel() / num_sequences
        block = BLOCKS[0] if mean_length <= BLOCKS[0] else BLOCKS[1]
        reverse_scan_kernel[(num_sequences,)](values, decay, result, bounds, BLOCK=block)
    return result
