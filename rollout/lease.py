"""Leases: the right to run one request on one engine, for as long as a context is open.

Consumes: a slot. Waits for: its grant. Unblocked by: the pool, or cancellation, which leaves no slot behind. While a
request runs under a lease, the lease is also where it can be interrupted: silence and fencing end it from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine
from penstock.rollout.routing import EngineView, Ticket

InterruptionKind = Literal["lost", "aborted", "silent", "fenced"]


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why an engine will not finish a request; the trajectory can go on from its tokens."""

    kind: InterruptionKind
    reason: str
    view: EngineView

    @property
    def may_be_the_requests_fault(self) -> bool:
        """Whether the engine died with it or stood still over it; not if it went out of service for other reasons."""
        return self.kind == "silent" or (self.kind == "lost" and self.view.fenced is not None)


class SlotSource(Protocol):
    """Where leases get their slots: the pool, or a gang of it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """That it runs in. Asking asyncio for it costs a system call, which is much for what happens so often."""
        ...

    def take(self, lease: Lease) -> bool:
        """Grant it at once, or promise to; says which."""
        ...

    def promise(self, lease: Lease) -> asyncio.Future[None]:
        """What is resolved with the grant of a lease that waits."""
        ...

    def give_back(self, lease: Lease) -> None: ...

    def give_up(self, lease: Lease) -> None:
        """Its waiter was cancelled, before or just after the grant."""
        ...

    def measured(self, view: EngineView) -> None:
        """The speed of an engine is known for the first time."""
        ...

    def lost(self, lease: Lease, error: EngineLostError, group: Hashable) -> None:
        """The engine lost the request, one of `group`."""
        ...


class LeaseMaker(Protocol):
    """Where trajectories get their leases: the pool, or a gang of it."""

    def lease(
        self, tokens: int = 1, prefix: str | None = None, min_version: int = -1, avoid: EngineId | None = None
    ) -> Lease: ...


class GangPool(SlotSource, LeaseMaker, Protocol):
    """What a gang needs of its pool."""

    def join(self, lease: Lease, view: EngineView) -> None:
        """Grant a lease that takes no slot of its own."""
        ...


class Lease(Ticket):
    """One slot, from `acquire` to `release` or under `async with`; afterwards it cannot be used again.

    Attributes:
        heard_at: When the engine last delivered tokens, or the lease was granted or began to wait; seconds.
        interruption: Why it was interrupted from outside, if it was.
        dispatched_at: Version of the engine when the request went to it.
    """

    __slots__ = ("_cancelling", "_holder", "_source", "dispatched_at", "heard_at", "interruption")

    def __init__(
        self,
        source: SlotSource,
        tokens: int = 1,
        prefix: str | None = None,
        min_version: int = -1,
        avoid: EngineId | None = None,
        slots: int = 1,
    ) -> None:
        Ticket.__init__(self, tokens, prefix, min_version, avoid, slots)
        self._source = source
        self._holder: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.heard_at = 0.0
        self.interruption: Interruption | None = None
        self.dispatched_at = -1

    async def acquire(self) -> None:
        """Wait for the slot. If that fails or is cancelled there is nothing to release."""
        if not self.take():
            await self.wait()

    def take(self) -> bool:
        """Take the slot if one is free; if this says no, it is to be waited for."""
        self.heard_at = self._source.loop.time()
        return self._source.take(self)

    async def wait(self) -> None:
        """Wait for the slot that was not free. If that fails or is cancelled there is nothing to release."""
        try:
            await self._source.promise(self)
        except BaseException:
            self._source.give_up(self)
            raise
        self.heard_at = self._source.loop.time()

    def release(self) -> None:
        """Give the slot back; nothing under it can be interrupted any more."""
        self._holder = None
        self._source.give_back(self)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.release()

    @property
    def engine(self) -> Engine:
        assert self.view is not None, "held between enter and exit"
        return self.view.engine

    def received(self, num_tokens: int) -> None:
        """Count new tokens: for the load and the speed of the engine, and as a sign of life."""
        now = self._source.loop.time()
        view = self.view
        assert view is not None, "tokens without a grant"
        if view.delivered(self, num_tokens, now - self.heard_at):
            self._source.measured(view)
        self.heard_at = now

    def lost(self, error: EngineLostError, group: Hashable) -> None:
        """The engine lost the request, or was silent; one that is dead, or loses many in a row, is fenced off.

        Args:
            error: Why.
            group: Whose request it was: one group alone may be the cause of all that it loses.
        """
        self._holder = None  # fencing interrupts the others on this engine, not the one that tells
        self._source.lost(self, error, group)

    def hold(self) -> None:
        """Until `let_go` the present task may be interrupted, by a cancellation that `was_interrupted` tells."""
        self._holder = holder = asyncio.current_task(self._source.loop)
        assert holder is not None, "called in a task"
        self._cancelling = holder.cancelling()

    def let_go(self) -> None:
        self._holder = None

    @property
    def is_held(self) -> bool:
        """Whether a request runs under it that can be interrupted."""
        return self._holder is not None

    def interrupt(self, kind: InterruptionKind, reason: str) -> None:
        """End the request under this lease from outside; only the first reason counts."""
        if self._holder is not None and self.interruption is None:
            assert self.view is not None, "a request runs"
            self.interruption = Interruption(kind, reason, self.view)
            self._holder.cancel()

    def was_interrupted(self) -> bool:
        """Whether a CancelledError that was just caught is ours alone. It is then used up (as in asyncio.timeout)."""
        if self.interruption is None:
            return False
        task = asyncio.current_task()
        assert task is not None, "called in a task"
        return task.uncancel() <= self._cancelling


class Gang:
    """Slots of one engine, held together; members lease from it at once. A `SlotSource`."""

    def __init__(self, pool: GangPool, held: Lease) -> None:
        self._pool = pool
        self._held = held
        self._num_members = 0

    @property
    def engine(self) -> Engine:
        """The engine that all members run on."""
        return self._held.engine

    def lease(
        self, tokens: int = 1, prefix: str | None = None, min_version: int = -1, avoid: EngineId | None = None
    ) -> Lease:
        """One of the gang's slots; if its engine is gone, or the gang has ended, any slot."""
        view = self._held.view
        if view is None or view.fenced is not None or avoid == view.engine_id:
            return self._pool.lease(tokens=tokens, prefix=prefix, min_version=min_version, avoid=avoid)
        return Lease(self, tokens, prefix, min_version, slots=0)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._pool.loop

    def take(self, lease: Lease) -> bool:
        assert self._num_members < self._held.slots, f"a gang of {self._held.slots} slots has no more"
        assert self._held.view is not None, "leased inside the gang's context"
        self._num_members += 1
        self._pool.join(lease, self._held.view)
        return True

    def promise(self, lease: Lease) -> asyncio.Future[None]:  # noqa: ARG002 - none is made
        raise AssertionError("a gang grants at once")

    def give_back(self, lease: Lease) -> None:
        self._num_members -= 1
        self._pool.give_back(lease)

    def give_up(self, lease: Lease) -> None:
        self.give_back(lease)

    def measured(self, view: EngineView) -> None:
        self._pool.measured(view)

    def lost(self, lease: Lease, error: EngineLostError, group: Hashable) -> None:
        self._pool.lost(lease, error, group)
