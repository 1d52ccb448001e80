"""Divergence from the reference policy per token, as a term of the loss or of the reward.

c = logprob of the policy (in the loss with gradient), r = reference logprob. Schulman's estimators:

    k1 = c − r                     right in the reward; in the loss its gradient has zero mean (refused there)
    k2 = ½ (c − r)²                in the loss: gradient of reverse KL(π‖r)
    k3 = exp(d) − d − 1            in the loss: gradient of forward KL(r‖π); d = clamp(r − c, ±10)

Source: Schulman, 2020; gradients: arXiv 2506.09477. Shape legend: T loss tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.trainer.algorithms.catalog import Entry, Variant, known
from penstock.trainer.algorithms.conditions import Condition, uses_rewards

if TYPE_CHECKING:
    from torch import Tensor

MAX_K3_LOG_RATIO = 10.0
"""r − c is clamped to ±10 in k3: a token that the policy has all but lost would outweigh the batch by e^(r − c)."""


_IS_COMPUTED = Condition(
    lambda config: config.kl.coefficient > 0,
    ("kl.coefficient",),
    "a divergence of weight 0 is not computed",
    "Use algorithm.kl.coefficient above 0",
)
_IS_REWARD_USED = Condition(
    lambda config: config.kl.apply_to != "reward" or uses_rewards(config),
    ("kl.apply_to", "loss"),
    "this loss uses no reward, from which the divergence is subtracted",
    "Use algorithm.kl.apply_to=loss",
)
_IS_WEIGHED_HERE = Condition(
    lambda config: config.weighs_divergence,
    ("loss", "proximal"),
    "the correction weighs the divergence as it weighs the policy loss",
    "Use algorithm.proximal=behavior",
)
_HAS_TARGET = Condition(
    lambda config: config.kl.target is not None,
    ("kl.target",),
    "the coefficient is fixed",
    "Use algorithm.kl.target, the divergence that it should keep",
)


class KlConfig(Variant):
    """Divergence from a frozen reference (section `reference`)."""

    coefficient: Annotated[float, _IS_REWARD_USED] = Field(default=0.0, ge=0, le=100)
    """β; with 0 no reference is started."""
    apply_to: Annotated[Literal["loss", "reward"], _IS_COMPUTED] = "loss"
    """Whether it is added to the loss or subtracted from the reward."""
    estimator: Annotated[str, AfterValidator(known("kl")), _IS_COMPUTED, _IS_REWARD_USED] = "k2"
    """`k2` (gradient of the reverse KL) or `k3` (of the forward KL) in the loss, `k1` in the reward."""
    max_weight: Annotated[float, _IS_COMPUTED, _IS_WEIGHED_HERE] = Field(default=2.0, ge=1)
    """C: in the loss, the divergence of a token has the weight min(exp(c − b), C) if the policy loss takes no weight of
    `correction`, since it uses the behavior logprobs itself or needs no correction."""
    target: Annotated[float | None, _IS_COMPUTED, _IS_REWARD_USED] = Field(default=None, gt=0)
    """KL*: after every batch the coefficient moves towards the one that keeps `loss/reference_kl` there, nat per token;
    None keeps `coefficient`."""
    gain: Annotated[float, _IS_COMPUTED, _HAS_TARGET] = Field(default=0.1, gt=0, le=1)
    """K: how fast it moves, by at most 0.2 K of itself per batch (Ziegler et al.: 0.1)."""


@Entry("kl", source="Schulman, 2020")
def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """`c − r (in the reward only)`, `[T]`."""
    return policy - reference


@Entry("kl", source="2506.09477")
def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """`½ (c − r)²; its gradient is that of KL(π‖r)`, `[T]`."""
    return 0.5 * (policy - reference).square()


@Entry("kl", source="2506.09477")
def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """`exp(d) − d − 1, d = clamp(r − c, ±10); its gradient is that of KL(r‖π)`, `[T]`.

    Both terms take the same clamped d. With exp alone clamped, −d would be left beyond the clamp, and its gradient
    pushes the policy *away* from the reference.
    """
    log_ratio = (reference - policy).clamp(-MAX_K3_LOG_RATIO, MAX_K3_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1.0
