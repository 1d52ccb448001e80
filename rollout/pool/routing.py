"""Which engine takes a request: pure policies over the pool's view of its engines.

Symbols: `tokens` of a request = what it may still sample; `outstanding_tokens` of an engine = their sum over its
requests; `speed` = tokens/s that one of its requests gets. Load of an engine = outstanding_tokens ÷ speed. Speed is
taken per request and not per engine: an engine with few requests would look slow by its total, get even less work,
and stay so; by what one request gets it looks fast and fills up again.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine

RoutingName = Literal["prefix_aware", "least_loaded"]

FULL_SCAN = 32
"""Up to so many engines with room, the best of all is taken; above, the better of two drawn at random.

A second draw is what balances; a third changes little (Mitzenmacher, The Power of Two Choices, 2001).
"""
MAX_LEAD = 0.25
"""How much busier than the best engine the one with the prefix may be, as a share of its slots."""
MAX_HOMES = 1 << 16
"""Prefixes remembered; the one used longest ago is forgotten first."""
SPEED_DECAY = 0.98
"""Weight of the past in the measured speed, per report of new tokens."""


@dataclass(slots=True, eq=False)
class EngineView:
    """An engine as routing sees it. Written by the dispatcher only; policies read.

    Attributes:
        max_slots: Requests it can hold at once.
        limit: Requests it may hold now, 1 ≤ limit ≤ max_slots (adaptive concurrency).
        in_use: Slots taken.
        outstanding_tokens: What its requests may still sample.
        speed: Tokens/s of one request, an exponential average; 1 until anything was measured anywhere.
        losses: Requests it lost, or was silent over, since it last delivered a token.
        losers: Groups that lost them.
        fenced: Why it is out of service, if it is.
        is_paused: It keeps its requests and gets no new ones.
        open_index: Where it stands in the dispatcher's list of engines with room; -1 if it has none.
        tickets: What holds its slots, in the order of their grants.
        line: Those who wait for this engine, because their prefix is here; first come, first served.
        gang: Waits for several slots at once; nobody else gets one before.
    """

    engine: Engine
    max_slots: int
    limit: int
    in_use: int = 0
    outstanding_tokens: int = 0
    speed: float = 1.0
    losses: int = 0
    losers: set[Hashable] = field(default_factory=set, repr=False)
    fenced: str | None = None
    is_paused: bool = False
    open_index: int = -1
    tickets: dict[SlotRequest, None] = field(default_factory=dict, repr=False)
    line: OrderedDict[SlotRequest, None] = field(default_factory=OrderedDict, repr=False)
    gang: SlotRequest | None = None
    _tokens: float = field(default=0.0, repr=False)
    _seconds: float = field(default=0.0, repr=False)

    @property
    def engine_id(self) -> EngineId:
        return self.engine.engine_id

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def is_measured(self) -> bool:
        return self._seconds > 0

    def may_take(self, ticket: SlotRequest) -> bool:
        """Whether it has room for `ticket` and is new enough, and no engine to avoid."""
        return (
            self.open_index >= 0
            and self.in_use + ticket.slots <= self.limit
            and (ticket.min_version < 0 or self.version >= ticket.min_version)
            and self.engine_id != ticket.avoid
        )

    def delivered(self, ticket: SlotRequest, num_tokens: int, elapsed_s: float) -> bool:
        """One of its requests got `num_tokens` in `elapsed_s`; says whether that is the first measure of its speed.

        Speed is a ratio of averages: short intervals weigh little.
        """
        fewer = min(num_tokens, ticket.tokens)
        ticket.tokens -= fewer
        self.outstanding_tokens -= fewer
        self.losses = 0
        self.losers.clear()
        if elapsed_s <= 0:
            return False
        is_first = not self.is_measured
        self._tokens = self._tokens * SPEED_DECAY + num_tokens
        self._seconds = self._seconds * SPEED_DECAY + elapsed_s
        if self._tokens > 0:
            self.speed = self._tokens / self._seconds
        return is_first


@dataclass(eq=False)
class SlotRequest:
    """A request for slots, from its submission to its release.

    Attributes:
        tokens: What it may still sample; falls as tokens arrive.
        prefix: What its prompt begins with, by name: the task of a group, a dialogue. None shares nothing.
        min_version: Oldest version it may be served by; -1 is any.
        avoid: An engine to stay away from while another serves that is new enough.
        slots: Slots on one engine, all or none: 1, or more for a gang; 0 for a member of one, whose gang holds them.
        serial: Order of submission.
        view: The engine it was granted, while it holds it.
        waits_at: The waiting line it stands in.
    """

    tokens: int = 1
    prefix: str | None = None
    min_version: int = -1
    avoid: EngineId | None = None
    slots: int = 1
    serial: int = -1
    view: EngineView | None = None
    waits_at: OrderedDict[SlotRequest, None] | None = None


class LeastLoaded:
    """Takes the engine that would be least loaded with the request; ties are broken at random.

    It decides; the dispatcher keeps the books.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, views: Sequence[EngineView], ticket: SlotRequest) -> EngineView:
        """One of `views`, which is not empty and all of which may take it."""
        tokens, num_views = ticket.tokens, len(views)
        if num_views > FULL_SCAN:
            one, other = views[int(self._rng.random() * num_views)], views[int(self._rng.random() * num_views)]
            is_other = (other.outstanding_tokens + tokens) * one.speed < (one.outstanding_tokens + tokens) * other.speed
            return other if is_other else one
        best, fewest, num_equal = views[0], math.inf, 0
        for view in views:
            load = (view.outstanding_tokens + tokens) / view.speed
            if load < fewest:
                best, fewest, num_equal = view, load, 1
            elif load == fewest:
                num_equal += 1
                if self._rng.random() * num_equal < 1:
                    best = view
        return best

    def home(self, ticket: SlotRequest) -> EngineView | None:  # noqa: ARG002 - prefixes do not matter here
        """The engine that holds its prefix, if any and if that matters."""
        return None

    def placed(self, ticket: SlotRequest, view: EngineView) -> None:
        """It was granted."""


class PrefixAware(LeastLoaded):
    """Least loaded, but the members of a group and the turns of a dialogue follow the first to its engine.

    Sticky until that engine leads the best one by more than `max_lead` of its slots, counted in requests of this size.
    """

    def __init__(self, seed: int = 0, max_lead: float = MAX_LEAD) -> None:
        super().__init__(seed)
        self._max_lead = max_lead
        self._homes: OrderedDict[str, EngineView] = OrderedDict()

    def choose(self, views: Sequence[EngineView], ticket: SlotRequest) -> EngineView:
        home = self.home(ticket)
        if home is None or not home.may_take(ticket):
            return super().choose(views, ticket)
        allowed = self._max_lead * home.max_slots * ticket.tokens
        if home.outstanding_tokens <= allowed:
            return home  # it cannot lead by more than it has
        best = super().choose(views, ticket)
        lead = home.outstanding_tokens - best.outstanding_tokens * home.speed / best.speed
        return best if lead > allowed else home

    def home(self, ticket: SlotRequest) -> EngineView | None:
        if ticket.prefix is None:
            return None
        view = self._homes.get(ticket.prefix)
        return None if view is None or view.fenced is not None else view

    def placed(self, ticket: SlotRequest, view: EngineView) -> None:
        if ticket.prefix is None:
            return
        self._homes[ticket.prefix] = view
        self._homes.move_to_end(ticket.prefix)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)


def make_policy(name: RoutingName, seed: int) -> LeastLoaded:
    """The policy that the configuration names."""
    return PrefixAware(seed) if name == "prefix_aware" else LeastLoaded(seed)
