"""Losses without settings: the policy gradient, its tapered off-policy form, given answers, and a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp, unclipped

if TYPE_CHECKING:
    from torch import Tensor


class PlainConfig(Named):
    """A loss without settings."""

    type: Literal["reinforce", "topr", "distill", "sft"]
    """Which loss."""


@Entry("loss", PlainConfig, source="Williams, 1992", has_ratio=False)
def reinforce(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """`−A c`."""
    del config
    return unclipped(-tokens.advantages * tokens.target)


@Entry("loss", PlainConfig, source="2503.14286", level="sequence", takes_weight=False)
def topr(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """`A > 0: −A c; else −sg(min(exp(Σ_t(c − b)), 1)) A c`. Tapered off-policy REINFORCE."""
    del config
    ratio = clamped_exp(tokens.segment_sum((tokens.target - tokens.behavior).detach())).clamp(max=1.0)
    weight = tokens.spread(ratio).masked_fill(tokens.advantages > 0, 1.0)
    return unclipped(-weight * tokens.advantages * tokens.target)


@Entry("loss", PlainConfig, source="2306.13649", has_ratio=False, needs_advantages=False)
def distill(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """`−sg(log π_teacher − c) c`: reverse KL from the student to a teacher, at the student's own sampled tokens."""
    del config
    assert tokens.teacher is not None, "distill needs the teacher's logprobs"
    return unclipped(-(tokens.teacher - tokens.target).detach() * tokens.target)


@Entry("loss", PlainConfig, takes_weight=False, needs_advantages=False)
def sft(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """`−c`: cross-entropy of the tokens; rewards are not used."""
    del config
    return unclipped(-tokens.target)


@Entry(
    "auxiliary_loss", name="nll_coefficient", source="2404.19733", needs_advantages=False,
    formula="+ coefficient · mean over tokens of passing answers of (−c); of pairs: mean over pairs of mean_t(−c⁺)",
)  # fmt: skip
def negative_logprob(tokens: LossTokens) -> Tensor:
    """`[T]`: `−c φ`, of answers that are worth imitating. RPO; VAPO, arXiv 2504.05118.

    With the token weights, φ (`nll_factors`) makes it one of two means over the batch. Of a loss of pairs, over the
    pairs, of the mean −c of the better answer's tokens: an answer counts once for each pair that it wins (RPO). Else
    over all tokens of the answers that pass (`dataflow.pass_reward`), however few they are (VAPO).

    A margin or an advantage only says that an answer is better than others, and both answers of a pair may lose
    probability.
    """
    return -tokens.target * (0.0 if tokens.nll_factors is None else tokens.nll_factors)
