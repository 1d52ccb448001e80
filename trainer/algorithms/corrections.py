"""Behavior corrections: importance weights and masks for tokens of an older policy or another implementation.

Each is `(LossTokens, settings of the correction) -> Correction`, and a field of `CorrectionConfig`. A chain multiplies
the weights (at most one is not 1) and masks what any of them masks. Nothing here carries a gradient. Rejected tokens
still count in the normaliser (I9).

Shape legend: T loss tokens, S sequences. `w = exp(clamp(p − b, ±20))`; of a sequence, the sum or mean is clamped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from penstock.trainer.algorithms.catalog import Entry, Variant, find
from penstock.trainer.algorithms.conditions import Condition
from penstock.trainer.algorithms.tokens import BatchTokens, LossTokens, clamped_exp, nowhere

if TYPE_CHECKING:
    from torch import Tensor


class Correction(NamedTuple):
    """Factors of the policy-loss terms."""

    weights: Tensor
    """`[T]` ≥ 0."""
    is_masked: Tensor
    """`[T] bool`, rejected."""
    of_sequences: Tensor
    """`[T]` ≥ 0, the part of the factor that all tokens of a sequence share: the weight of the sequence, and 0 where it
    is rejected as a whole."""

    @property
    def factors(self) -> Tensor:
        """`[T]` weights, 0 where rejected."""
        return self.weights.masked_fill(self.is_masked, 0.0)


class DecoupledConfig(Variant):
    """Weight w = exp(p − b); larger ones are masked."""

    max_weight: float = Field(default=5.0, ge=1)
    """Tokens of a larger weight are masked."""


@Entry("correction", DecoupledConfig, source="2505.24298", is_weight=True)
def decoupled(tokens: LossTokens, config: DecoupledConfig) -> Correction:
    """`weight w; masked where w > cap`. Decoupled PPO, arXiv 2110.00641; AReaL.

    The loss clips around the proximal policy; the weight corrects the step from the behavior to the proximal policy.
    """
    weights = _weights(tokens)
    return _weights_of_tokens(weights, weights > config.max_weight)


class TruncatedConfig(Variant):
    """Truncated importance weight, of tokens or of whole sequences."""

    min_weight: float = Field(default=0.0, ge=0, le=1)
    """Smaller weights are raised to it; 0 is no lower bound."""
    max_weight: float = Field(default=2.0, ge=1)
    """C: larger weights are truncated to it."""


@Entry("correction", TruncatedConfig, source="Ionides, 2008", is_weight=True)
def tis_token(tokens: LossTokens, config: TruncatedConfig) -> Correction:
    """`weight clamp(w, lo, C)`. Truncated importance sampling; for engines, Yao et al., 2025."""
    return _weights_of_tokens(_weights(tokens).clamp(config.min_weight, config.max_weight))


@Entry("correction", TruncatedConfig, source="Ionides, 2008", level="sequence", is_weight=True)
def tis_seq(tokens: LossTokens, config: TruncatedConfig) -> Correction:
    """`weight clamp(exp(Σ_t(p − b)), lo, C)` of the sequence: no bias within the bounds, and large variance."""
    ratio = clamped_exp(tokens.segment_sum(_log_weights(tokens)))
    weights = tokens.spread(ratio.clamp(config.min_weight, config.max_weight))
    return Correction(weights, nowhere(weights), of_sequences=weights)


class MisTokenConfig(Variant):
    """Weight w of tokens within a band; the others are masked."""

    min_weight: float = Field(default=0.5, gt=0, le=1)
    """Tokens of a smaller weight are masked."""
    max_weight: float = Field(default=5.0, ge=1)
    """Tokens of a larger weight are masked."""


@Entry("correction", MisTokenConfig, source="2510.18855", is_weight=True)
def mis_token(tokens: LossTokens, config: MisTokenConfig) -> Correction:
    """`weight w; masked outside lo ≤ w ≤ hi`. IcePop."""
    weights = _weights(tokens)
    return _weights_of_tokens(weights, (weights < config.min_weight) | (weights > config.max_weight))


class MisSeqGeoConfig(Variant):
    """Mask of sequences by the geometric mean of their weights."""

    min_weight: float = Field(default=0.99, gt=0, le=1)
    """Sequences of a smaller geometric mean are masked."""
    max_weight: float = Field(default=1.01, ge=1)
    """Sequences of a larger geometric mean are masked."""


@Entry(
    "correction", MisSeqGeoConfig, source="Liu et al., 2025", level="sequence", masks_sequences=True,
    compares_proximal=True,
)  # fmt: skip
def mis_seq_geo(tokens: LossTokens, config: MisSeqGeoConfig) -> Correction:
    """`sequence kept iff lo ≤ exp(mean_t(p − b)) ≤ hi`, bounds for any length of answer."""
    ratio = clamped_exp(tokens.segment_mean(_log_weights(tokens)))
    return _mask_of_sequences(tokens.spread((ratio < config.min_weight) | (ratio > config.max_weight)), tokens)


class OpsmConfig(Variant):
    """Mask of answers of negative advantage that the policy has moved away from."""

    delta: float = Field(default=0.1, gt=0)
    """δ: answers whose mean b − c is larger are masked, nat per token."""


@Entry("correction", OpsmConfig, source="2512.02556", level="sequence", masks_sequences=True, reads_advantages=True)
def opsm(tokens: LossTokens, config: OpsmConfig) -> Correction:
    """`sequence masked iff A < 0 and mean_t(b − c) > δ`. Off-policy sequence mask of DeepSeek-V3.2."""
    return _mask_of_sequences(_is_distant_and_negative(tokens, config.delta), tokens)


class FTisConfig(Variant):
    """Truncated weight of tokens, and a mask of distant answers of negative advantage."""

    max_weight: float = Field(default=2.0, ge=1)
    """C: larger weights are truncated to it."""
    max_kl: float = Field(default=0.1, gt=0)
    """Answers of negative advantage whose mean b − c is larger are masked, nat per token."""


@Entry("correction", FTisConfig, source="2605.22537", is_weight=True, masks_sequences=True, reads_advantages=True)
def f_tis(tokens: LossTokens, config: FTisConfig) -> Correction:
    """`tis_token; sequence masked iff A < 0 and mean_t(b − c) > KL limit`.

    The mean estimates KL(b‖c): the tokens of the sequence were sampled by the behavior policy.
    """
    mask = _mask_of_sequences(_is_distant_and_negative(tokens, config.max_kl), tokens)
    return mask._replace(weights=_weights(tokens).clamp(max=config.max_weight))


class VetoConfig(Variant):
    """Mask of sequences that hold a token the policy would not sample."""

    min_weight: float = Field(default=1e-4, gt=0, lt=1)
    """Sequences with any smaller weight are masked."""


@Entry(
    "correction", VetoConfig, source="Liu et al., 2025", level="sequence", masks_sequences=True, compares_proximal=True
)
def veto(tokens: LossTokens, config: VetoConfig) -> Correction:
    """`sequence masked iff any w < min_weight`: the policy would not have sampled that token."""
    is_impossible = (_weights(tokens) < config.min_weight).to(tokens.behavior.dtype)
    return _mask_of_sequences(tokens.spread(tokens.segment_sum(is_impossible) > 0), tokens)


class M2poConfig(Variant):
    """Mask of the few tokens that make the second moment of the log weights of a batch too large."""

    max_second_moment: float = Field(default=0.04, gt=0)
    """τ: largest mean of (p − b)² over the tokens that the advantage moves further from the behavior policy (its paper,
    section 5.2: 0.04)."""


def tokens_beyond(tokens: BatchTokens, config: M2poConfig) -> NDArray[np.bool_]:
    """`[T]`: of the tokens with A (p − b) > 0, those of largest (p − b)², until the mean of the others is at most τ.

    Only these tokens are moved further from the behavior policy by their advantage, and the mean is over them, as in
    the authors' code (AReaL has it over all loss tokens). Tokens equal to the last one are masked with it.
    """
    log_weights = tokens.proximal - tokens.behavior
    moves_away = tokens.advantages * log_weights > 0
    ascending = np.sort(log_weights[moves_away] ** 2)
    means = np.cumsum(ascending) / np.arange(1, len(ascending) + 1)
    num_kept = int((means <= config.max_second_moment).sum())
    limit = ascending[num_kept] if num_kept < len(ascending) else np.inf
    return moves_away & (log_weights**2 >= limit)


@Entry("correction", M2poConfig, source="2510.01161", level="batch", select=tokens_beyond)
def m2po(tokens: LossTokens, config: M2poConfig) -> Correction:
    """`masked: largest (p − b)² of tokens with A (p − b) > 0, until their mean is ≤ τ`. Algorithm 1 of its paper.

    The tokens are selected from the whole batch. The authors' code clips instead of masking, and never within ratios of
    0.7 to 1.5.
    """
    del config
    return _weights_of_tokens(tokens.behavior.new_ones(tokens.behavior.shape), tokens.selection("m2po"))


def _log_weights(tokens: LossTokens) -> Tensor:
    return (tokens.proximal - tokens.behavior).detach()


def _weights(tokens: LossTokens) -> Tensor:
    return clamped_exp(_log_weights(tokens))


def _is_distant_and_negative(tokens: LossTokens, limit: float) -> Tensor:
    """`[T] bool`: of negative advantage, in a sequence whose mean b − c is above `limit`."""
    drift = tokens.segment_mean((tokens.behavior - tokens.target).detach())
    return tokens.spread(drift > limit) & (tokens.spread(tokens.segment_mean(tokens.advantages)) < 0)


def _weights_of_tokens(weights: Tensor, is_masked: Tensor | None = None) -> Correction:
    ones = weights.new_ones(weights.shape)
    return Correction(weights, nowhere(weights) if is_masked is None else is_masked, ones)


def _mask_of_sequences(is_masked: Tensor, tokens: LossTokens) -> Correction:
    ones = tokens.behavior.new_ones(tokens.behavior.shape)
    return Correction(ones, is_masked, ones.masked_fill(is_masked, 0.0))


_LEAVES_SOMETHING_OUT = Condition(
    lambda config: bool(
        config.correction.chain
        and (not set(config.correction.chain) <= {"tis_token", "tis_seq"} or config.correction.renormalize == "weights")
    ),
    ("correction",),
    "it rejects no token, so all of the batch is left",
    "Use a correction with a mask, such as decoupled or mis_seq_geo",
)


class CorrectionConfig(Variant):
    """A chain of corrections: those that have a section. At most one of them has a weight; all others only mask."""

    decoupled: DecoupledConfig | None = None
    tis_token: TruncatedConfig | None = None
    tis_seq: TruncatedConfig | None = None
    mis_token: MisTokenConfig | None = None
    f_tis: FTisConfig | None = None
    mis_seq_geo: MisSeqGeoConfig | None = None
    opsm: OpsmConfig | None = None
    veto: VetoConfig | None = None
    m2po: M2poConfig | None = None
    renormalize: Annotated[Literal["none", "kept", "weights"], _LEAVES_SOMETHING_OUT] = "none"
    """Divide the gradient of a batch by the share that its corrections left: `kept` by that of the tokens that are not
    masked, `weights` by the mean weight, where masked tokens count 0, so that weights have mean 1 over the batch;
    `none` is no division. Where `aggregation` sums over the tokens of a sequence, the weights and masks of whole
    sequences are averaged over sequences. Not with a divergence in the loss."""

    @model_serializer(mode="wrap")
    def _omit_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out corrections that are off, so that a printed configuration shows the chain."""
        return {name: value for name, value in serialize(self).items() if value is not None}

    def __str__(self) -> str:
        """As it is chosen: `none`, `decoupled` or `[tis_token,veto]`."""
        names = list(self.chain)
        return "none" if not names else names[0] if len(names) == 1 else f"[{','.join(names)}]"

    @property
    def chain(self) -> dict[str, Variant]:
        """Name -> settings of each correction that is on."""
        found = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: section for name, section in found if isinstance(section, Variant)}

    @property
    def entries(self) -> list[Entry]:
        """Those that are on."""
        return [find("correction", name) for name in self.chain]

    @property
    def weights(self) -> list[Entry]:
        """Those that have a weight."""
        return [entry for entry in self.entries if entry.is_weight]
