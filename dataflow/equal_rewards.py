"""When the rewards of a group count as equal: up to rounding, so that 0.1 + 0.2 is no better than 0.3.

One definition for all that compares rewards within a group: the filter `zero_variance`, advantages of exactly 0, the
share of groups without a gradient, and preference pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64] | Sequence[float]

RELATIVE_TOLERANCE = 1e-6
"""Above the rounding of float32 rewards (of a reward model), 6e-8 of their size; below any difference that is meant."""


def rounding_error(rewards: Rewards) -> float:
    """`1e-6 · max |R|`: two of these rewards that differ by no more than this are equal. NaN if one of them is."""
    return RELATIVE_TOLERANCE * float(np.abs(rewards).max())


def are_equal(rewards: Rewards) -> bool:
    """`max R − min R ≤ 1e-6 · max |R|`; one alone is. False where a reward is not finite: that is no equal group."""
    return float(np.max(rewards)) - float(np.min(rewards)) <= rounding_error(rewards)
