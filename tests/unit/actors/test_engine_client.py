"""The client of an engine: if its process dies or hangs, the engine is lost, but the run continues."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from penstock.actors import batched_calls
from penstock.actors.engine import client as engine_client
from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import (
    GenerateRequest,
    TensorEntry,
    WeightAck,
    WeightManifest,
)
from penstock.dataflow.sampling import SamplingParams

MANIFEST = WeightManifest(1, "somewhere", (), 100, 7)


async def never(*_: object) -> None:
    await asyncio.Event().wait()


async def killed_for_memory(*_: object) -> None:
    raise ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")


async def refuses(*_: object) -> None:
    raise ray.exceptions.RayTaskError("update", "a remote traceback", ValueError("odd shape"))


def engine_with(**methods: Any) -> RemoteEngine:
    """An engine whose process gives these replies; polls wait forever."""

    async def call(method: str, *arguments: Any) -> Any:
        return await methods[method](*arguments)

    answers = {"collect": never, "call": call, **methods}
    handles = {name: SimpleNamespace(remote=method) for name, method in answers.items()}
    return RemoteEngine(EngineId("e"), SimpleNamespace(**handles), "node-a")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Actors that were ended."""
    actors: list[Any] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    return actors


@pytest.mark.parametrize("method", ["update_weights", "make_version_buffers", "load", "sleep", "wake"])
async def test_an_engine_that_is_killed_for_memory_is_lost(method: str) -> None:
    engine = engine_with(**{method: killed_for_memory})
    arguments = {"update_weights": (MANIFEST,), "make_version_buffers": ([], "float32", 1)}
    with pytest.raises(EngineLostError, match=r"^e:? .*low on memory"):
        await getattr(engine, method)(*arguments.get(method, ()))


async def test_an_engine_that_refuses_a_version_is_not_lost() -> None:
    engine = engine_with(update_weights=refuses)
    with pytest.raises(WeightSyncError, match="publish v1: e: odd shape"):
        await engine.update_weights(MANIFEST)
    assert engine._lost is None


@pytest.mark.parametrize("method", ["sleep", "wake"])
async def test_an_engine_that_does_not_free_its_memory_in_time_is_named_and_ended(
    method: str, monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    monkeypatch.setattr(engine_client, "SWITCH_S", 0.05)
    engine = engine_with(**{method: never})
    with pytest.raises(EngineLostError, match=rf"e: {method}: no answer within 0\.05 s") as lost:
        await asyncio.wait_for(getattr(engine, method)(), 5.0)
    assert lost.value.is_final
    assert killed == [engine._actor], "its device memory is free for the trainer"
    with pytest.raises(EngineLostError):
        await anext(engine.generate(GenerateRequest(RequestId("r"), (1,), SamplingParams(1))))


async def test_after_a_stall_of_the_driver_no_living_engine_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_calls, "POLL_S", 0.3)
    monkeypatch.setattr(batched_calls, "SILENCE_S", 0.7)
    elsewhere = asyncio.new_event_loop()
    threading.Thread(target=elsewhere.run_forever, daemon=True).start()

    async def answer(wait_s: float) -> list[Any]:
        await asyncio.sleep(wait_s)
        return []

    def collect(wait_s: float) -> asyncio.Future[list[Any]]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(wait_s), elsewhere))

    engine = engine_with(collect=collect)
    await asyncio.sleep(0.1)
    time.sleep(2.5)  # noqa: ASYNC251  the loop stands still; the engine's goes on
    await asyncio.sleep(0.3)
    assert engine._lost is None
    engine._poll.cancel()
    elsewhere.call_soon_threadsafe(elsewhere.call_later, 0.05, elsewhere.stop)


async def test_an_engine_that_is_silent_while_the_event_loop_runs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_calls, "POLL_S", 0.05)
    monkeypatch.setattr(batched_calls, "SILENCE_S", 0.05)
    engine = engine_with()
    with pytest.raises(EngineLostError, match="did not answer"):
        await asyncio.wait_for(anext(engine.generate(GenerateRequest(RequestId("r"), (1,), SamplingParams(1)))), 10.0)


async def test_an_engine_is_told_only_of_its_own_ranks_of_a_version_in_several_layouts() -> None:
    entries = tuple(TensorEntry("w", "float32", (4,), checksum=100 + rank, rank=rank) for rank in range(3))
    manifest = WeightManifest(1, "somewhere", entries, 48, 7, num_shards=3)
    got: list[WeightManifest] = []

    async def update_weights(received: WeightManifest, _payload: object) -> WeightAck:
        got.append(received)
        return WeightAck(EngineId("e"), received.version, received.checksum, 0.0, 0.0)

    engine = engine_with(update_weights=update_weights)
    engine.shards = range(1, 3)
    await engine.update_weights(manifest)
    (received,) = got
    assert [(entry.rank, entry.checksum) for entry in received.entries] == [(0, 101), (1, 102)]
    assert (received.num_shards, received.first_shard, engine.version) == (2, 1, 1)
    whole = WeightManifest(2, "somewhere", (), 48, 9)  # gathered tensors have no ranks
    got.clear()
    await engine.update_weights(whole)
    assert got == [whole]
