"""What `SimulatedEngine.generate` returns: an asynchronous iterator with an inbox.

Not an async generator: one that is abandoned would be closed by the garbage collector, at a time no seed decides.
"""

from __future__ import annotations

import asyncio

from penstock.dataflow.ports import TokenDelta


class TokenStream:
    """Token deltas of one request, in order. Ends after a delta with a finish reason, or with the error."""

    __slots__ = ("_inbox", "_is_over", "_loop", "_waiter", "is_cut")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_cut = False
        self._loop = loop
        self._inbox: list[TokenDelta | Exception] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._inbox:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        item = self._inbox.pop(0)
        if isinstance(item, Exception):
            self._is_over = True
            raise item
        self._is_over = item.finish_reason is not None
        return item

    def put(self, item: TokenDelta | Exception) -> None:
        self._inbox.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cut(self) -> None:
        """Lose every message from here on: the consumer hears nothing more."""
        self.is_cut = True

    def deliver(self, delta: TokenDelta) -> None:
        """Hand over a delta, unless the rest of the stream is lost."""
        if not self.is_cut:
            self.put(delta)
