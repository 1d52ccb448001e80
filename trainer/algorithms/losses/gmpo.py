from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.conditions import RATIO_MOVES
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp


class GmpoConfig(Named):
    """Geometric mean of the ratios of a sequence, each clipped before the mean."""

    type: Literal["gmpo"] = "gmpo"
    """Always `gmpo`."""
    clip_low: Annotated[float, RATIO_MOVES] = Field(default=0.4, gt=0)
    """The log-ratio of a token is clipped below −clip_low where the advantage is negative, nats (its paper, section 3:
    0.4)."""
    clip_high: Annotated[float, RATIO_MOVES] = Field(default=0.4, gt=0)
    """It is clipped above clip_high where the advantage is positive, nats (likewise)."""


@Entry("loss", GmpoConfig, source="2507.20673", level="sequence", has_one_term=True, is_plain_at_one=True)
def gmpo(tokens: LossTokens, config: GmpoConfig) -> PolicyLoss:
    """`−A exp(mean_t d), d = c − p, ≤ ε_hi for A > 0, ≥ −ε_lo for A < 0; one term per sequence`.

    The geometric mean of the ratios, each clipped in nats before the mean (the paper: e^−0.4 to e^0.4), so that a
    single ratio moves it little. As in gspo, advantages that differ within a sequence are averaged.
    """
    advantages = tokens.spread(tokens.segment_mean(tokens.advantages))
    drift = tokens.target - tokens.proximal
    is_high = (advantages > 0) & (drift > config.clip_high)
    is_low = (advantages < 0) & (drift < -config.clip_low)
    clipped = drift.masked_fill(is_high, config.clip_high).masked_fill(is_low, -config.clip_low)
    ratio = tokens.spread(clamped_exp(tokens.segment_mean(clipped)))
    return PolicyLoss(-advantages * ratio, is_low, is_high)
