"""The clipped policy loss of packed tokens with its correction, divergence and metrics, in one pass on a GPU.

    ρ = exp(c − p);   w = exp(p − b);   log-ratios clamped before exp
    loss = Σ_t weight_t · (f(w_t) · max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)) + g(w_t) · β · kl(c, r))
    f(w):  none 1;   decoupled w, 0 where w > cap;   tis_token min(w, cap)         without gradient
    g(w):  f(w), but 1 where w > cap masks the token
    kl:    k2 ½ (c − r)²;   k3 exp(d) − d − 1, d = r − c clamped

c target, p proximal, b behavior, r reference logprobs. On a GPU a micro-batch of these few hundred kilobytes is bound
by the number of kernels launched, 122 where it is composed; here it is one, and about ten around it. There is no
torch version beside it: that is what the trainer composes, runs where this does not, and tests this against. Sources:
PPO arXiv 1707.06347, AReaL arXiv 2505.24298 (decoupled).

Shape legend: T packed loss tokens, L buckets of staleness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError

SUMS = (
    "tokens", "measured_tokens", "loss", "entropy", "weight", "weight_squared", "masked", "clipped_low", "clipped_high",
    "abs_log_ratio", "kl_k3", "reference_kl", "teacher_kl", "token_weight", "kept_token_weight",
)  # fmt: skip
"""What is added up over tokens, in this order."""
BY_STALENESS = ("tokens", "weight", "masked", "weight_squared", "abs_log_ratio", "kl_k3")
"""What is added up over the tokens of each bucket of staleness, in this order."""
MAXIMA = ("weight", "abs_log_ratio")
"""What is maximised over tokens, in this order; behind it the greatest weight of each bucket of staleness."""


@dataclass(frozen=True)
class ClippedLoss:
    """The combinations that have a kernel: `ppo_clip` with a weight per token and a divergence per token.

    Attributes:
        clip_low: ε_low, in ratio units.
        clip_high: ε_high, in ratio units.
        max_log_ratio: c − p and p − b are clamped to ± this before exp.
        max_kl_log_ratio: r − c is clamped to ± this in k3, in both of its terms.
        correction: `none`: 1. `decoupled`: w, masked where w > cap. `tis_token`: min(w, cap).
        cap: Of the weight w; not read by `none`.
        kl: Estimator of the divergence from the reference.
        kl_coefficient: β ≥ 0; not read without an estimator.
    """

    clip_low: float
    clip_high: float
    max_log_ratio: float
    max_kl_log_ratio: float
    correction: Literal["none", "decoupled", "tis_token"]
    cap: float
    kl: Literal["none", "k2", "k3"]
    kl_coefficient: float


class ClippedTokens(NamedTuple):
    """One micro-batch; gradient flows to `target` alone.

    Attributes:
        target: `[T] float32` c, logprobs of the policy in training.
        proximal: `[T] float32` p, logprobs at the centre of the trust region.
        behavior: `[T] float32` b, logprobs recorded by the engine.
        reference: `[T] float32` r, of the reference policy; anything finite if there is none.
        advantages: `[T] float32` A.
        weights: `[T] float32`, of the aggregation: the loss is their weighted sum.
        start: `[T] float32`, logprobs at the start of the batch; None: behavior weights are not measured.
        teacher: `[T] float32`, of a teacher; only measured.
        entropies: `[T] float32`, nats; only measured.
        staleness: `[T] int64`, staleness in versions.
        bucket_ends: `[L − 1] int64`, ascending: the largest staleness of each bucket but the last. The first bucket
            holds the tokens of other policies: only `BY_STALENESS` measures their behavior weights.
    """

    target: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor
    advantages: Tensor
    weights: Tensor
    start: Tensor | None
    teacher: Tensor
    entropies: Tensor
    staleness: Tensor
    bucket_ends: Tensor


class LossAndMetrics(NamedTuple):
    """What one pass over the tokens gives. Sums over micro-batches and ranks are those of the batch.

    Attributes:
        loss: Scalar float32, with gradient in `target`.
        sums: `[15] float64`, see `SUMS`.
        maxima: `[2] float64`, see `MAXIMA`; 0 if nothing is measured.
        by_staleness: `[L, 6] float64`, see `BY_STALENESS`; 0 likewise.
    """

    loss: Tensor
    sums: Tensor
    maxima: Tensor
    by_staleness: Tensor


def clipped_policy_loss(tokens: ClippedTokens, settings: ClippedLoss) -> LossAndMetrics:
    """Compute the loss of one micro-batch and all that is measured of it, with Triton (`runs_on_triton`).

    Raises:
        ShapeError: If the columns are not equally long, flat and float32 (staleness int64).
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
    from penstock.kernels.gpu.policy_loss import fused_clipped_loss

    return fused_clipped_loss(tokens, settings)
