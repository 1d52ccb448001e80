"""Slots never leak and no request waits while a slot is free, for any calls in any order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.rollout.engine_pool.dispatch import Dispatcher
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engine_pool.routing import EngineView, LeastLoaded, PrefixAware, SlotRequest
from tests.tiers import examples

SLOTS = 4
CHANGES = st.sampled_from(["fence", "pause", "resume", "update", "limit"])
PREFIXES = st.sampled_from([None, "p", "q", "r"])


@dataclass
class Numbered:
    engine_id: EngineId
    version: int = 0


class Dispatching(RuleBasedStateMachine):
    """Every call of the dispatcher in any order, against a simple model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.granted: set[SlotRequest] = set()
        self.waiting: list[SlotRequest] = []

    @initialize(seed=st.integers(0, 9), is_prefix_aware=st.booleans(), num_engines=st.integers(1, 4))
    def begin(self, seed: int, is_prefix_aware: bool, num_engines: int) -> None:
        self.dispatcher = Dispatcher(PrefixAware(seed) if is_prefix_aware else LeastLoaded(seed))
        for _ in range(num_engines):
            self.join()

    @rule()
    def join(self) -> None:
        engine = Numbered(EngineId(f"e{len(self.dispatcher.views)}"), max(self.dispatcher.min_version, 0))
        self.take(self.dispatcher.add(EngineView(engine, SLOTS, SLOTS)))  # type: ignore[arg-type]

    @rule(prefix=PREFIXES, tokens=st.integers(1, 50))
    def submit(self, prefix: str | None, tokens: int) -> None:
        self.submit_request(SlotRequest(tokens, prefix))

    @rule(version=st.integers(-1, 1))
    def join_late(self, version: int) -> None:
        """Like a restarted engine, which may not have the version in service yet."""
        engine = Numbered(EngineId(f"e{len(self.dispatcher.views)}"), version)
        self.take(self.dispatcher.add(EngineView(engine, SLOTS, SLOTS)))  # type: ignore[arg-type]

    @rule(prefix=PREFIXES, version=st.integers(0, 3), avoided=st.integers(0, 3))
    def submit_resume(self, prefix: str | None, version: int, avoided: int) -> None:
        self.submit_request(SlotRequest(5, prefix, version, EngineId(f"e{avoided}")))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.granted, key=lambda request: request.serial)))
        self.granted.remove(request)
        self.take(self.dispatcher.release(request))

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), elapsed=st.sampled_from([0.0, 0.01, 1.0]))
    def deliver(self, data: st.DataObject, num_tokens: int, elapsed: float) -> None:
        request = data.draw(st.sampled_from(sorted(self.granted, key=lambda request: request.serial)))
        view = request.view
        assert view is not None
        view.delivered(request, num_tokens, elapsed)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.dispatcher.withdraw(request)

    @precondition(lambda self: self.dispatcher.num_serving > 0)
    @rule(
        data=st.data(), what=st.sampled_from(["fence", "pause", "resume", "update", "limit"]), limit=st.integers(0, 5)
    )
    def change(self, data: st.DataObject, what: str, limit: int) -> None:
        view = data.draw(st.sampled_from(list(self.dispatcher.serving())))
        if what == "fence":
            self.take(self.dispatcher.fence(view, "planted"))
        elif what == "pause":
            self.take(self.dispatcher.pause(view))
        elif what == "resume":
            self.take(self.dispatcher.resume(view))
        elif what == "limit":
            self.take(self.dispatcher.set_limit(view, limit))
        else:
            view.engine.version += 1  # type: ignore[misc]
            self.take(self.dispatcher.refresh())

    @precondition(lambda self: self.dispatcher.num_serving > 0)
    @rule()
    def set_min_version(self) -> None:
        self.take(self.dispatcher.set_min_version(max(view.version for view in self.dispatcher.serving())))

    @invariant()
    def the_counts_agree(self) -> None:
        for view in self.dispatcher.views.values():
            mine = [request for request in self.granted if request.view is view]
            assert set(view.requests) == set(mine)
            assert view.in_use == len(mine) <= view.max_slots
            assert view.outstanding_tokens == sum(request.tokens for request in mine)
        assert set(self.dispatcher.waiting()) == set(self.waiting)
        assert self.dispatcher.num_waiting == len(self.waiting)

    @invariant()
    def no_request_waits_for_an_engine_with_a_free_slot(self) -> None:
        views = list(self.dispatcher.serving())
        able = [view for view in views if not view.is_paused and view.version >= self.dispatcher.min_version]
        for view in able:
            for request in self.waiting:
                others = [other for other in able if other is not view and other.version >= request.min_version]
                is_avoided = request.avoid == view.engine_id and bool(others)
                assert view.in_use >= view.limit or request.min_version > view.version or is_avoided, (view, request)

    def teardown(self) -> None:
        while self.waiting:
            self.dispatcher.withdraw(self.waiting.pop())
        while self.granted:
            self.take(self.dispatcher.release(self.granted.pop()))
        for view in getattr(self, "dispatcher", Dispatcher(LeastLoaded())).views.values():
            assert (view.in_use, view.outstanding_tokens, len(view.queue)) == (0, 0, 0)

    def submit_request(self, request: SlotRequest) -> None:
        if self.dispatcher.submit(request):
            self.granted.add(request)
        else:
            self.waiting.append(request)

    def take(self, granted: list[SlotRequest]) -> None:
        for request in granted:
            self.waiting.remove(request)
            self.granted.add(request)


TestDispatching = Dispatching.TestCase
TestDispatching.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "cancel", "release", "fence", "tick"]), st.integers(0, 30)),
        max_size=60,
    )
)
def test_any_interleaving_of_acquire_cancel_fence_and_release_leaves_no_slot_taken(
    steps: list[tuple[str, int]],
) -> None:
    asyncio.run(interleave(steps))


async def interleave(steps: list[tuple[str, int]]) -> None:
    pool = EnginePool([Numbered(EngineId(f"e{index}")) for index in range(3)], SLOTS)  # type: ignore[arg-type]
    ends: list[asyncio.Event] = []
    jobs: list[asyncio.Task[None]] = []
    for step, choice in steps:
        if step == "acquire":
            ends.append(asyncio.Event())
            jobs.append(asyncio.create_task(start_interruptible(pool, ends[-1], choice)))
        elif step == "fence":
            pool.fence(EngineId(f"e{choice % 3}"), "planted")
        elif jobs and step == "cancel":
            jobs[choice % len(jobs)].cancel()
        elif jobs and step == "release":
            ends[choice % len(jobs)].set()
        else:
            await asyncio.sleep(0)
    for end in ends:
        end.set()
    for outcome in await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5):
        assert outcome is None or isinstance(outcome, asyncio.CancelledError | EngineLostError), outcome
    await asyncio.wait_for(pool.wait_idle(), 1)
    assert pool.num_waiting == 0
    assert list(pool.leases()) == []
    assert [(view.in_use, view.outstanding_tokens) for view in pool.views()] == [(0, 0)] * len(pool.engines())


async def start_interruptible(pool: EnginePool, end: asyncio.Event, choice: int) -> None:
    async with pool.lease(tokens=choice, prefix=f"p{choice % 4}" if choice % 3 else None):
        await end.wait()
