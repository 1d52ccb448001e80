"""The scalar loss of one micro-batch; what is measured of its tokens is added to the update that it belongs to.

The algorithms that `kernels.policy_loss` has are one pass on a GPU: loss, gradient and metrics. Any other, and any on a
CPU, is composed of `algorithms/objective.py` and `algorithms/metrics.py`, which the kernel is tested against.

Shape legend: T loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor

from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.policy_loss import ClippedLoss, ClippedTokens, clipped_policy_loss
from penstock.trainer.algorithms.config import ClippedConfig
from penstock.trainer.algorithms.kl import MAX_K3_LOG_RATIO
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import LossTerms, Objective
from penstock.trainer.algorithms.tokens import MAX_LOG_RATIO
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.updates import OpenUpdate

LossFunction = Callable[[Tensor, Tensor, MicroBatch, OpenUpdate], Tensor]
"""`[T]` logprobs with gradient, `[T]` entropies in nats, everything else -> Σ weight · term."""
_FUSED_CORRECTIONS: tuple[Literal["none", "decoupled", "tis_token"], ...] = ("none", "decoupled", "tis_token")


class PolicyObjective:
    """An algorithm: by one kernel where there is one for it and for the device, else composed of plain functions."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._composed = Objective(config)
        self._fused = fused_settings(config)

    def __call__(self, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor:
        if self._fused is not None and can_fuse(target):
            proximal = self._composed.proximal(target, micro_batch, is_first_update=update.is_first)
            start = _start(target, micro_batch, update)
            loss = fused_loss(target, proximal, start, entropies, micro_batch, self._fused, update.metrics)
        else:
            loss = composed_loss(self._composed, target, entropies, micro_batch, update)
        # NaN if a recorded logprob is not finite: not every algorithm reads all of them, but none may train on it. The
        # gradient of this is 0; of a loss that is not finite it becomes NaN at every token (`poison_if_not_finite`),
        # also where a clip or a mask has cut the gradient of the loss off.
        recorded = (
            micro_batch.behavior_logprobs,
            micro_batch.reference_logprobs,
            micro_batch.proximal_logprobs,
            micro_batch.teacher_logprobs,
        )
        return loss + 0.0 * torch.cat([target, *(one for one in recorded if one is not None)]).sum()


def composed_loss(
    objective: Objective, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate
) -> Tensor:
    """Any algorithm, on any device."""
    terms = objective(target, entropies, micro_batch, is_first_update=update.is_first)
    return _weighted(terms, target, entropies, micro_batch, update)


def supervised_loss(target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor:
    """−logprob of given answers."""
    nowhere, ones = torch.zeros_like(target, dtype=torch.bool), torch.ones_like(target).detach()
    terms = LossTerms(-target, nowhere, nowhere, nowhere, ones, ones, ones)
    return _weighted(terms, target, entropies, micro_batch, update)


def _weighted(
    terms: LossTerms, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate
) -> Tensor:
    loss = (terms.terms * micro_batch.token_weights).sum()
    if micro_batch.num_tokens:
        start = _start(target, micro_batch, update)
        update.metrics.add(loss, target, start, entropies, micro_batch, terms)
    return loss


def _start(target: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor | None:
    """`[T]` logprobs at the start of the batch; None: not known any more, or measured before."""
    if update.is_first:
        return target
    return micro_batch.proximal_logprobs if update.is_first_epoch else None


def fused_settings(config: AlgorithmConfig) -> ClippedLoss | None:
    """What the kernel is told; None if it does not have the algorithm.

    It has `ppo_clip` with one correction by token, a divergence by token in the loss and no other factor or term. A
    divergence at `proximal=behavior` has a factor of its own (u in `objective.py`).
    """
    loss, settings = config.loss, config.correction.decoupled or config.correction.tis_token
    correction = next((name for name in _FUSED_CORRECTIONS if str(config.correction) == name), None)
    estimator = config.kl.estimator if config.kl_in_loss else "none"
    has_plain_divergence = estimator == "none" or (estimator in ("k2", "k3") and config.proximal != "behavior")
    has_factors = config.staleness_decay < 1 or config.entropy_top_share < 1
    has_additions = config.teacher_coefficient > 0 or config.nll_coefficient > 0 or config.entropy.coefficient > 0
    has_lower_bound = getattr(settings, "min_weight", 0.0) > 0
    if not isinstance(loss, ClippedConfig) or loss.type != "ppo_clip":
        return None
    if correction is None or not has_plain_divergence or has_factors or has_additions or has_lower_bound:
        return None
    if config.correction.renormalize == "weights":
        return None
    return ClippedLoss(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        max_log_ratio=MAX_LOG_RATIO,
        max_kl_log_ratio=MAX_K3_LOG_RATIO,
        correction=correction,
        cap=1.0 if settings is None else settings.max_weight,
        kl=cast("Literal['none', 'k2', 'k3']", estimator),
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
        staleness=micro_batch.staleness,
        bucket_ends=metrics.bucket_ends,
    )
    loss, sums, maxima, by_staleness = clipped_policy_loss(tokens, settings)
    if micro_batch.num_tokens:
        metrics.add_sums(sums, maxima, by_staleness)
    return loss
