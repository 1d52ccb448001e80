"""The decisions of the pool: which request gets which slot, and which requests wait. No asyncio: tests call it
directly.

Invariants, after every call: slots in use = slots of the granted requests; no request waits while an engine with free
slots may take it; waiting requests are served in order of submission, with two bounded exceptions:
 - A resumed trajectory goes first: its tokens are the oldest, and its group has the nearest deadline.
 - A request whose prefix is cached on another engine waits in the queue of that engine while this queue is shorter
   than the engine's slots. It is served elsewhere as soon as slots would otherwise stay free.

Cost per event: O(1) while all engines are full, else O(engines with free slots, at most 32).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from penstock.dataflow.ids import EngineId
from penstock.rollout.engine_pool.routing import AverageSpeed, EngineView, LeastLoaded, SlotRequest

Granted = list[SlotRequest]


class Dispatcher:
    """Engines, requests and queues of waiting requests.

    Attributes:
        views: State of every engine, including those out of service.
        min_version: Engines below this version get no requests.
        num_waiting: Requests in all queues.
        num_serving: Engines in service.
        newest: Version of the newest engine in service, as of the last update.
    """

    def __init__(self, policy: LeastLoaded) -> None:
        self.policy = policy
        self.views: dict[EngineId, EngineView] = {}
        self.min_version = -1
        self.num_waiting = 0
        self.num_serving = 0
        self.newest = -1
        self._speed = AverageSpeed(1.0)
        self._open: list[EngineView] = []
        self._queue: OrderedDict[SlotRequest, None] = OrderedDict()
        self._resumes: OrderedDict[SlotRequest, None] = OrderedDict()
        self._engines_with_queues: OrderedDict[EngineView, None] = OrderedDict()
        self._serials = itertools.count()

    def serving(self) -> Iterator[EngineView]:
        """Engines in service, in the order in which they joined."""
        return (view for view in self.views.values() if view.fenced is None)

    def waiting(self) -> Iterator[SlotRequest]:
        """All waiting requests."""
        queues = (view.queue for view in self._engines_with_queues)
        return itertools.chain(self._resumes, self._queue, *queues)

    def stalled(self) -> list[SlotRequest]:
        """Requests that wait for a version that no engine in service has."""
        self._update_newest()
        if self.newest < self.min_version:
            return list(self.waiting())
        return [request for request in self._resumes if request.min_version > self.newest]

    def submit(self, request: SlotRequest) -> bool:
        """Grant a request or queue it. Returns whether it was granted."""
        request.serial = next(self._serials)
        if self._open:
            views: list[EngineView] = self._open
            if request.min_version >= 0 or request.avoid is not None:
                views = [view for view in self._open if view.may_take(request)]
                if not views and request.avoid is not None and not self._may_avoid(request):
                    request.avoid = None
                    views = [view for view in self._open if view.may_take(request)]
            if views:
                self._grant(request, self.policy.choose(views, request))
                return True
        self.num_waiting += 1
        is_resume = request.min_version >= 0 or request.avoid is not None
        self._enqueue(request, self._resumes if is_resume else self._queue)
        return False

    def withdraw(self, request: SlotRequest) -> None:
        """Remove a waiting request."""
        queue = request.waits_at
        assert queue is not None, "the request does not wait"
        del queue[request]
        request.waits_at = None
        self.num_waiting -= 1

    def release(self, request: SlotRequest) -> Granted:
        """Return the slot of a request. Returns the request that it is granted to, if there is one."""
        view = request.view
        assert view is not None, "released without a grant"
        request.view = None
        del view.requests[request]
        view.outstanding_tokens -= request.tokens
        granted: Granted = []
        if self.num_waiting:
            self._fill(view, granted)
        elif view.open_index < 0:
            self._sync(view)
        return granted

    def add(self, view: EngineView) -> Granted:
        """Add an engine, or return a fenced one to service."""
        view.of_all = self._speed
        self.views[view.engine_id] = view
        self.num_serving += 1
        self.newest = max(self.newest, view.version)
        return self._refill([view], [])

    def fence(self, view: EngineView, reason: str) -> Granted:
        """Take an engine out of service. Requests that waited for it wait for any engine."""
        view.fenced = reason
        self.num_serving -= 1
        self._requeue_waiters(view)
        return self.refresh()

    def remove(self, view: EngineView) -> None:
        """Forget an engine that is out of service. Requests that still hold its slots release them as usual."""
        del self.views[view.engine_id]

    def pause(self, view: EngineView) -> Granted:
        """Grant no new requests to an engine until `resume`; running ones continue."""
        view.is_paused = True
        self._requeue_waiters(view)
        return self.refresh()

    def resume(self, view: EngineView) -> Granted:
        view.is_paused = False
        return self._refill([view], [])

    def set_limit(self, view: EngineView, limit: int) -> Granted:
        """Limit the concurrent requests of an engine, within 1..max_slots. Running requests above the limit
        continue.
        """
        view.limit = min(max(limit, 1), view.max_slots)
        return self._refill([view], [])

    def set_min_version(self, version: int) -> Granted:
        """Grant requests only to engines at `version` or newer. The bound never decreases."""
        self.min_version = max(self.min_version, version)
        for view in self.serving():
            if not self.serves(view):
                self._requeue_waiters(view)
        return self.refresh()

    def refresh(self) -> Granted:
        """Re-evaluate all waiters after an engine may have changed its version."""
        self._update_newest()
        return self._refill(list(self.serving()), [])

    def _grant(self, request: SlotRequest, view: EngineView) -> None:
        request.view = view
        view.requests[request] = None
        view.outstanding_tokens += request.tokens
        self.policy.record_grant(request, view)
        if view.in_use >= view.limit:
            self._sync(view)

    def _enqueue(self, request: SlotRequest, queue: OrderedDict[SlotRequest, None]) -> None:
        request.waits_at = queue
        queue[request] = None

    def _refill(self, views: Iterable[EngineView], granted: Granted) -> Granted:
        for view in views:
            self._sync(view)
            if self.num_waiting:
                self._fill(view, granted)
        return granted

    def _fill(self, view: EngineView, granted: Granted) -> None:
        """Grant free slots of an engine to waiting requests."""
        if self.serves(view):
            while view.in_use < view.limit and (request := self._next(view)) is not None:
                self.withdraw(request)
                self._grant(request, view)
                granted.append(request)
        self._sync(view)

    def _next(self, view: EngineView) -> SlotRequest | None:
        """The waiting request that gets the next free slot of `view`."""
        if self._resumes and (resume := self._next_resume(view)) is not None:
            return resume
        mine = next(iter(view.queue), None)
        other = self._next_unbound(view)
        if mine is not None and (other is None or mine.serial < other.serial):
            return mine
        return self._next_elsewhere() if other is None else other

    def _next_resume(self, view: EngineView) -> SlotRequest | None:
        for request in self._resumes:
            is_avoided = request.avoid == view.engine_id and self._may_avoid(request)
            if request.min_version <= view.version and not is_avoided:
                return request
        return None

    def _may_avoid(self, request: SlotRequest) -> bool:
        """Whether an engine other than the one to avoid can serve the request, now or once a slot is free."""
        return any(
            self.serves(view) and view.version >= request.min_version
            for view in self.views.values()
            if view.engine_id != request.avoid
        )

    def _next_elsewhere(self) -> SlotRequest | None:
        """The first request in the queue of another engine: a slot without its prefix beats an idle slot."""
        while self._engines_with_queues:
            view = next(iter(self._engines_with_queues))
            if view.queue:
                return next(iter(view.queue))
            del self._engines_with_queues[view]
        return None

    def _next_unbound(self, view: EngineView) -> SlotRequest | None:
        """The first request of the common queue, after moving those whose prefix is on another engine to its queue."""
        found: SlotRequest | None = None
        leaving: list[tuple[SlotRequest, EngineView]] = []
        for request in self._queue:
            home = self.policy.home(request)
            is_elsewhere = home is not None and home is not view and self.serves(home)
            if home is not None and is_elsewhere and len(home.queue) + len(leaving) < home.limit:
                leaving.append((request, home))
            else:
                found = request
                break
        for request, home in leaving:
            del self._queue[request]
            self._enqueue(request, home.queue)
            self._engines_with_queues[home] = None
        return found

    def _requeue_waiters(self, view: EngineView) -> None:
        """Move the requests that waited for this engine to the head of the common queue."""
        self._sync(view)
        for request in reversed(list(view.queue)):
            self.withdraw(request)
            self.num_waiting += 1
            self._enqueue(request, self._queue)
            self._queue.move_to_end(request, last=False)

    def serves(self, view: EngineView) -> bool:
        """Whether an engine may get new requests."""
        return view.fenced is None and not view.is_paused and view.version >= self.min_version

    def _sync(self, view: EngineView) -> None:
        """Update the list of engines with free slots, in O(1): the last entry moves into a gap."""
        is_open = view.in_use < view.limit and self.serves(view)
        if is_open and view.open_index < 0:
            view.open_index = len(self._open)
            self._open.append(view)
        elif not is_open and view.open_index >= 0:
            last = self._open.pop()
            if last is not view:
                self._open[view.open_index] = last
                last.open_index = view.open_index
            view.open_index = -1

    def _update_newest(self) -> None:
        self.newest = max((view.version for view in self.serving()), default=-1)
