"""Loss, gradient and metrics of packed tokens in one pass: 28 bytes read and 4 written per token.

The loss is a scalar, so its gradient in the target logprobs is known up to one factor, which backward supplies.
Formulas: `portable.policy_loss`. Comparisons are written so that NaN passes through: a NaN is to end the step.

Shape legend: T packed loss tokens, b blocks of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.kernels.portable.policy_loss import MAX_LOG_RATIO, MAXIMA, SUMS, ClippedLoss, LossAndMetrics, LossTokens

BLOCK = 32 if is_interpreted() else 1024
NUM_COLUMNS = len(SUMS) + len(MAXIMA)
CORRECTIONS = {"none": 0, "decoupled": 1, "tis_token": 2}
DIVERGENCES = {"none": 0, "k2": 2, "k3": 3}


@triton.jit
def clamped(log_ratio, limit):
    """NaN stays NaN, which `tl.clamp` does not promise."""
    return tl.where(log_ratio > limit, limit, tl.where(log_ratio < -limit, -limit, log_ratio))


@triton.jit
def greatest(left, right):
    """Maximum that keeps NaN."""
    return tl.where((left > right) | (left != left), left, right)


@triton.jit
def clipped_loss_kernel(
    target,
    proximal,
    behavior,
    reference,
    advantages,
    weights,
    entropies,
    gradient,
    partials,
    num_tokens,
    lowest_ratio,
    highest_ratio,
    cap,
    kl_coefficient,
    limit,
    CORRECTION: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    """One program: BLOCK tokens -> their gradient, and one row of `partials` `[b, NUM_COLUMNS]`."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    c = tl.load(target + token, mask=is_token, other=0.0)
    p = tl.load(proximal + token, mask=is_token, other=0.0)
    r = tl.load(reference + token, mask=is_token, other=0.0)
    advantage = tl.load(advantages + token, mask=is_token, other=0.0)
    log_weight = p - tl.load(behavior + token, mask=is_token, other=0.0)

    log_ratio = c - p
    ratio = tl.exp(clamped(log_ratio, limit))
    unclipped = -advantage * ratio
    inside = tl.where(ratio < lowest_ratio, lowest_ratio, tl.where(ratio > highest_ratio, highest_ratio, ratio))
    clipped = -advantage * inside
    is_clipped = clipped > unclipped
    is_free = (log_ratio >= -limit) & (log_ratio <= limit)
    term = greatest(unclipped, clipped)
    slope = tl.where(is_clipped | (is_free == 0), 0.0, unclipped)
    if DIVERGENCE == 2:
        term += kl_coefficient * 0.5 * (c - r) * (c - r)
        slope += kl_coefficient * (c - r)
    if DIVERGENCE == 3:
        drift = tl.exp(clamped(r - c, limit))
        term += kl_coefficient * (drift - (r - c) - 1.0)
        slope += kl_coefficient * (1.0 - tl.where((r - c >= -limit) & (r - c <= limit), drift, 0.0))

    weight = tl.exp(clamped(log_weight, limit))
    is_above = weight > cap
    factor = weight
    if CORRECTION == 0:
        factor = tl.full((BLOCK,), 1.0, tl.float32)
        is_above = is_above & False
    if CORRECTION == 1:
        factor = tl.where(is_above, 0.0, weight)
    if CORRECTION == 2:
        factor = tl.where(is_above, cap, weight)
        is_above = is_above & False
    factor *= tl.load(weights + token, mask=is_token, other=0.0)
    tl.store(gradient + token, factor * slope, mask=is_token)

    row = partials + tl.program_id(0) * NUM_COLUMNS
    distance = tl.abs(log_weight)
    measured = tl.exp(clamped(r - p, limit)) - (r - p) - 1.0
    inside_weight = tl.where(is_token, weight, 0.0)
    tl.store(row + 0, tl.sum(is_token.to(tl.float32), 0))
    tl.store(row + 1, tl.sum(factor * term, 0))
    tl.store(row + 2, tl.sum(tl.load(entropies + token, mask=is_token, other=0.0), 0))
    tl.store(row + 3, tl.sum(inside_weight, 0))
    tl.store(row + 4, tl.sum(inside_weight * inside_weight, 0))
    tl.store(row + 5, tl.sum((is_above & is_token).to(tl.float32), 0))
    tl.store(row + 6, tl.sum((is_clipped & is_token).to(tl.float32), 0))
    tl.store(row + 7, tl.sum(distance, 0))
    tl.store(row + 8, tl.sum(tl.where(is_token, weight - log_weight - 1.0, 0.0), 0))
    tl.store(row + 9, tl.sum(measured, 0))
    tl.store(row + 10, tl.reduce(inside_weight, 0, greatest))
    tl.store(row + 11, tl.reduce(distance, 0, greatest))


class _ClippedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Tensor, tokens: LossTokens, settings: ClippedLoss) -> tuple[Tensor, Tensor]:
        num_tokens = target.numel()
        num_blocks = triton.cdiv(num_tokens, BLOCK)
        gradient = torch.empty_like(target)
        partials = target.new_zeros((max(num_blocks, 1), NUM_COLUMNS))
        if num_blocks:
            clipped_loss_kernel[(num_blocks,)](
                *(each.contiguous() for each in tokens),
                gradient,
                partials,
                num_tokens,
                1.0 - settings.clip_low,
                1.0 + settings.clip_high,
                settings.cap,
                settings.kl_coefficient,
                MAX_LOG_RATIO,
                CORRECTION=CORRECTIONS[settings.correction],
                DIVERGENCE=DIVERGENCES[settings.kl],
                BLOCK=BLOCK,
                NUM_COLUMNS=NUM_COLUMNS,
            )
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(partials)
        return partials[:, 1].sum(dtype=torch.float64).float(), partials

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None


def fused_clipped_loss(tokens: LossTokens, settings: ClippedLoss) -> LossAndMetrics:
    """See `kernels.policy_loss.clipped_policy_loss`."""
    loss, partials = _ClippedLoss.apply(tokens.target, tokens, settings)
    sums = partials[:, : len(SUMS)].sum(0, dtype=torch.float64)
    return LossAndMetrics(loss, sums, partials[:, len(SUMS) :].amax(0).double())
