"""How often a lost worker is started again: one policy for engines, reward workers, frozen workers and the trainer."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

HOUR_S = 3600.0
RESTARTS_PER_HOUR = 10
"""Of a reward worker or a frozen worker. One that is lost more often is given up."""
MAX_LOSSES = 2
"""A trajectory or a group on which this many workers were lost may be the cause, so it fails."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before the second restart of a worker within an hour, doubled for each one after it; seconds. Each pause is
shortened by a random part of up to a half, so that workers that were lost together do not start together."""


class RestartBudget:
    """The restarts of one worker.

    Invariant: at most `per_hour` restarts are remembered, and only `take` forgets one, after an hour.
    """

    def __init__(self, per_hour: int, clock: Callable[[], float] | None = None) -> None:
        """Create a budget of which nothing is used.

        Args:
            per_hour: Maximum number of restarts within an hour.
            clock: The time in seconds; None is the clock of the running event loop.
        """
        self.per_hour = per_hour
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._times: deque[float] = deque()

    def __str__(self) -> str:
        """The newest restart, for messages."""
        return f"restart {len(self._times)} of {self.per_hour} within an hour"

    def take(self, *, has_served: bool = True) -> float | None:
        """Use one restart.

        Args:
            has_served: Whether the worker has served since its last restart. Only then are restarts of more than an
                hour ago forgotten. So a worker that never comes up is given up, however long each attempt takes.

        Returns:
            Pause before the restart, seconds, 0 for the first one; None if the budget is used up.
        """
        now = self._clock()
        while has_served and self._times and self._times[0] <= now - HOUR_S:
            self._times.popleft()
        num_earlier = len(self._times)
        if num_earlier >= self.per_hour:
            return None
        self._times.append(now)
        if not num_earlier:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** (num_earlier - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
