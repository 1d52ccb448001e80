"""Adaptive concurrency of an engine: additive increase, multiplicative decrease, from the load that it reports.

Symbols: L = the limit, 1 ≤ L ≤ `max_slots`; u = share of its KV-cache blocks in use; p = requests it has preempted so
far (their KV cache was discarded and is recomputed); r = requests it holds.

    p grew since the last report, or u > HIGH_USAGE:  L ← max(1, ⌊CUT · min(L, r)⌋)
    u < LOW_USAGE and r ≥ L (the limit is binding):  L ← min(max_slots, L + STEP)

A cut takes effect only once requests have ended, so there is no second cut before r ≤ L. Otherwise one shortage would
cause many cuts. Pure: reports in, limit out.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.ports import EngineLoad

HIGH_USAGE = 0.95
"""Above it the next decode steps will preempt, since every running request grows by a token per step."""
LOW_USAGE = 0.80
"""Below it there are blocks for more requests."""
CUT = 0.8
"""A fifth fewer requests lets the others grow by a quarter."""
STEP = 4
"""Requests added per report; reports come once a second."""


@dataclass(slots=True)
class ConcurrencyLimit:
    """The limit of one engine. It starts at `max_slots`, so an engine that never runs short is never limited."""

    max_slots: int
    limit: int
    """L, largest number of concurrent requests."""
    _preemptions_seen: int = 0

    @classmethod
    def starting(cls, max_slots: int) -> ConcurrencyLimit:
        return cls(max_slots, max_slots)

    def observe(self, load: EngineLoad) -> int:
        """Update the limit from one report of the engine, and return it."""
        held = load.num_running + load.num_waiting
        has_preempted = load.num_preemptions > self._preemptions_seen
        self._preemptions_seen = load.num_preemptions
        if held > self.limit:
            return self.limit  # the last cut has not taken effect yet
        if has_preempted or load.kv_cache_usage > HIGH_USAGE:
            self.limit = max(1, int(CUT * min(self.limit, max(held, 1))))
        elif load.kv_cache_usage < LOW_USAGE and held >= self.limit:
            self.limit = min(self.max_slots, self.limit + STEP)
        return self.limit
