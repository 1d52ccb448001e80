"""Lost engines return with the current version, a bounded number of times, and waiting requests do not fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import ray

from penstock.actors import restart_budget
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import GatherTransport, PublishHandle
from penstock.dataflow.errors import EngineLostError, PlacementError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.platform.cluster.actor_factory import RunActors
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.engine_restarts import EngineRestarts
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.config import WeightsConfig
from tests.unit.actors.test_publisher import FakeTrainer, Receiver
from tests.virtual_time import run_virtual

A, B = EngineId("a"), EngineId("b")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of pauses run in virtual time and set them themselves."""
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 0.0)


@dataclass
class Starter:
    """Starts receivers; the first `failures` starts fail."""

    failures: int = 0
    refuse: int = 0
    error: Exception = field(default_factory=lambda: PlacementError("planted: not up in time"))
    started: list[Receiver] = field(default_factory=list)
    calls: int = 0
    may_start: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, engine_id: EngineId) -> Receiver:
        self.calls += 1
        await self.may_start.wait()
        if self.calls <= self.failures:
            raise self.error
        self.started.append(Receiver(engine_id, refuse=self.refuse))
        return self.started[-1]


class Written(GatherTransport):
    """Says on each publish with which engines in the pool the trainer wrote which version."""

    def __init__(self, trainer: FakeTrainer, pool: EnginePool) -> None:
        super().__init__(trainer, pool)  # type: ignore[arg-type]
        self.trainer, self.written, self._engines_of = trainer, list[tuple[int, list[str]]](), pool

    async def send(self, version: int) -> PublishHandle:
        self.written.append((version, [engine.engine_id for engine in self._engines_of.engines()]))
        return await super().send(version)


def export_of(publisher: ActorWeightPublisher) -> Written:
    transport = publisher._transport
    assert isinstance(transport, Written)
    return transport


@asynccontextmanager
async def service(
    *engines: Receiver, starter: Starter, max_restarts: int = 2, mode: str = "keep_kv", overlap: bool = False
) -> AsyncIterator[tuple[ActorWeightPublisher, EnginePool]]:
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    config = WeightsConfig(timeout_s=0.2, update_mode=mode, overlap=overlap)  # type: ignore[arg-type]
    trainer = FakeTrainer()
    publisher = ActorWeightPublisher(pool, config, Written(trainer, pool), trainer)  # type: ignore[arg-type]
    async with EngineRestarts(pool, starter, publisher.catch_up, max_restarts).running():  # type: ignore[arg-type]
        yield publisher, pool
    await publisher.close()


async def until_returned(pool: EnginePool, times: int) -> None:
    async with asyncio.timeout(5):
        while pool.num_returned < times:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0)


async def test_a_lost_engine_has_the_version_in_service_before_it_serves() -> None:
    starter = Starter()
    starter.may_start.set()
    async with service(Receiver(A), Receiver(B), starter=starter) as (publisher, pool):
        for version in (0, 1, 2):
            await publisher.publish(version)
        pool.fence(A, "planted")
        await until_returned(pool, 1)
        assert pool.fenced == {}
        assert starter.started[0].received == [(2, None)], "the present version, not the next one"
        assert {view.engine_id: view.version for view in pool.views()} == {A: 2, B: 2}
        assert len((await publisher.publish(3)).acks) == 2


async def test_requests_and_publishes_wait_for_the_only_engine_to_come_back() -> None:
    starter = Starter()
    async with service(Receiver(A), starter=starter) as (publisher, pool):
        await publisher.publish(0)
        pool.fence(A, "planted")
        lease = pool.lease()
        waiting = asyncio.ensure_future(lease.acquire())
        publish = asyncio.ensure_future(publisher.publish(1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert not publish.done()
        starter.may_start.set()
        await asyncio.wait_for(waiting, 5)
        assert lease.engine is starter.started[0]
        lease.release()
        assert [ack.version for ack in (await publish).acks] == [1]
        assert [version for version, _ in starter.started[0].received] == [0, 1]


async def test_an_engine_that_is_lost_in_a_publish_gets_that_version_when_it_is_back() -> None:
    starter = Starter()
    starter.may_start.set()
    async with service(Receiver(A, hang=True), starter=starter) as (publisher, pool):
        assert [ack.version for ack in (await publisher.publish(0)).acks] == [0]
        assert pool.num_returned == 1
        assert pool.fenced == {}


async def test_an_engine_that_cannot_take_the_version_now_serves_from_the_next_one_on() -> None:
    starter = Starter(refuse=1)
    starter.may_start.set()
    async with service(Receiver(A), Receiver(B), starter=starter) as (publisher, pool):
        await publisher.publish(0)
        pool.fence(A, "planted")
        await until_returned(pool, 1)
        async with pool.lease() as one, pool.lease() as two:
            assert {one.engine.engine_id, two.engine.engine_id} == {B}, "the other one is below the minimum version"
        await publisher.publish(1)
        assert {view.version for view in pool.views()} == {1}


async def trained(publisher: ActorWeightPublisher, version: int) -> None:
    """The trainer has this version, and it is published."""
    export_of(publisher).trainer.version = version
    await publisher.publish(version)


@pytest.mark.parametrize("mode", ["keep_kv", "drain", "multi_version"])
@pytest.mark.parametrize("overlap", [False, True])
async def test_a_version_that_no_engine_has_any_more_is_written_for_the_one_that_comes_back(
    mode: str, overlap: bool
) -> None:
    """No batch becomes complete without an engine that serves, so no next version would ever come."""
    starter = Starter(refuse=1)  # as one whose slots on its own device were not written yet
    starter.may_start.set()
    async with service(Receiver(A), starter=starter, mode=mode, overlap=overlap) as (publisher, pool):
        for version in (0, 1):
            await trained(publisher, version)
        await publisher.delivered()
        pool.fence(A, "planted")
        async with asyncio.timeout(5), pool.lease() as lease:
            assert (lease.engine, lease.engine.version) == (starter.started[0], 1)
        assert export_of(publisher).written[-1] == (1, [A]), "it was in the pool, where exports look for engines"
        assert [version for version, _ in export_of(publisher).written] == [0, 1, 1]
        assert starter.calls == 1


async def test_an_engine_that_refuses_what_was_written_for_it_too_has_failed_its_restart() -> None:
    starter = Starter(refuse=9)
    starter.may_start.set()
    async with service(Receiver(A), starter=starter, max_restarts=2) as (publisher, pool):
        await publisher.publish(0)
        pool.fence(A, "planted")
        with pytest.raises(EngineLostError, match="no rollout engine is left in service"):
            await asyncio.wait_for(pool.lease().acquire(), 5)
        assert starter.calls == 2, "each restart counted once"
        assert pool.num_returning == 0


async def test_while_a_step_is_under_way_the_version_before_it_is_not_written_again() -> None:
    """It would be the weights of the next version under the number of this one."""
    starter = Starter(refuse=1)
    starter.may_start.set()
    async with service(Receiver(A), starter=starter) as (publisher, pool):
        await trained(publisher, 0)
        trainer = export_of(publisher).trainer
        async with trainer.step_lock:
            pool.fence(A, "planted")
            await until_returned(pool, 1)
            trainer.version = 1
        await publisher.publish(1)
        assert [version for version, _ in export_of(publisher).written] == [0, 1]
        assert {view.version for view in pool.views()} == {1}


async def test_once_a_step_is_over_its_version_is_the_next_to_be_written() -> None:
    starter = Starter(refuse=1)
    starter.may_start.set()
    async with service(Receiver(A), starter=starter) as (publisher, pool):
        await trained(publisher, 0)
        export_of(publisher).trainer.version = 1
        pool.fence(A, "planted")
        await until_returned(pool, 1)
        assert [version for version, _ in export_of(publisher).written] == [0]


@pytest.mark.parametrize(
    "error", [OSError("fork: Resource temporarily unavailable"), ray.exceptions.RaySystemError("GCS")]
)
async def test_whatever_a_restart_fails_with_requests_and_publishes_that_wait_hear_of_it(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    starter = Starter(failures=9, error=error)
    async with service(Receiver(A), starter=starter) as (publisher, pool):
        await publisher.publish(0)
        pool.fence(A, "planted")
        lease = asyncio.ensure_future(pool.lease().acquire())
        publish = asyncio.ensure_future(publisher.publish(1))
        starter.may_start.set()
        with pytest.raises(EngineLostError, match="no rollout engine is left in service"):
            await asyncio.wait_for(lease, 5)
        with pytest.raises(WeightSyncError, match="no rollout engine is left in service: 1 of 1"):
            await asyncio.wait_for(publish, 5)
        assert (starter.calls, pool.num_returning) == (2, 0)
        assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("failures", [1, 9])
async def test_restarts_are_bounded_and_then_every_waiter_gets_the_error(
    failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    starter = Starter(failures=failures)
    async with service(Receiver(A), starter=starter, max_restarts=2) as (publisher, pool):
        await publisher.publish(0)
        pool.fence(A, "planted")
        waiting = asyncio.ensure_future(pool.lease().acquire())
        await asyncio.sleep(0)
        starter.may_start.set()
        if failures == 1:
            await asyncio.wait_for(waiting, 5)
            assert "a is back in service (restart 2 of 2 within an hour)" in caplog.text
        else:
            with pytest.raises(EngineLostError, match="no rollout engine is left in service"):
                await asyncio.wait_for(waiting, 5)
            assert "restart 2 of 2 within an hour failed: planted: not up in time" in caplog.text
        assert starter.calls == 2
        pool.fence(A, "again")
        assert pool.num_returning == 0, "it has had its restarts"


async def test_without_restarts_a_lost_engine_stays_lost() -> None:
    starter = Starter()
    async with service(Receiver(A), Receiver(B), starter=starter, max_restarts=0) as (publisher, pool):
        await publisher.publish(0)
        pool.fence(A, "planted")
        assert (pool.num_returning, starter.calls) == (0, 0)
        assert len((await publisher.publish(1)).acks) == 1


@dataclass
class TimedStarter(Starter):
    """Takes `start_s` for each start."""

    start_s: float = 0.0
    called_at: list[float] = field(default_factory=list)

    async def __call__(self, engine_id: EngineId) -> Receiver:
        self.called_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.start_s)
        return await super().__call__(engine_id)


def timed(starter: TimedStarter) -> TimedStarter:
    starter.may_start.set()
    return starter


def test_pauses_between_restarts_double_and_differ_between_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 1.0)

    async def pauses() -> list[float]:
        starter = timed(TimedStarter(failures=99))
        async with service(Receiver(A), Receiver(B), starter=starter, max_restarts=9) as (publisher, pool):
            await publisher.publish(0)
            pool.fence(A, "planted")
            pool.fence(B, "planted")
            with pytest.raises(EngineLostError):
                await pool.lease().acquire()
        first, second = (starter.called_at[index::2] for index in (0, 1))
        assert first[0] == second[0] == 0.0, "the first restart comes at once"
        assert len(starter.called_at) == 18
        times = sorted(starter.called_at)
        assert len(set(times)) == 17, "those after it do not come together"
        return times

    times = run_virtual(pauses())
    assert 2 * 60 / 2 + 63 / 2 <= times[-1] <= 2 * 60 + 63, "1 + 2 + 4 + … + 32 + 60 + 60 s, or at least half of it"


def test_an_engine_that_is_lost_now_and_then_is_restarted_for_as_long_as_the_run_takes() -> None:
    async def preemptions() -> int:
        async with service(Receiver(A), starter=timed(TimedStarter(start_s=60.0)), max_restarts=3) as (publisher, pool):
            await publisher.publish(0)
            for number in range(1, 101):
                pool.fence(A, "preempted")
                async with pool.lease():
                    assert pool.num_returned == number
                await asyncio.sleep(1200.0)  # three an hour
        return number

    assert run_virtual(preemptions()) == 100


def test_an_engine_that_is_lost_more_often_within_an_hour_stays_out() -> None:
    async def losses() -> int:
        async with service(Receiver(A), starter=timed(TimedStarter()), max_restarts=3) as (publisher, pool):
            await publisher.publish(0)
            for _ in range(3):
                pool.fence(A, "planted")
                async with pool.lease():
                    await asyncio.sleep(1000.0)
            pool.fence(A, "planted")
            with pytest.raises(EngineLostError, match="no rollout engine is left in service"):
                await pool.lease().acquire()
            return pool.num_returned

    assert run_virtual(losses()) == 3


def test_an_engine_that_never_comes_up_is_given_up_however_long_each_start_takes() -> None:
    async def starts() -> float:
        starter = timed(TimedStarter(failures=99, start_s=3000.0))
        async with service(Receiver(A), starter=starter, max_restarts=4) as (publisher, pool):
            await publisher.publish(0)
            pool.fence(A, "planted")
            with pytest.raises(EngineLostError, match="no rollout engine is left in service"):
                await pool.lease().acquire()
        return asyncio.get_running_loop().time()

    assert run_virtual(starts()) == 4 * 3000.0


async def test_a_delivery_in_the_background_that_lost_every_engine_is_over_once_they_are_back() -> None:
    starter, engine = Starter(), Receiver(A)
    starter.may_start.set()
    async with service(engine, starter=starter, overlap=True) as (publisher, pool):
        await publisher.publish(0)
        engine.refuse = 100
        await publisher.publish(1)
        await until_returned(pool, 1)
        assert [view.version for view in pool.views()] == [1]
        await publisher.publish(2)
        assert (await publisher.delivered()).version == 2


async def test_a_delivery_in_the_background_that_lost_every_engine_is_waited_for_at_the_end() -> None:
    starter, engine = Starter(), Receiver(A)
    async with service(engine, starter=starter, overlap=True) as (publisher, pool):
        await publisher.publish(0)
        engine.refuse = 100
        await publisher.publish(1)
        last = asyncio.create_task(publisher.delivered())
        while not pool.num_returning:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0)
        starter.may_start.set()
        assert (await last).version == 0, "the last one that was delivered to all"
        assert [view.version for view in pool.views()] == [1]


class Process(Receiver):
    """An engine that can be ended."""

    node_id = "node-a"

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


class StartsSlowly(RunActors):
    """A start takes some ticks."""

    async def start_engine(self, _config: RunConfig, index: int, _near: str | None = None) -> Process:  # type: ignore[override] # a fake
        for _ in range(5):
            await asyncio.sleep(0)
        return Process(EngineId(f"engine-{index}"))


async def test_an_engine_that_leaves_during_the_restart_of_another_one_does_not_mix_up_the_list() -> None:
    engines = [Process(EngineId(f"engine-{index}")) for index in range(3)]
    actors = StartsSlowly(engines, *[None] * 5)  # type: ignore[arg-type]
    config = RunConfig.model_construct()
    restart = asyncio.create_task(actors.restarted(config, EngineId("engine-1")))
    await asyncio.sleep(0)
    await actors.ended(engines[0])  # type: ignore[arg-type]
    assert (await restart) is actors.engines[0]
    assert [engine.engine_id for engine in actors.engines] == ["engine-1", "engine-2"]
    assert (await actors.restarted(config, EngineId("engine-2"))) is actors.engines[1]
