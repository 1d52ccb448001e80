"""The update modes over fakes that run requests: which engines serve during a publish, and where new requests go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from penstock.actors.weights.publisher import InFlight, Rolling, make_updater
from penstock.actors.weights.transports import PublishedVersion
from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck, WeightManifest
from penstock.rollout.engine_pool.pool import EnginePool, Lease
from penstock.weights.config import WeightsConfig


@dataclass
class Rack:
    """Engines with a shared record of which were frozen when."""

    engines: list[Swapping] = field(default_factory=list)
    most_frozen: int = 0

    def look(self) -> None:
        self.most_frozen = max(self.most_frozen, sum(engine.is_frozen for engine in self.engines))


@dataclass
class Swapping:
    """Takes several ticks to swap. `held`: number of requests frozen in it, for each swap."""

    engine_id: EngineId
    rack: Rack
    version: int = 0
    is_frozen: bool = False
    refuses: bool = False
    ticks: int = 5
    held: list[int] = field(default_factory=list)
    in_use: Callable[[], int] = lambda: 0

    async def update_weights(self, manifest: WeightManifest, payload: object = None) -> WeightAck:
        self.is_frozen = True
        self.held.append(self.in_use())
        try:
            for _ in range(self.ticks):
                self.rack.look()
                await asyncio.sleep(0)
            if self.refuses:
                raise WeightSyncError("planted refusal")
            self.version = manifest.version
        finally:
            self.is_frozen = False
        return WeightAck(self.engine_id, manifest.version, 7, 0.0, 0.0)


def setting(
    mode: str, num_engines: int = 3, drain_timeout_s: float = 5.0
) -> tuple[Rack, EnginePool, InFlight | Rolling]:
    rack = Rack()
    rack.engines = [Swapping(EngineId(f"e{index}"), rack) for index in range(num_engines)]
    pool = EnginePool(rack.engines, 4)  # type: ignore[arg-type]
    for engine, view in zip(rack.engines, pool.views(), strict=True):
        engine.in_use = lambda view=view: view.in_use  # type: ignore[misc]
    config = WeightsConfig(update_mode=mode, drain_timeout_s=drain_timeout_s, timeout_s=5)  # type: ignore[arg-type]
    return rack, pool, make_updater(pool, config)


def published(version: int) -> PublishedVersion:
    return PublishedVersion(WeightManifest(version, "somewhere", (), 100, 7))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - fakes have no events
            await asyncio.sleep(0)


class Request:
    """A request that runs until the test ends it."""

    def __init__(self, pool: EnginePool) -> None:
        self.lease: Lease | None = None
        self.started_at = -1
        self._end = asyncio.Event()
        self._job = asyncio.create_task(self._run(pool))

    async def _run(self, pool: EnginePool) -> None:
        async with pool.lease(tokens=10) as self.lease:
            self.started_at = self.lease.engine.version
            await self._end.wait()

    @property
    def engine(self) -> EngineId | None:
        return self.lease.engine.engine_id if self.lease is not None and self.lease.view is not None else None

    async def end(self) -> None:
        self._end.set()
        await self._job


@asynccontextmanager
async def requests(pool: EnginePool, number: int) -> AsyncIterator[list[Request]]:
    running = [Request(pool) for _ in range(number)]
    await until(lambda: all(request.engine is not None for request in running))
    try:
        yield running
    finally:
        await asyncio.gather(*(request.end() for request in running))


async def test_drain_swaps_no_engine_with_requests_and_routes_none_during_the_swap() -> None:
    rack, pool, updater = setting("drain")
    async with requests(pool, 6) as running:
        update = asyncio.create_task(updater.update(published(1)))
        await asyncio.sleep(0)
        waiting = Request(pool)
        for request in running[:5]:
            await request.end()
        assert not update.done()
        assert waiting.engine is None
        await running[5].end()
        assert len(await update) == 3
    assert [engine.held for engine in rack.engines] == [[0], [0], [0]]
    await until(lambda: waiting.engine is not None)
    assert waiting.started_at == 1
    await waiting.end()
    assert updater.drain_timeouts == 0


async def test_a_drain_that_takes_too_long_freezes_the_rest_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    rack, pool, updater = setting("drain", drain_timeout_s=0.02)
    async with requests(pool, 1):
        assert len(await updater.update(published(1))) == 3
    assert sorted(engine.held for engine in rack.engines) == [[0], [0], [1]]
    assert updater.drain_timeouts == 1
    assert "1 requests on" in caplog.text
    assert "weights.drain_timeout_s=0.02" in caplog.text


@pytest.mark.parametrize("num_engines", [2, 3, 5])
async def test_at_least_all_but_one_engine_serve_at_all_times_during_a_roll(num_engines: int) -> None:
    rack, pool, updater = setting("multi_version", num_engines)
    for version in (1, 2, 3):
        async with requests(pool, 2 * num_engines):
            update = asyncio.create_task(updater.update(published(version)))
            await asyncio.sleep(0)
        await update
        await until(lambda version=version: all(engine.version == version for engine in rack.engines))
    await updater.settle()
    assert rack.most_frozen == 1
    assert all(held == 0 for engine in rack.engines for held in engine.held), "each finished on its version"


async def test_during_a_roll_new_work_goes_to_the_newest_only_once_there_is_one() -> None:
    rack, pool, updater = setting("multi_version")
    async with requests(pool, 9) as old:
        update = asyncio.create_task(updater.update(published(1)))
        await asyncio.sleep(0)
        async with requests(pool, 2) as before:
            assert {request.started_at for request in before} == {0}, "no engine has the newest yet: the others serve"
            assert {request.engine for request in before} <= {e.engine_id for e in rack.engines if e.version == 0}
            first = next(view for view in pool.views() if view.is_paused)
            for request in [request for request in old if request.engine == first.engine_id]:
                await request.end()
            (ack,) = await update
            assert ack.engine_id == first.engine_id
            async with requests(pool, 4) as after:
                assert {request.engine for request in after} == {first.engine_id}
                assert {request.started_at for request in after} == {1}
                waiting = Request(pool)
                await asyncio.sleep(0)
                assert waiting.engine is None, "old engines have free slots, but the updated one is full"
        for request in old:
            await request.end()
        await until(lambda: waiting.engine is not None)
        assert waiting.started_at == 1
        await waiting.end()
    await until(lambda: all(engine.version == 1 for engine in rack.engines))
    await updater.settle()


async def test_a_publish_takes_over_from_the_previous_one_and_skips_its_version() -> None:
    rack, pool, updater = setting("multi_version")
    async with requests(pool, 9) as old:
        update = asyncio.create_task(updater.update(published(1)))
        await until(lambda: any(view.is_paused for view in pool.views()))
        first = next(view for view in pool.views() if view.is_paused).engine_id
        for request in [request for request in old if request.engine == first]:
            await request.end()
        await update
        await updater.settle()
        second = asyncio.create_task(updater.update(published(2)))
        (ack,) = await second
        assert ack.engine_id == first, "the only one without requests"
    await until(lambda: all(engine.version == 2 for engine in rack.engines))
    await updater.settle()
    assert sorted(len(engine.held) for engine in rack.engines) == [1, 1, 2]


async def test_a_roll_that_cannot_drain_an_engine_freezes_it_and_continues() -> None:
    rack, pool, updater = setting("multi_version", drain_timeout_s=0.02)
    async with requests(pool, 3):
        await updater.update(published(1))
        await until(lambda: all(engine.version == 1 for engine in rack.engines))
        await updater.settle()
    assert updater.drain_timeouts == 3
    assert rack.most_frozen == 1


async def test_an_engine_that_refuses_is_fenced_and_the_roll_continues() -> None:
    rack, pool, updater = setting("multi_version")
    rack.engines[0].refuses = True
    await updater.update(published(1))
    await until(lambda: [engine.version for engine in rack.engines] == [0, 1, 1])
    await updater.settle()
    assert "planted refusal" in pool.fenced[EngineId("e0")]


async def test_a_roll_without_any_acknowledgement_is_an_error() -> None:
    rack, pool, updater = setting("multi_version", 2)
    for engine in rack.engines:
        engine.refuses = True
    assert await updater.update(published(1)) == []
    assert len(pool.fenced) == 2


async def test_engines_that_were_restarted_with_the_version_acknowledge_it_again() -> None:
    rack, pool, updater = setting("multi_version")
    for engine in rack.engines:
        engine.version = 1  # all were lost in the first attempt to publish it, and have caught up
    assert [ack.version for ack in await updater.update(published(1))] == [1]
    await updater.settle()
    assert sum(len(engine.held) for engine in rack.engines) == 1, "the others need nothing"
    assert all(view.version == 1 for view in pool.views())


async def test_closing_in_the_middle_of_a_roll_ends_it() -> None:
    _, pool, updater = setting("multi_version")
    assert isinstance(updater, Rolling)
    async with requests(pool, 6):
        update = asyncio.create_task(updater.update(published(1)))
        await asyncio.sleep(0)
        await updater.close()
        await asyncio.wait([update], timeout=1)
        assert update.done()
        assert not any(view.is_paused for view in pool.views())
    await asyncio.gather(update, return_exceptions=True)


async def test_an_update_that_failed_is_not_raised_again_by_the_next_one() -> None:
    rack, pool, update = setting("multi_version", 1)
    rack.engines[0].refuses = True

    async def fails() -> PublishedVersion:
        raise WeightSyncError("a receiver did not join")

    with pytest.raises(WeightSyncError, match="did not join"):
        await update.update(published(1), fails)
    rack.engines[0].refuses = False
    assert [ack.version for ack in await update.update(published(2))] == [2]
    assert not pool.fenced
