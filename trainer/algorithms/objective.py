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

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.trainer.algorithms.advantages import with_teacher
from penstock.trainer.algorithms.aggregation import is_low_entropy, staleness_factors
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.controllers import entropy_bonus
from penstock.trainer.algorithms.corrections import correct
from penstock.trainer.algorithms.losses import negative_logprob
from penstock.trainer.algorithms.proximal import ProximalInputs
from penstock.trainer.algorithms.rules import SEQUENCE_SUMS
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.config import AlgorithmConfig


class LossTerms(NamedTuple):
    """Per loss token of one micro-batch, `[T]`.

    Attributes:
        terms: To be summed with the token weights; they carry the gradient.
        is_masked: Rejected by a behavior correction.
        is_clipped_low: A lower bound of the loss acted.
        is_clipped_high: An upper bound did.
        left: What the corrections left of each token, by which `correction.renormalize` divides: 1 or the weight, and 0
            where masked.
        left_of_sequences: The part of it that all tokens of a sequence share.
        unit_shares: What a token is of one unit of the aggregation's mean: 1 / n_i if it sums over the tokens of a
            sequence, else 1.
    """

    terms: Tensor
    is_masked: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor
    left: Tensor
    left_of_sequences: Tensor
    unit_shares: Tensor


class Objective:
    """An algorithm as one function of a micro-batch."""

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
        self._weighs_divergence = config.proximal == "behavior" or not find("loss", config.loss.name).takes_weight

    def __call__(
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
