"""Fused clipped policy loss of packed tokens, with off-policy correction, KL divergence and metrics, on a GPU.

    ρ = exp(c − p);   w = exp(p − b);   log-ratios clamped before exp
    loss = Σ_t weight_t · (f(w_t) · max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)) + g(w_t) · β · kl(c, r))
    f(w):  none 1;   decoupled w, 0 where w > cap;   tis_token min(w, cap)         without gradient
    g(w):  f(w), but 1 where w > cap masks the token
    kl:    k2 ½ (c − r)²;   k3 exp(d) − d − 1, d = r − c clamped

c target, p proximal, b behavior, r reference logprobs. A micro-batch has a few hundred kilobytes, so its time on a GPU
is bound by kernel launches: 122 for the loss composed of torch operations, one here plus about ten around it. There is
no torch version in this package: the trainer's composed loss is the fallback and the reference in tests. Sources: PPO
arXiv 1707.06347, AReaL arXiv 2505.24298 (decoupled).

Shape legend: T packed loss tokens, L buckets of staleness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.dataflow.errors import ShapeError

SUMS = (
    "tokens", "measured_tokens", "loss", "entropy", "weight", "weight_squared", "masked", "clipped_low", "clipped_high",
    "abs_log_ratio", "kl_k3", "reference_kl", "teacher_kl", "token_weight", "kept_token_weight",
)  # fmt: skip
"""Sums over all tokens, in this order."""
BY_STALENESS = ("tokens", "weight", "masked", "weight_squared", "abs_log_ratio", "kl_k3")
"""Sums over the tokens of each staleness bucket, in this order."""
MAXIMA = ("weight", "abs_log_ratio")
"""Maxima over all tokens, in this order, followed by the largest weight of each staleness bucket."""


@dataclass(frozen=True)
class ClippedLoss:
    """Settings of the fused loss: `ppo_clip` with an off-policy weight and a KL divergence per token."""

    clip_low: float
    """ε_low, in ratio units."""
    clip_high: float
    """ε_high, in ratio units."""
    max_log_ratio: float
    """c − p and p − b are clamped to ± this before exp."""
    max_kl_log_ratio: float
    """r − c is clamped to ± this in k3, in both of its terms."""
    correction: Literal["none", "decoupled", "tis_token"]
    """`none`: 1. `decoupled`: w, masked where w > cap. `tis_token`: min(w, cap)."""
    cap: float
    """Upper limit of the weight w; ignored by `none`."""
    kl: Literal["none", "k2", "k3"]
    """Estimator of the divergence from the reference."""
    kl_coefficient: float
    """β ≥ 0; ignored without an estimator."""


class ClippedTokens(NamedTuple):
    """Columns of one micro-batch. Gradient flows to `target` only."""

    target: Tensor
    """`[T] float32` c, logprobs of the policy in training."""
    proximal: Tensor
    """`[T] float32` p, logprobs of the proximal policy, the centre of the trust region."""
    behavior: Tensor
    """`[T] float32` b, logprobs recorded by the engine."""
    reference: Tensor
    """`[T] float32` r, logprobs of the reference policy; any finite values if there is none."""
    advantages: Tensor
    """`[T] float32` A."""
    weights: Tensor
    """`[T] float32`, aggregation weights: the loss is the weighted sum over tokens."""
    start: Tensor | None
    """`[T] float32`, logprobs at the start of the batch; None disables metrics of behavior weights."""
    teacher: Tensor
    """`[T] float32`, logprobs of a teacher, used for metrics only."""
    entropies: Tensor
    """`[T] float32`, nats, used for metrics only."""
    staleness: Tensor
    """`[T] int64`, staleness in versions."""
    bucket_ends: Tensor
    """`[L − 1] int64`, ascending: the largest staleness of each bucket but the last. The first bucket holds the tokens
    of other policies, whose behavior weights enter `BY_STALENESS` only."""


class LossAndMetrics(NamedTuple):
    """Result of one pass over the tokens. Summing over micro-batches and ranks gives the values of the batch."""

    loss: Tensor
    """Scalar float32, with gradient in `target`."""
    sums: Tensor
    """`[15] float64`, see `SUMS`."""
    maxima: Tensor
    """`[2] float64`, see `MAXIMA`; 0 without `start`."""
    by_staleness: Tensor
    """`[L, 6] float64`, see `BY_STALENESS`; 0 without `start`."""


def clipped_policy_loss(tokens: ClippedTokens, settings: ClippedLoss) -> LossAndMetrics:
    """Compute the loss and the metrics of one micro-batch with Triton. Requires `runs_on_triton`.

    Raises:
        ShapeError: If the columns are not one-dimensional, of equal length and float32 (staleness int64).
    """
    length = tokens.target.shape
    columns = {
        name: column for name, column in tokens._asdict().items() if name != "bucket_ends" and column is not None
    }
    wrong = [
        f"{name} {list(column.shape)} {column.dtype}"
        for name, column in columns.items()
        if column.shape != length
        or column.dim() != 1
        or column.dtype != (torch.int64 if name == "staleness" else torch.float32)
    ]
    if wrong:
        raise ShapeError(
            f"clipped_policy_loss: {', '.join(wrong)}, with a target of {list(length)}. Every column must be [T] "
            "float32, staleness [T] int64, one number per loss token: select the loss tokens first, and cast."
        )
    fixed = {name: column.detach() for name, column in tokens._asdict().items() if column is not None}
    loss, partials = _ClippedLoss.apply(tokens.target, tokens._replace(**fixed), settings)
    added, end = partials.sum(0), len(SUMS) + len(MAXIMA) + len(tokens.bucket_ends) + 1
    maxima, by_staleness = partials[:, len(SUMS) : end].amax(0), added[end:].view(-1, len(BY_STALENESS))
    return LossAndMetrics(loss, added[: len(SUMS)], maxima, by_staleness)


class _ClippedLoss(torch.autograd.Function):
    """The loss, and the partial sums and maxima of every program of the kernel, which writes the gradient as well."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, tokens: ClippedTokens, settings: ClippedLoss) -> tuple[Tensor, Tensor]:
        from penstock.kernels.gpu.policy_loss import BLOCK, CORRECTIONS, DIVERGENCES, clipped_loss_kernel

        num_tokens, num_buckets = target.numel(), len(tokens.bucket_ends) + 1
        num_blocks = -(-num_tokens // BLOCK)
        gradient = torch.empty_like(target)
        width = len(SUMS) + len(MAXIMA) + num_buckets * (1 + len(BY_STALENESS))
        partials = torch.zeros((max(num_blocks, 1), width), dtype=torch.float64, device=target.device)
        columns = tokens._asdict() | {"start": target if tokens.start is None else tokens.start}
        if num_blocks:
            clipped_loss_kernel[(num_blocks,)](
                *(column.contiguous() for column in columns.values()),
                gradient,
                partials,
                num_tokens,
                1.0 - settings.clip_low,
                1.0 + settings.clip_high,
                settings.cap,
                settings.kl_coefficient,
                settings.max_log_ratio,
                settings.max_kl_log_ratio,
                CORRECTION=CORRECTIONS[settings.correction],
                DIVERGENCE=DIVERGENCES[settings.kl],
                IS_MEASURED=tokens.start is not None,
                NUM_BUCKETS=num_buckets,
                BLOCK=BLOCK,
            )
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(partials)
        return partials[:, SUMS.index("loss")].sum().float(), partials

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None
