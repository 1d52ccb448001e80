"""Policy losses per token, by name: functions of target, proximal and behavior logprobs and advantages.

Shape legend: T loss tokens, flat over sequences. All float32, natural logs. `ρ = exp(target − proximal)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.trainer.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp: e^20 is 5e8, far beyond any trust region and safe in float32."""


class PolicyLoss(NamedTuple):
    """Per-token loss terms, before correction and aggregation.

    Attributes:
        terms: `[T] float32`, to be minimised; carries the gradient.
        is_clipped: `[T] bool`, the clip took the gradient away.
    """

    terms: Tensor
    is_clipped: Tensor


PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], PolicyLoss]
"""(target, proximal, behavior, advantages), each `[T] float32`; gradient only through target."""


def ppo_clip(
    target: Tensor, proximal: Tensor, behavior: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Clipped surrogate: `max(−A ρ, −A clip(ρ, 1−ε_low, 1+ε_high))`.

    PPO, arXiv 1707.06347; ε_high > ε_low is DAPO's clip-higher, arXiv 2503.14476.

    Args:
        target: `[T]`, carries the gradient.
        proximal: `[T]`, centre of the trust region.
        behavior: `[T]`, unused here: the behavior correction multiplies the term (corrections.py).
        advantages: `[T]`.
        clip_low: ε_low, in ratio units.
        clip_high: ε_high, in ratio units.
    """
    del behavior
    ratio = clamped_exp(target - proximal)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(torch.maximum(unclipped, clipped), (clipped > unclipped).detach())


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """`exp` of a log-ratio clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def policy_loss(config: AlgorithmConfig) -> PolicyLossFunction:
    """The loss that `config.loss` names, with its settings bound."""
    losses: dict[str, PolicyLossFunction] = {
        "ppo_clip": partial(ppo_clip, clip_low=config.clip_low, clip_high=config.clip_high),
    }
    return losses[config.loss]
