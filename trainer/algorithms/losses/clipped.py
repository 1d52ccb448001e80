"""Losses that clip the ratio of each token: `ppo_clip` (PPO, DAPO), and `dual_clip`, also bounded where A < 0.

ρ = exp(c − p), with c the logprob of the policy that is trained and p that of the proximal policy
(`algorithm.proximal` says which one that is); A is the advantage of the token. A loss gives the terms of single tokens;
correction and mean come later (objective.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.conditions import RATIO_MOVES, Deviation
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.trainer.config import AlgorithmConfig


class ClipConfig(Named):
    """What losses with a clipped ratio have. Without effect where ρ is 1 (`RATIO_MOVES`: one update per batch)."""

    clip_low: Annotated[float, RATIO_MOVES] = Field(default=0.2, gt=0, lt=1)
    """ε_lo: the ratio is clipped below 1 − ε_lo (PPO's paper, section 6.1: 0.2)."""
    clip_high: Annotated[float, RATIO_MOVES] = Field(default=0.2, gt=0)
    """ε_hi: the ratio is clipped above 1 + ε_hi (likewise)."""


class ClippedConfig(ClipConfig):
    """`max(−A ρ, −A clip(ρ, 1 − ε_lo, 1 + ε_hi))` of the ratio of a token."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Always `ppo_clip`."""


class DualClipConfig(ClipConfig):
    """`ppo_clip` whose loss is bounded where the advantage is negative."""

    type: Literal["dual_clip"] = "dual_clip"
    """Always `dual_clip`."""
    max_ratio: Annotated[float, RATIO_MOVES] = Field(default=3.0, gt=1)
    """c_dual: largest ratio that counts where the advantage is negative."""


def is_dapo(config: AlgorithmConfig) -> bool:
    """Whether these settings are DAPO's: clip-higher and a length penalty. The configuration keeps no preset's name."""
    loss = config.loss
    clips_higher = isinstance(loss, ClipConfig) and loss.clip_high > loss.clip_low
    return clips_higher and config.overlong.mode == "penalty"


_OF_DAPO = (
    Deviation(
        holds=lambda config: is_dapo(config) and config.kl.coefficient > 0,
        key="kl.coefficient",
        others=("loss.clip_high", "overlong.mode"),
        why="DAPO has no divergence, since a policy that learns to reason moves far from where it began (arXiv "
        "2503.14476, section 2.3)",
        remedy="Use kl.coefficient=0",
    ),
    Deviation(
        holds=lambda config: is_dapo(config) and config.aggregation != "token_mean",
        key="aggregation",
        others=("loss.clip_high", "overlong.mode"),
        why="DAPO weighs all tokens of the batch equally, so that long answers are learned from (arXiv 2503.14476, "
        "section 3.3)",
        remedy="Use aggregation=token_mean",
    ),
)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """`max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))` of any ratio."""
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = (bound > free).detach()
    return PolicyLoss(
        terms=free.maximum(bound),
        is_clipped_low=is_clipped & (ratio < 1.0),
        is_clipped_high=is_clipped & (ratio > 1.0),
    )


@Entry("loss", ClippedConfig, source="1707.06347", is_plain_at_one=True, deviations=_OF_DAPO)
def ppo_clip(tokens: LossTokens, config: ClippedConfig) -> PolicyLoss:
    """`max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))`. PPO; ε_hi > ε_lo: DAPO, arXiv 2503.14476."""
    ratio = clamped_exp(tokens.target - tokens.proximal)
    return clipped_surrogate(ratio, tokens.advantages, config.clip_low, config.clip_high)


@Entry("loss", DualClipConfig, source="1912.09729", is_plain_at_one=True, deviations=_OF_DAPO)
def dual_clip(tokens: LossTokens, config: DualClipConfig) -> PolicyLoss:
    """`ppo_clip; where A < 0: min(ppo_clip, −A c_dual)`, so that the loss of a huge ratio is bounded."""
    ratio = clamped_exp(tokens.target - tokens.proximal)
    loss = clipped_surrogate(ratio, tokens.advantages, config.clip_low, config.clip_high)
    ceiling = -tokens.advantages * config.max_ratio
    is_bounded = ((tokens.advantages < 0) & (loss.terms > ceiling)).detach()
    terms = ceiling.where(is_bounded, loss.terms)
    return PolicyLoss(terms, loss.is_clipped_low, loss.is_clipped_high | is_bounded)
