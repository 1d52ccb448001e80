"""Equality of rewards within a group up to rounding, so that 0.1 + 0.2 equals 0.3.

This is the single definition for everything that compares the rewards of a group: the filter `zero_variance`,
advantages of exactly 0, the share of groups without a gradient, and preference pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64] | Sequence[float]

RELATIVE_TOLERANCE = 1e-6
"""Above the relative rounding error of float32 rewards (of a reward model), 6e-8; below any intended difference."""


def rounding_error(rewards: Rewards) -> float:
    """`1e-6 · max |R|`: rewards that differ by at most this are equal. NaN if any reward is NaN."""
    return RELATIVE_TOLERANCE * float(np.abs(rewards).max())


def are_equal(rewards: Rewards) -> bool:
    """Whether `max R − min R ≤ 1e-6 · max |R|`. True for a single reward, False if any reward is not finite."""
    return float(np.max(rewards)) - float(np.min(rewards)) <= rounding_error(rewards)
