"""Triton kernel from a tile of float32 logits to the gradient in them, in the dtype of the following matrix product.

`portable.logprob.gradient_of_tile` has the formula and the torch version. Reads 4 bytes per logit, writes 2 (bf16).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.kernels.portable.logprob import LogprobGradient

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((2048, 4), (4096, 8), (8192, 8))]


@triton.autotune(configs=CONFIGS[:1] if is_interpreted() else CONFIGS, key=["vocab_size"])
@triton.jit
def logits_gradient_kernel(
    logits,
    gradient,
    columns,
    upstream_logprob,
    upstream_entropy,
    maxima,
    log_totals,
    entropies,
    vocab_size,
    scale,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row, BLOCK columns. `logits` and `gradient` are contiguous `[t, vocab_size]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < vocab_size
    target = tl.load(columns + row)
    upstream = tl.load(upstream_logprob + row)
    log_probability = tl.load(logits + row * vocab_size + column, mask=is_inside, other=0.0) * scale
    log_probability = (log_probability - tl.load(maxima + row)) - tl.load(log_totals + row)
    probability = tl.exp(log_probability)
    slope = upstream
    if HAS_ENTROPY:
        slope += tl.load(upstream_entropy + row) * (log_probability + tl.load(entropies + row))
    result = tl.where(column == target, upstream, 0.0) - probability * slope
    tl.store(gradient + row * vocab_size + column, result.to(gradient.dtype.element_ty), mask=is_inside)


def logits_gradient(
    logits: Tensor, columns: Tensor, upstream: LogprobGradient, scale: float, dtype: torch.dtype
) -> Tensor:
    """Compute the gradient in the scaled logits.

    Args:
        logits: `[t, v]` float32, unscaled, contiguous.
        columns: `[t] int64`, each row's target in this tile; outside of 0 … v − 1 if it is in another tile.
        upstream: Upstream gradients of these tokens.
        scale: Multiplies the logits.
        dtype: Data type of the result.

    Returns:
        `[t, v]`.
    """
    num_tokens, vocab_size = logits.shape
    gradient = torch.empty_like(logits, dtype=dtype)
    # Without an entropy gradient the kernel needs some pointer, which it does not read.
    entropy = upstream.logprob if upstream.entropy is None else upstream.entropy

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return num_tokens, triton.cdiv(vocab_size, meta["BLOCK"])

    logits_gradient_kernel[grid](
        logits,
        gradient,
        columns.contiguous(),
        upstream.logprob,
        entropy,
        upstream.maximum,
        upstream.log_total,
        upstream.entropies,
        vocab_size,
        scale,
        HAS_ENTROPY=upstream.entropy is not None,
    )
    return gradient
