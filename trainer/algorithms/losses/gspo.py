"""GSPO: the ratio of a whole sequence is clipped. A sequence is never split over micro-batches (batches/packing.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.conditions import RATIO_MOVES, Deviation
from penstock.trainer.algorithms.losses.clipped import clipped_surrogate
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

_MAX_CLIP = 0.1


class GspoConfig(Named):
    """`max(−A s, −A clip(s, 1 − ε_lo, 1 + ε_hi))` of the ratio s of a sequence."""

    type: Literal["gspo", "gspo_token"] = "gspo"
    """`gspo` has one term per sequence, `gspo_token` the advantage of each token."""
    clip_low: Annotated[float, RATIO_MOVES] = Field(default=0.2, gt=0, lt=1)
    """ε_lo: the ratio is clipped below 1 − ε_lo (its paper, section 5.1: 0.0003)."""
    clip_high: Annotated[float, RATIO_MOVES] = Field(default=0.2, gt=0)
    """ε_hi: the ratio is clipped above 1 + ε_hi (likewise: 0.0004)."""


def _too_wide(bound: Literal["clip_low", "clip_high"], published: str) -> Deviation:
    return Deviation(
        lambda config: isinstance(config.loss, GspoConfig) and getattr(config.loss, bound) > _MAX_CLIP,
        f"loss.{bound}",
        ("loss",),
        "the ratio of a whole sequence moves far less than that of a token, so this bound is never reached; the paper "
        f"has {published} (arXiv 2507.18071, section 5.1)",
        f"Use loss.{bound}={published}",
    )


DEVIATIONS = (_too_wide("clip_high", "0.0004"), _too_wide("clip_low", "0.0003"))


@Entry(
    "loss", GspoConfig, source="2507.18071", level="sequence", has_one_term=True, is_plain_at_one=True,
    deviations=DEVIATIONS,
)  # fmt: skip
def gspo(tokens: LossTokens, config: GspoConfig) -> PolicyLoss:
    """`ppo_clip on s_i = exp(mean_t(c − p)), one term per sequence`.

    Each of the n_i tokens gets the term, with the weight 1 / (N n_i) by `seq_mean_token_mean`. Advantages that differ
    within a sequence are averaged.
    """
    advantages = tokens.segment_mean(tokens.advantages)
    terms, is_low, is_high = clipped_surrogate(sequence_ratio(tokens), advantages, config.clip_low, config.clip_high)[
        :3
    ]
    return PolicyLoss(tokens.spread(terms), tokens.spread(is_low), tokens.spread(is_high))


@Entry("loss", GspoConfig, source="2507.18071", level="sequence", is_plain_at_one=True, deviations=DEVIATIONS)
def gspo_token(tokens: LossTokens, config: GspoConfig) -> PolicyLoss:
    """`ppo_clip on sg(s_i)·exp(c − sg(c))`: ratio of the sequence, advantage of the token."""
    ratio = tokens.spread(sequence_ratio(tokens)).detach() * (tokens.target - tokens.target.detach()).exp()
    return clipped_surrogate(ratio, tokens.advantages, config.clip_low, config.clip_high)


def sequence_ratio(tokens: LossTokens) -> Tensor:
    """`[S]` s_i: the mean is computed first and then clamped to ±20."""
    return clamped_exp(tokens.segment_mean(tokens.target - tokens.proximal))
