"""Ray's exceptions become ours here, with the cause in the sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from penstock.dataflow.errors import PenstockError, WeightSyncError


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
        raise error(f"{what}: a process died: {str(lost).strip().splitlines()[0]}") from lost


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
        interrupt((str(first).strip().splitlines() or [type(first).__name__])[0])
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
