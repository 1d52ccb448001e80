"""The algorithms that `kernels.policy_loss` has: loss, gradient and metrics of a micro-batch in one pass on a GPU.

Any other, and any on a CPU, is composed of `objective.py` and `metrics.py`, which the kernel is tested against.

Shape legend: T loss tokens.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.policy_loss import ClippedLoss, ClippedTokens, clipped_policy_loss
from penstock.trainer.algorithms.kl import MAX_K3_LOG_RATIO
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.tokens import MAX_LOG_RATIO
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.config import AlgorithmConfig

Estimator = Literal["none", "k2", "k3"]
_CORRECTIONS: tuple[Literal["none", "decoupled", "tis_token"], ...] = ("none", "decoupled", "tis_token")
_ESTIMATORS = ("k2", "k3")


def fused_settings(config: AlgorithmConfig) -> ClippedLoss | None:
    """What the kernel is told; None if it does not have the algorithm.

    It has `ppo_clip` with one correction by token, a divergence by token in the loss and no other factor. A divergence
    at `proximal=behavior` has a factor of its own (u in `objective.py`).
    """
    correction = next((name for name in _CORRECTIONS if config.correction == (name,)), None)
    estimator = config.kl_estimator if config.kl_in_loss else "none"
    has_plain_divergence = estimator == "none" or (estimator in _ESTIMATORS and config.proximal != "behavior")
    has_factors = config.lag_decay < 1 or config.entropy_top_share < 1
    if config.loss != "ppo_clip" or correction is None or not has_plain_divergence or has_factors:
        return None
    return ClippedLoss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        max_log_ratio=MAX_LOG_RATIO,
        max_kl_log_ratio=MAX_K3_LOG_RATIO,
        correction=correction,
        cap=config.correction_cap if correction == "decoupled" else config.tis_cap,
        kl=cast("Estimator", estimator),
        kl_coefficient=config.kl_in_loss,
    )


def can_fuse(target: Tensor) -> bool:
    """Logprobs that the kernel takes: in float32, where Triton runs."""
    return target.dtype == torch.float32 and runs_on_triton(target)


def fused_loss(
    target: Tensor,
    proximal: Tensor,
    start: Tensor | None,
    entropies: Tensor,
    micro_batch: MicroBatch,
    settings: ClippedLoss,
    metrics: TokenMetrics,
) -> Tensor:
    """Σ weight · term of one micro-batch, with gradient in `target`; what is measured is added to `metrics`.

    Args:
        target: `[T] float32`.
        proximal: `[T] float32`, without gradient.
        start: `[T] float32`, logprobs at the start of the batch; None: not known any more, or measured before.
        entropies: `[T] float32`, nats.
        micro_batch: Everything else.
        settings: Of the algorithm.
        metrics: Of the optimizer step.
    """
    reference, teacher = micro_batch.reference_logprobs, micro_batch.teacher_logprobs
    tokens = ClippedTokens(
        target=target,
        proximal=proximal,
        behavior=micro_batch.behavior_logprobs,
        reference=reference,
        advantages=micro_batch.advantages,
        weights=micro_batch.token_weights,
        start=start,
        teacher=reference if teacher is None else teacher,
        entropies=entropies,
        lags=micro_batch.lags,
        last_lags=metrics.last_lags,
    )
    loss, sums, maxima, by_lag = clipped_policy_loss(tokens, settings)
    if micro_batch.num_tokens:
        metrics.add_sums(sums, maxima, by_lag)
    return loss
