"""Calls of other processes: each has a time limit, and Ray's exceptions become ours, with the cause in the sentence.

The driver's loop may stand still for minutes: a stopped process, a frozen container, a hook that blocks. What its peers
sent meanwhile lies unread, so a plain time limit would find all of them silent at once: our own standstill uses up none
of these limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import ray

from penstock.dataflow.errors import PenstockError, WeightSyncError

_Answer = TypeVar("_Answer")
_LOOKS = 8
_LATE_S = 1.0
"""By at least how much a timer is late in a loop that stood still, seconds; less is ordinary load."""


@contextmanager
def ray_boundary(error: type[PenstockError], what: str) -> Iterator[None]:
    """Re-raise what Ray calls raise as `error`, naming `what` was tried. A local time-out passes through.

    A remote exception is told by its type and message, a dead process by Ray's first line.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as failed:
        raise error(f"{what} failed: {type(failed.cause).__name__}: {failed.cause}") from failed
    except ray.exceptions.RayError as lost:
        raise error(f"{what}: a process died: {first_line(lost)}") from lost


def first_line(error: BaseException) -> str:
    """Of its message; its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@asynccontextmanager
async def silence_limit(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but if this loop stood still the peer gets a fresh period.

    The loop looks at the clock `_LOOKS` times per period, and stood still if a look was late by more than the time
    between two.

    Args:
        limit_s: Longest wait, seconds of a loop that runs.

    Raises:
        TimeoutError: When it is over.
    """
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


async def answer_of(
    call: Awaitable[_Answer], limit_s: float, error: type[PenstockError], what: str, hint: str = ""
) -> _Answer:
    """The answer of another process.

    Args:
        call: The call.
        limit_s: Longest wait, seconds.
        error: What is raised if it fails, if the process dies, or if there is no answer in time.
        what: Peer and purpose, for the message.
        hint: What to do about an answer that does not come.
    """
    try:
        with ray_boundary(error, what):
            async with silence_limit(limit_s):
                return await call
    except TimeoutError:
        raise error(f"{what}: no answer within {limit_s:g} s. {hint}".rstrip()) from None


async def together(
    what: str, timeout_s: float, *calls: Awaitable[Any], interrupt: Callable[[str], None] = lambda _cause: None
) -> list[Any]:
    """All answers of calls that need each other; the first failure counts, once everyone has come back.

    Failures that come at the same time are told by the first of `calls`.

    Args:
        what: What they do.
        timeout_s: Longest wait, seconds.
        calls: The calls.
        interrupt: Told of the first failure, so that nobody waits for the one that failed.

    Raises:
        WeightSyncError: If one fails, or does not answer in time.
    """
    pending = [asyncio.ensure_future(call) for call in calls]
    if not pending:
        return []
    done, late = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    first = next((call.exception() for call in pending if call in done and call.exception() is not None), None)
    if first is not None:
        interrupt(first_line(first))
        _, late = await asyncio.wait(pending, timeout=timeout_s)
    for call in late:
        call.cancel()
    for call in pending:
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was told once
    with ray_boundary(WeightSyncError, what):
        if first is not None:
            raise first
    if late:
        raise WeightSyncError(f"{what}: {len(late)} of {len(pending)} did not answer within {timeout_s:.0f} s")
    return [call.result() for call in pending]
