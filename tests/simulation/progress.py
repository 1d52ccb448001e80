"""No virtual hour passes without progress: a token that arrived, a score, a step or a checkpoint.

Every wait of the platform has a time limit well below an hour, so an hour without any of them is a wait without a limit
or one that is renewed forever. While faults are injected some timer is always set, so `DeadlockError` cannot find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.dataflow.core import Dataflow
from tests.simulation.world import InvariantError

PROGRESS_S = 3600.0
CHECKS_PER_LIMIT = 8
NAMES_LISTED = 8


async def watch_progress(counters: Callable[[], tuple[int, ...]], core: Dataflow, limit_s: float = PROGRESS_S) -> None:
    """Compare the counters of progress until cancelled.

    Raises:
        InvariantError: After `limit_s` virtual seconds in which none has changed. It names what waits.
    """
    loop = asyncio.get_running_loop()
    before, since = counters(), loop.time()
    while True:
        await asyncio.sleep(limit_s / CHECKS_PER_LIMIT)
        if (now := counters()) != before:
            before, since = now, loop.time()
        elif loop.time() - since >= limit_s:
            raise InvariantError(
                "progress",
                f"no token, score, step or checkpoint for {loop.time() - since:.0f} s: {core.describe_wait()}. "
                f"Waiting: {_waiting(loop)}",
            )


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    tasks = sorted(asyncio.all_tasks(loop) - {asyncio.current_task(loop)}, key=hash)
    more = f" and {len(tasks) - NAMES_LISTED} more" if len(tasks) > NAMES_LISTED else ""
    return ", ".join(task.get_name() for task in tasks[:NAMES_LISTED]) + more
