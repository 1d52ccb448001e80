"""Clip-Cov and KL-Cov: a few tokens of the batch, whose advantage and logprob vary together, are treated apart.

They are those that lower the entropy. Which ones is chosen once from the whole batch, before its first gradient, in
float64 (`select` in algorithm.py). Shape legend: T loss tokens, of the batch in a selection, else of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Named
from penstock.trainer.algorithms.conditions import RATIO_MOVES
from penstock.trainer.algorithms.kl import k3
from penstock.trainer.algorithms.losses.clipped import clipped_surrogate
from penstock.trainer.algorithms.tokens import BatchTokens, LossTokens, PolicyLoss, clamped_exp, unclipped

if TYPE_CHECKING:
    from penstock.trainer.config import AlgorithmConfig


class ClipCovConfig(Named):
    """`ppo_clip` without the gradient of a few tokens whose advantage and logprob vary together."""

    type: Literal["clip_cov"] = "clip_cov"
    """Always `clip_cov`."""
    clip_low: Annotated[float, RATIO_MOVES] = Field(default=1.0, gt=0, le=1)
    """ε_lo: the ratio is clipped below 1 − ε_lo; 1 as in the authors' recipes is no lower bound."""
    clip_high: Annotated[float, RATIO_MOVES] = Field(default=1.0, gt=0)
    """ε_hi: the ratio is clipped above 1 + ε_hi."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the tokens of a batch that are drawn, at least one token (its paper, section 4.3: 0.0002)."""
    min_covariance: float = 1.0
    """Tokens of a larger covariance can be drawn (likewise: 1)."""
    max_covariance: float = 5.0
    """Tokens of a smaller covariance can be drawn (likewise: 5)."""


class KlCovConfig(Named):
    """A ratio without a clip; the tokens of largest covariance are held to the proximal policy by a divergence."""

    type: Literal["kl_cov"] = "kl_cov"
    """Always `kl_cov`."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the tokens of a batch, those of largest covariance, at least one token (its paper, section 4.3: 0.0002
    for 32 B parameters, 0.002 for 7 B)."""
    coefficient: float = Field(default=1.0, ge=0)
    """β of their divergence ρ − log ρ − 1 from the proximal policy. The paper's number, 1, is of |log ρ|, whose slope
    is 1 at any distance; ours has the slope ρ − 1, which reaches 1 only at ρ = 2."""


def tokens_to_clip(tokens: BatchTokens, config: ClipCovConfig) -> NDArray[np.bool_]:
    """`[T]`: a share of T, drawn from the tokens whose covariance is between the bounds."""
    covariances = tokens.covariances
    candidates = np.flatnonzero((covariances > config.min_covariance) & (covariances < config.max_covariance))
    candidates = candidates[np.argsort(covariances[candidates])]  # drawn by rank, not by their place in the batch
    num_drawn = min(_num_of(config.share, covariances), len(candidates))
    drawn = np.zeros(len(covariances), dtype=bool)
    drawn[np.random.default_rng(tokens.seed).choice(candidates, num_drawn, replace=False)] = True
    return drawn


def tokens_to_hold(tokens: BatchTokens, config: KlCovConfig) -> NDArray[np.bool_]:
    """`[T]`: a share of T, at least one: the tokens of largest covariance.

    Of equal covariances those of the larger advantage are selected, then of the larger behavior logprob.
    """
    ascending = np.lexsort((tokens.behavior, tokens.advantages, tokens.covariances))
    held = np.zeros(len(ascending), dtype=bool)
    held[ascending[-_num_of(config.share, ascending) :]] = True
    return held


def _num_of(share: float, values: NDArray[Any]) -> int:
    return max(1, int(share * len(values)))


def _refused(config: AlgorithmConfig) -> Iterator[str]:
    loss = config.loss
    if isinstance(loss, ClipCovConfig) and loss.min_covariance >= loss.max_covariance:
        yield (
            f"algorithm.loss.min_covariance={loss.min_covariance:g} is not below max_covariance="
            f"{loss.max_covariance:g}: no token is between them, so none can be drawn. Use a larger max_covariance."
        )


@Entry("loss", ClipCovConfig, source="2505.22617", level="batch", select=tokens_to_clip, refused=_refused)
def clip_cov(tokens: LossTokens, config: ClipCovConfig) -> PolicyLoss:
    """`ppo_clip; 0 at tokens drawn of those with lo < (A − mean A)(p − mean p) < hi`; they count as clipped."""
    ratio = clamped_exp(tokens.target - tokens.proximal)
    loss = clipped_surrogate(ratio, tokens.advantages, config.clip_low, config.clip_high)
    is_drawn = tokens.selection("clip_cov")
    return PolicyLoss(loss.terms.masked_fill(is_drawn, 0.0), loss.is_clipped_low, loss.is_clipped_high | is_drawn)


@Entry(
    "loss", KlCovConfig, source="2505.22617", level="batch", select=tokens_to_hold, selected_learn=True,
    is_plain_at_one=True,
)  # fmt: skip
def kl_cov(tokens: LossTokens, config: KlCovConfig) -> PolicyLoss:
    """`−A ρ; + β (ρ − log ρ − 1) at the tokens of largest (A − mean A)(p − mean p)`.

    The added term estimates KL(π_p‖π) from tokens of π_p. The authors' code adds β |c − p|, whose slope is ±β also
    where c and p differ by rounding only; so the gradient would depend on how a batch is packed. Ours has the slope
    β (ρ − 1), so the published β = 1, of |c − p|, holds a token less firmly here while ρ is below 2.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal)
    divergence = config.coefficient * k3(tokens.proximal, tokens.target)
    is_held = tokens.selection("kl_cov")
    return unclipped(-tokens.advantages * ratio + divergence.masked_fill(~is_held, 0.0))
