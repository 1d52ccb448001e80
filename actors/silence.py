"""Time limits on other processes that our own standstill does not use up.

The driver's loop may stand still for minutes: a stopped process, a frozen container, a hook that blocks. What its peers
sent meanwhile lies unread, so a plain time limit would find all of them silent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_LOOKS = 8
_LATE_S = 1.0
"""By at least how much a timer is late in a loop that stood still, seconds; less is ordinary load."""


@asynccontextmanager
async def silence_limit(limit_s: float | None) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but if this loop stood still the peer gets a fresh period.

    The loop looks at the clock `_LOOKS` times per period, and stood still if a look was late by more than the time
    between two.

    Args:
        limit_s: Longest wait, seconds of a loop that runs; None is no limit.

    Raises:
        TimeoutError: When it is over.
    """
    if limit_s is None:
        yield
        return
    loop, between_s, left = asyncio.get_running_loop(), limit_s / _LOOKS, _LOOKS
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def look(due: float) -> None:
            nonlocal left, timer
            left = _LOOKS if loop.time() - due > max(between_s, _LATE_S) else left - 1
            if left:
                timer = loop.call_later(between_s, look, loop.time() + between_s)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(between_s, look, loop.time() + between_s)
        try:
            yield
        finally:
            timer.cancel()
