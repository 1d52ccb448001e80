"""The pool of rollout engines: leases give trajectories concurrency slots on engines.

A lease allows one request on one engine while its context is open, so a slot cannot leak. A running request is
interrupted through its lease when the engine falls silent or is fenced.

Consumes: leases. Waits for: an engine with a free slot and a version that is new enough. Unblocked by: a released
lease, an engine that joins or receives newer weights, the loss of the last engine that serves or restarts (every waiter
then gets the error), or the time limit for a version that no engine has. dispatch.py decides which lease is granted;
this file only holds the futures. A lost engine is restarted by platform/run/engine_restarts.py, and its trajectories
are resumed on other engines by rollout/trajectory/runner.py. Engines join and leave by
platform/run/fleet.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self, cast

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine
from penstock.rollout.config import RolloutConfig
from penstock.rollout.engine_pool.dispatch import Dispatcher
from penstock.rollout.engine_pool.routing import EngineView, LeastLoaded, PrefixAware, SlotRequest, make_policy

logger = logging.getLogger(__name__)

LOSSES_IN_A_ROW = 8
"""An engine is fenced after losing this many requests in a row without delivering a token, if they belong to at least
`LOSING_GROUPS` groups. Requests of a single group may be lost because of the group's own prompt."""
LOSING_GROUPS = 2
LATE_S = 1.0
"""A timer that is later than this shows that the driver's event loop stood still; less is ordinary load. Seconds."""


InterruptionKind = Literal["lost", "aborted", "silent", "fenced", "left"]


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why an engine will not finish a request. The trajectory can resume from its tokens."""

    kind: InterruptionKind
    reason: str
    view: EngineView

    @property
    def is_charged(self) -> bool:
        """Whether it counts against `rollout.max_resumes`. An engine that was told to leave has not failed."""
        return self.kind != "left"

    @property
    def may_be_caused_by_request(self) -> bool:
        """Whether the engine died or hung while it processed the request, as opposed to an unrelated fencing."""
        return self.kind == "silent" or (self.kind == "lost" and self.view.fenced is not None)


class Lease(SlotRequest):
    """One slot, held from `acquire` to `release` or within `async with`. A lease is used once.

    Attributes:
        granted: Future of a waiting lease; resolved when it is granted.
        last_token_at: Time of the last tokens, else of the grant, else of the submission; seconds of the loop's clock.
        interruption: Why the request was interrupted; None if it was not.
    """

    def __init__(
        self,
        pool: EnginePool,
        tokens: int = 1,
        prefix: str | None = None,
        min_version: int = -1,
        avoid: EngineId | None = None,
    ) -> None:
        super().__init__(tokens, prefix, min_version, avoid)
        self.granted: asyncio.Future[None] | None = None
        self.last_token_at = 0.0
        self.interruption: Interruption | None = None
        self._pool = pool
        self._holder: asyncio.Task[object] | None = None
        self._cancelling = 0

    async def acquire(self) -> None:
        """Wait for a slot. After an exception or a cancellation there is nothing to release."""
        while True:
            self.last_token_at = _now()
            if (granted := self._pool.submit(self)) is None:
                return
            try:
                await granted
            except BaseException:
                self._pool.cancel_lease(self)
                raise
            if self._pool.still_serves(self):
                self.last_token_at = _now()
                return
            # Since the grant, a version was published that this engine does not have, or it has left.
            self._pool.release_lease(self)

    def release(self) -> None:
        """Return the slot. The request can no longer be interrupted."""
        self._holder = None
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
        """Record new tokens: they update the load and the speed of the engine, and show that it is alive."""
        now = _now()
        assert self.view is not None, "tokens without a grant"
        self.view.delivered(self, num_tokens, now - self.last_token_at)
        self.last_token_at = self.view.last_token_at = now

    def lost(self, error: EngineLostError, group: Hashable) -> None:
        """Report that the engine lost the request or was silent. A dead engine, or one that loses many, is fenced.

        Args:
            error: Cause of the loss.
            group: Group of the request. Losses of a single group do not fence an engine.
        """
        # Fencing interrupts all requests of this engine, except this one, which is handling the loss already.
        self._holder = None
        assert self.view is not None, "reported while held"
        self._pool.lost(self.view, error, group)

    def start_interruptible(self) -> None:
        """Allow `interrupt` to cancel the current task until `stop_interruptible`."""
        self._holder = holder = asyncio.current_task()
        assert holder is not None, "called in a task"
        self._cancelling = holder.cancelling()

    def stop_interruptible(self) -> None:
        self._holder = None

    @property
    def is_interruptible(self) -> bool:
        """Whether a running request can be interrupted."""
        return self._holder is not None

    def interrupt(self, kind: InterruptionKind, reason: str) -> None:
        """Cancel the running request. Only the first reason is kept."""
        if self._holder is not None and self.interruption is None:
            assert self.view is not None, "a request runs"
            self.interruption = Interruption(kind, reason, self.view)
            self._holder.cancel()

    def was_interrupted(self) -> bool:
        """Whether the CancelledError that was just caught came from `interrupt` alone; it is then consumed.

        As in `asyncio.timeout`: a cancellation from elsewhere that arrives at the same time must still propagate.
        """
        if self.interruption is None:
            return False
        task = asyncio.current_task()
        assert task is not None, "called in a task"
        return task.uncancel() <= self._cancelling


class EnginePool:
    """Routes requests to engines.

    Attributes:
        max_per_engine: Concurrent requests of an engine that joins. Further ones wait in the pool, not yet bound to a
            version.
        version_timeout_s: Longest wait for a version that no engine in service has, seconds; restarts are not counted.
        num_returned: Number of times that a fenced engine has returned to service.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        max_per_engine: int,
        *,
        policy: LeastLoaded | None = None,
        version_timeout_s: float = 600.0,
    ) -> None:
        self.max_per_engine = max_per_engine
        self.version_timeout_s = version_timeout_s
        self._dispatcher = Dispatcher(policy or PrefixAware())
        for engine in engines:
            self._dispatcher.add(EngineView(engine, max_per_engine, max_per_engine))
        self._num_leases = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_events: dict[EngineView, asyncio.Event] = {}
        self._restart_hook: Callable[[EngineId], bool] | None = None
        self._max_restarts_per_hour: int | None = None
        self._returning: set[EngineId] = set()
        self._joined = asyncio.Event()
        self.num_returned = 0
        self._stall: asyncio.TimerHandle | None = None

    def engines(self) -> list[Engine]:
        """Engines in service, in the order in which they joined."""
        return [view.engine for view in self._dispatcher.serving()]

    def views(self) -> list[EngineView]:
        """State of the engines in service. Read only."""
        return list(self._dispatcher.serving())

    @property
    def fenced(self) -> dict[EngineId, str]:
        """Engine -> reason, for engines that were taken out of service."""
        views = self._dispatcher.views.items()
        return {engine_id: view.fenced for engine_id, view in views if view.fenced is not None}

    @property
    def num_waiting(self) -> int:
        """Number of leases that wait for a slot."""
        return self._dispatcher.num_waiting

    def leases(self) -> Iterator[Lease]:
        """Leases that hold a slot."""
        for view in self._dispatcher.views.values():
            yield from _leases(view.requests)

    def add(self, engine: Engine, max_requests: int | None = None) -> None:
        """Add an engine, or return a fenced one to service. It serves once its version is new enough."""
        known = self._dispatcher.views.get(engine.engine_id)
        assert known is None or known.fenced is not None, f"{engine.engine_id} is in service already"
        self._returning.discard(engine.engine_id)
        self.num_returned += known is not None
        self._joined.set()
        slots = max_requests or (self.max_per_engine if known is None else known.max_slots)
        self._wake_granted(self._dispatcher.add(EngineView(engine, slots, slots)))

    def set_restart_hook(self, restart: Callable[[EngineId], bool], max_per_hour: int = 0) -> None:
        """Call `restart` for every engine that is fenced from now on.

        Args:
            restart: True promises a later `add` or `abandon_return`.
            max_per_hour: How often one engine is restarted within an hour; for the message when none is left.
        """
        self._restart_hook = restart
        self._max_restarts_per_hour = max_per_hour

    def abandon_return(self, engine_id: EngineId) -> None:
        """Report that the restart of an engine was abandoned."""
        self._returning.discard(engine_id)
        self._joined.set()
        self._fail_unservable()

    @property
    def num_returning(self) -> int:
        """Number of fenced engines that are being restarted."""
        return len(self._returning)

    async def wait_available(self) -> None:
        """Wait until an engine is in service, or no engine is being restarted."""
        while self._returning and not self._dispatcher.num_serving:
            await self.wait_one_returned()

    async def wait_one_returned(self) -> None:
        """Wait until a restarting engine has rejoined the pool, or its restart was abandoned."""
        if self._returning:
            self._joined.clear()
            await self._joined.wait()

    def fence(
        self,
        engine_id: EngineId,
        reason: str,
        kind: Literal["fenced", "lost"] = "fenced",
        *,
        only_if_restarted: bool = False,
    ) -> None:
        """Take an engine out of service: no new requests are routed to it, and its trajectories resume elsewhere.

        Args:
            engine_id: The engine.
            reason: Shown in logs and errors.
            kind: `lost` if the engine process is gone, and its requests with it.
            only_if_restarted: Leave the engine in service if it would not be restarted.
        """
        view = self._dispatcher.views.get(engine_id)
        # A publish that began before an engine left may report its loss after it.
        if view is None or view.fenced is not None:
            return
        is_restarted = self._restart_hook is not None and self._restart_hook(engine_id)
        if only_if_restarted and not is_restarted:
            return
        logger.warning("%s is fenced and gets no more requests: %s", engine_id, reason)
        if is_restarted:
            self._returning.add(engine_id)
        self._take_out(view, reason)
        for lease in _leases(view.requests):
            lease.interrupt(kind, f"{engine_id} was fenced: {reason}")

    def retire(self, engine_id: EngineId, reason: str) -> None:
        """Take an engine out of service for good: it gets no new requests and no new versions.

        Its running requests continue until they end, or until `move_requests`. It is not restarted.
        """
        self._take_out(self._dispatcher.views[engine_id], reason)

    async def wait_drained(self, engine_id: EngineId) -> None:
        """Wait until a retired engine has no requests."""
        view = self._dispatcher.views[engine_id]
        while view.in_use:
            await self._idle_events.setdefault(view, asyncio.Event()).wait()

    def move_requests(self, engine_id: EngineId) -> int:
        """Interrupt the requests of a retired engine, which resume on other engines from their tokens.

        Returns:
            The number of requests.
        """
        running = [lease for lease in _leases(self._dispatcher.views[engine_id].requests) if lease.is_interruptible]
        for lease in running:
            lease.interrupt("left", f"{engine_id} leaves the run")
        return len(running)

    def remove(self, engine_id: EngineId) -> None:
        """Forget a retired engine."""
        self._dispatcher.remove(self._dispatcher.views[engine_id])

    def _take_out(self, view: EngineView, reason: str) -> None:
        """Take an engine out of service: its waiters go elsewhere, or fail if no engine can serve them any more."""
        self._wake_granted(self._dispatcher.fence(view, reason))
        if (idle := self._idle_events.pop(view, None)) is not None:
            idle.set()
        if self._dispatcher.stalled():
            self._watch_stall(_now() + self.version_timeout_s)
        self._fail_unservable()

    def _fail_unservable(self) -> None:
        """Fail the waiters that no engine can serve, now or after a restart."""
        if not self._returning and not self._dispatcher.num_serving:
            self._fail(self._dispatcher.waiting(), EngineLostError(self.no_engine_left()))

    def lease(
        self,
        tokens: int = 1,
        prefix: str | None = None,
        min_version: int = -1,
        avoid: EngineId | None = None,
    ) -> Lease:
        """Lease one slot of an engine: `async with pool.lease(...) as lease`, then `lease.engine`.

        Args:
            tokens: Tokens that may still be sampled. Routing balances their sum over engines.
            prefix: Name of the shared prompt prefix. Equal names go to one engine while it is not too busy.
            min_version: The engine must have acknowledged this version or a newer one.
            avoid: Engine to avoid while another one can serve the request.

        Raises:
            EngineLostError: If no engine is left.
            TrajectoryError: kind `engine`, if no engine reaches `min_version` within `version_timeout_s`.
        """
        return Lease(self, tokens, prefix, min_version, avoid)

    def pause(self, engine_id: EngineId) -> None:
        """Route no new requests to an engine, unless it has left meanwhile; running ones continue."""
        if (view := self._dispatcher.views.get(engine_id)) is not None:
            self._wake_granted(self._dispatcher.pause(view))

    def resume(self, engine_id: EngineId) -> None:
        """Undo `pause`, unless the engine has left meanwhile."""
        if (view := self._dispatcher.views.get(engine_id)) is not None:
            self._wake_granted(self._dispatcher.resume(view))

    def set_limit(self, engine_id: EngineId, limit: int) -> None:
        """Limit the concurrent requests of one engine (adaptive concurrency), unless it has left meanwhile."""
        if (view := self._dispatcher.views.get(engine_id)) is not None:
            self._wake_granted(self._dispatcher.set_limit(view, limit))

    def set_min_version(self, version: int) -> None:
        """Route no new requests to engines below `version`."""
        self._wake_granted(self._dispatcher.set_min_version(version))

    def refresh(self) -> None:
        """Re-evaluate the waiters after an engine changed its version."""
        self._wake_granted(self._dispatcher.refresh())

    async def wait_idle(self) -> None:
        """Wait until no request holds a slot and no `in_use` context is open."""
        await self._idle.wait()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the pool busy within the context, for work that holds no slot between its requests."""
        self._num_leases += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_leases -= 1
            if not self._num_leases:
                self._idle.set()

    async def wait_engine_idle(self, engine_id: EngineId) -> None:
        """Wait until an engine has no requests or is out of service."""
        view = self._dispatcher.views.get(engine_id)
        while view is not None and view.in_use and view.fenced is None:
            await self._idle_events.setdefault(view, asyncio.Event()).wait()

    # Called by leases.

    def submit(self, lease: Lease) -> asyncio.Future[None] | None:
        """Grant the lease, or queue it and return what it waits for, `lease.granted`."""
        dispatcher = self._dispatcher
        if not dispatcher.num_serving and not self._returning:
            raise EngineLostError(self.no_engine_left())
        if dispatcher.submit(lease):
            self._num_leases += 1
            self._idle.clear()
            return None
        lease.granted = asyncio.get_running_loop().create_future()
        if lease.min_version > dispatcher.newest or dispatcher.newest < dispatcher.min_version:
            self._watch_stall(lease.last_token_at + self.version_timeout_s)
        return lease.granted

    def still_serves(self, lease: Lease) -> bool:
        """Whether the engine of a lease that waited may get its request now."""
        assert lease.view is not None, "it was granted"
        return self._dispatcher.serves(lease.view)

    def release_lease(self, lease: Lease) -> None:
        view = lease.view
        assert view is not None, "released twice"
        granted = self._dispatcher.release(lease)
        self._num_leases -= 1
        if granted:
            self._wake_granted(granted)
        elif not self._num_leases:
            self._idle.set()
        if self._idle_events and not view.in_use and (idle := self._idle_events.pop(view, None)) is not None:
            idle.set()

    def cancel_lease(self, lease: Lease) -> None:
        """Withdraw a lease whose waiter was cancelled, before or just after the grant."""
        if lease.view is not None:
            self.release_lease(lease)
        elif lease.waits_at is not None:
            self._dispatcher.withdraw(lease)

    def lost(self, view: EngineView, error: EngineLostError, group: Hashable) -> None:
        """Record that the engine of `view` lost a request of `group`; fence it if it is dead or loses many."""
        view.num_losses += 1
        view.losing_groups.add(group)
        if view.fenced is not None:
            return
        if error.is_final:
            self.fence(view.engine_id, str(error), "lost")
        elif view.num_losses >= LOSSES_IN_A_ROW and len(view.losing_groups) >= LOSING_GROUPS:
            lost = f"it lost {view.num_losses} requests in a row, of {len(view.losing_groups)} groups"
            self.fence(view.engine_id, f"{lost}; the last one: {error}")

    def _wake_granted(self, granted: Iterable[SlotRequest]) -> None:
        """Wake the waiters of granted leases. A waiter that was cancelled meanwhile releases its slot
        (`cancel_lease`).
        """
        for lease in _leases(granted):
            self._num_leases += 1
            self._idle.clear()
            assert lease.granted is not None, "it waited"
            if not lease.granted.done():
                lease.granted.set_result(None)

    def _fail(self, waiting: Iterable[SlotRequest], error: Exception) -> None:
        for lease in _leases(waiting):
            self._dispatcher.withdraw(lease)
            assert lease.granted is not None, "it waits"
            if not lease.granted.done():
                lease.granted.set_exception(error)

    def _watch_stall(self, at: float) -> None:
        """Schedule `_fail_stalled` at a time of the loop's clock, unless it is scheduled already."""
        if self._stall is None:
            self._stall = asyncio.get_running_loop().call_at(at, self._fail_stalled)

    def _fail_stalled(self) -> None:
        """Fail the leases that have waited too long for a version that no engine has."""
        assert self._stall is not None, "called by its timer"
        due, self._stall = self._stall.when(), None
        stalled, now = _leases(self._dispatcher.stalled()), _now()
        # A restart has time limits of its own. A driver that stood still has not read what its engines have answered.
        if stalled and (self._returning or now - due > LATE_S):
            for lease in stalled:
                lease.last_token_at = now
            self._watch_stall(now + self.version_timeout_s)
            return
        # The same sum decides which lease is late and when to check again. Two sums that round differently could find
        # no late lease and schedule the next check at once, in an endless loop.
        deadlines = {lease: lease.last_token_at + self.version_timeout_s for lease in stalled}
        late = [lease for lease, deadline in deadlines.items() if deadline <= now]
        have = ", ".join(f"{view.engine_id} at v{view.version}" for view in self.views())
        for lease in late:
            needed = max(lease.min_version, self._dispatcher.min_version)
            waited = f"waited {self.version_timeout_s:.0f} s for an engine at v{needed} or newer"
            self._fail([lease], TrajectoryError("engine", f"{waited}; in service: {have}"))
        if len(late) < len(stalled):
            self._watch_stall(min(deadline for deadline in deadlines.values() if deadline > now))

    def no_engine_left(self) -> str:
        """The message of a run that has lost its last engine."""
        fenced, limit = self.fenced, self._max_restarts_per_hour
        restarts = f"each is restarted at most rollout.max_engine_restarts_per_hour={limit} times within an hour"
        if limit is None:
            restarts = "lost engines are restarted only in training, and not if they take turns with the trainer"
        causes = "; ".join(f"{engine_id}: {reason.rstrip('.')}" for engine_id, reason in fenced.items())
        return (
            f"no rollout engine is left in service: {len(fenced)} of {len(fenced)} are out ({restarts}), so nothing "
            f"can be sampled. Causes: {causes}. Mend them (Ray's logs tell more), then continue with `penstock resume`."
        )


def _leases(requests: Iterable[SlotRequest]) -> list[Lease]:
    """Requests of the dispatcher as leases: the pool submits only leases."""
    return cast("list[Lease]", list(requests))


def _now() -> float:
    """Time of the event loop's clock, seconds."""
    return asyncio.get_running_loop().time()


def make_pool(engines: Sequence[Engine], config: RolloutConfig, seed: int, num_slots: Sequence[int]) -> EnginePool:
    """Build the pool of a configuration; `num_slots[i]` are the concurrent requests of `engines[i]`."""
    pool = EnginePool(
        [],
        config.engine.max_num_seqs,
        policy=make_policy(config.routing, seed),
        version_timeout_s=config.request_timeout_s,
    )
    for engine, slots in zip(engines, num_slots, strict=True):
        pool.add(engine, slots)
    return pool
