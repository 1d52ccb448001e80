"""Forwards ready groups on the trainer ranks while they wait for their batch (docs/concepts/dataflow.md, "Prefetch").

Consumes: ready groups, due first. Waits for: one forward at a time. Unblocked by: a group that becomes ready; ended by
the batch that closes. So a step starts at most one group's forward later than its batch closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from penstock.dataflow.early_logprobs import EarlyLogprobsQueue
from penstock.dataflow.ports import EarlyLogprobWorker
from penstock.dataflow.trajectory import GroupRef

_Batch = TypeVar("_Batch")


class EarlyLogprobs:
    """Hands the groups of a `EarlyLogprobsQueue` to the trainer, while it has nothing else to do."""

    def __init__(self, trainer: EarlyLogprobWorker, queue: EarlyLogprobsQueue) -> None:
        self._trainer = trainer
        self._queue = queue
        self._changed = asyncio.Event()
        self._is_waiting = False

    def ready(self, group: GroupRef) -> None:
        """A group became ready. Call it after who waits for the batch was woken: it may complete the batch."""
        self._queue.add(group)
        self._changed.set()

    async def during(self, wait: Awaitable[_Batch]) -> _Batch:
        """Await the batch; forward ready groups meanwhile. The forward under way when it closes is awaited too.

        Raises:
            TrainingError: As soon as a forward fails; the wait is given up.
        """
        self._queue.begin_wait()
        self._is_waiting = True
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward_all(), name="early_logprobs")
                try:
                    return await wait
                finally:
                    self._is_waiting = False
                    self._changed.set()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _forward_all(self) -> None:
        while True:
            self._changed.clear()
            while self._is_waiting and (group := self._queue.next()) is not None:
                await self._trainer.early_logprobs(group)
            if not self._is_waiting:
                return
            await self._changed.wait()
