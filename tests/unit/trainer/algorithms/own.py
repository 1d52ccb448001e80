"""What a user might plug in by import path."""

from __future__ import annotations

import numpy as np
import torch

from penstock.trainer.algorithms.catalog import Custom, Entry
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped


def half_of_the_reward(rewards: np.ndarray, config: Custom) -> np.ndarray:
    return rewards / 2


def one_number(rewards: np.ndarray, config: Custom) -> float:
    return float(rewards.mean())


def squared(tokens: LossTokens, config: Custom) -> PolicyLoss:
    return unclipped(tokens.advantages * tokens.target.square())


@Entry("loss", level="pair", takes_weight=False, has_ratio=False)
def pairs_of_nothing(tokens: LossTokens, config: Custom) -> PolicyLoss:
    """`−c`."""
    return unclipped(-tokens.target)


def a_tensor(tokens: LossTokens, config: Custom) -> torch.Tensor:
    return tokens.target


NOT_A_FUNCTION = 3
