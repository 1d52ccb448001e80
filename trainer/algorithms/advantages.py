"""Advantages from the rewards of one group, by name. Numpy, float64 inside, float32 out.

A group whose rewards are all equal gives exactly 0, never NaN, whatever the estimator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.config import AlgorithmConfig

AdvantageEstimator = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def grpo(rewards: NDArray[np.float64], std: str = "sample", epsilon: float = 1e-4) -> NDArray[np.float64]:
    """Centre and scale: `A_i = (R_i − mean_g R) / (std_g R + ε)`. DeepSeekMath, arXiv 2402.03300.

    Args:
        rewards: `[G]`, one per trajectory of the group.
        std: `sample` (ddof 1), `population` (ddof 0), or `none` (centre only).
        epsilon: Added to the standard deviation.

    Returns:
        `[G]` advantages.
    """
    centred = dr_grpo(rewards)
    if std == "none" or not centred.any():
        return centred
    return centred / (rewards.std(ddof=1 if std == "sample" else 0) + epsilon)


def dr_grpo(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centre only: `A_i = R_i − mean_g R`; pair it with `constant_length`. Dr. GRPO, arXiv 2503.20783."""
    if is_zero_variance(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def rloo(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leave one out: `A_i = R_i − mean_{j≠i} R_j`. Ahmadian et al., arXiv 2402.14740."""
    if is_zero_variance(rewards):
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (rewards.size - 1)


def is_zero_variance(rewards: NDArray[np.float64]) -> bool:
    """True if all rewards of the group are equal (a group of one included): it carries no signal."""
    return bool(rewards.max() == rewards.min())


def advantage_estimator(config: AlgorithmConfig) -> AdvantageEstimator:
    """The estimator that `config.advantage` names, with its settings bound."""
    estimators: dict[str, AdvantageEstimator] = {
        "grpo": partial(grpo, std=config.advantage_std, epsilon=config.std_epsilon),
        "dr_grpo": dr_grpo,
        "rloo": rloo,
    }
    return estimators[config.advantage]
