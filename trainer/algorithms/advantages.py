"""Advantages from the rewards of one group: `(rewards [G] float64, AlgorithmConfig) -> [G] float64`. Numpy.

A group whose rewards are all equal (up to rounding, dataflow/equal_rewards.py) gives exactly 0, never NaN, whatever the
estimator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.equal_rewards import are_equal
from penstock.trainer.config import AlgorithmConfig

GroupEstimator = Callable[[NDArray[np.float64], AlgorithmConfig], NDArray[np.float64]]


def grpo(rewards: NDArray[np.float64], config: AlgorithmConfig) -> NDArray[np.float64]:
    """Centre and scale: `A_i = (R_i − mean_g R) / (std_g R + ε)`. DeepSeekMath, arXiv 2402.03300.

    `advantage_std`: `sample` (ddof 1), `population` (ddof 0) or `none` (centre only).
    """
    return scaled(dr_grpo(rewards, config), rewards, config)


def dr_grpo(rewards: NDArray[np.float64], config: AlgorithmConfig) -> NDArray[np.float64]:
    """Centre only: `A_i = R_i − mean_g R`; pair it with `constant_length`. Dr. GRPO, arXiv 2503.20783."""
    del config
    if are_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def rloo(rewards: NDArray[np.float64], config: AlgorithmConfig) -> NDArray[np.float64]:
    """Leave one out: `A_i = R_i − mean_{j≠i} R_j`. Ahmadian et al., arXiv 2402.14740."""
    del config
    if are_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (rewards.size - 1)


def scaled(centred: NDArray[np.float64], values: NDArray[np.float64], config: AlgorithmConfig) -> NDArray[np.float64]:
    """`centred / (std values + ε)` with the configured deviation; unchanged if there is nothing to scale."""
    if config.advantage_std == "none" or not centred.any():
        return centred
    return centred / (values.std(ddof=1 if config.advantage_std == "sample" else 0) + config.std_epsilon)
