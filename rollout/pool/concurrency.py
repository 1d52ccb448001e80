"""How many requests an engine may hold: additive increase, multiplicative decrease, from its own figures.

Symbols: L = the limit, 1 ≤ L ≤ `max_slots`; u = share of its KV-cache blocks in use; p = requests it has preempted so
far (their KV was thrown away and is computed anew); r = requests it holds.

    p grew since the last look, or u > HIGH_USAGE:  L ← max(1, ⌊CUT · min(L, r)⌋)
    u < LOW_USAGE and r ≥ L (the limit is what holds it back):  L ← min(max_slots, L + STEP)

A cut only shows once requests have ended, so there is no second one before r ≤ L: else one shortage would be answered
many times. Pure: it is told what an engine reported and says what its limit is now.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.ports import EngineLoad

HIGH_USAGE = 0.95
"""Above, the next decode steps will preempt: every running request grows by a token per step."""
LOW_USAGE = 0.80
"""Below, there is room for more requests to grow."""
CUT = 0.8
"""A fifth of the requests leave room for the others to grow by a quarter."""
STEP = 4
"""Requests added per look, one a second."""


@dataclass(slots=True)
class ConcurrencyLimit:
    """The limit of one engine; it starts at `max_slots`, so an engine that never runs short is never held back.

    Attributes:
        limit: L, requests the engine may hold from now on.
    """

    max_slots: int
    limit: int
    _preemptions_seen: int = 0

    @classmethod
    def starting(cls, max_slots: int) -> ConcurrencyLimit:
        return cls(max_slots, max_slots)

    def observe(self, load: EngineLoad) -> int:
        """Take one report of the engine; returns the limit from now on."""
        held = load.num_running + load.num_waiting
        has_preempted = load.num_preemptions > self._preemptions_seen
        self._preemptions_seen = load.num_preemptions
        if held > self.limit:
            return self.limit  # the last cut has not shown yet
        if has_preempted or load.kv_cache_usage > HIGH_USAGE:
            self.limit = max(1, int(CUT * min(self.limit, max(held, 1))))
        elif load.kv_cache_usage < LOW_USAGE and held >= self.limit:
            self.limit = min(self.max_slots, self.limit + STEP)
        return self.limit
