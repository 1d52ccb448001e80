from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.conditions import RATIO_MOVES
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp


class CispoConfig(Named):
    """Policy gradient whose importance weight is clipped, not its gradient."""

    type: Literal["cispo"] = "cispo"
    """Always `cispo`."""
    clip_low: Annotated[float | None, RATIO_MOVES] = Field(default=None, gt=0, lt=1)
    """The weight is at least 1 − clip_low; null is no lower bound."""
    clip_high: Annotated[float, RATIO_MOVES] = Field(default=4.0, gt=0)
    """The weight is at most 1 + clip_high; its paper has no number."""


@Entry("loss", CispoConfig, source="2506.13585", is_plain_at_one=True)
def cispo(tokens: LossTokens, config: CispoConfig) -> PolicyLoss:
    """`−sg(min(ρ, 1+ε_hi)) A c`: every token keeps a gradient, only its weight is bounded."""
    ratio = clamped_exp(tokens.target - tokens.proximal).detach()
    lowest = 0.0 if config.clip_low is None else 1.0 - config.clip_low
    weight = ratio.clamp(lowest, 1.0 + config.clip_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.target, ratio < weight, ratio > weight)
