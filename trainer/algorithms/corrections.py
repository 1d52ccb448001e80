"""Behavior corrections: importance weights and masks for tokens of an older policy or another implementation.

Each is `(LossTokens, settings of the correction) -> Correction`; a chain multiplies the weights (at most one is not 1)
and masks what any of them masks. Nothing here carries a gradient. Rejected tokens still count in the normaliser (I9).

Shape legend: T loss tokens, S sequences. `w = exp(clamp(p − b, ±20))`; of a sequence, the sum or mean is clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.trainer.algorithms.config import (
    DecoupledConfig,
    FTisConfig,
    M2poConfig,
    MisSeqGeoConfig,
    MisTokenConfig,
    OpsmConfig,
    TruncatedConfig,
    VetoConfig,
)
from penstock.trainer.algorithms.tokens import LossTokens, clamped_exp


class Correction(NamedTuple):
    """Factors of the policy-loss terms.

    Attributes:
        weights: `[T]` ≥ 0.
        is_masked: `[T] bool`, rejected.
        of_sequences: `[T]` ≥ 0, the part of the factor that all tokens of a sequence share: the weight of the sequence,
            and 0 where it is rejected as a whole.
    """

    weights: Tensor
    is_masked: Tensor
    of_sequences: Tensor

    @property
    def factors(self) -> Tensor:
        """`[T]` weights, 0 where rejected."""
        return self.weights.masked_fill(self.is_masked, 0.0)


CorrectionFunction = Callable[[LossTokens], Correction]
"""One of the functions below with its settings."""


@torch.no_grad()
def correct(chain: Iterable[CorrectionFunction], tokens: LossTokens) -> Correction:
    """Return the product of the weights, and the union of the masks.

    With an empty chain all weights are 1, which suits on-policy tokens and losses that use b themselves.
    """
    total = _weights_of_tokens(torch.ones_like(tokens.behavior))
    for correction in chain:
        one = correction(tokens)
        total = Correction(
            total.weights * one.weights,
            total.is_masked | one.is_masked,
            total.of_sequences * one.of_sequences,
        )
    return total


def decoupled(tokens: LossTokens, config: DecoupledConfig) -> Correction:
    """Weight w; tokens with w > cap are masked. Decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298.

    The loss clips around the proximal policy; the weight corrects the step from the behavior to the proximal policy.
    """
    weights = _weights(tokens)
    return _weights_of_tokens(weights, weights > config.max_weight)


def tis_token(tokens: LossTokens, config: TruncatedConfig) -> Correction:
    """Weight clamp(w, lo, C). Truncated importance sampling: Ionides, 2008; for engines, Yao et al., 2025."""
    return _weights_of_tokens(_weights(tokens).clamp(config.min_weight, config.max_weight))


def tis_seq(tokens: LossTokens, config: TruncatedConfig) -> Correction:
    """Weight clamp(exp(Σ_t (p − b)), lo, C) of the sequence: no bias within the bounds, and large variance."""
    ratio = clamped_exp(tokens.segment_sum(_log_weights(tokens)))
    weights = tokens.spread(ratio.clamp(config.min_weight, config.max_weight))
    return Correction(weights, torch.zeros_like(weights, dtype=torch.bool), of_sequences=weights)


def mis_token(tokens: LossTokens, config: MisTokenConfig) -> Correction:
    """Weight w if lo ≤ w ≤ hi, else masked. IcePop, arXiv 2510.18855."""
    weights = _weights(tokens)
    return _weights_of_tokens(weights, (weights < config.min_weight) | (weights > config.max_weight))


def mis_seq_geo(tokens: LossTokens, config: MisSeqGeoConfig) -> Correction:
    """A sequence is kept iff lo ≤ exp(mean_t (p − b)) ≤ hi, bounds for any length of answer. Liu et al., 2025."""
    ratio = clamped_exp(tokens.segment_mean(_log_weights(tokens)))
    return _mask_of_sequences(tokens.spread((ratio < config.min_weight) | (ratio > config.max_weight)), tokens)


def opsm(tokens: LossTokens, config: OpsmConfig) -> Correction:
    """A sequence is masked iff A < 0 and mean_t (b − c) > δ. Off-policy sequence mask, DeepSeek-V3.2, 2512.02556."""
    return _mask_of_sequences(_is_distant_and_negative(tokens, config.delta), tokens)


def f_tis(tokens: LossTokens, config: FTisConfig) -> Correction:
    """tis_token, and samples of negative advantage are masked where KL(b‖c) > limit. F-TIS, arXiv 2605.22537.

    KL(b‖c) is estimated by mean_t (b − c) over the sequence: its tokens were sampled by the behavior policy.
    """
    mask = _mask_of_sequences(_is_distant_and_negative(tokens, config.max_kl), tokens)
    return mask._replace(weights=_weights(tokens).clamp(max=config.max_weight))


def veto(tokens: LossTokens, config: VetoConfig) -> Correction:
    """A sequence is masked iff any of its tokens has w < min_weight: the policy would not have sampled it."""
    is_impossible = (_weights(tokens) < config.min_weight).to(tokens.behavior.dtype)
    return _mask_of_sequences(tokens.spread(tokens.segment_sum(is_impossible) > 0), tokens)


def m2po(tokens: LossTokens, config: M2poConfig) -> Correction:
    """Masks the tokens of largest (p − b)² until its mean is at most τ over the batch. M2PO, arXiv 2510.01161.

    `selection.m2po` has chosen them, from the whole batch.
    """
    del config
    return _weights_of_tokens(torch.ones_like(tokens.behavior), tokens.selection("m2po"))


def _log_weights(tokens: LossTokens) -> Tensor:
    return (tokens.proximal - tokens.behavior).detach()


def _weights(tokens: LossTokens) -> Tensor:
    return clamped_exp(_log_weights(tokens))


def _is_distant_and_negative(tokens: LossTokens, limit: float) -> Tensor:
    """`[T] bool`: of negative advantage, in a sequence whose mean b − c is above `limit`."""
    drift = tokens.segment_mean((tokens.behavior - tokens.target).detach())
    return tokens.spread(drift > limit) & (tokens.spread(tokens.segment_mean(tokens.advantages)) < 0)


def _weights_of_tokens(weights: Tensor, is_masked: Tensor | None = None) -> Correction:
    none = torch.zeros_like(weights, dtype=torch.bool)
    return Correction(weights, none if is_masked is None else is_masked, torch.ones_like(weights))


def _mask_of_sequences(is_masked: Tensor, tokens: LossTokens) -> Correction:
    ones = torch.ones_like(tokens.behavior)
    return Correction(ones, is_masked, ones.masked_fill(is_masked, 0.0))
