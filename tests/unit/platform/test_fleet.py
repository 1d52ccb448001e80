"""Engines join and leave while requests and publishes run: nothing is lost, and nothing is charged."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.actors.weights.transports import GatherTransport, SharedMemoryTransport
from penstock.dataflow.errors import EngineLostError, PenstockError, PlacementError, WeightSyncError
from penstock.dataflow.ids import EngineId, TaskId
from penstock.dataflow.ports import (
    GenerateRequest,
    TokenDelta,
    WeightAck,
    WeightManifest,
)
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.checks.load import compose_config
from penstock.platform.config.schema import RunConfig
from penstock.platform.run import control, fleet
from penstock.platform.run.control import request, served_control
from penstock.platform.run.fleet import Fleet
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from penstock.weights.config import WeightsConfig
from tests.fakes import FakeEngine, ends_by_context
from tests.unit.actors.test_publisher import FakeTrainer
from tests.virtual_time import run_virtual

CODEC = TokenCodec(character_tokenizer())
TASK = Task(TaskId("t"), "12+34=")
GREEDY = SamplingParams(64, temperature=0.0, stop_token_ids=(1,))
SMALL = ("experiment=arithmetic", "rollout/engine=torch", "model.path=policy", "cluster.pools.cpu.memory_gib=64")
GPUS = ("experiment=arithmetic", "cluster=eight_gpu")
OLDER = (
    "+cluster.pools.older={device: gpu, count: 8, memory_gib: 40}",
    "cluster.extra_rollout_pools={older: {num_engines: 2}}",
)


@dataclass
class Engine(FakeEngine):
    """A fake that receives versions too.

    Attributes:
        may_update: Updates wait for this event.
        refuse: So many updates are refused.
        is_closed: Its process was ended; it must not be asked for anything then.
        stops_after: Says nothing after so many tokens of a request; None: it goes on.
    """

    node_id: str = "node-a"
    version: int = -1
    may_update: asyncio.Event | None = None
    refuse: int = 0
    updates: int = 0
    is_closed: bool = False
    stops_after: int | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        num_tokens = 0
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                if num_tokens == self.stops_after:
                    await asyncio.sleep(3600)
                num_tokens += 1
                yield delta

    async def update_weights(self, manifest: WeightManifest, payload: object = None) -> WeightAck:
        del payload
        assert not self.is_closed
        self.updates += 1
        if self.may_update is not None:
            await self.may_update.wait()
        if self.is_closed:
            raise EngineLostError.final("it was ended in the middle of an update")
        if self.updates <= self.refuse:
            raise WeightSyncError("planted refusal")
        self.version = manifest.version
        return WeightAck(self.engine_id, manifest.version, 7, 0.0, 0.0)


def engine(index: int, **settings: object) -> Engine:
    return Engine(EngineId(f"engine-{index}"), ends=ends_by_context, **settings)  # type: ignore[arg-type]


@dataclass
class Processes:
    """Starts fakes; an error is raised instead."""

    make: Callable[[int], Engine] = engine
    error: Exception | None = None
    num_started: int = 0
    ended_ids: list[str] = field(default_factory=list)

    async def started(self, config: RunConfig) -> Engine:
        del config
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.num_started += 1
        return self.make(self.num_started - 1)

    async def ended(self, engine: Engine) -> None:
        assert not engine.running, "no request is on an engine that is ended"
        engine.is_closed = True
        self.ended_ids.append(engine.engine_id)


class Service:
    """A pool of `count` engines, all at version 0, with runner, publisher and fleet."""

    def __init__(self, count: int, *overrides: str, drain_s: float = 5.0, mode: str = "keep_kv") -> None:
        weights = WeightsConfig(timeout_s=5.0, drain_timeout_s=drain_s, update_mode=mode)  # type: ignore[arg-type]
        self.config = compose_config(list(overrides or SMALL)).model_copy(update={"weights": weights})
        self.processes = Processes(num_started=count)
        self.engines = [engine(index) for index in range(count)]
        self.pool = EnginePool(self.engines, 8)
        trainer = FakeTrainer()
        transport = GatherTransport(trainer, self.pool)  # type: ignore[arg-type]
        self.publisher = ActorWeightPublisher(self.pool, weights, transport, trainer)  # type: ignore[arg-type]
        self.runner = TrajectoryRunner(self.pool, CODEC, 5.0, max_resumes=0)
        self.notes: list[str] = []
        self.told: list[str] = []
        self.fleet = Fleet(self.config, self.pool, self.publisher, self.processes, self.notes.append)  # type: ignore[arg-type]

    async def scale(self, num_engines: int) -> str:
        return await asyncio.wait_for(self.fleet.scale(num_engines, self.told.append), 5)

    async def run(self) -> Trajectory:
        self.context = RolloutContext(TASK, "0")
        return await asyncio.wait_for(self.runner.run(self.context, 0, GREEDY), 5)

    @property
    def ids(self) -> list[str]:
        return [engine.engine_id for engine in self.pool.engines()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the fakes have no events for it
            await asyncio.sleep(0)


async def test_an_engine_that_joins_has_the_version_and_serves() -> None:
    service = Service(1)
    await service.publisher.publish(3)
    assert await service.scale(2) == "1 -> 2 engines are in service"
    assert [view.version for view in service.pool.views()] == [3, 3]
    assert service.told[-1] == "engine-1 has joined and serves at v3"
    assert service.notes == service.told
    service.pool.pause(EngineId("engine-0"))
    assert (await service.run()).spans[0].version == 3
    assert len((await service.publisher.publish(4)).acks) == 2


async def test_an_engine_that_refuses_the_version_serves_from_the_next_one_on() -> None:
    service = Service(1)
    service.processes.make = lambda index: engine(index, refuse=1)
    await service.publisher.publish(0)
    await service.scale(2)
    assert service.told[-1] == "engine-1 has joined and serves from the next version on"
    assert len((await service.publisher.publish(1)).acks) == 2


async def test_ids_are_never_used_again() -> None:
    service = Service(2)
    await service.publisher.publish(0)
    await service.scale(1)
    await service.scale(3)
    assert len(service.ids) == 3
    assert {"engine-2", "engine-3"} < set(service.ids)


@asynccontextmanager
async def one_request_on(service: Service, leaving: Engine) -> AsyncIterator[asyncio.Task[Trajectory]]:
    """Engine-0 holds more, so `leaving`, on which one request runs, is the one that leaves."""
    first = EngineId("engine-0")
    service.pool.pause(leaving.engine_id)
    async with service.pool.lease(tokens=10_000), service.pool.lease(tokens=10_000):
        service.pool.resume(leaving.engine_id)
        service.pool.pause(first)
        running = asyncio.create_task(service.run())
        await until(lambda: leaving.running == 1)
        service.pool.resume(first)
        yield running


async def test_an_engine_that_leaves_finishes_its_requests() -> None:
    service = Service(2)
    await service.publisher.publish(0)
    async with one_request_on(service, service.engines[1]) as running:
        assert await service.scale(1) == "2 -> 1 engines are in service"
        assert running.done()
    assert service.told[-1] == "engine-1 has left"
    assert service.processes.ended_ids == ["engine-1"]
    assert len(service.engines[1].requests) == 1
    assert service.runner.stats.interruptions == {}


async def test_the_engine_that_holds_least_leaves_and_gets_no_more_requests() -> None:
    service = Service(2)
    await service.publisher.publish(0)
    service.pool.pause(EngineId("engine-1"))
    async with service.pool.lease(tokens=100) as held:
        assert held.engine.engine_id == "engine-0"
        service.pool.resume(EngineId("engine-1"))
        await service.scale(1)
        assert service.ids == ["engine-0"]


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_at_the_deadline_requests_move_with_their_tokens_and_nothing_is_charged(num_tokens: int) -> None:
    whole = await Service(1).run()
    service = Service(2, drain_s=0.05)
    await service.publisher.publish(0)
    await service.scale(2)
    leaving = service.engines[1]
    leaving.stops_after = num_tokens
    async with one_request_on(service, leaving) as running:
        turn = service.context.turns[0]
        assert await service.scale(1) == "2 -> 1 engines are in service"
        moved = await running
    assert service.told[-1] == "engine-1 has left; 1 of its requests continue on other engines"
    assert np.array_equal(moved.token_ids, whole.token_ids)
    (begun,), (continued,) = leaving.requests, service.engines[0].requests
    assert continued.prompt_token_ids == tuple(whole.token_ids[: len(begun.prompt_token_ids) + num_tokens])
    stats = service.runner.stats
    assert (stats.interruptions, stats.tokens) == ({"left": 1}, num_tokens), "max_resumes is 0, so nothing was charged"
    assert turn.num_interruptions == 0


@pytest.mark.parametrize("mode", ["keep_kv", "drain", "multi_version"])
async def test_a_leave_during_a_publish_waits_for_it_and_breaks_nothing(mode: str) -> None:
    service = Service(3, mode=mode)
    await service.publisher.publish(0)
    for one in service.engines:
        one.may_update = asyncio.Event()
    publish = asyncio.create_task(service.publisher.publish(1))
    await until(lambda: any(one.updates == 2 for one in service.engines) or mode == "multi_version")
    scale = asyncio.create_task(service.scale(2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert service.processes.ended_ids == [], "it may be in the middle of the transfer"
    for one in service.engines:
        assert one.may_update is not None
        one.may_update.set()
    assert (await publish).acks
    await scale
    await service.publisher.publish(2)
    await service.publisher._updater.settle()
    assert len(service.pool.views()) == 2
    assert service.pool.fenced == {}
    assert len(service.processes.ended_ids) == 1
    await service.publisher.close()


async def test_engines_on_a_draining_node_leave_but_never_the_last_one() -> None:
    service = Service(3)
    await service.publisher.publish(0)
    for one in service.engines[1:]:
        one.node_id = "node-b"
    answers = [set[str](), {"node-b"}, {"node-a", "node-b"}]

    async def draining_nodes() -> set[str]:
        if not answers:
            raise ConnectionError("planted: the cluster does not answer, and the run goes on")
        return answers.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "DRAIN_PERIOD_S", 0.0)
        async with service.fleet.following(draining_nodes):
            await until(lambda: not answers and len(service.processes.ended_ids) == 2)
    assert service.ids == ["engine-0"]
    assert "engine-1 is leaving: its node is being drained" in service.notes


async def test_scaling_to_the_same_number_does_nothing() -> None:
    service = Service(2)
    assert await service.scale(2) == "2 -> 2 engines are in service"
    assert (service.told, service.processes.num_started, service.processes.ended_ids) == ([], 2, [])


async def test_an_engine_that_does_not_start_leaves_the_others_as_they_are() -> None:
    service = Service(1)
    service.processes.error = PlacementError("planted: not up in time")
    with pytest.raises(PenstockError, match=r"2 of 2 engines could not join: planted"):
        await service.scale(3)
    service.processes.error = None
    await service.scale(2)


async def test_an_engine_on_a_node_that_the_route_does_not_reach_is_refused_by_name() -> None:
    service = Service(1)
    service.processes.make = lambda index: engine(index, node_id="node-b")
    trainer = FakeTrainer()
    trainer.nodes = ["node-a"]  # type: ignore[attr-defined]
    shared = SharedMemoryTransport(trainer, service.engines, None, "float32", 5.0)  # type: ignore[arg-type]
    service.publisher._transport = shared
    with pytest.raises(PenstockError, match=r"engine-1 was started on node node-b, .*node node-a"):
        await service.scale(2)
    assert service.processes.ended_ids == ["engine-1"]
    assert service.ids == ["engine-0"]


@pytest.mark.parametrize(
    ("overrides", "num_engines", "message"),
    [
        (SMALL, 0, r"--engines 0: a run needs at least 1"),
        ((*GPUS, "rollout.num_engines=4", *OLDER), 7, r"generate\.count=4 is too small: the roles need 5 for engines"),
        ((*GPUS, "rollout.num_engines=4"), 5, r"count=4 is too small: the roles need .*5 "),
        (("experiment=arithmetic", "cluster=one_gpu", "dataflow=synchronous"), 2, r"cluster\.colocated=true"),
    ],
)
async def test_what_cannot_be_is_refused(overrides: tuple[str, ...], num_engines: int, message: str) -> None:
    service = Service(1, *overrides)
    with pytest.raises(PenstockError, match=message):
        await service.scale(num_engines)
    assert service.told == []


async def test_a_second_change_and_one_during_a_restart_are_refused() -> None:
    service = Service(2)
    changing = asyncio.create_task(service.scale(3))
    await asyncio.sleep(0)
    with pytest.raises(PenstockError, match="already"):
        await service.scale(4)
    await changing
    service.pool.set_restart_hook(lambda _engine_id: True)
    service.pool.fence(EngineId("engine-0"), "planted")
    with pytest.raises(PenstockError, match="1 lost engines are being restarted"):
        await service.scale(4)


async def test_a_late_report_about_an_engine_that_has_left_is_ignored() -> None:
    service = Service(2)
    await service.publisher.publish(0)
    await service.scale(1)
    gone = EngineId(service.processes.ended_ids[0])
    service.pool.fence(gone, "reported late")
    service.pool.resume(gone)
    service.pool.set_limit(gone, 1)
    await service.pool.wait_engine_idle(gone)
    assert service.pool.fenced == {}


async def scale_nothing(num_engines: int, progress: Callable[[str], None]) -> str:
    if num_engines < 1:
        raise PenstockError("planted refusal")
    progress("on the way")
    await asyncio.sleep(0.01)
    return f"there are {num_engines}"


@pytest.mark.parametrize("depth", [0, 12])
async def test_a_command_reaches_the_driver_and_the_socket_goes_with_it(depth: int, tmp_path: Path) -> None:
    run_dir = tmp_path.joinpath(*["a-long-name"] * depth)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "control.sock").write_text("of a dead driver")
    notes: list[str] = []
    async with served_control(run_dir, {"scale": scale_nothing}, notes.append):
        progress: list[str] = []
        assert await asyncio.to_thread(request, run_dir, "scale", 2, progress.append) == "there are 2"
        assert progress == ["on the way"]
        with pytest.raises(PenstockError, match="planted refusal"):
            await asyncio.to_thread(request, run_dir, "scale", 0, progress.append)
        link = run_dir / "control"
        folder = Path(link.read_text().strip()).parent.parent if link.exists() else None
        assert (folder is not None) == (len(str(run_dir / "control.sock")) > 107)
    assert notes == []
    assert list(run_dir.glob("control*")) == []
    assert folder is None or not folder.exists()
    with pytest.raises(PenstockError, match="is not running"):
        await asyncio.to_thread(request, run_dir, "scale", 2, progress.append)
    with pytest.raises(PenstockError, match="no such run directory"):
        request(run_dir / "other", "scale", 2, progress.append)


async def test_a_client_that_sends_something_else_is_told_and_one_that_waits_hears_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ALIVE_S", 0.01)
    started = asyncio.Event()

    async def scale_forever(num_engines: int, progress: Callable[[str], None]) -> str:
        del num_engines, progress
        started.set()
        await asyncio.sleep(3600)
        return ""

    run_dir = tmp_path
    async with served_control(run_dir, {"scale": scale_forever}, print):
        address = control._address(run_dir)
        for line in (b"\n", b"[]\n", b'{"engines": 2}\n', b"x" * (1 << 17) + b"\n"):
            reader, writer = await asyncio.open_unix_connection(address)
            writer.write(line)
            assert b'"error"' in await asyncio.wait_for(reader.readline(), 5)
            writer.close()
        waiting = asyncio.create_task(asyncio.to_thread(request, run_dir, "scale", 2, print))
        await started.wait()
        await asyncio.sleep(0.05)
    with pytest.raises(PenstockError, match="the run has ended"):
        await waiting


TOKEN_S, LOAD_S, CHANGE_EVERY_S, NUM_CHANGES = 0.05, 5.0, 20.0, 9


class Paced(Engine):
    """One token per request every `TOKEN_S`, whatever else runs: the processor is no bottleneck."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                await asyncio.sleep(TOKEN_S)
                yield delta


class PacedProcesses(Processes):
    """Counts the seconds of engines, from the time at which they are up to the end of their process."""

    engine_s = 0.0

    async def started(self, config: RunConfig) -> Engine:
        await asyncio.sleep(LOAD_S)
        found = await super().started(config)
        self.engine_s -= asyncio.get_running_loop().time()
        return found

    async def ended(self, engine: Engine) -> None:
        await super().ended(engine)
        self.engine_s += asyncio.get_running_loop().time()


async def tokens_per_engine_second(*, changes: bool) -> float:
    """Of 3 minutes of requests and publishes, without changes or with an engine that joins or leaves every 20 s."""
    service = Service(0, drain_s=2.0)
    service.processes = PacedProcesses(lambda index: Paced(EngineId(f"engine-{index}"), length=lambda _serial: 150))
    service.fleet = Fleet(service.config, service.pool, service.publisher, service.processes, service.notes.append)  # type: ignore[arg-type]
    for _ in range(2):
        service.pool.add(await service.processes.started(service.config))
    await service.publisher.publish(0)
    loop, sampling = asyncio.get_running_loop(), SamplingParams(400, stop_token_ids=(1,))

    num_tokens = 0

    async def ask(number: int) -> None:
        nonlocal num_tokens
        while True:
            answer = await service.runner.run(RolloutContext(TASK, f"{number}"), 0, sampling)
            num_tokens += answer.num_sampled_tokens

    async def publish() -> None:
        for version in itertools.count(1):
            await asyncio.sleep(3.0)
            await service.publisher.publish(version)

    jobs = [asyncio.create_task(ask(number)) for number in range(32)] + [asyncio.create_task(publish())]
    for number in range(NUM_CHANGES):
        change_at = loop.time() + CHANGE_EVERY_S
        if changes:
            await service.fleet.scale(1 + number % 2, service.told.append)
        await asyncio.sleep(change_at - loop.time())
    engine_s = service.processes.engine_s + len(service.pool.views()) * loop.time()
    assert not [job for job in jobs if job.done()]
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    assert len(service.processes.ended_ids) == (5 if changes else 0)
    return num_tokens / engine_s


@pytest.mark.full
def test_engines_that_join_and_leave_are_used_for_most_of_their_time() -> None:
    steady, changing = (run_virtual(tokens_per_engine_second(changes=changes)) for changes in (False, True))
    assert steady == pytest.approx(8 / TOKEN_S, rel=0.1), "all slots are used"
    print(f"{changing:.1f} tokens per engine-second with changes, {steady:.1f} without: {changing / steady:.3f}")
    assert changing / steady >= 0.9
