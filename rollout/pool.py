"""The engines as one pool: slots of engines, leased to trajectories.

Consumes: leases. Waits for: an engine with a free slot, new enough. Unblocked by: a lease given back, an engine that
joins or gets newer weights, the loss of the last engine that serves or is coming back (then every waiter gets the
error), the time limit for a version that no engine has. A lease is a context manager, so a slot cannot leak. Who gets
what is decided in rollout/dispatch.py; here are only the futures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from penstock.dataflow.errors import EngineLostError, PlacementError, TrajectoryError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine
from penstock.rollout.config import RolloutConfig
from penstock.rollout.dispatch import Dispatcher
from penstock.rollout.lease import Gang, Lease
from penstock.rollout.routing import EngineView, PrefixAware, RoutingPolicy, Ticket, make_policy

logger = logging.getLogger(__name__)

LOSSES_IN_A_ROW = 8
"""An engine that loses so many requests without delivering a token in between is fenced off, if they were of at least
`LOSING_GROUPS`: what only one group loses, wherever it goes, may be its own fault."""
LOSING_GROUPS = 2


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
        policy: RoutingPolicy | None = None,
        version_timeout_s: float = 600.0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.max_per_engine = max_per_engine
        self.version_timeout_s = version_timeout_s
        self._dispatcher = Dispatcher(policy or PrefixAware(seed))
        for engine in engines:
            self._dispatcher.add(EngineView(engine, max_per_engine, max_per_engine))
        self._promised: dict[Lease, asyncio.Future[None]] = {}
        self._num_leases = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._quiet: dict[EngineView, asyncio.Event] = {}
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
            yield from (ticket for ticket in view.tickets if isinstance(ticket, Lease))

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

    async def someone(self) -> None:
        """Wait until an engine is in service, or none is coming back."""
        while self._returning and not self._dispatcher.num_serving:
            await self.one_returned()

    async def one_returned(self) -> None:
        """Wait until one of the engines that are coming back has come, or has been given up."""
        if self._returning:
            self._joined.clear()
            await self._joined.wait()

    async def fence(self, engine_id: EngineId, reason: str) -> None:
        """Take an engine out of service; its trajectories resume elsewhere, nothing new is routed to it."""
        self.fence_now(engine_id, reason)

    def fence_now(self, engine_id: EngineId, reason: str, kind: Literal["fenced", "lost"] = "fenced") -> None:
        """`fence` for callers that are not asynchronous; of kind `lost` it takes its requests with it."""
        view = self._dispatcher.views[engine_id]
        if view.fenced is not None:
            return
        logger.warning("%s is fenced off and gets no more work: %s", engine_id, reason)
        if self._brings_back is not None and self._brings_back(engine_id):
            self._returning.add(engine_id)
        self._settle(self._dispatcher.fence(view, reason))
        for ticket in list(view.tickets):
            if isinstance(ticket, Lease):
                ticket.interrupt(kind, f"{engine_id} was fenced off: {reason}")
        if (quiet := self._quiet.pop(view, None)) is not None:
            quiet.set()
        if self._dispatcher.stalled():
            self._watch_stall(self.loop.time() + self.version_timeout_s)
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

    def raise_floor(self, version: int) -> None:
        """Engines below `version` get no new work from now on."""
        self._settle(self._dispatcher.raise_floor(version))

    def refresh(self) -> None:
        """Some engine has got another version."""
        self._settle(self._dispatcher.refresh())

    async def idle(self) -> None:
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

    async def quiet(self, engine_id: EngineId) -> None:
        """Wait until one engine has no request, or is out of service."""
        view = self._dispatcher.views[engine_id]
        while view.in_use and view.fenced is None:
            await self._quiet.setdefault(view, asyncio.Event()).wait()

    # What leases call (SlotSource).

    def take(self, lease: Lease) -> bool:
        dispatcher = self._dispatcher
        if not dispatcher.num_serving and not self._returning:
            raise EngineLostError(self._nobody())
        if dispatcher.submit(lease):
            self._num_leases += 1
            if self._num_leases == 1:
                self._idle.clear()
            return True
        self._promised[lease] = self.loop.create_future()
        if lease.min_version > dispatcher.newest or dispatcher.newest < dispatcher.floor:
            self._watch_stall(lease.heard_at + self.version_timeout_s)
        return False

    def promise(self, lease: Lease) -> asyncio.Future[None]:
        return self._promised[lease]

    def join(self, lease: Lease, view: EngineView) -> None:
        self._dispatcher.join(lease, view)
        self._num_leases += 1

    def give_back(self, lease: Lease) -> None:
        view = lease.view
        assert view is not None, "given back twice"
        granted = self._dispatcher.release(lease)
        self._num_leases -= 1
        if granted:
            self._settle(granted)
        elif not self._num_leases:
            self._idle.set()
        if self._quiet and not view.in_use and (quiet := self._quiet.pop(view, None)) is not None:
            quiet.set()

    def give_up(self, lease: Lease) -> None:
        if lease.view is not None:
            self.give_back(lease)
        elif lease.waits_at is not None:
            del self._promised[lease]
            self._settle(self._dispatcher.withdraw(lease))

    def measured(self, view: EngineView) -> None:
        self._dispatcher.assume(view.speed)

    def lost(self, lease: Lease, error: EngineLostError, group: Hashable) -> None:
        view = lease.view
        assert view is not None, "reported while held"
        view.losses += 1
        view.losers.add(group)
        if view.fenced is not None:
            return
        if error.is_final:
            self.fence_now(view.engine_id, str(error), "lost")
        elif view.losses >= LOSSES_IN_A_ROW and len(view.losers) >= LOSING_GROUPS:
            lost = f"it lost {view.losses} requests in a row, of {len(view.losers)} groups"
            self.fence_now(view.engine_id, f"{lost}; the last one: {error}")

    def _settle(self, granted: Iterable[Ticket]) -> None:
        """Wake those who got a slot. One that was cancelled meanwhile gives it back when it runs (`give_up`)."""
        for lease in granted:
            assert isinstance(lease, Lease), "the pool submits leases"
            self._num_leases += 1
            self._idle.clear()
            promised = self._promised.pop(lease)
            if not promised.done():
                promised.set_result(None)

    def _fail(self, waiting: Iterable[Ticket], error: Exception) -> None:
        for ticket in list(waiting):
            assert isinstance(ticket, Lease), "the pool submits leases"
            self._settle(self._dispatcher.withdraw(ticket))
            promised = self._promised.pop(ticket)
            if not promised.done():
                promised.set_exception(error)

    def _watch_stall(self, at: float) -> None:
        """Look for stalled leases at a time of the loop's clock, or earlier if that is due already."""
        if self._stall is None:
            self._stall = self.loop.call_at(at, self._end_stalled)

    def _end_stalled(self) -> None:
        """Fail those whose time is up; they wait for a version that no engine has."""
        self._stall = None
        stalled = [ticket for ticket in self._dispatcher.stalled() if isinstance(ticket, Lease)]
        now = self.loop.time()
        # One sum says who is late and when to look again: with two that round differently, a look may find nobody late
        # and ask for another at once, without end.
        deadlines = {lease: lease.heard_at + self.version_timeout_s for lease in stalled}
        late = [lease for lease, deadline in deadlines.items() if deadline <= now]
        have = ", ".join(f"{view.engine_id} at v{view.version}" for view in self.views())
        for lease in late:
            needed = max(lease.min_version, self._dispatcher.floor)
            waited = f"waited {self.version_timeout_s:.0f} s for an engine at v{needed} or newer"
            self._fail([lease], TrajectoryError("engine", f"{waited}; in service: {have}"))
        if len(late) < len(stalled):
            self._watch_stall(min(deadline for deadline in deadlines.values() if deadline > now))

    def _nobody(self) -> str:
        return f"no rollout engine is left in service: {self.fenced}"


def make_pool(engines: Sequence[Engine], config: RolloutConfig, seed: int) -> EnginePool:
    """The pool that the configuration describes."""
    policy = make_policy(config.routing, seed)
    limit = config.engine.max_num_seqs
    return EnginePool(engines, limit, seed, policy=policy, version_timeout_s=config.request_timeout_s)


def _too_large(largest: int) -> str:
    return (
        f"The largest engine in service has {largest} slots, so it would wait for ever. Use a smaller "
        "dataflow.group_size, or a larger rollout.engine.max_num_seqs."
    )
