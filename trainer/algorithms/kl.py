"""Divergence from the reference policy per token, as a term of the loss or of the reward.

c = logprob of the policy (in the loss with gradient), r = reference logprob. Schulman's estimators:

    k1 = c − r                     right in the reward; in the loss its gradient has zero mean (refused there)
    k2 = ½ (c − r)²                in the loss: gradient of reverse KL(π‖r)
    k3 = exp(d) − d − 1            in the loss: gradient of forward KL(r‖π); d = clamp(r − c, ±10)

Source: Schulman, 2020; gradients: arXiv 2506.09477. Shape legend: T loss tokens.
"""

from __future__ import annotations

from torch import Tensor

MAX_K3_LOG_RATIO = 10.0
"""r − c is clamped to ±10 in k3: a token that the policy has all but lost would outweigh the batch by e^(r − c)."""


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """`c − r`, `[T]`."""
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """`½ (c − r)²`, `[T]`."""
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """`exp(d) − d − 1`, `d = clamp(r − c, ±10)`, `[T]`.

    Both terms take the same clamped d. With exp alone clamped, −d would be left beyond the clamp, and its gradient
    pushes the policy *away* from the reference.
    """
    log_ratio = (reference - policy).clamp(-MAX_K3_LOG_RATIO, MAX_K3_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1.0
