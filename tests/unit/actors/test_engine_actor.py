"""The actor around an engine: failures of single requests, and aborts before the engine knows the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from penstock.actors.engine.actor import EngineActor
from penstock.dataflow.errors import EngineLostError, PlacementError, TrajectoryError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta, WeightManifest
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.versions import Span
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.weights.model_config import ModelConfig
from tests.conftest import TINY_SHAPE

NUM_TOKENS = 200


class Registering:
    """Knows a request some ticks after its submission, like vLLM; aborting an unknown request does nothing."""

    def __init__(self, ticks: int) -> None:
        self.num_sampled = 0
        self._ticks = ticks
        self._stops: dict[RequestId, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        for _ in range(self._ticks):
            await asyncio.sleep(0)
        stop = self._stops[request.request_id] = asyncio.Event()
        for index in range(NUM_TOKENS):
            await asyncio.sleep(0)
            if stop.is_set():
                yield TokenDelta((), (), (), "abort")
                return
            self.num_sampled += 1
            yield TokenDelta((5,), (-1.0,), (Span(0, 1),), "length" if index == NUM_TOKENS - 1 else None)

    async def abort(self, request_id: RequestId) -> None:
        if request_id in self._stops:
            self._stops[request_id].set()


class Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        raise self._error
        yield TokenDelta((), (), (), None)


def actor_over(engine: object, directory: Path) -> EngineActor:
    model, config = ModelConfig(max_context_tokens=64, shape=TINY_SHAPE), TorchEngineConfig(type="torch")
    spec = EngineSpec(EngineId("e"), "", model, config, "cpu", "keep_kv", 0, 1, publish_in=str(directory))
    actor = EngineActor(spec)
    actor._engine = engine  # type: ignore[assignment]
    return actor


REQUEST = GenerateRequest(RequestId("r"), (2, 3), SamplingParams(NUM_TOKENS))


@pytest.mark.parametrize("known_after_ticks", [0, 5])
async def test_an_abort_in_the_tick_of_its_submission_is_not_lost(known_after_ticks: int, tmp_path: Path) -> None:
    engine = Registering(known_after_ticks)
    actor = actor_over(engine, tmp_path)
    await asyncio.gather(actor.submit([REQUEST]), actor.abort([REQUEST.request_id]))
    (request_id, last), *more = await actor.collect(5.0)
    assert (request_id, last.finish_reason, more) == ("r", "abort", [])  # type: ignore[union-attr]
    assert engine.num_sampled == 0


async def test_an_abort_before_the_engine_has_the_request_stops_it_at_its_first_tokens(tmp_path: Path) -> None:
    engine = Registering(ticks=5)
    actor = actor_over(engine, tmp_path)
    await actor.submit([REQUEST])
    await asyncio.sleep(0)  # it has been handed to the engine
    await actor.abort([REQUEST.request_id])
    outputs = await actor.collect(5.0)
    while outputs[-1][1].finish_reason is None:  # type: ignore[union-attr]
        outputs += await actor.collect(5.0)
    assert outputs[-1][1].finish_reason == "abort"  # type: ignore[union-attr]
    assert engine.num_sampled == 1
    await actor.abort([REQUEST.request_id])  # it is over: a no-op
    assert not actor._aborted


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (EngineLostError.final("e: dead"), EngineLostError),
        (PlacementError("e: asked to generate while asleep"), EngineLostError),
        (TrajectoryError("engine", "too long", is_final=True), TrajectoryError),
        (ValueError("prompt of 40 tokens"), TrajectoryError),
        (KeyError("planted"), TrajectoryError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_only_errors_of_the_whole_engine_lose_it(
    raised: Exception, expected: type[Exception], tmp_path: Path
) -> None:
    actor = actor_over(Raising(raised), tmp_path)
    await actor.submit([REQUEST])
    ((request_id, told),) = await actor.collect(5.0)
    assert (request_id, type(told)) == ("r", expected)
    assert str(raised).strip("'") in str(told)
    assert not actor._requests


async def test_two_attempts_at_a_version_have_a_file_each(tmp_path: Path) -> None:
    """The engine may still read that of the first, which was given up for being late."""

    class Reading:
        def __init__(self) -> None:
            self.begun: asyncio.Queue[None] = asyncio.Queue()
            self.may_end = asyncio.Event()

        async def update_weights(self, manifest: WeightManifest) -> str:
            self.begun.put_nowait(None)
            await self.may_end.wait()
            return Path(manifest.location).read_text()

    engine = Reading()
    actor = actor_over(engine, tmp_path)
    manifest = WeightManifest(3, "", (), 4, 0)
    first = asyncio.create_task(actor.update_weights(manifest, np.frombuffer(b"once", np.uint8)))
    async with asyncio.timeout(10.0):
        await engine.begun.get()
        second = asyncio.create_task(actor.update_weights(manifest, np.frombuffer(b"again", np.uint8)))
        await engine.begun.get()
        engine.may_end.set()
        assert [await first, await second] == ["once", "again"]
