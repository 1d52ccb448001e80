"""Computes logprobs of ready groups on the trainer ranks while they wait (docs/concepts/dataflow.md, "Early logprobs").

Consumes: ready groups in deadline order. Waits for: one forward pass at a time. Unblocked by: a group that becomes
ready. It stops when the batch closes, so a step starts at most one group's forward pass after its batch has closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.dataflow.early_logprobs import EarlyLogprobsQueue
from penstock.dataflow.trajectory import GroupRef

Forward = Callable[[GroupRef], Awaitable[None]]
"""Computes and caches the logprobs of a group that the next step needs, with the weights at the start of that step.
Raises TrainingError if a rank fails or does not respond in time."""
_Batch = TypeVar("_Batch")


class EarlyLogprobs:
    """Passes the groups of an `EarlyLogprobsQueue` to the trainer while it is idle."""

    def __init__(self, forward: Forward, queue: EarlyLogprobsQueue) -> None:
        self._forward = forward
        self._queue = queue
        self._changed = asyncio.Event()
        self._is_waiting = False

    def ready(self, group: GroupRef) -> None:
        """Queue a ready group. Call it after the trainer was woken, since the group may complete the batch."""
        self._queue.add(group)
        self._changed.set()

    async def during(self, wait: Awaitable[_Batch]) -> _Batch:
        """Await the batch and forward ready groups meanwhile. A forward running when the batch closes is completed.

        Raises:
            TrainingError: As soon as a forward fails; the wait is cancelled.
        """
        self._queue.begin_wait()
        self._is_waiting = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward_all(), name="early_logprobs")
                try:
                    return await wait
                finally:
                    self._is_waiting = False
                    self._changed.set()
        # Callers expect the error itself and not the exception group of the task group.
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _forward_all(self) -> None:
        while True:
            self._changed.clear()
            while self._is_waiting and (group := self._queue.next()) is not None:
                await self._forward(group)
            if not self._is_waiting:
                return
            await self._changed.wait()
