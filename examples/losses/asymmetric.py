"""A loss of your own in one file: its settings, its formula, its source and what it measures.

    cd losses
    penstock algorithms asymmetric:asymmetric_reinforce
    penstock train --config-dir conf experiment=arithmetic algorithm/loss=asymmetric algorithm/correction=none

conf/algorithm/loss/asymmetric.yaml makes it a choice; `algorithm.loss.args.delta=-0.5` changes its setting.
"""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Variant
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped


class Settings(Variant):
    """A constant is taken from every advantage, without a correction of old tokens."""

    delta: float = Field(default=-0.1, ge=-1, le=0)
    """δ: below 0, good answers are learned from more than bad ones, which keeps old data from doing harm."""


@Entry(
    "loss",
    Settings,
    source="2506.20520",
    takes_weight=False,
    metrics={"raised_share": "share of tokens whose probability it raises"},
)
def asymmetric_reinforce(tokens: LossTokens, config: Settings) -> PolicyLoss:
    """`−(A − δ) c`. Asymmetric REINFORCE."""
    pull = tokens.advantages - config.delta
    return unclipped(-pull * tokens.target, {"raised_share": pull > 0})
