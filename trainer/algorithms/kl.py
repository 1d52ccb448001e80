"""Divergence from the reference policy as a term of the loss, per token.

c = target logprob (with gradient), r = reference logprob. Schulman's estimators on the sampled tokens:

    k2 = ½ (c − r)²                gradient of reverse KL(π‖r)
    k3 = exp(r − c) − (r − c) − 1  gradient of forward KL(r‖π); ≥ 0 and unbiased as a *value*

k1 = c − r has a gradient of zero mean, so it is not offered here (arXiv 2506.09477).

Shape legend: T loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.trainer.algorithms.policy_loss import clamped_exp
from penstock.trainer.config import AlgorithmConfig

KlFunction = Callable[[Tensor, Tensor], Tensor]
"""(target, reference), each `[T] float32` -> `[T] float32`, with gradient in the target."""


def k2(target: Tensor, reference: Tensor) -> Tensor:
    return 0.5 * (target - reference).square()


def k3(target: Tensor, reference: Tensor) -> Tensor:
    log_ratio = reference - target
    return clamped_exp(log_ratio) - log_ratio - 1.0


def kl_term(config: AlgorithmConfig) -> KlFunction:
    """The estimator that `config.kl_estimator` names, times its coefficient; zero where that is 0."""
    if not config.kl_coefficient:
        return lambda target, _reference: torch.zeros_like(target)
    estimator = {"k2": k2, "k3": k3}[config.kl_estimator]
    return lambda target, reference: config.kl_coefficient * estimator(target, reference)
