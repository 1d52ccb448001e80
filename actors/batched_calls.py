"""Batched messages between the driver and an actor: two Ray calls carry all traffic.

    driver   Outgoing.send(item)                      items of one tick of the event loop ─▶ one call of `submit`
    actor    Outbox.put(answer)                       answers that were not collected yet
    driver   await collect(actor.collect.remote)      a long poll: all answers since the last one

So the number of calls does not grow with the number of trajectories, and a slow answer delays no other. An outbox is
bounded by what was submitted and not yet answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from penstock.actors.ray_errors import silence_limit

Item = TypeVar("Item")

POLL_S = 20.0
"""Longest time until an actor answers a poll though it has nothing to say, seconds."""
SILENCE_S = 60.0
"""An actor that answers a poll so much later hangs; seconds, not counting stalls of the event loop."""


class Outgoing(Generic[Item]):
    """Gathers the items of one tick of the event loop."""

    def __init__(self, submit: Callable[[list[Item]], object]) -> None:
        """`submit` is called with the items once per tick in which there are any."""
        self._submit = submit
        self._items: list[Item] = []

    def send(self, item: Item) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append(item)

    def clear(self) -> None:
        """Send none of the items that are still here."""
        self._items.clear()

    def _flush(self) -> None:
        items, self._items = self._items, []
        if items:  # none if they were cleared meanwhile
            self._submit(items)


class Outbox(Generic[Item]):
    """Answers in order, until a poll takes them."""

    def __init__(self) -> None:
        self._answers: list[Item] = []
        self._has_answers = asyncio.Event()

    def put(self, answer: Item) -> None:
        self._answers.append(answer)
        self._has_answers.set()

    async def collect(self, wait_s: float) -> list[Item]:
        """All answers since the last call; waits at most `wait_s` seconds for the first one."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_answers.wait(), wait_s)
        self._has_answers.clear()
        answers, self._answers = self._answers, []
        return answers

    def clear(self) -> None:
        self._answers.clear()


async def collect(poll: Callable[[float], Awaitable[list[Any]]], wait_s: float | None = None) -> list[Any]:
    """The answers of an actor, by its remote method `collect`.

    Args:
        poll: The method.
        wait_s: How long the actor may wait for an answer; None: `POLL_S`.

    Raises:
        TimeoutError: If it has said nothing within `SILENCE_S` after that.
        RayError: If it is dead.
    """
    wait_s = POLL_S if wait_s is None else wait_s
    async with silence_limit(wait_s + SILENCE_S):
        return await poll(wait_s)
