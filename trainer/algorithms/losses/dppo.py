from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp


class DppoConfig(Named):
    """A trust region in probability instead of in ratio."""

    type: Literal["dppo"] = "dppo"
    """Always `dppo`."""
    delta: float = Field(default=0.2, gt=0, lt=1)
    """δ, largest change of a token's probability (its paper, appendix E: 0.2)."""
    max_weight: float = Field(default=3.0, ge=1)
    """Largest weight exp(c − b): 3 in the authors' recipes, 5 in the large runs of their paper, 10 in their function.
    """


@Entry("loss", DppoConfig, source="2602.04879", takes_weight=False)
def dppo(tokens: LossTokens, config: DppoConfig) -> PolicyLoss:
    """`−keep A min(exp(c − b), cap); dropped where A pushes π − μ beyond ±δ`.

    Dropped iff (A > 0 and π − μ > δ) or (A ≤ 0 and π − μ < −δ), with π = exp(c), μ = exp(b): the binary form of the
    total variation between the policies. A limit on the difference does not limit the ratio: π = 0.19 and μ = 1e-6
    differ by less than 0.2 and by a factor of 190,000. So the weight is capped as in the authors' code, and the
    gradient is −A min(exp(c − b), cap) everywhere, also where the cap acts.
    """
    shift = tokens.target.detach().exp() - tokens.behavior.exp()
    goes_up = tokens.advantages > 0
    too_high = goes_up & (shift > config.delta)
    too_low = ~goes_up & (shift < -config.delta)
    weight = clamped_exp((tokens.target - tokens.behavior).detach()).clamp(max=config.max_weight)
    terms = -tokens.advantages * weight * (tokens.target - tokens.target.detach()).exp()
    return PolicyLoss(terms.masked_fill(too_high | too_low, 0.0), too_low, too_high)
