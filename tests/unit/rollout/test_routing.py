"""Routing of requests, and their waiting order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop
from penstock.rollout.engine_pool.dispatch import Dispatcher
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engine_pool.routing import FULL_SCAN, EngineView, LeastLoaded, PrefixAware, SlotRequest
from tests.fakes import FakeEngine


@dataclass
class Named:
    engine_id: EngineId
    version: int = 0


def dispatcher(policy: LeastLoaded, *slots: int) -> Dispatcher:
    made = Dispatcher(policy)
    for index, number in enumerate(slots):
        made.add(EngineView(Named(EngineId(f"e{index}")), number, number))  # type: ignore[arg-type]
    return made


def place(made: Dispatcher, tokens: int = 10, prefix: str | None = None) -> SlotRequest:
    request = SlotRequest(tokens, prefix)
    made.submit(request)
    return request


def name(request: SlotRequest) -> str | None:
    return None if request.view is None else request.view.engine_id


def deliver(request: SlotRequest, num_tokens: int, elapsed_s: float) -> None:
    assert request.view is not None
    request.view.delivered(request, num_tokens, elapsed_s)


def test_outstanding_tokens_decide_not_the_number_of_requests() -> None:
    made = dispatcher(LeastLoaded(), 8, 8)
    big = place(made, tokens=100)
    small = [place(made, tokens=10) for _ in range(5)]
    assert {name(request) for request in small}.isdisjoint({name(big)})


def test_tokens_that_have_arrived_are_no_load() -> None:
    made = dispatcher(LeastLoaded(), 8, 8)
    first, second = place(made, tokens=100), place(made, tokens=60)
    deliver(first, 90, 0.0)
    assert name(place(made, tokens=10)) == name(first) != name(second)


def test_an_engine_that_is_twice_as_fast_gets_twice_the_tokens() -> None:
    made = dispatcher(LeastLoaded(), 100, 100)
    probes = [place(made, tokens=1) for _ in range(2)]
    for probe, speed in zip(probes, (200, 100), strict=True):
        deliver(probe, speed, 1.0)
        made.release(probe)
    fast = probes[0].serial  # both were measured; the first one is the fast one
    assert fast == 0
    counts = Counter(name(place(made)) for _ in range(90))
    assert sorted(counts.values()) == [30, 60]


def test_speed_weighs_short_intervals_little_and_forgets_the_past() -> None:
    view = EngineView(Named(EngineId("e")), 1, 1)  # type: ignore[arg-type]
    view.delivered(SlotRequest(), 100, 1.0)
    view.delivered(SlotRequest(), 64, 1e-6)  # came in the same message as the one before
    assert view.speed == pytest.approx(165, rel=0.02)
    for _ in range(400):
        view.delivered(SlotRequest(), 10, 1.0)
    assert view.speed == pytest.approx(10, rel=0.01)


def test_an_engine_that_was_never_measured_counts_as_fast_as_the_requests_of_all_others() -> None:
    made = dispatcher(LeastLoaded(), 1, 1, 1)
    assert [view.speed for view in made.serving()] == [1.0, 1.0, 1.0]
    deliver(place(made), 5, 0.1)
    assert [view.speed for view in made.serving()] == [50.0, 50.0, 50.0]
    deliver(place(made), 20, 0.1)
    made.add(EngineView(Named(EngineId("late")), 1, 1))  # type: ignore[arg-type]
    mean = (0.98 * 5 + 20) / (0.98 * 0.1 + 0.1)
    assert sorted(view.speed for view in made.serving()) == pytest.approx([50.0, mean, mean, 200.0])


class Counting(Named):
    """Counts how often the dispatcher looks at its version."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "version":
            Counting.looks += 1
        return super().__getattribute__(name)


def looks_at_start(num_engines: int) -> int:
    made, Counting.looks = Dispatcher(LeastLoaded()), 0
    for index in range(num_engines):
        made.add(EngineView(Counting(EngineId(f"e{index}")), 1, 1))  # type: ignore[arg-type]
    for _ in range(num_engines):
        deliver(place(made), 5, 0.1)
    return Counting.looks


def test_starting_ten_times_as_many_engines_takes_ten_times_as_many_looks_at_them() -> None:
    assert 0 < looks_at_start(1000) <= 10 * looks_at_start(100)


def test_ties_are_broken_at_random_but_the_same_for_the_same_seed() -> None:
    def first_choices(seed: int) -> list[str | None]:
        return [name(place(dispatcher(LeastLoaded(seed + index), 1, 1, 1, 1))) for index in range(40)]

    assert first_choices(3) == first_choices(3)
    assert len(set(first_choices(3))) == 4


def test_among_many_engines_a_sample_is_enough_to_stay_balanced() -> None:
    made = dispatcher(LeastLoaded(1), *[100] * (4 * FULL_SCAN))
    for _ in range(40 * FULL_SCAN):
        place(made)
    assert max(view.in_use for view in made.serving()) <= 13, "10 on average"


def test_members_of_a_group_go_to_one_engine_until_it_leads_by_too_much() -> None:
    made = dispatcher(PrefixAware(max_lead=0.5), 8, 8)
    group = [name(place(made, prefix="g")) for _ in range(8)]
    assert len(set(group[:5])) == 1, "half of eight slots ahead, and one"
    assert len(set(group)) == 2


def test_least_loaded_spreads_the_same_group() -> None:
    made = dispatcher(LeastLoaded(), 8, 8)
    assert Counter(name(place(made, prefix="g")) for _ in range(8)).most_common(1)[0][1] == 4


def test_those_who_wait_stay_with_their_group_although_slots_come_free_one_by_one() -> None:
    made = dispatcher(PrefixAware(), 4, 4)
    held = [place(made) for _ in range(8)]
    for request in range(24):
        place(made, prefix=f"g{request // 4}")
    engines: dict[str | None, set[str | None]] = defaultdict(set)
    for _ in range(24):
        for granted in made.release(held.pop(0)):  # who came first ends first: slots come free in turns
            engines[granted.prefix].add(name(granted))
            held.append(granted)
    assert [len(engines[f"g{group}"]) for group in range(6)] == [1] * 6


def test_a_free_slot_is_used_without_the_prefix_when_no_other_request_needs_it() -> None:
    made = dispatcher(PrefixAware(), 2, 2)
    first = place(made, prefix="g")
    held = [place(made) for _ in range(3)]
    waiting = [place(made, prefix="g") for _ in range(2)]
    elsewhere = [request for request in held if name(request) != name(first)]
    granted = [got for request in elsewhere for got in made.release(request)]
    assert granted == waiting


def test_those_without_a_common_prefix_are_served_first_come_first_served() -> None:
    made = dispatcher(PrefixAware(), 1, 1)
    held = [place(made) for _ in range(2)]
    waiting = [place(made, prefix=f"p{index}") for index in range(20)]
    served = []
    while held:
        got = made.release(held.pop(0))
        served += got
        held += got
    assert served == waiting


async def is_granted(pool: EnginePool, min_version: int, avoid: str) -> bool:
    async with asyncio.timeout(1), pool.lease(min_version=min_version, avoid=EngineId(avoid)) as lease:
        return lease.engine.engine_id == avoid


async def test_an_engine_is_not_avoided_for_one_that_is_behind() -> None:
    """As when an engine has just come back and waits for the next version: no engine could serve the request."""
    pool = EnginePool([FakeEngine(EngineId("good"), version=5), FakeEngine(EngineId("behind"), version=-1)], 8)
    pool.set_min_version(5)
    assert await is_granted(pool, min_version=5, avoid="good")


async def test_an_engine_is_not_avoided_for_one_that_is_older_than_the_request() -> None:
    pool = EnginePool([FakeEngine(EngineId("good"), version=5), FakeEngine(EngineId("older"), version=4)], 8)
    assert await is_granted(pool, min_version=5, avoid="good")


async def test_an_engine_is_not_avoided_for_one_that_is_paused_from_then_on() -> None:
    pool = EnginePool([FakeEngine(EngineId(engine)) for engine in "ab"], 1)
    async with pool.lease(avoid=EngineId("a")):  # b has no free slot
        waiting = asyncio.create_task(is_granted(pool, min_version=0, avoid="a"))
        await asyncio.sleep(0)
        assert pool.num_waiting == 1, "b serves, so a is avoided"
        pool.pause(EngineId("b"))
        assert await waiting


@pytest.mark.parametrize("seed", range(20))
def test_slot_requests_that_wait_for_a_version_end_in_virtual_time_too(seed: int) -> None:
    """If a clock stands still while callbacks run, a timer that is a rounding error early would fire forever."""
    rng = random.Random(seed)

    async def wait_at_odd_times() -> list[BaseException | None]:
        pool = EnginePool([FakeEngine(EngineId("a"), version=-1)], 8, version_timeout_s=600.0)
        pool.set_min_version(0)
        waiting = []
        for _ in range(20):
            await asyncio.sleep(rng.random() * 1000)
            waiting.append(asyncio.ensure_future(pool.lease().acquire()))
        asyncio.get_running_loop().call_later(10_000, asyncio.current_task().cancel)  # type: ignore[union-attr]
        return await asyncio.gather(*waiting, return_exceptions=True)

    loop = VirtualTimeLoop()
    run_once = loop._run_once

    def counted() -> None:
        assert loop.num_turns < 20_000, "it spins"
        run_once()

    loop._run_once = counted  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        outcomes = runner.run(wait_at_odd_times())
    assert all("waited 600 s for an engine at v0 or newer" in str(outcome) for outcome in outcomes)


async def test_an_engine_that_joins_takes_over_those_who_wait_and_one_that_is_behind_does_not() -> None:
    pool = EnginePool([FakeEngine(EngineId("a"), version=3)], 1)
    pool.set_min_version(3)
    async with pool.lease():
        waiting = asyncio.create_task(name_of_a_lease(pool))
        behind = FakeEngine(EngineId("b"), version=-1)
        pool.add(behind)
        await asyncio.sleep(0)
        assert pool.num_waiting == 1, "it has missed versions"
        behind.version = 3
        pool.refresh()
        assert await waiting == "b"


@pytest.mark.parametrize("change", ["a version is published", "the engine is fenced"])
async def test_a_slot_that_came_free_just_before_a_change_of_its_engine_is_not_used(change: str) -> None:
    engines = [FakeEngine(EngineId(name), version=1) for name in ("a", "b")]
    pool = EnginePool(engines, 1)
    async with asyncio.timeout(5):
        held = [pool.lease(), pool.lease()]
        for lease in held:
            await lease.acquire()
        waits = pool.lease()
        waiting = asyncio.create_task(waits.acquire())
        await asyncio.sleep(0)
        old, new = (lease.engine for lease in held)
        held[0].release()  # grants the lease that waits, whose task has not run since
        assert waits.engine is old
        if change == "a version is published":
            new.version = 2  # type: ignore[attr-defined]
            pool.set_min_version(2)
        else:
            pool.fence(old.engine_id, "planted")
        await asyncio.sleep(0)
        assert not waiting.done()
        held[1].release()
        await waiting
    assert waits.engine is new
    waits.release()


async def test_an_engine_comes_back_after_it_was_fenced_off() -> None:
    pool = EnginePool([FakeEngine(EngineId("a"))], 1)
    async with pool.lease():
        waiting = asyncio.create_task(name_of_a_lease(pool))
        await asyncio.sleep(0)
        pool.fence(EngineId("a"), "planted")
        with pytest.raises(EngineLostError, match="no rollout engine is left in service"):
            await waiting
        pool.add(FakeEngine(EngineId("a")))
        assert await name_of_a_lease(pool) == "a"
    assert pool.fenced == {}


async def test_ten_thousand_who_wait_are_served_in_order() -> None:
    pool = EnginePool([FakeEngine(EngineId(f"e{index}")) for index in range(4)], 2)
    order: list[int] = []

    async def one(index: int) -> None:
        async with pool.lease(tokens=8):
            order.append(index)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(index) for index in range(10_000)))
    assert order == list(range(10_000))


async def name_of_a_lease(pool: EnginePool) -> str:
    async with pool.lease() as lease:
        return lease.engine.engine_id
