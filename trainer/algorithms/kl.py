"""Divergence from the reference policy per token, as a term of the loss or of the reward.

c = logprob of the policy (in the loss with gradient), r = reference logprob. Schulman's estimators:

    k1 = c − r                     right in the reward; in the loss its gradient has zero mean (refused there)
    k2 = ½ (c − r)²                in the loss: gradient of reverse KL(π‖r)
    k3 = exp(r − c) − (r − c) − 1  in the loss: gradient of forward KL(r‖π); ≥ 0 and unbiased as a *value*

Source: Schulman, 2020; gradients: arXiv 2506.09477. Shape legend: T loss tokens.
"""

from __future__ import annotations

from torch import Tensor

from penstock.trainer.algorithms.tokens import clamped_exp


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """`c − r`, `[T]`."""
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """`½ (c − r)²`, `[T]`."""
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """`exp(r − c) − (r − c) − 1`, `[T]`."""
    log_ratio = reference - policy
    return clamped_exp(log_ratio) - log_ratio - 1.0
