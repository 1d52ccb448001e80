"""Routing policies: which engine takes a request. Pure functions of the pool's view of its engines.

Symbols: `tokens` of a request = tokens it may still sample; `outstanding_tokens` of an engine = their sum over its
requests; `speed` = tokens/s of one of its requests. Load of an engine = outstanding_tokens ÷ speed. Speed is measured
per request and not per engine: by its total throughput an engine with few requests would look slow, get fewer requests
and stay so.
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
"""With up to this many engines with free slots, the least loaded of all is chosen; with more, the better of two random
ones.

Two choices balance almost as well as all (Mitzenmacher, The Power of Two Choices, 2001).
"""
MAX_LEAD = 0.25
"""How much busier than the least loaded engine the engine with the prefix may be, as a share of its slots."""
MAX_HOMES = 1 << 16
"""Remembered prefixes; the least recently used one is forgotten first."""
SPEED_DECAY = 0.98
"""Weight of the past in the measured speed, per report of new tokens."""


@dataclass(slots=True)
class AverageSpeed:
    """Tokens/s of one request: the ratio of two exponential averages, so that short intervals weigh little."""

    value: float
    """The ratio; as at the start, while no tokens were reported."""
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, num_tokens: int, elapsed_s: float) -> None:
        """Record `num_tokens` of one request in `elapsed_s` > 0."""
        self._tokens = self._tokens * SPEED_DECAY + num_tokens
        self._seconds = self._seconds * SPEED_DECAY + elapsed_s
        if self._tokens > 0:
            self.value = self._tokens / self._seconds


@dataclass(slots=True, eq=False)
class EngineView:
    """State of one engine as routing sees it. Only the dispatcher writes it."""

    engine: Engine
    max_slots: int
    """Largest number of concurrent requests."""
    limit: int
    """Present limit of concurrent requests, 1 ≤ limit ≤ max_slots (adaptive concurrency)."""
    outstanding_tokens: int = 0
    """Tokens that its requests may still sample."""
    of_all: AverageSpeed = field(default_factory=lambda: AverageSpeed(1.0), repr=False)
    """Speed of all engines of the dispatcher that the engine is in."""
    num_losses: int = 0
    """Requests lost, or interrupted for silence, since the last delivered token."""
    losing_groups: set[Hashable] = field(default_factory=set, repr=False)
    """Groups of those requests."""
    last_token_at: float = -math.inf
    """Time of the newest tokens of any of its requests, seconds of the event loop's clock."""
    fenced: str | None = None
    """Reason why the engine is out of service; None if it is in service."""
    is_paused: bool = False
    """Running requests continue, new ones are routed elsewhere."""
    open_index: int = -1
    """Index in the dispatcher's list of engines with free slots; -1 without free slots."""
    requests: dict[SlotRequest, None] = field(default_factory=dict, repr=False)
    """Requests that hold its slots, in order of their grants."""
    queue: OrderedDict[SlotRequest, None] = field(default_factory=OrderedDict, repr=False)
    """Requests that wait for this engine because it has their prefix, in order of submission."""
    _own: AverageSpeed = field(default_factory=lambda: AverageSpeed(0.0), repr=False)

    @property
    def in_use(self) -> int:
        """Slots in use."""
        return len(self.requests)

    @property
    def engine_id(self) -> EngineId:
        return self.engine.engine_id

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def speed(self) -> float:
        """Tokens/s of one request; until it is measured, that of all engines, and 1 until any is measured."""
        return self._own.value or self.of_all.value

    def may_take(self, request: SlotRequest) -> bool:
        """Whether it has a free slot for `request`, is new enough, and is not the engine to avoid."""
        return (
            self.open_index >= 0
            and (request.min_version < 0 or self.version >= request.min_version)
            and self.engine_id != request.avoid
        )

    def delivered(self, request: SlotRequest, num_tokens: int, elapsed_s: float) -> None:
        """Record `num_tokens` of one request in `elapsed_s`."""
        fewer = min(num_tokens, request.tokens)
        request.tokens -= fewer
        self.outstanding_tokens -= fewer
        self.num_losses = 0
        self.losing_groups.clear()
        if elapsed_s > 0:
            self._own.add(num_tokens, elapsed_s)
            self.of_all.add(num_tokens, elapsed_s)


@dataclass(eq=False)
class SlotRequest:
    """A request for a slot, from its submission to its release."""

    tokens: int = 1
    """Tokens it may still sample; decreases as tokens arrive."""
    prefix: str | None = None
    """Name of the prompt prefix that it shares: the task of a group, or a conversation; None shares nothing."""
    min_version: int = -1
    """Oldest version that may serve it; -1 is any."""
    avoid: EngineId | None = None
    """Engine to avoid while another one can serve it."""
    serial: int = -1
    """Order of submission."""
    view: EngineView | None = None
    """Engine that was granted, while its slot is held."""
    waits_at: OrderedDict[SlotRequest, None] | None = None
    """Queue that it waits in."""


class LeastLoaded:
    """Chooses the engine that would be least loaded with the request; ties are broken at random."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, views: Sequence[EngineView], request: SlotRequest) -> EngineView:
        """Choose one of `views`, a non-empty list of engines that may take the request."""
        tokens, num_views = request.tokens, len(views)
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

    def home(self, request: SlotRequest) -> EngineView | None:  # noqa: ARG002 - prefixes do not matter here
        """The engine that has the prefix of the request; None if there is none or the policy ignores prefixes."""
        return None

    def record_grant(self, request: SlotRequest, view: EngineView) -> None:
        """Remember where a request was granted."""


class PrefixAware(LeastLoaded):
    """Least loaded, but the trajectories of a group and the turns of a conversation go to the engine of the first one.

    They do so until that engine is busier than the least loaded one by more than `max_lead` of its slots, counted in
    requests of this size.
    """

    def __init__(self, seed: int = 0, max_lead: float = MAX_LEAD) -> None:
        super().__init__(seed)
        self._max_lead = max_lead
        self._homes: OrderedDict[str, EngineView] = OrderedDict()

    def choose(self, views: Sequence[EngineView], request: SlotRequest) -> EngineView:
        home = self.home(request)
        if home is None or not home.may_take(request):
            return super().choose(views, request)
        allowed = self._max_lead * home.max_slots * request.tokens
        if home.outstanding_tokens <= allowed:
            return home  # it cannot lead by more than it has
        best = super().choose(views, request)
        lead = home.outstanding_tokens - best.outstanding_tokens * home.speed / best.speed
        return best if lead > allowed else home

    def home(self, request: SlotRequest) -> EngineView | None:
        if request.prefix is None:
            return None
        view = self._homes.get(request.prefix)
        return None if view is None or view.fenced is not None else view

    def record_grant(self, request: SlotRequest, view: EngineView) -> None:
        if request.prefix is None:
            return
        self._homes[request.prefix] = view
        self._homes.move_to_end(request.prefix)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)


def make_policy(name: RoutingName, seed: int) -> LeastLoaded:
    """Build the policy of a configuration."""
    return PrefixAware(seed) if name == "prefix_aware" else LeastLoaded(seed)
