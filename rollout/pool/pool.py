"""The engines as one pool: slots of engines, leased to trajectories.

A lease is the right to run one request on one engine, for as long as a context is open, so a slot cannot leak. While a
request runs under it, the lease is also where it can be interrupted: silence and fencing end it from outside.

Consumes: leases. Waits for: an engine with a free slot, new enough. Unblocked by: a lease given back, an engine that
joins or gets newer weights, the loss of the last engine that serves or is coming back (then every waiter gets the
error), the time limit for a version that no engine has. Who gets what is decided in rollout/pool/dispatch.py; here are
only the futures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal, Self, cast

from penstock.dataflow.errors import EngineLostError, PlacementError, TrajectoryError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine
from penstock.rollout.config import RolloutConfig
from penstock.rollout.pool.dispatch import Dispatcher
from penstock.rollout.pool.routing import EngineView, LeastLoaded, PrefixAware, SlotRequest, make_policy

logger = logging.getLogger(__name__)

LOSSES_IN_A_ROW = 8
"""An engine that loses so many requests without delivering a token in between is fenced off, if they were of at least
`LOSING_GROUPS`: what only one group loses, wherever it goes, may be its own fault."""
LOSING_GROUPS = 2


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


class Lease(SlotRequest):
    """One slot, from `acquire` to `release` or under `async with`; afterwards it cannot be used again.

    Attributes:
        granted: Resolved with the grant of a lease that waits.
        heard_at: When the engine last delivered tokens, or the lease was granted or began to wait; seconds.
        interruption: Why it was interrupted from outside, if it was.
    """

    def __init__(
        self,
        pool: EnginePool,
        tokens: int = 1,
        prefix: str | None = None,
        min_version: int = -1,
        avoid: EngineId | None = None,
        slots: int = 1,
        gang: Gang | None = None,
    ) -> None:
        super().__init__(tokens, prefix, min_version, avoid, slots)
        self.granted: asyncio.Future[None] | None = None
        self.heard_at = 0.0
        self.interruption: Interruption | None = None
        self._pool = pool
        self._gang = gang
        self._holder: asyncio.Task[object] | None = None
        self._cancelling = 0

    async def acquire(self) -> None:
        """Wait for the slot. If that fails or is cancelled there is nothing to release."""
        self.heard_at = _now()
        if self._gang is not None:
            self._gang.join(self)
            return
        self._pool.submit(self)
        if self.granted is not None:
            try:
                await self.granted
            except BaseException:
                self._pool.cancel_lease(self)
                raise
            self.heard_at = _now()

    def release(self) -> None:
        """Give the slot back; nothing under it can be interrupted any more."""
        self._holder = None
        if self._gang is not None:
            self._gang.num_members -= 1
        self._pool.release_lease(self)

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
        now = _now()
        assert self.view is not None, "tokens without a grant"
        if self.view.delivered(self, num_tokens, now - self.heard_at):
            self._pool.assume(self.view.speed)
        self.heard_at = now

    def lost(self, error: EngineLostError, group: Hashable) -> None:
        """The engine lost the request, or was silent; one that is dead, or loses many in a row, is fenced off.

        Args:
            error: Why.
            group: Whose request it was: one group alone may be the cause of all that it loses.
        """
        self._holder = None  # fencing interrupts the others on this engine, not the one that tells
        assert self.view is not None, "reported while held"
        self._pool.lost(self.view, error, group)

    def hold(self) -> None:
        """Until `let_go` the present task may be interrupted, by a cancellation that `was_interrupted` tells."""
        self._holder = holder = asyncio.current_task()
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
    """Slots of one engine, held together; members lease from it at once.

    Attributes:
        num_members: Leases of it that are held.
    """

    def __init__(self, pool: EnginePool, held: Lease) -> None:
        self.num_members = 0
        self._pool = pool
        self._held = held

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
        return Lease(self._pool, tokens, prefix, min_version, slots=0, gang=self)

    def join(self, lease: Lease) -> None:
        """Grant a lease of a member."""
        assert self.num_members < self._held.slots, f"a gang of {self._held.slots} slots has no more"
        assert self._held.view is not None, "leased inside the gang's context"
        self.num_members += 1
        self._pool.join(lease, self._held.view)


class EnginePool:
    """Routes requests to engines.

    Attributes:
        max_per_engine: Requests one engine holds at once; more wait here, not yet bound to a version.
        version_timeout_s: Longest wait for an engine with a version that none in service has.
        num_returned: Times that an engine which had been fenced off came back.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        max_per_engine: int,
        seed: int = 0,
        *,
        policy: LeastLoaded | None = None,
        version_timeout_s: float = 600.0,
    ) -> None:
        self.max_per_engine = max_per_engine
        self.version_timeout_s = version_timeout_s
        self._dispatcher = Dispatcher(policy or PrefixAware(seed))
        for engine in engines:
            self._dispatcher.add(EngineView(engine, max_per_engine, max_per_engine))
        self._num_leases = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_events: dict[EngineView, asyncio.Event] = {}
        self._brings_back: Callable[[EngineId], bool] | None = None
        self._returning: set[EngineId] = set()
        self._joined = asyncio.Event()
        self.num_returned = 0
        self._stall: asyncio.TimerHandle | None = None

    def engines(self) -> list[Engine]:
        """Engines that may serve, in the order they joined."""
        return [view.engine for view in self._dispatcher.serving()]

    def views(self) -> list[EngineView]:
        """What is known of the engines in service; to be read only."""
        return list(self._dispatcher.serving())

    @property
    def fenced(self) -> dict[EngineId, str]:
        """Engines taken out of service, with the reason."""
        views = self._dispatcher.views.items()
        return {engine_id: view.fenced for engine_id, view in views if view.fenced is not None}

    @property
    def num_waiting(self) -> int:
        """Leases that wait for a slot."""
        return self._dispatcher.num_waiting

    def leases(self) -> Iterator[Lease]:
        """Leases that hold a slot."""
        for view in self._dispatcher.views.values():
            yield from _leases(view.tickets)

    def add(self, engine: Engine, max_requests: int | None = None) -> None:
        """An engine joins, or one that was fenced off comes back; it serves once its version is the pool's."""
        known = self._dispatcher.views.get(engine.engine_id)
        assert known is None or known.fenced is not None, f"{engine.engine_id} is in service already"
        self._returning.discard(engine.engine_id)
        self.num_returned += known is not None
        self._joined.set()
        slots = self.max_per_engine if max_requests is None else max_requests
        self._settle(self._dispatcher.add(EngineView(engine, slots, slots)))

    def when_fenced(self, brings_back: Callable[[EngineId], bool]) -> None:
        """Ask `brings_back` about every engine that is fenced off from now on: True promises `add` or `gave_up`."""
        self._brings_back = brings_back

    def gave_up(self, engine_id: EngineId) -> None:
        """An engine that was to come back does not."""
        self._returning.discard(engine_id)
        self._joined.set()
        self._fail_if_hopeless()

    @property
    def num_returning(self) -> int:
        """Engines that were fenced off and are coming back."""
        return len(self._returning)

    async def wait_available(self) -> None:
        """Wait until an engine is in service, or none is coming back."""
        while self._returning and not self._dispatcher.num_serving:
            await self.one_returned()

    async def one_returned(self) -> None:
        """Wait until one of the engines that are coming back has come, or has been given up."""
        if self._returning:
            self._joined.clear()
            await self._joined.wait()

    def fence(self, engine_id: EngineId, reason: str, kind: Literal["fenced", "lost"] = "fenced") -> None:
        """Take an engine out of service: nothing new is routed to it, its trajectories resume elsewhere.

        Of kind `lost` it has taken its requests with it.
        """
        view = self._dispatcher.views[engine_id]
        if view.fenced is not None:
            return
        logger.warning("%s is fenced off and gets no more work: %s", engine_id, reason)
        if self._brings_back is not None and self._brings_back(engine_id):
            self._returning.add(engine_id)
        self._settle(self._dispatcher.fence(view, reason))
        for lease in _leases(view.tickets):
            lease.interrupt(kind, f"{engine_id} was fenced off: {reason}")
        if (quiet := self._idle_events.pop(view, None)) is not None:
            quiet.set()
        if self._dispatcher.stalled():
            self._watch_stall(_now() + self.version_timeout_s)
        self._fail_if_hopeless()

    def _fail_if_hopeless(self) -> None:
        """Fail who waits for what no engine can give, neither one in service nor one that is coming back."""
        if self._returning:
            return
        largest = self._dispatcher.max_gang
        if largest == 0:
            self._fail(self._dispatcher.waiting(), EngineLostError(self._nobody()))
        self._fail([t for t in self._dispatcher.waiting() if t.slots > largest], PlacementError(_too_large(largest)))

    def lease(
        self,
        tokens: int = 1,
        prefix: str | None = None,
        min_version: int = -1,
        avoid: EngineId | None = None,
    ) -> Lease:
        """Hold one slot of an engine: `async with pool.lease(...) as lease`, then `lease.engine`.

        Args:
            tokens: What may be sampled under it; routing balances their sum.
            prefix: Name of what the prompt begins with; equal names go to one engine while that is not too busy.
            min_version: The engine must have acknowledged this version or a newer one.
            avoid: Not this engine, while another serves that is new enough.

        Raises:
            EngineLostError: If no engine is left.
            TrajectoryError: kind `engine`, if no engine reaches `min_version` within `version_timeout_s`.
        """
        return Lease(self, tokens, prefix, min_version, avoid)

    @asynccontextmanager
    async def gang(self, prefix: str | None, slots: int) -> AsyncIterator[Gang]:
        """Hold `slots` slots of one engine, all or none, in the order of asking.

        Raises:
            PlacementError: If no engine has that many.
            EngineLostError: If no engine is left.
        """
        largest = self._dispatcher.max_gang
        if self.engines() and slots > largest:
            raise PlacementError(f"rollout: {slots} trajectories on one engine were asked for. {_too_large(largest)}")
        async with Lease(self, 0, prefix, slots=slots) as held:
            yield Gang(self, held)

    def pause(self, engine_id: EngineId) -> None:
        """Route nothing new to an engine; what it has goes on."""
        self._settle(self._dispatcher.pause(self._dispatcher.views[engine_id]))

    def resume(self, engine_id: EngineId) -> None:
        """Undo `pause`."""
        self._settle(self._dispatcher.resume(self._dispatcher.views[engine_id]))

    def set_limit(self, engine_id: EngineId, limit: int) -> None:
        """Requests one engine may hold from now on (adaptive concurrency)."""
        self._settle(self._dispatcher.set_limit(self._dispatcher.views[engine_id], limit))

    def set_min_version(self, version: int) -> None:
        """Engines below `version` get no new work from now on."""
        self._settle(self._dispatcher.set_min_version(version))

    def refresh(self) -> None:
        """Some engine has got another version."""
        self._settle(self._dispatcher.refresh())

    async def wait_idle(self) -> None:
        """Wait until no request holds a slot, and no context of `in_use` is open."""
        await self._idle.wait()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Not idle until the context ends: for work of several requests, which holds no slot between them."""
        self._num_leases += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_leases -= 1
            if not self._num_leases:
                self._idle.set()

    async def wait_engine_idle(self, engine_id: EngineId) -> None:
        """Wait until one engine has no request, or is out of service."""
        view = self._dispatcher.views[engine_id]
        while view.in_use and view.fenced is None:
            await self._idle_events.setdefault(view, asyncio.Event()).wait()

    # What leases call.

    def submit(self, lease: Lease) -> None:
        """Grant it at once, or let it wait for `lease.granted`."""
        dispatcher = self._dispatcher
        if not dispatcher.num_serving and not self._returning:
            raise EngineLostError(self._nobody())
        if dispatcher.submit(lease):
            self._num_leases += 1
            self._idle.clear()
            return
        lease.granted = asyncio.get_running_loop().create_future()
        if lease.min_version > dispatcher.newest or dispatcher.newest < dispatcher.min_version:
            self._watch_stall(lease.heard_at + self.version_timeout_s)

    def join(self, lease: Lease, view: EngineView) -> None:
        """Grant a lease that takes no slot of its own."""
        self._dispatcher.join(lease, view)
        self._num_leases += 1

    def release_lease(self, lease: Lease) -> None:
        view = lease.view
        assert view is not None, "given back twice"
        granted = self._dispatcher.release(lease)
        self._num_leases -= 1
        if granted:
            self._settle(granted)
        elif not self._num_leases:
            self._idle.set()
        if self._idle_events and not view.in_use and (quiet := self._idle_events.pop(view, None)) is not None:
            quiet.set()

    def cancel_lease(self, lease: Lease) -> None:
        """Its waiter was cancelled, before or just after the grant."""
        if lease.view is not None:
            self.release_lease(lease)
        elif lease.waits_at is not None:
            self._settle(self._dispatcher.withdraw(lease))

    def assume(self, speed: float) -> None:
        """The first engine was measured."""
        self._dispatcher.assume(speed)

    def lost(self, view: EngineView, error: EngineLostError, group: Hashable) -> None:
        """The engine of `view` lost a request of `group`."""
        view.losses += 1
        view.losers.add(group)
        if view.fenced is not None:
            return
        if error.is_final:
            self.fence(view.engine_id, str(error), "lost")
        elif view.losses >= LOSSES_IN_A_ROW and len(view.losers) >= LOSING_GROUPS:
            lost = f"it lost {view.losses} requests in a row, of {len(view.losers)} groups"
            self.fence(view.engine_id, f"{lost}; the last one: {error}")

    def _settle(self, granted: Iterable[SlotRequest]) -> None:
        """Wake those who got a slot. One that was cancelled meanwhile gives it back when it runs (`cancel_lease`)."""
        for lease in _leases(granted):
            self._num_leases += 1
            self._idle.clear()
            assert lease.granted is not None, "it waited"
            if not lease.granted.done():
                lease.granted.set_result(None)

    def _fail(self, waiting: Iterable[SlotRequest], error: Exception) -> None:
        for lease in _leases(waiting):
            self._settle(self._dispatcher.withdraw(lease))
            assert lease.granted is not None, "it waits"
            if not lease.granted.done():
                lease.granted.set_exception(error)

    def _watch_stall(self, at: float) -> None:
        """Look for stalled leases at a time of the loop's clock, or earlier if that is due already."""
        if self._stall is None:
            self._stall = asyncio.get_running_loop().call_at(at, self._end_stalled)

    def _end_stalled(self) -> None:
        """Fail those whose time is up; they wait for a version that no engine has."""
        self._stall = None
        stalled, now = _leases(self._dispatcher.stalled()), _now()
        # One sum says who is late and when to look again: with two that round differently, a look may find nobody late
        # and ask for another at once, without end.
        deadlines = {lease: lease.heard_at + self.version_timeout_s for lease in stalled}
        late = [lease for lease, deadline in deadlines.items() if deadline <= now]
        have = ", ".join(f"{view.engine_id} at v{view.version}" for view in self.views())
        for lease in late:
            needed = max(lease.min_version, self._dispatcher.min_version)
            waited = f"waited {self.version_timeout_s:.0f} s for an engine at v{needed} or newer"
            self._fail([lease], TrajectoryError("engine", f"{waited}; in service: {have}"))
        if len(late) < len(stalled):
            self._watch_stall(min(deadline for deadline in deadlines.values() if deadline > now))

    def _nobody(self) -> str:
        return f"no rollout engine is left in service: {self.fenced}"


def _leases(tickets: Iterable[SlotRequest]) -> list[Lease]:
    """Tickets of the pool's dispatcher, all of which the pool has submitted."""
    return cast("list[Lease]", list(tickets))


def _now() -> float:
    """Seconds, by the clock of the event loop."""
    return asyncio.get_running_loop().time()


def make_pool(engines: Sequence[Engine], config: RolloutConfig, seed: int) -> EnginePool:
    """The pool that the configuration describes."""
    return EnginePool(
        engines,
        config.engine.max_num_seqs,
        policy=make_policy(config.routing, seed),
        version_timeout_s=config.request_timeout_s,
    )


def _too_large(largest: int) -> str:
    return (
        f"The largest engine in service has {largest} slots, so it would wait for ever. Use a smaller "
        "dataflow.group_size, or a larger rollout.engine.max_num_seqs."
    )
