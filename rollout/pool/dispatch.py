"""Who gets which slot, and who waits: the pool's decisions without asyncio, so that they are tested as plain calls.

Invariants, after every call: slots in use = slots of the granted tickets; nobody waits whom an engine with room may
take; what waits is served first come, first served, with three exceptions that are bounded.
 - A resumed trajectory goes first: its tokens are the oldest, its group is due the soonest.
 - A ticket whose prefix is on another engine waits for that one, if the line there is shorter than its slots. It is
   served elsewhere once nobody else wants the room.
 - A gang at the head claims the next engine that could hold it: that engine gives nothing out until the gang fits.
   The others serve those behind. So a gang waits at most for one engine to empty.

Cost per event: O(1) while engines are full, O(engines with room, at most 32) otherwise; no waiter is looked at twice.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from penstock.dataflow.ids import EngineId
from penstock.rollout.pool.routing import EngineView, LeastLoaded, SlotRequest

Granted = list[SlotRequest]


class Dispatcher:
    """Engines, tickets and waiting lines.

    Attributes:
        views: Every engine, also those out of service.
        floor: Engines below this version get nothing.
        num_waiting: Tickets in all waiting lines.
        num_serving: Engines in service.
        newest: Version of the newest engine in service, when last looked.
    """

    def __init__(self, policy: LeastLoaded) -> None:
        self.policy = policy
        self.views: dict[EngineId, EngineView] = {}
        self.min_version = -1
        self.num_waiting = 0
        self.num_serving = 0
        self.newest = -1
        self._open: list[EngineView] = []
        self._queue: OrderedDict[SlotRequest, None] = OrderedDict()
        self._resumes: OrderedDict[SlotRequest, None] = OrderedDict()
        self._lined: OrderedDict[EngineView, None] = OrderedDict()
        self._claims: OrderedDict[SlotRequest, None] = OrderedDict()
        self._serials = itertools.count()

    def serving(self) -> Iterator[EngineView]:
        """Engines in service, in the order they joined."""
        return (view for view in self.views.values() if view.fenced is None)

    def waiting(self) -> Iterator[SlotRequest]:
        """Everything that waits."""
        lines = (view.line for view in self._lined)
        return itertools.chain(self._resumes, self._claims, self._queue, *lines)

    def stalled(self) -> list[SlotRequest]:
        """Those who wait for a version that no engine in service has."""
        self._look()
        if self.newest < self.min_version:
            return list(self.waiting())
        return [ticket for ticket in self._resumes if ticket.min_version > self.newest]

    @property
    def max_gang(self) -> int:
        """Slots of the largest engine in service."""
        return max((view.max_slots for view in self.serving()), default=0)

    def submit(self, ticket: SlotRequest) -> bool:
        """Grant it at once, or let it wait; says which."""
        ticket.serial = next(self._serials)
        if self._open:
            views: list[EngineView] = self._open
            if ticket.slots > 1 or ticket.min_version >= 0 or ticket.avoid is not None:
                views = [view for view in self._open if view.may_take(ticket)]
                if not views and ticket.avoid is not None and not self._may_avoid(ticket):
                    ticket.avoid = None
                    views = [view for view in self._open if view.may_take(ticket)]
            if views:
                self._grant(ticket, self.policy.choose(views, ticket))
                return True
        self.num_waiting += 1
        is_resume = ticket.min_version >= 0 or ticket.avoid is not None
        self._stand(ticket, self._resumes if is_resume else self._queue)
        return ticket.slots > 1 and self._claim_best(ticket)

    def withdraw(self, ticket: SlotRequest) -> Granted:
        """It waits no more."""
        self._leave(ticket)
        claimed = [view for view in self.serving() if view.gang is ticket] if ticket.slots > 1 else []
        for view in claimed:
            view.gang = None
        return self._refill(claimed, [])

    def release(self, ticket: SlotRequest) -> Granted:
        """It gives its slots back; says who got them."""
        view = ticket.view
        assert view is not None, "released without a grant"
        ticket.view = None
        del view.tickets[ticket]
        view.in_use -= ticket.slots
        view.outstanding_tokens -= ticket.tokens
        granted: Granted = []
        if self.num_waiting:
            self._fill(view, granted)
        elif view.open_index < 0:
            self._sync(view)
        return granted

    def join(self, ticket: SlotRequest, view: EngineView) -> None:
        """Grant a ticket that takes no slot of its own."""
        ticket.serial = next(self._serials)
        self._grant(ticket, view)

    def assume(self, speed: float) -> None:
        """The first engine was measured: the others are as fast until they are measured themselves."""
        for view in self.serving():
            if not view.is_measured:
                view.speed = speed

    def add(self, view: EngineView) -> Granted:
        """An engine joins, or comes back."""
        known = [other.speed for other in self.serving() if other.is_measured]
        view.speed = sum(known) / len(known) if known else 1.0
        self.views[view.engine_id] = view
        self.num_serving += 1
        return self.refresh()

    def fence(self, view: EngineView, reason: str) -> Granted:
        """It is out of service: who waited for it waits for any."""
        view.fenced = reason
        self.num_serving -= 1
        self._disband(view)
        return self.refresh()

    def pause(self, view: EngineView) -> Granted:
        """It keeps its requests and gets nothing new until `resume`."""
        view.is_paused = True
        self._disband(view)
        return self.refresh()

    def resume(self, view: EngineView) -> Granted:
        view.is_paused = False
        return self._refill([view], [])

    def set_limit(self, view: EngineView, limit: int) -> Granted:
        """Requests it may hold from now on; within 1..max_slots. More than that may still run."""
        view.limit = min(max(limit, 1), view.max_slots)
        return self._refill([view], [])

    def set_min_version(self, version: int) -> Granted:
        """From now on only engines at `version` or newer get anything. It never falls."""
        self.min_version = max(self.min_version, version)
        for view in self.serving():
            if not self._serves(view):
                self._disband(view)
        return self.refresh()

    def refresh(self) -> Granted:
        """Some engine may have another version than before."""
        self._look()
        return self._refill(list(self.serving()), [])

    def _grant(self, ticket: SlotRequest, view: EngineView) -> None:
        ticket.view = view
        view.tickets[ticket] = None
        view.in_use += ticket.slots
        view.outstanding_tokens += ticket.tokens
        self.policy.placed(ticket, view)
        if view.in_use >= view.limit:
            self._sync(view)

    def _stand(self, ticket: SlotRequest, line: OrderedDict[SlotRequest, None]) -> None:
        ticket.waits_at = line
        line[ticket] = None

    def _leave(self, ticket: SlotRequest) -> None:
        line = ticket.waits_at
        assert line is not None, "it does not wait"
        del line[ticket]
        ticket.waits_at = None
        self.num_waiting -= 1

    def _refill(self, views: Iterable[EngineView], granted: Granted) -> Granted:
        for view in views:
            self._sync(view)
            if self.num_waiting:
                self._fill(view, granted)
        return granted

    def _fill(self, view: EngineView, granted: Granted) -> None:
        """Give its room to those who wait."""
        if self._serves(view):
            while (view.in_use < view.limit or view.gang is not None) and (ticket := self._next(view)) is not None:
                self._leave(ticket)
                self._grant(ticket, view)
                granted.append(ticket)
        self._sync(view)

    def _next(self, view: EngineView) -> SlotRequest | None:
        """Who is to get room on `view`; still waiting when this returns."""
        if self._resumes and view.in_use < view.limit and (resume := self._next_resume(view)) is not None:
            return resume
        if view.gang is not None:
            return self._next_of_gang(view, view.gang)
        mine = next(iter(view.line), None)
        other = self._next_unbound(view)
        if mine is not None and (other is None or mine.serial < other.serial):
            return mine
        if other is not None and other.slots > 1 and view.in_use + other.slots > view.limit:
            self._claim(view, other)
            return self._next_of_gang(view, other)
        return self._next_elsewhere() if other is None else other

    def _claim_best(self, gang: SlotRequest) -> bool:
        """Claim the engine that is nearest to holding it; says whether that one is empty and takes it at once."""
        large_enough = (view for view in self._open if view.max_slots >= gang.slots)
        view = max(large_enough, key=lambda view: view.limit - view.in_use, default=None)
        if view is None:
            return False
        self._claim(view, gang)
        if self._next_of_gang(view, gang) is not None:
            self._leave(gang)
            self._grant(gang, view)
        self._sync(view)
        return gang.view is not None

    def _claim(self, view: EngineView, gang: SlotRequest) -> None:
        del self._queue[gang]
        self._stand(gang, self._claims)
        view.gang = gang

    def _next_of_gang(self, view: EngineView, gang: SlotRequest) -> SlotRequest | None:
        """A limit below the gang's size holds nobody back for ever: an empty engine takes it."""
        if view.in_use + gang.slots > max(view.limit, gang.slots):
            return None
        view.gang = None
        return gang

    def _next_resume(self, view: EngineView) -> SlotRequest | None:
        for ticket in self._resumes:
            is_avoided = ticket.avoid == view.engine_id and self._may_avoid(ticket)
            if ticket.min_version <= view.version and not is_avoided:
                return ticket
        return None

    def _may_avoid(self, ticket: SlotRequest) -> bool:
        """Whether another engine than the one to avoid takes it now, or once it has a free slot."""
        return any(
            self._serves(view) and view.version >= ticket.min_version
            for view in self.views.values()
            if view.engine_id != ticket.avoid
        )

    def _next_elsewhere(self) -> SlotRequest | None:
        """The first of another engine's line: room is better used without the prefix than not at all."""
        while self._lined:
            view = next(iter(self._lined))
            if view.line:
                return next(iter(view.line))
            del self._lined[view]
        return None

    def _next_unbound(self, view: EngineView) -> SlotRequest | None:
        """The first of the queue, after sending those with their prefix elsewhere to wait there."""
        found: SlotRequest | None = None
        leaving: list[tuple[SlotRequest, EngineView]] = []
        for ticket in self._queue:
            home = self.policy.home(ticket) if ticket.slots == 1 else None  # lines hold no gangs
            is_elsewhere = home is not None and home is not view and self._serves(home)
            if home is not None and is_elsewhere and len(home.line) + len(leaving) < home.limit:
                leaving.append((ticket, home))
            elif ticket.slots <= view.max_slots:
                found = ticket
                break
        for ticket, home in leaving:
            del self._queue[ticket]
            self._stand(ticket, home.line)
            self._lined[home] = None
        return found

    def _disband(self, view: EngineView) -> None:
        """Those who waited for this engine wait for any, at the head of the queue."""
        self._sync(view)
        back = [*([view.gang] if view.gang is not None else []), *view.line]
        view.gang = None
        for ticket in reversed(back):
            self._leave(ticket)
            self.num_waiting += 1
            self._stand(ticket, self._queue)
            self._queue.move_to_end(ticket, last=False)

    def _serves(self, view: EngineView) -> bool:
        return view.fenced is None and not view.is_paused and view.version >= self.min_version

    def _sync(self, view: EngineView) -> None:
        """Keep the list of engines with room: O(1), the last one moves into a gap."""
        is_open = view.in_use < view.limit and view.gang is None and self._serves(view)
        if is_open and view.open_index < 0:
            view.open_index = len(self._open)
            self._open.append(view)
        elif not is_open and view.open_index >= 0:
            last = self._open.pop()
            if last is not view:
                self._open[view.open_index] = last
                last.open_index = view.open_index
            view.open_index = -1

    def _look(self) -> None:
        self.newest = max((view.version for view in self.serving()), default=-1)
