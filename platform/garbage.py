"""How often Python looks for garbage in cycles.

A run keeps hundreds of thousands of small objects alive (tasks, futures, records of live groups). By default the
collector walks young ones every 700 allocations and, ever so often, all of them; in the flow that was half of the time
of a trajectory. What the flow lets go is freed by reference counts, so cycles may wait.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 100_000


def collect_rarely() -> None:
    """Look at young objects after 100,000 allocations instead of 700."""
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
