"""What a user might plug in by import path."""

from __future__ import annotations

import numpy as np
import torch

from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped
from penstock.trainer.config import AlgorithmConfig


def half_of_the_reward(rewards: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    return rewards / 2


def one_number(rewards: np.ndarray, config: AlgorithmConfig) -> float:
    return float(rewards.mean())


def squared(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    return unclipped(tokens.advantages * tokens.target.square())


def a_tensor(tokens: LossTokens, config: AlgorithmConfig) -> torch.Tensor:
    return tokens.target


NOT_A_FUNCTION = 3
