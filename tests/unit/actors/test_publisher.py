"""Publishing over fakes: engines acknowledge; a slow or refusing one gets a second attempt and is then fenced."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import GatherTransport, PublishedVersion, PublishHandle
from penstock.dataflow.errors import EngineLostError, WeightSendError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck, WeightManifest
from penstock.rollout.engine_pool.pool import EnginePool, Lease
from penstock.weights.config import WeightsConfig


@dataclass
class FakeTrainer:
    node_id: str = "node-a"
    read_back_calls: int = 0
    version: int = 0
    step_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def export(self, version: int) -> WeightManifest:
        return WeightManifest(version, "somewhere", (), 100, 7)

    def read_back(self, manifest: WeightManifest) -> str:
        self.read_back_calls += 1
        return f"bytes of v{manifest.version}"


@dataclass
class Receiver:
    engine_id: EngineId
    refuse: int = 0
    hang: bool = False
    node_id: str = "node-a"
    version: int = -1
    received: list[tuple[int, object]] = field(default_factory=list)

    async def update_weights(self, manifest: WeightManifest, payload: object = None) -> WeightAck:
        self.received.append((manifest.version, payload))
        if self.hang:
            await asyncio.sleep(3600)
        if len(self.received) <= self.refuse:
            raise WeightSyncError("planted refusal")
        self.version = manifest.version
        return WeightAck(self.engine_id, manifest.version, 7, 0.0, 0.01 * len(self.received))


def publisher(*engines: Receiver, mode: str = "keep_kv") -> tuple[ActorWeightPublisher, EnginePool, FakeTrainer]:
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    trainer = FakeTrainer()
    config = WeightsConfig(timeout_s=0.05, update_mode=mode)  # type: ignore[arg-type]
    transport = GatherTransport(trainer, pool)  # type: ignore[arg-type]
    return ActorWeightPublisher(pool, config, transport), pool, trainer


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv", "drain"])
async def test_every_engine_acknowledges(mode: str) -> None:
    publish, pool, trainer = publisher(Receiver(EngineId("a")), Receiver(EngineId("b")), mode=mode)
    report = await publish.publish(3)
    assert [ack.version for ack in report.acks] == [3, 3]
    assert report.num_bytes == 100
    assert report.max_stall_s == pytest.approx(0.01)
    assert not pool.fenced
    assert trainer.read_back_calls == 0, "one node: nothing goes through the object store"


async def test_rolling_reports_the_first_engine_and_close_ends_what_follows() -> None:
    engines = [Receiver(EngineId(name)) for name in "ab"]
    publish, pool, _ = publisher(*engines, mode="multi_version")
    assert len((await publish.publish(0)).acks) == 1
    await publish.publish(1)
    await publish.close()
    assert max(engine.version for engine in engines) == 1
    assert not pool.fenced


@pytest.mark.parametrize("mode", ["keep_kv", "drain", "multi_version"])
async def test_a_refusal_is_tried_again(mode: str) -> None:
    engine = Receiver(EngineId("a"), refuse=1)
    publish, pool, _ = publisher(engine, mode=mode)
    assert len((await publish.publish(1)).acks) == 1
    assert len(engine.received) == 2
    assert not pool.fenced


class CountedTransport(GatherTransport):
    """Records the versions that the trainer writes."""

    def __init__(self, trainer: FakeTrainer, pool: EnginePool) -> None:
        super().__init__(trainer, pool)  # type: ignore[arg-type]
        self.written: list[int] = []

    async def send(self, version: int) -> PublishHandle:
        self.written.append(version)
        return await super().send(version)


@dataclass
class Shared(Receiver):
    """Refuses a version until it has been written twice."""

    written: list[int] = field(default_factory=list)

    async def update_weights(self, manifest: WeightManifest, payload: object = None) -> WeightAck:
        if self.written.count(manifest.version) < 2:
            self.received.append((manifest.version, payload))
            raise WeightSyncError("the received data differs")
        return await super().update_weights(manifest, payload)


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv", "drain", "multi_version"])
async def test_a_version_damaged_in_the_copy_for_all_engines_is_written_once_more_and_none_is_fenced(mode: str) -> None:
    engines = [Shared(EngineId(name)) for name in "abc"]
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    config = WeightsConfig(timeout_s=5.0, update_mode=mode)  # type: ignore[arg-type]
    transport = CountedTransport(FakeTrainer(), pool)
    for engine in engines:
        engine.written = transport.written
    publish = ActorWeightPublisher(pool, config, transport)
    for version in (1, 2):
        report = await publish.publish(version)
        assert (report.version, report.rewrites) == (version, 1)
    await publish._updater.settle()
    assert transport.written == [1, 1, 2, 2], "once more, however many refuse"
    assert not pool.fenced
    assert max(engine.version for engine in engines) == 2
    await publish.close()


async def test_a_version_that_stays_damaged_is_written_twice_and_the_engines_that_refuse_it_are_fenced() -> None:
    broken = Receiver(EngineId("broken"), refuse=9)
    publish, pool, _ = publisher(Receiver(EngineId("a")), broken)
    report = await publish.publish(1)
    assert ([ack.engine_id for ack in report.acks], report.rewrites) == (["a"], 1)
    assert "planted refusal" in pool.fenced[EngineId("broken")]
    assert (await publish.publish(2)).rewrites == 0


async def test_overlapped_a_version_is_not_written_again_from_changed_weights() -> None:
    publish, pool, engine = await overlapped()
    engine.refuse = len(engine.received) + 1
    engine.may_take.set()
    assert (await publish.delivered()).rewrites == 0
    assert not pool.fenced, "its second attempt went well"
    await publish.close()


async def test_a_hanging_engine_is_fenced_and_the_rest_continue() -> None:
    slow = Receiver(EngineId("slow"), hang=True)
    publish, pool, _ = publisher(Receiver(EngineId("a")), slow)
    assert [ack.engine_id for ack in (await publish.publish(1)).acks] == ["a"]
    assert "took longer than" in pool.fenced[EngineId("slow")]
    assert len(slow.received) == 2
    await publish.publish(2)
    assert len(slow.received) == 2, "a fenced engine is left alone"
    assert [engine.engine_id for engine in pool.engines()] == ["a"]


@pytest.mark.parametrize("mode", ["keep_kv", "drain", "multi_version"])
async def test_no_engine_left_stops_the_run(mode: str) -> None:
    publish, _, _ = publisher(Receiver(EngineId("a"), refuse=9), mode=mode)
    with pytest.raises(WeightSyncError, match=r"no engine acknowledged it.*planted refusal"):
        await publish.publish(1)


async def test_an_engine_that_joins_is_part_of_the_next_publish() -> None:
    publish, pool, _ = publisher(Receiver(EngineId("a")))
    await publish.publish(1)
    late = Receiver(EngineId("late"))
    pool.add(late)  # type: ignore[arg-type]
    assert len((await publish.publish(2)).acks) == 2
    assert late.version == 2


async def test_other_nodes_get_the_bytes_through_the_object_store() -> None:
    engine = Receiver(EngineId("a"), node_id="node-b")
    publish, _, _ = publisher(engine)
    await publish.publish(5)
    assert engine.received == [(5, "bytes of v5")]


@dataclass
class Slow(Receiver):
    """Takes a version when the test allows it."""

    may_take: asyncio.Event = field(default_factory=asyncio.Event)

    async def update_weights(self, manifest: WeightManifest, payload: object = None) -> WeightAck:
        await self.may_take.wait()
        return await super().update_weights(manifest, payload)


async def granted(pool: EnginePool, number: int = 1) -> list[Lease]:
    leases = [pool.lease() for _ in range(number)]
    await asyncio.wait_for(asyncio.gather(*(lease.acquire() for lease in leases)), 5.0)
    return leases


async def test_an_engine_that_refused_a_version_gets_no_requests_before_its_second_attempt() -> None:
    refusing, slow = Receiver(EngineId("refusing"), refuse=1, version=0), Slow(EngineId("slow"), version=0)
    pool = EnginePool([refusing, slow], 4)  # type: ignore[list-item]
    config = WeightsConfig(timeout_s=5.0)
    publish = ActorWeightPublisher(pool, config, GatherTransport(FakeTrainer(), pool))  # type: ignore[arg-type]
    publishing = asyncio.create_task(publish.publish(1))
    await asyncio.sleep(0.01)
    assert len(refusing.received) == 1
    assert {lease.engine.engine_id for lease in await granted(pool, 4)} == {"slow"}, "the other would lose them"
    waiting = asyncio.create_task(granted(pool))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    slow.may_take.set()
    await publishing
    (lease,) = await waiting
    assert (lease.engine.engine_id, lease.engine.version) == ("refusing", 1)


async def overlapped(*others: Receiver, timeout_s: float = 0.2) -> tuple[ActorWeightPublisher, EnginePool, Slow]:
    """An overlapped publish of version 1: it has left the trainer, and the slow engine is still at version 0."""
    engine = Slow(EngineId("a"))
    engine.may_take.set()
    pool = EnginePool([engine, *others], 4)  # type: ignore[list-item]
    config = WeightsConfig(timeout_s=timeout_s, overlap=True)
    publish = ActorWeightPublisher(pool, config, GatherTransport(FakeTrainer(), pool))  # type: ignore[arg-type]
    assert (await publish.publish(0)).version == 0, "the first publish is waited for: nothing can be sampled before"
    engine.may_take.clear()
    assert (await publish.publish(1)).version == 0, "the newest complete one"
    return publish, pool, engine


async def test_overlapped_the_trainer_continues_while_the_engine_takes_the_version() -> None:
    publish, _, engine = await overlapped()
    assert engine.version == 0
    engine.may_take.set()
    assert (await publish.publish(2)).version == 1, "one at a time: the delivery before was waited for"
    await publish.delivered()
    assert (engine.version, publish.last.version) == (2, 2)  # type: ignore[union-attr]
    await publish.close()


async def test_overlapped_no_request_starts_below_the_version_that_has_left() -> None:
    publish, pool, engine = await overlapped()
    lease = pool.lease()
    started = asyncio.ensure_future(lease.acquire())
    await asyncio.sleep(0.01)
    assert not started.done()
    engine.may_take.set()
    await publish.delivered()
    await asyncio.wait_for(started, 1.0)
    assert lease.view is not None
    assert lease.view.version == 1
    lease.release()
    await publish.close()


async def test_overlapped_an_engine_with_the_version_serves_while_another_one_takes_it() -> None:
    publish, pool, slow = await overlapped(Receiver(EngineId("quick")), timeout_s=60.0)
    assert [(lease.engine.engine_id, lease.engine.version) for lease in await granted(pool)] == [("quick", 1)]
    assert slow.version == 0
    await publish.close()


async def test_overlapped_a_version_that_no_engine_takes_stops_the_run_at_the_next() -> None:
    publish, _, _ = await overlapped()
    with pytest.raises(WeightSyncError, match="publish v1: no engine acknowledged it"):
        await publish.publish(2)
    await publish.close()


async def test_overlapped_requests_that_wait_for_a_failed_version_get_its_error() -> None:
    class Broken(GatherTransport):
        async def send(self, version: int) -> PublishHandle:
            return await super().send(version) if version == 0 else self.fails()

        async def fails(self) -> PublishedVersion:
            raise WeightSyncError("the weight receiver is lost")

    engine = Slow(EngineId("a"))
    engine.may_take.set()
    pool = EnginePool([engine], 4)  # type: ignore[list-item]
    config = WeightsConfig(timeout_s=0.2, overlap=True)
    publish = ActorWeightPublisher(pool, config, Broken(FakeTrainer(), pool))  # type: ignore[arg-type]
    await publish.publish(0)
    await publish.publish(1)
    with pytest.raises(EngineLostError, match="the weight receiver is lost"):
        await asyncio.wait_for(pool.lease().acquire(), 5.0)
    with pytest.raises(WeightSyncError, match="the weight receiver is lost"):
        await publish.delivered()
    await publish.close()


async def test_overlapped_the_wait_for_the_previous_version_does_not_count_for_the_next() -> None:
    publish, _, engine = await overlapped()
    asyncio.get_running_loop().call_later(0.15, engine.may_take.set)
    await publish.publish(2)
    assert (await publish.delivered()).send_s < 0.15
    await publish.close()


class FailingTransport(GatherTransport):
    """A training rank is dead."""

    num_tries = 0

    async def send(self, version: int) -> PublishHandle:
        self.num_tries += 1
        raise WeightSendError(f"publish v{version}: write_shards on the training ranks: a process died")


async def test_a_failed_send_ends_the_publish_at_once_although_an_engine_is_restarting() -> None:
    pool = EnginePool([Receiver(EngineId("a")), Receiver(EngineId("b"))], 4)  # type: ignore[list-item]
    pool.set_restart_hook(lambda _engine_id: True)
    pool.fence(EngineId("b"), "it is restarted")
    config = WeightsConfig(timeout_s=5.0)
    transport = FailingTransport(FakeTrainer(), pool)  # type: ignore[arg-type]
    with pytest.raises(WeightSendError, match="a process died"):
        await asyncio.wait_for(ActorWeightPublisher(pool, config, transport).publish(1), 5.0)
    assert transport.num_tries == 1


async def test_a_version_that_the_last_engine_refuses_is_not_tried_again_before_another_engine_has_restarted() -> None:
    pool = EnginePool([Receiver(EngineId("a"), refuse=9)], 4)  # type: ignore[list-item]
    pool.set_restart_hook(lambda _engine_id: True)
    config = WeightsConfig(timeout_s=5.0)
    transport = CountedTransport(FakeTrainer(), pool)
    publish = ActorWeightPublisher(pool, config, transport)
    publishing = asyncio.create_task(publish.publish(1))
    await asyncio.sleep(0.05)
    assert transport.written == [1, 1], "once, and once more because it was refused"
    pool.add(Receiver(EngineId("a")))  # type: ignore[arg-type]
    assert [ack.engine_id for ack in (await asyncio.wait_for(publishing, 5.0)).acks] == ["a"]
    assert transport.written == [1, 1, 1]


class FailsOnce(GatherTransport):
    """The first rendezvous of ranks and engines fails."""

    num_tries = 0

    async def send(self, version: int) -> PublishHandle:
        self.num_tries += 1
        if self.num_tries > 1:
            return await super().send(version)
        raise WeightSyncError("weights: joining the transfer group: an engine died")


async def test_a_publish_that_fails_for_an_engine_is_not_tried_again_before_an_engine_has_restarted() -> None:
    engines = [Receiver(EngineId("a")), Receiver(EngineId("b"))]
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    pool.set_restart_hook(lambda _engine_id: True)
    pool.fence(EngineId("b"), "it is restarted")
    config = WeightsConfig(timeout_s=5.0)
    transport = FailsOnce(FakeTrainer(), pool)  # type: ignore[arg-type]
    publishing = asyncio.create_task(ActorWeightPublisher(pool, config, transport).publish(1))
    await asyncio.sleep(0.05)
    assert transport.num_tries == 1, "it does not spin, although an engine is in service"
    pool.add(Receiver(EngineId("b")))  # type: ignore[arg-type]
    assert len((await asyncio.wait_for(publishing, 5.0)).acks) == 2


@pytest.mark.parametrize(("every", "expected"), [(3, [0, 3]), (0, [])])
async def test_version_0_and_every_nth_is_probed(every: int, expected: list[int]) -> None:
    pool = EnginePool([Receiver(EngineId("a"))], 4)  # type: ignore[list-item]
    probed: list[int] = []

    async def probe(version: int) -> float:
        probed.append(version)
        return 0.5

    config = WeightsConfig(timeout_s=5.0, probe_every=every)
    publish = ActorWeightPublisher(pool, config, GatherTransport(FakeTrainer(), pool), probe=probe)  # type: ignore[arg-type]
    reports = [await publish.publish(version) for version in range(5)]
    assert probed == expected == [report.version for report in reports if report.max_logprob_diff == 0.5]
    assert sum(report.max_logprob_diff is None for report in reports) == 5 - len(expected)


async def test_an_overlapped_version_is_waited_for_before_it_is_probed() -> None:
    engine = Slow(EngineId("a"))
    engine.may_take.set()
    pool = EnginePool([engine], 4)  # type: ignore[list-item]
    served: list[tuple[int, int]] = []

    async def probe(version: int) -> float:
        served.append((version, engine.version))
        return 0.5

    config = WeightsConfig(timeout_s=5.0, overlap=True, probe_every=2)
    publish = ActorWeightPublisher(pool, config, GatherTransport(FakeTrainer(), pool), probe=probe)  # type: ignore[arg-type]
    await publish.publish(0)
    assert (await publish.publish(1)).max_logprob_diff is None
    await publish.delivered()
    engine.may_take.clear()
    publishing = asyncio.create_task(publish.publish(2))
    await asyncio.sleep(0.05)
    assert not publishing.done()
    engine.may_take.set()
    report = await publishing
    assert (report.version, report.max_logprob_diff) == (2, 0.5)
    assert served == [(0, 0), (2, 2)]
    await publish.close()
