"""The loss of a critic (section `critic`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trainer.algorithms.catalog import Entry
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss

if TYPE_CHECKING:
    from penstock.trainer.config import CriticConfig


@Entry("loss", source="2005.12729", takes_weight=False, needs_advantages=False)
def value(tokens: LossTokens, config: CriticConfig) -> PolicyLoss:
    """`½ max((V − ret)², (clip(V, V_old ± ε_v) − ret)²)`. Engstrom et al., section 3."""
    assert tokens.values is not None, "value needs a critic"
    assert tokens.old_values is not None, "value needs the values at sampling"
    assert tokens.returns is not None, "value needs returns"
    low, high = tokens.old_values - config.value_clip, tokens.old_values + config.value_clip
    free = (tokens.values - tokens.returns).square()
    bound = (tokens.values.clamp(low, high) - tokens.returns).square()
    is_clipped = (bound > free).detach()
    return PolicyLoss(
        0.5 * free.maximum(bound), is_clipped & (tokens.values < low), is_clipped & (tokens.values > high)
    )
