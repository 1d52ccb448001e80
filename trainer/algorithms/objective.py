"""The whole loss of one micro-batch: policy loss, corrections, masks, divergence, entropy bonus, in this order.

    term = (loss(c, p, b, A) · sg(weight) · [not masked] + β v k(c, r) − η H) · decay^staleness · [high entropy]
            + coefficient · φ · (−c)

A is that of the rewards plus `teacher_coefficient` · (log π_teacher − sg(c)).

v = sg(weight · u), and 1 where a mask or a cap rejects the token: masks apply to the policy loss, not to the
divergence. u = min(exp(c − b), C) where the chain can have no weight, because the loss contains the ratio to the
behavior policy itself (proximal=behavior, dppo, topr) or needs none (sft, online_dpo, ipo); else 1. The divergence
needs it in both cases: it is an expectation over the policy, and the behavior policy has sampled the tokens.

H is the entropy of the policy's distribution at a token, with its exact gradient, over the vocabulary or, with
`rollout.sampling.top_k`, over the tokens that could be sampled. It does not depend on the token that was sampled, so
corrections give it no weight and no mask.

φ makes the last term a mean of its own: over the pairs of the batch, or over the tokens of answers that pass
(`negative_logprob`).

The algorithms that `kernels.policy_loss` has are one pass on a GPU: loss, gradient and metrics. Any other, and any on a
CPU, is composed of plain functions, which the kernel is tested against.

Shape legend: T loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.policy_loss import ClippedLoss, ClippedTokens, clipped_policy_loss
from penstock.trainer.algorithms.advantages import with_teacher
from penstock.trainer.algorithms.aggregation import is_low_entropy, staleness_factors
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.config import ClippedConfig
from penstock.trainer.algorithms.controllers import entropy_bonus
from penstock.trainer.algorithms.corrections import correct
from penstock.trainer.algorithms.kl import MAX_K3_LOG_RATIO
from penstock.trainer.algorithms.losses import negative_logprob
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.proximal import ProximalInputs
from penstock.trainer.algorithms.rules import SEQUENCE_SUMS
from penstock.trainer.algorithms.tokens import MAX_LOG_RATIO, LossTerms, LossTokens, PolicyLoss, clamped_exp
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.updates import OpenUpdate

LossFunction = Callable[[Tensor, Tensor, MicroBatch, OpenUpdate], Tensor]
"""`[T]` logprobs with gradient, `[T]` entropies in nats, everything else -> Σ weight · term."""
_FUSED_CORRECTIONS: tuple[Literal["none", "decoupled", "tis_token"], ...] = ("none", "decoupled", "tis_token")


class Objective:
    """An algorithm: by one kernel where there is one for it and for the device, else composed of plain functions."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Load the functions that the configuration names.

        Raises:
            ConfigError: If an import path does not resolve.
        """
        self._config = config
        self._loss = find("loss", config.loss.name).load()
        self._proximal = find("proximal", config.proximal).load()
        self._chain = [
            partial(find("correction", name).load(), config=settings)
            for name, settings in config.correction.chain.items()
        ]
        self._kl = find("kl", config.kl.estimator).load()
        self._fused = fused_settings(config)
        self._weighs_divergence = config.proximal == "behavior" or not find("loss", config.loss.name).takes_weight

    def __call__(self, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor:
        """Σ weight · term of one micro-batch; what is measured of its tokens is added to the update.

        Args:
            target: `[T]` logprobs with gradient.
            entropies: `[T]` of the same policy with gradient, nats.
            micro_batch: The recorded logprobs, advantages, staleness and weights of the tokens.
            update: That the micro-batch belongs to.
        """
        if self._fused is not None and can_fuse(target):
            proximal = self.proximal(target, micro_batch, is_first_update=update.is_first)
            start = _start(target, micro_batch, update)
            loss = fused_loss(target, proximal, start, entropies, micro_batch, self._fused, update.metrics)
        else:
            loss = self.composed(target, entropies, micro_batch, update)
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

    def composed(self, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenUpdate) -> Tensor:
        """Any algorithm, on any device."""
        terms = self.terms(target, entropies, micro_batch, is_first_update=update.is_first)
        return _weighted(terms, target, entropies, micro_batch, update)

    def terms(
        self, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, *, is_first_update: bool = True
    ) -> LossTerms:
        """Compute the loss terms of one micro-batch.

        Args:
            target: `[T]` logprobs with gradient.
            entropies: `[T]` of the same policy with gradient, nats.
            micro_batch: The recorded logprobs, advantages and staleness of the tokens.
            is_first_update: Whether the policy is still the one from the start of the batch.

        Raises:
            ShapeError: If a user's own loss did not return a `PolicyLoss` of one term per token.
        """
        config = self._config
        # The dummy token of an empty micro-batch has no teacher.
        teacher = micro_batch.teacher_logprobs if micro_batch.num_tokens else target.detach()
        advantages = micro_batch.advantages
        if config.teacher_coefficient:
            assert teacher is not None, "the trainer refuses batches without the teacher's logprobs"
            advantages = with_teacher(advantages, teacher, target.detach(), config.teacher_coefficient)
        tokens = LossTokens(
            target=target,
            proximal=self.proximal(target, micro_batch, is_first_update=is_first_update),
            behavior=micro_batch.behavior_logprobs,
            reference=micro_batch.reference_logprobs,
            advantages=advantages,
            segments=micro_batch.segments,
            num_segments=micro_batch.num_segments,
            pairs=micro_batch.pairs,
            teacher=teacher,
            selected=micro_batch.selected,
            nll_factors=micro_batch.nll_factors,
        )
        loss = self._loss(tokens, config.loss)
        # A loss of the user's own may return anything.
        if not isinstance(loss, PolicyLoss) or loss.terms.shape != target.shape:
            got = tuple(loss.terms.shape) if isinstance(loss, PolicyLoss) else type(loss).__name__
            raise ShapeError(
                f"algorithm.loss={config.loss.name}: it returned {got} for {len(target)} tokens. Return a PolicyLoss "
                "(trainer/algorithms/tokens.py) with one term per token."
            )
        correction = correct(self._chain, tokens)
        terms = loss.terms * correction.factors
        if config.kl_in_loss:
            # v: a weight of the chain multiplies the policy loss and the divergence. Where the loss takes no weight,
            # the divergence of stale tokens would stay uncorrected, so it is weighted here.
            weights = correction.weights
            if self._weighs_divergence:
                ratio = clamped_exp((tokens.target - tokens.behavior).detach())
                weights = weights * ratio.clamp(max=config.kl.max_weight)
            weights = weights.masked_fill(correction.is_masked, 1.0)
            terms = terms + config.kl_in_loss * weights * self._kl(target, micro_batch.reference_logprobs)
        if config.entropy.coefficient:
            terms = terms + entropy_bonus(entropies, config.entropy)
        if config.staleness_decay < 1:
            terms = terms * staleness_factors(micro_batch.staleness, config.staleness_decay).to(terms.dtype)
        if config.entropy_top_share < 1:
            has_low_entropy = is_low_entropy(entropies, tokens.segments, tokens.num_segments, config.entropy_top_share)
            terms = terms.masked_fill(has_low_entropy, 0.0)
        if config.nll_coefficient:
            terms = terms + config.nll_coefficient * negative_logprob(tokens)
        left, left_of_sequences = correction.factors, correction.of_sequences
        if config.correction.renormalize != "weights":
            # Only a mask makes a factor 0: log-ratios are clamped, and what is not a number is not masked.
            left, left_of_sequences = ((factor != 0).to(factor.dtype) for factor in (left, left_of_sequences))
        ones = torch.ones_like(left)
        unit_shares = ones / tokens.spread(tokens.segment_sum(ones)) if config.aggregation in SEQUENCE_SUMS else ones
        return LossTerms(
            terms,
            correction.is_masked,
            loss.is_clipped_low,
            loss.is_clipped_high,
            left,
            left_of_sequences,
            unit_shares,
        )

    def proximal(self, target: Tensor, micro_batch: MicroBatch, *, is_first_update: bool) -> Tensor:
        """`[T]` p, without gradient."""
        # The dummy token of an empty micro-batch has not been recomputed.
        recomputed = micro_batch.proximal_logprobs if micro_batch.num_tokens else target.detach()
        behavior, staleness = micro_batch.behavior_logprobs, micro_batch.staleness
        return self._proximal(ProximalInputs(target.detach(), behavior, recomputed, staleness, is_first_update))


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
