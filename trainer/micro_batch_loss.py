"""The scalar loss of one micro-batch; what is measured of its tokens is added to the update that it belongs to.

Shape legend: T loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.trainer.algorithms.fused import can_fuse, fused_loss, fused_settings
from penstock.trainer.algorithms.metrics import TokenFacts
from penstock.trainer.algorithms.objective import LossTerms, Objective, supervised_terms
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.updates import OpenUpdate

LossFunction = Callable[[Tensor, Tensor, MicroBatch, OpenUpdate], Tensor]
"""`[T]` logprobs with gradient, `[T]` entropies in nats, everything else -> Σ weight · term."""


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
        return loss + _nan_unless_finite(target, micro_batch)


def _nan_unless_finite(target: Tensor, micro_batch: MicroBatch) -> Tensor:
    """0, or NaN if a recorded logprob is not finite: not every algorithm reads all of them, but none may train on it.

    The gradient is 0 too; of a loss that is not finite it becomes NaN at every token (`poison_if_not_finite`), also
    where a clip or a mask has cut the gradient of the loss off.
    """
    recorded = (
        micro_batch.behavior_logprobs,
        micro_batch.reference_logprobs,
        micro_batch.proximal_logprobs,
        micro_batch.teacher_logprobs,
    )
    return 0.0 * torch.cat([target, *(one for one in recorded if one is not None)]).sum()


def composed_loss(
    objective: Objective, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate
) -> Tensor:
    """Any algorithm, on any device."""
    terms = objective(target, entropies, micro_batch, is_first_update=update.is_first)
    return _weighted(terms, target, entropies, micro_batch, update)


def supervised_loss(target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor:
    """−logprob of given answers."""
    return _weighted(supervised_terms(target), target, entropies, micro_batch, update)


def _weighted(
    terms: LossTerms, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate
) -> Tensor:
    loss = (terms.terms * micro_batch.token_weights).sum()
    if micro_batch.num_tokens:
        reference, teacher = micro_batch.reference_logprobs, micro_batch.teacher_logprobs
        facts = TokenFacts(
            target=target,
            start=_start(target, micro_batch, update),
            behavior=micro_batch.behavior_logprobs,
            reference=reference,
            teacher=reference if teacher is None else teacher,
            entropies=entropies,
            lags=micro_batch.lags,
            token_weights=micro_batch.token_weights,
            is_masked=terms.is_masked,
            is_clipped_low=terms.is_clipped_low,
            is_clipped_high=terms.is_clipped_high,
        )
        update.metrics.add(loss, facts)
    return loss


def _start(target: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor | None:
    """`[T]` logprobs at the start of the batch; None: not known any more, or measured before."""
    if update.is_first:
        return target
    return micro_batch.proximal_logprobs if update.is_first_epoch else None
