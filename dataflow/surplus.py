"""How many redundant groups the next batch gets where `dataflow.surplus` is `auto`: the fewest that are as fast as any.

Symbols: s redundant groups of a batch, m(s) mean seconds from one version to the next.

A redundant group shortens the wait for the slowest groups and costs the tokens of the group that is dropped for it.
Which of both is more depends on lengths, free slots, the engines' speed under load and the trainer, so m(s) is
measured, for the levels s = 0, 1, 2, 4, … up to the largest, each for some versions in a row. The next level is the
fastest one known or one of its two neighbours, whichever may be fastest by its mean and the number of its versions
(unimodal bandits, arXiv 1405.5096). Two rules keep waste low: of levels that are about as fast the smaller one counts
as faster, and no larger one is tried while the trainer hardly waits. Old versions lose weight, since lengths change
during training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

VERSIONS_PER_TRY = 2
"""Versions in a row with one level, and η more, at most `MAX_MORE`: a version that waited for long is followed by fast
ones, which have its groups in stock."""
MAX_MORE = 4
MEMORY_VERSIONS = 70.0
"""After so many versions a measurement has lost 1 − 1/e of its weight."""
PREFERENCE = 0.01
"""Share of m(s) by which a level must be faster than the next smaller one to count as fast as it."""
HARDLY_WAITS = 0.02
"""Share of the time in which the trainer waited for its batches, below which more groups could not make it faster."""
CONFIDENCE = 1.0
"""Standard errors by which a level may be faster than its mean."""
UNKNOWN_SPREAD = 0.25
"""Standard deviation ÷ mean of the seconds of a version, while few were measured."""
LONGEST = 6.0
"""A version counts as at most this many times the mean of all: evaluations and restarts happen with every level."""


class AdaptiveSurplus:
    """The level for the next batch, by what the versions so far took. A function of its inputs, without a clock.

    Attributes:
        levels: The numbers of redundant groups that are tried, ascending from 0.
    """

    def __init__(self, largest: int, max_staleness: int) -> None:
        """Begin with the largest number. That it does not pay shows after two tries; what it gains, after all of them.

        Args:
            largest: Largest number of redundant groups.
            max_staleness: η.
        """
        doubled = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
        self.levels = (0, *doubled, largest) if largest else (0,)
        self._per_try = VERSIONS_PER_TRY + min(max_staleness, MAX_MORE)
        self._at = len(self.levels) - 1
        self._num_seen = 0
        self._waited_s = self._total_s = 0.0
        self._weights = [0.0] * len(self.levels)
        self._seconds = [0.0] * len(self.levels)
        self._squares = 0.0

    @property
    def surplus(self) -> int:
        """s of the next batch."""
        return self.levels[self._at]

    def observe(self, step_s: float, waited_s: float) -> None:
        """Record a version with the present level, and choose that of the next one.

        Args:
            step_s: Seconds since the version before.
            waited_s: Of these, seconds in which the trainer waited for its batch.
        """
        if step_s <= 0:
            return
        self._num_seen += 1
        self._add(step_s)
        self._waited_s += waited_s
        self._total_s += step_s
        if self._num_seen >= self._per_try:
            self._move(self._choose())

    def state_dict(self) -> dict[str, Any]:
        """What has been measured, as JSON types."""
        return {
            "levels": list(self.levels),
            "at": self._at,
            "num_seen": self._num_seen,
            "waited_s": self._waited_s,
            "total_s": self._total_s,
            "weights": list(self._weights),
            "seconds": list(self._seconds),
            "squares": self._squares,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; unchanged if that had another largest level."""
        if tuple(state["levels"]) != self.levels:
            return
        self._at, self._num_seen = state["at"], state["num_seen"]
        self._waited_s, self._total_s = state["waited_s"], state["total_s"]
        self._weights, self._seconds = list(state["weights"]), list(state["seconds"])
        self._squares = state["squares"]

    def _add(self, step_s: float) -> None:
        at, kept = self._at, math.exp(-1 / MEMORY_VERSIONS)
        if (total := sum(self._weights)) >= self._per_try:
            step_s = min(step_s, LONGEST * sum(self._seconds) / total)
        self._weights = [kept * weight for weight in self._weights]
        self._seconds = [kept * seconds for seconds in self._seconds]
        self._squares *= kept
        self._weights[at] += 1
        self._seconds[at] += step_s
        self._squares += (step_s / self._mean(at) - 1) ** 2

    def _mean(self, at: int) -> float:
        return self._seconds[at] / self._weights[at]

    def _choose(self) -> int:
        known = [at for at, weight in enumerate(self._weights) if weight]
        fastest = min(known, key=self._cost)
        highest = fastest + (self._waited_s >= HARDLY_WAITS * self._total_s)
        near = range(max(fastest - 1, 0), min(highest, len(self.levels) - 1) + 1)
        return min(near, key=lambda at: (self._cost(at) - CONFIDENCE * self._error(at), at))

    def _cost(self, at: int) -> float:
        """m(s), and a little more for each smaller level; 0 of one that was not tried."""
        return self._mean(at) * (1 + PREFERENCE * at) if self._weights[at] else 0.0

    def _error(self, at: int) -> float:
        """Standard error of the mean."""
        if not self._weights[at]:
            return math.inf
        # The spread is that of all levels together; a prior of a few versions keeps it from being 0.
        total = sum(self._weights)
        spread = math.sqrt((self._squares + VERSIONS_PER_TRY * UNKNOWN_SPREAD**2) / (total + VERSIONS_PER_TRY))
        return self._mean(at) * spread / math.sqrt(self._weights[at])

    def _move(self, at: int) -> None:
        self._num_seen = 0
        self._waited_s = self._total_s = 0.0
        self._at = at
