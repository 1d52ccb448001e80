from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.conditions import RATIO_MOVES, Deviation
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp, unclipped


class SapoConfig(Named):
    """A soft gate around ratio 1 instead of a clip."""

    type: Literal["sapo"] = "sapo"
    """Always `sapo`."""
    tau_positive: Annotated[float, RATIO_MOVES] = Field(default=1.0, gt=0)
    """τ⁺, steepness of the gate for positive advantages (its paper, section 5.1: 1.0)."""
    tau_negative: Annotated[float, RATIO_MOVES] = Field(default=1.05, gt=0)
    """τ⁻, steepness of the gate for negative advantages (its paper, section 5.1: 1.05)."""


DEVIATIONS = (
    Deviation(
        lambda config: isinstance(config.loss, SapoConfig) and config.loss.tau_negative < config.loss.tau_positive,
        "loss.tau_negative",
        ("loss.tau_positive",),
        "the gate has to be steeper for negative advantages, whose gradients raise many unsampled tokens (arXiv "
        "2511.20347, section 3)",
        "Use a tau_negative above tau_positive",
    ),
    Deviation(
        lambda config: config.aggregation == "token_mean",
        "aggregation",
        ("loss",),
        "SAPO averages its gate within each answer first (arXiv 2511.20347, section 3)",
        "Use aggregation=seq_mean_token_mean",
    ),
)


@Entry("loss", SapoConfig, source="2511.20347", is_plain_at_one=True, deviations=DEVIATIONS)
def sapo(tokens: LossTokens, config: SapoConfig) -> PolicyLoss:
    """`−(4/τ) σ(τ(ρ − 1)) A, τ⁺ for A > 0, else τ⁻`: a gate whose slope falls as ρ leaves 1.

    Its slope at ρ = 1 is that of −A ρ.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal)
    tau = ratio.new_full(ratio.shape, config.tau_negative).masked_fill(tokens.advantages > 0, config.tau_positive)
    return unclipped(-(4.0 / tau) * (tau * (ratio - 1.0)).sigmoid() * tokens.advantages)
