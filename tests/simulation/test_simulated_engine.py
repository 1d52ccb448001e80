"""The simulated engine keeps the port's contract and its cost model is the arithmetic it states."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta, WeightManifest
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.versions import join_spans, num_tokens, versions_per_token
from penstock.platform.simulator.engine import EngineCost
from penstock.platform.simulator.world import POSITION_BITS, LengthProfile, LengthTable, prompt_ids
from tests.simulation.faulty_engines import FaultyEngine
from tests.simulation.world import CheckedWorld
from tests.virtual_time import run_virtual

COST = EngineCost(0.01, 0.001, 0.0, 8, 100_000, stage_s=0.5, swap_s=0.2)
LENGTH = 200


def make_engine(cost: EngineCost = COST, length: int = LENGTH) -> FaultyEngine:
    world = CheckedWorld(
        LengthTable(LengthProfile("constant", length, 0.0, 10_000), 8, seed=0), prompt_tokens=4, seed=0
    )
    return FaultyEngine(EngineId("engine-0"), cost, world)


def request(member: int, task: int = 0) -> GenerateRequest:
    return GenerateRequest(RequestId(f"{task}/{member}#0"), prompt_ids(task, 4), SamplingParams(10_000))


async def publish(engine: FaultyEngine, version: int) -> None:
    await engine.update_weights(WeightManifest(version, "", (), 0, 0))


async def collect(engine: FaultyEngine, member: int) -> tuple[float, list[TokenDelta]]:
    started = asyncio.get_running_loop().time()
    deltas = [delta async for delta in engine.generate(request(member))]
    return asyncio.get_running_loop().time() - started, deltas


def test_a_lone_request_takes_its_length_times_the_step_time() -> None:
    async def alone() -> tuple[float, list[TokenDelta]]:
        engine = make_engine()
        await publish(engine, 0)
        return await collect(engine, 0)

    took_s, deltas = run_virtual(alone())
    assert took_s == pytest.approx(LENGTH * 0.011)
    assert [len(delta.token_ids) for delta in deltas] == [64, 64, 64, 8]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]


def test_requests_share_the_steps_and_those_beyond_the_slots_wait() -> None:
    async def sixteen() -> list[float]:
        engine = make_engine()
        await publish(engine, 0)
        return [took_s for took_s, _ in await asyncio.gather(*(collect(engine, member) for member in range(16)))]

    took = run_virtual(sixteen())
    assert took[:8] == pytest.approx([LENGTH * 0.018] * 8)
    assert took[8:] == pytest.approx([2 * LENGTH * 0.018] * 8)


def test_an_update_in_flight_splits_the_spans_where_the_weights_changed() -> None:
    async def updated() -> tuple[float, list[TokenDelta]]:
        engine = make_engine()
        await publish(engine, 0)
        job = asyncio.create_task(collect(engine, 0))
        await asyncio.sleep(0.6)
        await publish(engine, 1)
        return await job

    took_s, deltas = run_virtual(updated())
    assert took_s == pytest.approx(LENGTH * 0.011 + 0.2)  # staging during generation, then the swap while frozen
    spans = join_spans([span for delta in deltas for span in delta.spans])
    assert spans == ((0, 100), (1, 100))  # 1.1 s at 11 ms per token
    ids = [token for delta in deltas for token in delta.token_ids]
    assert [(token >> POSITION_BITS) - 1 for token in ids] == versions_per_token(spans).tolist()


def test_a_full_kv_cache_preempts_and_loses_no_token() -> None:
    async def crowded() -> tuple[list[list[TokenDelta]], int]:
        engine = make_engine(EngineCost(0.01, 0.0, 0.001, 8, 600, 0.0, 0.0))
        await publish(engine, 0)
        done = await asyncio.gather(*(collect(engine, member) for member in range(8)))
        return [deltas for _, deltas in done], engine.counters.preempted

    answers, preempted = run_virtual(crowded())
    assert preempted > 0
    for deltas in answers:
        assert sum(num_tokens(delta.spans) for delta in deltas) == LENGTH
        positions = [token & ((1 << POSITION_BITS) - 1) for delta in deltas for token in delta.token_ids]
        assert positions == list(range(LENGTH))


def test_an_engine_without_weights_serves_nothing_and_one_that_forgets_is_without() -> None:
    async def forgets() -> None:
        engine = make_engine()
        with pytest.raises(EngineLostError, match="no weights"):
            await collect(engine, 0)
        await publish(engine, 3)
        await engine.forget_versions()
        with pytest.raises(EngineLostError, match="no weights"):
            await collect(engine, 0)

    run_virtual(forgets())


def test_versions_are_forgotten_after_an_update_that_was_under_way() -> None:
    async def forgets() -> int:
        engine = make_engine()
        update = asyncio.create_task(publish(engine, 3))
        await asyncio.sleep(0.1)
        await engine.forget_versions()
        await update
        return engine.version

    assert run_virtual(forgets()) == -1


def test_a_request_that_waits_for_a_slot_is_aborted_with_an_answer() -> None:
    async def aborted() -> list[TokenDelta]:
        engine = make_engine()
        await publish(engine, 0)
        jobs = [asyncio.create_task(collect(engine, member)) for member in range(9)]
        await asyncio.sleep(0.1)
        await engine.abort(RequestId("0/8#0"))
        return (await jobs[8])[1]

    assert run_virtual(aborted()) == [TokenDelta((), (), (), "abort")]


def test_a_hang_costs_its_time_and_nothing_else() -> None:
    async def hang() -> tuple[float, list[TokenDelta]]:
        engine = make_engine()
        await publish(engine, 0)
        job = asyncio.create_task(collect(engine, 0))
        await asyncio.sleep(1)
        engine.hang()
        await asyncio.sleep(50)
        engine.recover()
        return await job

    took_s, _ = run_virtual(hang())
    assert took_s == pytest.approx(LENGTH * 0.011 + 50)


def test_a_prompt_is_prefilled_once_per_engine_and_version() -> None:
    async def group() -> tuple[int, int]:
        engine = make_engine(EngineCost(0.01, 0.0, 0.001, 8, 100_000, 0.0, 0.0))
        await publish(engine, 0)
        await asyncio.gather(*(collect(engine, member) for member in range(8)))
        before = engine.counters.prefilled
        await publish(engine, 1)
        await collect(engine, 0)
        return before, engine.counters.prefilled

    assert run_virtual(group()) == (4, 8)
