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

Shape legend: T loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.trainer.algorithms.advantages import with_teacher
from penstock.trainer.algorithms.aggregation import SEQUENCE_SUMS, is_low_entropy, staleness_factors
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.controllers import entropy_bonus
from penstock.trainer.algorithms.corrections import Correction
from penstock.trainer.algorithms.losses.plain import negative_logprob
from penstock.trainer.algorithms.proximal import ProximalInputs
from penstock.trainer.algorithms.tokens import LossTerms, LossTokens, PolicyLoss, clamped_exp, nowhere
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.optimizer_steps import OpenOptimizerStep

LossFunction = Callable[[Tensor, Tensor, MicroBatch, OpenOptimizerStep], Tensor]
"""`[T]` logprobs with gradient, `[T]` entropies in nats, everything else -> Σ weight · term."""


class Objective:
    """The loss of an algorithm, composed of the functions that its configuration names."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def __call__(self, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenOptimizerStep) -> Tensor:
        """Σ weight · term of one micro-batch; what is measured of its tokens is added to the update.

        Args:
            target: `[T]` logprobs with gradient.
            entropies: `[T]` of the same policy with gradient, nats.
            micro_batch: The recorded logprobs, advantages, staleness and weights of the tokens.
            update: That the micro-batch belongs to.
        """
        terms = self.terms(target, entropies, micro_batch, is_first_update=update.is_first)
        loss = _weighted(terms, target, entropies, micro_batch, update)
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
        algorithm, config = self._algorithm, self._algorithm.config
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
        loss = algorithm.loss(tokens, algorithm.loss_settings)
        # A loss of the user's own may return anything.
        if not isinstance(loss, PolicyLoss) or loss.terms.shape != target.shape:
            got = tuple(loss.terms.shape) if isinstance(loss, PolicyLoss) else type(loss).__name__
            raise ShapeError(
                f"algorithm.loss={config.loss.name}: it returned {got} for {len(target)} tokens. Return a PolicyLoss "
                "(trainer/algorithms/tokens.py) with one term per token."
            )
        if loss.measured.keys() != set(algorithm.metrics):
            raise ShapeError(
                f"algorithm.loss={config.loss.name}: it measured {sorted(loss.measured)}, but its entry declares "
                f"metrics={sorted(algorithm.metrics)}, which all ranks add up. Measure what is declared."
            )
        correction = correct(algorithm.chain, tokens)
        terms = loss.terms * correction.factors
        if algorithm.kl_in_loss:
            # v: a weight of the chain multiplies the policy loss and the divergence. Where the loss takes no weight,
            # the divergence of stale tokens would stay uncorrected, so it is weighted here.
            weights = correction.weights
            if algorithm.weighs_divergence:
                ratio = clamped_exp((tokens.target - tokens.behavior).detach())
                weights = weights * ratio.clamp(max=config.kl.max_weight)
            weights = weights.masked_fill(correction.is_masked, 1.0)
            terms = terms + algorithm.kl_in_loss * weights * algorithm.kl(target, micro_batch.reference_logprobs)
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
            loss.measured,
        )

    def proximal(self, target: Tensor, micro_batch: MicroBatch, *, is_first_update: bool) -> Tensor:
        """`[T]` p, without gradient."""
        # The dummy token of an empty micro-batch has not been recomputed.
        recomputed = micro_batch.proximal_logprobs if micro_batch.num_tokens else target.detach()
        behavior, staleness = micro_batch.behavior_logprobs, micro_batch.staleness
        inputs = ProximalInputs(target.detach(), behavior, recomputed, staleness, is_first_update)
        return self._algorithm.proximal(inputs)


def supervised_loss(target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenOptimizerStep) -> Tensor:
    """−logprob of given answers."""
    none, ones = nowhere(target), torch.ones_like(target).detach()
    terms = LossTerms(-target, none, none, none, ones, ones, ones)
    return _weighted(terms, target, entropies, micro_batch, update)


def _weighted(
    terms: LossTerms, target: Tensor, entropies: Tensor, micro_batch: MicroBatch, update: OpenOptimizerStep
) -> Tensor:
    loss = (terms.terms * micro_batch.token_weights).sum()
    if micro_batch.num_tokens:
        start = _start(target, micro_batch, update)
        update.metrics.add(loss, target, start, entropies, micro_batch, terms)
    return loss


def _start(target: Tensor, micro_batch: MicroBatch, update: OpenOptimizerStep) -> Tensor | None:
    """`[T]` logprobs at the start of the batch; None: not known any more, or measured before."""
    if update.is_first:
        return target
    return micro_batch.proximal_logprobs if update.is_first_epoch else None


@torch.no_grad()
def correct(chain: Iterable[Callable[[LossTokens], Correction]], tokens: LossTokens) -> Correction:
    """Return the product of the weights, and the union of the masks.

    With an empty chain all weights are 1, which suits on-policy tokens and losses that use b themselves.
    """
    ones = torch.ones_like(tokens.behavior)
    total = Correction(ones, nowhere(ones), ones)
    for correction in chain:
        one = correction(tokens)
        total = Correction(
            total.weights * one.weights, total.is_masked | one.is_masked, total.of_sequences * one.of_sequences
        )
    return total
