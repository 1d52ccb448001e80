"""Triton kernel for loss, gradient and metrics of packed tokens: reads at most 44 bytes and writes 4 per token.

The loss is a scalar, so forward can compute its gradient in the target logprobs up to one factor, which backward
supplies. Comparisons propagate NaN, because a NaN must cause the step to be skipped. Metrics are computed in float64,
as in the composed loss: for nearly equal logprobs, exp(x) − x − 1 has no significant digit in float32.

Shape legend: T packed loss tokens, b blocks of them, L buckets of staleness.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.dispatch import is_interpreted

BLOCK = 32 if is_interpreted() else 1024
CORRECTIONS = {"none": 0, "decoupled": 1, "tis_token": 2}
DIVERGENCES = {"none": 0, "k2": 2, "k3": 3}


@triton.jit
def clamped(log_ratio, limit):
    """Clamp to ± limit. Propagates NaN, which `tl.clamp` does not guarantee."""
    return tl.where(log_ratio > limit, limit, tl.where(log_ratio < -limit, -limit, log_ratio))


@triton.jit
def greatest(left, right):
    """Maximum that propagates NaN."""
    return tl.where((left > right) | (left != left), left, right)


@triton.jit
def k3(policy, other, limit):
    """The k3 estimator of every token, in float64."""
    log_ratio = clamped(other.to(tl.float64) - policy.to(tl.float64), limit)
    return tl.exp(log_ratio) - log_ratio - 1.0


@triton.jit
def total(column):
    """Sum over the tokens of this program, in float64."""
    return tl.sum(column.to(tl.float64), 0)


@triton.jit
def clipped_loss_kernel(
    target,
    proximal,
    behavior,
    reference,
    advantages,
    weights,
    start,
    teacher,
    entropies,
    staleness,
    bucket_ends,
    gradient,
    partials,
    num_tokens,
    lowest_ratio,
    highest_ratio,
    cap,
    kl_coefficient,
    limit,
    kl_limit,
    CORRECTION: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    IS_MEASURED: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK tokens -> their gradient, and one row of `partials` `[b, 17 + 7 L] float64`.

    A row is `SUMS` from 0 on, `MAXIMA` from 15, those of each bucket from 17, `BY_STALENESS` of each from 17 + L.
    Lanes beyond the last token hold zeros, so sums need no mask where a zero contributes nothing.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    c = tl.load(target + token, mask=is_token, other=0.0)
    p = tl.load(proximal + token, mask=is_token, other=0.0)
    b = tl.load(behavior + token, mask=is_token, other=0.0)
    r = tl.load(reference + token, mask=is_token, other=0.0)
    advantage = tl.load(advantages + token, mask=is_token, other=0.0)
    token_weight = tl.load(weights + token, mask=is_token, other=0.0)

    log_ratio = c - p
    ratio = tl.exp(clamped(log_ratio, limit))
    unclipped = -advantage * ratio
    inside = tl.where(ratio < lowest_ratio, lowest_ratio, tl.where(ratio > highest_ratio, highest_ratio, ratio))
    clipped = -advantage * inside
    is_clipped = clipped > unclipped
    is_free = (log_ratio >= -limit) & (log_ratio <= limit)
    term = greatest(unclipped, clipped)
    slope = tl.where(is_clipped | (is_free == 0), 0.0, unclipped)

    weight = tl.exp(clamped(p - b, limit))
    is_masked = (weight > cap) & is_token
    factor = token_weight
    kl_factor = token_weight
    if CORRECTION == 1:
        # The mask rejects the policy term only. The divergence of a masked token has weight 1, as on-policy.
        factor *= tl.where(is_masked, 0.0, weight)
        kl_factor *= tl.where(is_masked, 1.0, weight)
    else:
        if CORRECTION == 2:
            factor *= tl.where(is_masked, cap, weight)
            kl_factor = factor
        is_masked = is_masked & False
    loss = factor * term
    slope *= factor
    if DIVERGENCE == 2:
        loss += kl_factor * kl_coefficient * 0.5 * (c - r) * (c - r)
        slope += kl_factor * kl_coefficient * (c - r)
    if DIVERGENCE == 3:
        drift = clamped(r - c, kl_limit)
        is_near = (r - c >= -kl_limit) & (r - c <= kl_limit)
        loss += kl_factor * kl_coefficient * (tl.exp(drift) - drift - 1.0)
        slope += kl_factor * kl_coefficient * tl.where(is_near, 1.0 - tl.exp(drift), 0.0)
    tl.store(gradient + token, slope, mask=is_token)

    row = partials + tl.program_id(0) * (17 + 7 * NUM_BUCKETS)
    tl.store(row + 0, total(is_token))
    tl.store(row + 2, total(loss))
    tl.store(row + 3, total(tl.load(entropies + token, mask=is_token, other=0.0)))
    tl.store(row + 6, total(is_masked))
    tl.store(row + 7, total(is_clipped & (ratio < 1.0)))
    tl.store(row + 8, total(is_clipped & (ratio > 1.0)))
    tl.store(row + 11, total(k3(c, r, kl_limit)))
    tl.store(row + 12, total(k3(c, tl.load(teacher + token, mask=is_token, other=0.0), kl_limit)))
    tl.store(row + 13, total(token_weight))
    tl.store(row + 14, total(tl.where(is_masked, 0.0, token_weight)))
    if IS_MEASURED:
        token_staleness = tl.load(staleness + token, mask=is_token, other=0)
        bucket = tl.zeros((BLOCK,), tl.int32)
        for index in tl.static_range(NUM_BUCKETS - 1):
            bucket += (token_staleness > tl.load(bucket_ends + index)).to(tl.int32)
        distance = tl.load(start + token, mask=is_token, other=0.0).to(tl.float64) - b.to(tl.float64)
        behavior_weight = tl.exp(clamped(distance, limit))
        is_own = (is_token & (bucket > 0)).to(tl.float64)
        own_weight = behavior_weight * is_own
        own_distance = tl.abs(distance) * is_own
        tl.store(row + 1, tl.sum(is_own, 0))
        tl.store(row + 4, tl.sum(own_weight, 0))
        tl.store(row + 5, tl.sum(own_weight * own_weight, 0))
        tl.store(row + 9, tl.sum(own_distance, 0))
        tl.store(row + 10, tl.sum((behavior_weight - distance - 1.0) * is_own, 0))
        tl.store(row + 15, tl.reduce(own_weight, 0, greatest))
        tl.store(row + 16, tl.reduce(own_distance, 0, greatest))
        for index in tl.static_range(NUM_BUCKETS):
            is_here = (bucket == index) & is_token
            weight_here = tl.where(is_here, behavior_weight, 0.0)
            distance_here = tl.where(is_here, distance, 0.0)
            drift_here = tl.where(is_here, behavior_weight - distance - 1.0, 0.0)
            tl.store(row + 17 + index, tl.reduce(weight_here, 0, greatest))
            sums = row + 17 + NUM_BUCKETS + 6 * index
            tl.store(sums + 0, total(is_here))
            tl.store(sums + 1, tl.sum(weight_here, 0))
            tl.store(sums + 2, total(is_here & is_masked))
            tl.store(sums + 3, tl.sum(weight_here * weight_here, 0))
            tl.store(sums + 4, tl.sum(tl.abs(distance_here), 0))
            tl.store(sums + 5, tl.sum(drift_here, 0))
