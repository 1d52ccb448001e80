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
    """

    weights: Tensor
    is_masked: Tensor

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
    total = _mask_only(tokens, torch.zeros_like(tokens.behavior, dtype=torch.bool))
    for correction in chain:
        weights, is_masked = correction(tokens)
        total = Correction(total.weights * weights, total.is_masked | is_masked)
    return total


def decoupled(tokens: LossTokens, config: DecoupledConfig) -> Correction:
    """Weight w; tokens with w > cap are masked. Decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298.

    The loss clips around the proximal policy; the weight corrects the step from the behavior to the proximal policy.
    """
    weights = _weights(tokens)
    return Correction(weights, weights > config.max_weight)


def tis_token(tokens: LossTokens, config: TruncatedConfig) -> Correction:
    """Weight clamp(w, lo, C). Truncated importance sampling: Ionides, 2008; for engines, Yao et al., 2025."""
    return _weights_only(_weights(tokens).clamp(config.min_weight, config.max_weight))


def tis_seq(tokens: LossTokens, config: TruncatedConfig) -> Correction:
    """Weight clamp(exp(Σ_t (p − b)), lo, C) of the sequence: no bias within the bounds, and large variance."""
    ratio = clamped_exp(tokens.segment_sum(_log_weights(tokens)))
    return _weights_only(tokens.spread(ratio.clamp(config.min_weight, config.max_weight)))


def mis_token(tokens: LossTokens, config: MisTokenConfig) -> Correction:
    """Weight w if lo ≤ w ≤ hi, else masked. IcePop, arXiv 2510.18855."""
    weights = _weights(tokens)
    return Correction(weights, (weights < config.min_weight) | (weights > config.max_weight))


def mis_seq_geo(tokens: LossTokens, config: MisSeqGeoConfig) -> Correction:
    """A sequence is kept iff lo ≤ exp(mean_t (p − b)) ≤ hi, bounds for any length of answer. Liu et al., 2025."""
    ratio = clamped_exp(tokens.segment_mean(_log_weights(tokens)))
    return _mask_only(tokens, tokens.spread((ratio < config.min_weight) | (ratio > config.max_weight)))


def opsm(tokens: LossTokens, config: OpsmConfig) -> Correction:
    """A sequence is masked iff A < 0 and mean_t (b − c) > δ. Off-policy sequence mask, DeepSeek-V3.2, 2512.02556."""
    return _mask_only(tokens, _is_distant_and_negative(tokens, config.delta))


def f_tis(tokens: LossTokens, config: FTisConfig) -> Correction:
    """tis_token, and samples of negative advantage are masked where KL(b‖c) > limit. F-TIS, arXiv 2605.22537.

    KL(b‖c) is estimated by mean_t (b − c) over the sequence: its tokens were sampled by the behavior policy.
    """
    return Correction(_weights(tokens).clamp(max=config.max_weight), _is_distant_and_negative(tokens, config.max_kl))


def veto(tokens: LossTokens, config: VetoConfig) -> Correction:
    """A sequence is masked iff any of its tokens has w < min_weight: the policy would not have sampled it."""
    is_impossible = (_weights(tokens) < config.min_weight).to(tokens.behavior.dtype)
    return _mask_only(tokens, tokens.spread(tokens.segment_sum(is_impossible) > 0))


def m2po(tokens: LossTokens, config: M2poConfig) -> Correction:
    """Masks the tokens of largest (p − b)² until its mean is at most τ over the batch. M2PO, arXiv 2510.01161.

    `selection.m2po` has chosen them, from the whole batch.
    """
    del config
    return _mask_only(tokens, tokens.selection("m2po"))


def _log_weights(tokens: LossTokens) -> Tensor:
    return (tokens.proximal - tokens.behavior).detach()


def _weights(tokens: LossTokens) -> Tensor:
    return clamped_exp(_log_weights(tokens))


def _is_distant_and_negative(tokens: LossTokens, limit: float) -> Tensor:
    """`[T] bool`: of negative advantage, in a sequence whose mean b − c is above `limit`."""
    drift = tokens.segment_mean((tokens.behavior - tokens.target).detach())
    return tokens.spread(drift > limit) & (tokens.spread(tokens.segment_mean(tokens.advantages)) < 0)


def _weights_only(weights: Tensor) -> Correction:
    return Correction(weights, torch.zeros_like(weights, dtype=torch.bool))


def _mask_only(tokens: LossTokens, is_masked: Tensor) -> Correction:
    return Correction(torch.ones_like(tokens.behavior), is_masked)
