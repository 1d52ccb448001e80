"""A version that engines take while they are frozen, as the driver has it (`weights.staging=bucket`).

Consumes: the engines' updates. Waits for: nothing; the first update has the training ranks begin to send, since only
then engines begin to receive. Unblocked by: the acknowledgements. Whoever fails ends the crossing for everyone: nobody
waits for its messages any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from penstock.actors.ray_errors import first_line
from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck


class Streaming:
    """One version, once."""

    def __init__(
        self,
        version: int,
        engines: Collection[str],
        send: Callable[[], Coroutine[Any, Any, None]],
        interrupt: Callable[[str], None],
    ) -> None:
        """Wait for the first engine.

        Args:
            version: Of the policy.
            engines: Who is in the crossing; each gets it once.
            send: Has the training ranks send it.
            interrupt: Ends the crossing, for a reason.
        """
        self._version = version
        self._left = set(engines)
        self._send = send
        self._interrupt = interrupt
        self._sending: asyncio.Task[None] | None = None

    async def into(self, engine_id: EngineId, update: Awaitable[WeightAck]) -> WeightAck:
        """Let an engine take it.

        Args:
            engine_id: The engine.
            update: Its update, not begun.

        Raises:
            WeightSyncError: If it is not among the engines, or has had its try.
        """
        if engine_id not in self._left:
            if isinstance(update, Coroutine):
                update.close()
            raise WeightSyncError(
                f"publish v{self._version}: it is no longer on its way to {engine_id}, which gets the next version."
            )
        self._left.remove(engine_id)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name=f"send v{self._version}")
            self._sending.add_done_callback(self._sent)
        try:
            return await update
        except BaseException as error:
            self._interrupt(first_line(error))
            raise

    async def over(self) -> None:
        """Wait until the training ranks send no more of it; that they failed is for their engines to say."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def _sent(self, sending: asyncio.Task[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._interrupt(first_line(error))
