"""The torch version of `kernels.policy_loss`: the formulas as they are written, differentiated by autograd.

Shape legend: T packed loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp."""

SUMS = (
    "tokens",
    "loss",
    "entropy",
    "weight",
    "weight_squared",
    "masked",
    "clipped",
    "abs_log_ratio",
    "kl_k3",
    "reference_kl",
)
"""What is added up over tokens, in this order."""
MAXIMA = ("weight", "abs_log_ratio")
"""What is maximised over tokens, in this order."""


@dataclass(frozen=True)
class ClippedLoss:
    """The combinations that have a kernel: `ppo_clip` with a weight per token and a divergence per token.

    Attributes:
        clip_low: ε_low, in ratio units.
        clip_high: ε_high, in ratio units.
        correction: `none`: 1. `decoupled`: w, and 0 where w > cap. `tis_token`: min(w, cap).
        cap: Of the weight w.
        kl: Estimator of the divergence from the reference.
        kl_coefficient: Multiplies it; ≥ 0.
    """

    clip_low: float
    clip_high: float
    correction: Literal["none", "decoupled", "tis_token"] = "decoupled"
    cap: float = 5.0
    kl: Literal["none", "k2", "k3"] = "none"
    kl_coefficient: float = 0.0


class LossTokens(NamedTuple):
    """Each `[T] float32`; all but `target` without gradient.

    Attributes:
        target: c, logprobs of the policy in training.
        proximal: p, logprobs at the centre of the trust region.
        behavior: b, logprobs recorded by the engine.
        reference: r, logprobs of the reference policy; anything finite if there is none.
        advantages: A.
        weights: Aggregation weight of each token: the loss is their weighted sum.
        entropies: Nats; only measured.
    """

    target: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor
    advantages: Tensor
    weights: Tensor
    entropies: Tensor


class LossAndMetrics(NamedTuple):
    """What one pass over the tokens gives.

    Attributes:
        loss: Scalar float32, with gradient in `target`.
        sums: `[10] float64`, see `SUMS`.
        maxima: `[2] float64`, see `MAXIMA`; 0 if there are no tokens.
    """

    loss: Tensor
    sums: Tensor
    maxima: Tensor


def clipped_loss(tokens: LossTokens, settings: ClippedLoss) -> LossAndMetrics:
    """See `kernels.policy_loss.clipped_policy_loss`."""
    ratio = _clamped_exp(tokens.target - tokens.proximal)
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    log_weight = tokens.proximal - tokens.behavior
    weight = _clamped_exp(log_weight)
    factor, is_masked = _correction(weight, settings)
    terms = torch.maximum(unclipped, clipped)
    if settings.kl != "none":
        terms = terms + settings.kl_coefficient * _divergence(tokens, settings.kl)
    loss = (tokens.weights * factor * terms).sum()
    distance = log_weight.abs()
    columns = (
        torch.ones_like(weight),
        torch.zeros_like(weight),
        tokens.entropies,
        weight,
        weight.square(),
        is_masked,
        clipped > unclipped,
        distance,
        weight - log_weight - 1.0,
        _k3(tokens.proximal, tokens.reference),
    )
    sums = torch.stack([column.detach().sum(dtype=torch.float64) for column in columns])
    sums[SUMS.index("loss")] = loss.detach()
    nothing = weight.new_zeros(1)
    maxima = torch.stack([torch.cat([each.detach(), nothing]).max() for each in (weight, distance)]).double()
    return LossAndMetrics(loss, sums, maxima)


def _correction(weight: Tensor, settings: ClippedLoss) -> tuple[Tensor, Tensor]:
    is_above = weight > settings.cap
    nothing = torch.zeros_like(is_above)
    if settings.correction == "none":
        return torch.ones_like(weight), nothing
    if settings.correction == "tis_token":
        return weight.masked_fill(is_above, settings.cap), nothing
    return weight.masked_fill(is_above, 0.0), is_above


def _divergence(tokens: LossTokens, kl: str) -> Tensor:
    if kl == "k2":
        return 0.5 * (tokens.target - tokens.reference).square()
    return _k3(tokens.target, tokens.reference)


def _k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    log_ratio = reference - logprobs
    return _clamped_exp(log_ratio) - log_ratio - 1.0


def _clamped_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
