"""A virtual actor is to its client what Ray's is: order, errors, deaths that are noticed later, hangs."""

from __future__ import annotations

import asyncio

import pytest
import ray

from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta, WeightManifest
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.versions import num_tokens
from penstock.platform.simulator.engine import EngineCost
from penstock.platform.simulator.virtual_actor import VirtualProcess
from penstock.platform.simulator.world import LengthProfile, LengthTable, prompt_ids
from tests.simulation.config import FaultRates
from tests.simulation.faulty_engines import CheckedEngine, EngineProcess, FaultyEngine
from tests.simulation.processes import FaultyProcess
from tests.simulation.world import CheckedWorld, InvariantError
from tests.virtual_time import run_virtual


class Counting:
    """Notes its calls in order."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    async def add(self, number: int) -> int:
        self.calls.append(number)
        await asyncio.sleep(1.0)
        return number

    async def refuse(self) -> None:
        raise WeightSyncError("odd shape")

    async def violate(self) -> None:
        raise InvariantError("I8", "planted")


def test_a_call_starts_at_once_and_goes_on_when_its_caller_stops_waiting() -> None:
    async def main() -> tuple[list[int], int]:
        process = VirtualProcess(actor := Counting(), lambda: None)
        first, second = process.handle.add.remote(1), process.handle.add.remote(2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.5)
        return actor.calls, await second

    assert run_virtual(main()) == ([1, 2], 2)


def test_what_a_method_raises_arrives_as_rays_error_with_its_cause() -> None:
    async def main() -> None:
        process = VirtualProcess(Counting(), lambda: None)
        with pytest.raises(ray.exceptions.RayTaskError) as raised:
            await process.handle.refuse.remote()
        assert isinstance(raised.value.cause, WeightSyncError)
        assert isinstance(raised.value, WeightSyncError), "as Ray's error of a task is an instance of its cause too"

    run_virtual(main())


def test_a_violation_ends_the_run_and_is_no_error_of_a_task() -> None:
    async def main() -> None:
        await FaultyProcess(Counting(), lambda: None).handle.violate.remote()

    with pytest.raises(InvariantError, match="planted"):
        run_virtual(main())


def test_a_death_ends_calls_once_it_is_noticed_and_later_calls_at_once() -> None:
    async def main() -> tuple[float, float, list[int]]:
        process, now = FaultyProcess(actor := Counting(), lambda: None), asyncio.get_running_loop().time
        call = process.handle.add.remote(1)
        await asyncio.sleep(0.5)
        process.die(ray.exceptions.OutOfMemoryError("low on memory"), noticed_after_s=2.0)
        unnoticed = process.handle.add.remote(2)
        with pytest.raises(ray.exceptions.OutOfMemoryError):
            await call
        noticed_at = now()
        with pytest.raises(ray.exceptions.OutOfMemoryError):
            await unnoticed
        with pytest.raises(ray.exceptions.ActorDiedError):
            await process.handle.add.remote(3)
        return noticed_at, now(), actor.calls

    assert run_virtual(main()) == (2.5, 2.5, [1])


def test_a_process_that_hangs_starts_and_answers_nothing_until_it_recovers() -> None:
    async def main() -> tuple[float, list[int]]:
        process = FaultyProcess(actor := Counting(), lambda: None)
        running = process.handle.add.remote(1)
        await asyncio.sleep(0.5)
        process.hang()
        queued = process.handle.add.remote(2)
        await asyncio.sleep(9.5)
        assert actor.calls == [1]
        assert not running.done()
        process.recover()
        await asyncio.gather(running, queued)
        return asyncio.get_running_loop().time(), actor.calls

    assert run_virtual(main()) == (11.0, [1, 2])


LENGTH = 200


def client() -> CheckedEngine:
    world = CheckedWorld(
        LengthTable(LengthProfile("constant", LENGTH, 0.0, 10_000), 8, seed=0), prompt_tokens=4, seed=0
    )
    cost = EngineCost(0.01, 0.001, 0.0, 8, 100_000, stage_s=0.5, swap_s=0.2)
    engine = FaultyEngine(EngineId("engine-0"), cost, world)
    process = EngineProcess(engine, "node-0", FaultRates(), 1.0, world, joins=False)
    return CheckedEngine(engine.engine_id, process.handle, "node-0")  # type: ignore[arg-type]


def request(member: int) -> GenerateRequest:
    return GenerateRequest(RequestId(f"0/{member}#0"), prompt_ids(0, 4), SamplingParams(10_000))


async def collect(engine: RemoteEngine, member: int) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(request(member))]


async def publish(engine: RemoteEngine, version: int) -> None:
    await engine.update_weights(WeightManifest(version, "", (), 0, 0))


def test_the_shipping_client_streams_from_the_simulated_engine() -> None:
    async def main() -> list[TokenDelta]:
        engine = client()
        await publish(engine, 0)
        deltas = await collect(engine, 0)
        assert asyncio.get_running_loop().time() == pytest.approx(0.7 + LENGTH * 0.011)
        assert (await engine.load()).tokens_generated == LENGTH
        await engine.close()
        return deltas

    deltas = run_virtual(main())
    assert sum(num_tokens(delta.spans) for delta in deltas) == LENGTH
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_death_fails_every_request_for_good(*, is_killed: bool) -> None:
    async def main() -> None:
        engine = client()
        await publish(engine, 0)
        jobs = [asyncio.create_task(collect(engine, member)) for member in range(2)]
        await asyncio.sleep(1)
        engine.kill() if is_killed else engine.process.die()
        for job in jobs:
            with pytest.raises(EngineLostError) as lost:
                await job
            assert lost.value.is_final
        with pytest.raises(EngineLostError):
            await collect(engine, 2)

    run_virtual(main())


def test_a_process_that_hangs_for_long_is_lost() -> None:
    async def main() -> float:
        engine = client()
        await publish(engine, 0)
        job = asyncio.create_task(collect(engine, 0))
        await asyncio.sleep(1)
        engine.process.hang()
        engine.process.engine.hang()
        with pytest.raises(EngineLostError, match="did not answer for 80 s"):
            await job
        return asyncio.get_running_loop().time()

    assert 80 < run_virtual(main()) < 102


def test_a_client_that_takes_its_engine_for_newer_than_it_is_is_found() -> None:
    async def main() -> None:
        engine = client()
        await publish(engine, 1)
        engine._version = 2
        await collect(engine, 0)

    with pytest.raises(InvariantError, match=r"I8: engine-0 gets 0/0#0 as if it served v2, but its process has v1"):
        run_virtual(main())
