"""Calls of other processes: each has a time limit, and Ray's exceptions become Penstock's, with their cause.

The driver's event loop may stall for minutes: a stopped process, a frozen container, a hook that blocks. Messages that
peers sent during the stall are unread, so a plain time limit would declare all peers silent at once. A stall of the
event loop therefore does not count towards these limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import ray

from penstock.dataflow.errors import PenstockError, PlacementError, WeightSyncError

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
NOTE_S = 60.0
"""Between two messages about what a start still waits for, seconds."""
_NUM_CHECKS = 8
_LATE_S = 1.0
"""A timer that is at least this late indicates a stalled event loop, seconds; less is ordinary load."""
_MAX_RENEWALS = 8
"""A loop that stalls so often has run often enough between to read an answer."""


@contextmanager
def ray_boundary(error: type[PenstockError], what: str) -> Iterator[None]:
    """Re-raise exceptions of Ray calls as `error`, naming the operation `what`. A local time-out passes through.

    The message has the type and text of a remote exception, or the first line of Ray's error for a dead process.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as failed:
        raise error(f"{what} failed: {type(failed.cause).__name__}: {failed.cause}") from failed
    except ray.exceptions.RayError as lost:
        raise error(f"{what}: a process died: {first_line(lost)}") from lost


def first_line(error: BaseException) -> str:
    """First line of an error's message; its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@asynccontextmanager
async def silence_limit(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but the limit starts again if the event loop stalled, at most `_MAX_RENEWALS` times.

    The clock is checked `_NUM_CHECKS` times per limit. The loop stalled if a check was late by more than the time
    between two checks.

    Args:
        limit_s: Longest wait, seconds of a running event loop.

    Raises:
        TimeoutError: After that time.
    """
    loop, between_s = asyncio.get_running_loop(), limit_s / _NUM_CHECKS
    left, renewals = _NUM_CHECKS, _MAX_RENEWALS
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def check(due: float) -> None:
            nonlocal left, renewals, timer
            if renewals and loop.time() - due > max(between_s, _LATE_S):
                left, renewals = _NUM_CHECKS, renewals - 1
            else:
                left -= 1
            if left:
                timer = loop.call_later(between_s, check, loop.time() + between_s)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(between_s, check, loop.time() + between_s)
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
        error: Raised if the call fails, if the process dies, or, with a `TimeoutError` as its cause, if there is no
            answer in time.
        what: Peer and purpose, for the error message.
        hint: What to do if there is no answer.
    """
    try:
        with ray_boundary(error, what):
            async with silence_limit(limit_s):
                return await call
    except TimeoutError as late:
        raise error(f"{what}: no answer within {limit_s:g} s. {hint}".rstrip()) from late


async def late_calls(
    calls: Collection[asyncio.Future[Any]], limit_s: float, return_when: str = asyncio.ALL_COMPLETED
) -> set[asyncio.Future[Any]]:
    """Wait as `asyncio.wait`, within a `silence_limit` of `limit_s` seconds; returns the calls that have not ended.

    Failures that the caller does not look at are not reported by asyncio.
    """
    for call in calls:
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
    with suppress(TimeoutError):
        async with silence_limit(limit_s):
            await asyncio.wait(calls, return_when=return_when)
    return {call for call in calls if not call.done()}


@asynccontextmanager
async def noting(what: str, waits_for: Callable[[], str], limit_s: float, first_s: float) -> AsyncIterator[None]:
    """Within the context, log what a start waits for: after `first_s` seconds, and every `NOTE_S` seconds after that.

    Args:
        what: The start, for messages.
        waits_for: Says what it waits for.
        limit_s: Longest wait, seconds, for messages.
        first_s: Seconds until the first message; a start that ends earlier says nothing.
    """

    async def note() -> None:
        passed_s = first_s
        await asyncio.sleep(first_s)
        while True:
            logger.warning("%s: waiting for %s, %.0f s so far; the limit is %g s", what, waits_for(), passed_s, limit_s)
            await asyncio.sleep(NOTE_S)
            passed_s += NOTE_S

    task = asyncio.create_task(note())
    try:
        yield
    finally:
        task.cancel()


async def wait_started(
    what: str, starts: Mapping[str, Awaitable[_Answer]], limit_s: float, error: type[PenstockError], hint: str
) -> list[_Answer]:
    """The answers of processes that start; every `NOTE_S` seconds, those that are not up yet are logged.

    Args:
        what: The start, for messages.
        starts: Name of each process -> its start.
        limit_s: Longest wait, seconds.
        error: Raised if one fails, with its cause, without waiting for the others.
        hint: What to do if one is too slow.

    Raises:
        PlacementError: If some are not up in time, with their names.
    """
    calls = {name: asyncio.ensure_future(start) for name, start in starts.items()}

    def pending() -> str:
        return ", ".join(name for name, call in calls.items() if not call.done())

    try:
        async with noting(what, pending, limit_s, NOTE_S):
            late = await late_calls(calls.values(), limit_s, asyncio.FIRST_EXCEPTION)
        missing = pending()
    finally:
        for call in calls.values():
            call.cancel()
    with ray_boundary(error, what):
        answers = [call.result() for call in calls.values() if call not in late]
    if late:
        raise PlacementError(f"{what}: {missing} not up within {limit_s:g} s. {hint}")
    return answers


async def gather_answers(
    what: str, timeout_s: float, *calls: Awaitable[Any], interrupt: Callable[[str], None] = lambda _cause: None
) -> list[Any]:
    """The answers of calls that depend on each other. The first failure is raised after all calls have ended.

    Of failures at the same time, the one of the first call is raised.

    Args:
        what: Purpose of the calls, for the error message.
        timeout_s: Longest wait, seconds.
        calls: The calls.
        interrupt: Called with the first failure, so that the other calls stop waiting for the failed one.

    Raises:
        WeightSyncError: If one fails, or does not answer in time.
    """
    pending = [asyncio.ensure_future(call) for call in calls]
    if not pending:
        return []
    late = await late_calls(pending, timeout_s, asyncio.FIRST_EXCEPTION)
    first = next((call.exception() for call in pending if call not in late and call.exception() is not None), None)
    if first is not None:
        interrupt(first_line(first))
        late = await late_calls(pending, timeout_s)
    for call in late:
        call.cancel()
    with ray_boundary(WeightSyncError, what):
        if first is not None:
            raise first
    if late:
        raise WeightSyncError(f"{what}: {len(late)} of {len(pending)} did not answer within {timeout_s:g} s")
    return [call.result() for call in pending]
