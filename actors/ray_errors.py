"""Calls of other processes: each has a time limit, and Ray's exceptions become ours, with the cause in the sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from penstock.actors.silence import silence_limit
from penstock.dataflow.errors import PenstockError, WeightSyncError

_Answer = TypeVar("_Answer")


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
