"""Conversion of Ray's exceptions."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from penstock.actors import ray_errors
from penstock.actors.ray_errors import (
    answer_of,
    gather_answers,
    late_calls,
    noting,
    ray_boundary,
    silence_limit,
    wait_started,
)
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.publisher import attempt
from penstock.actors.weights.transports import PublishedVersion
from penstock.dataflow.errors import PlacementError, TrainingError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightAck, WeightManifest
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop


def step() -> AbstractContextManager[None]:
    return ray_boundary(TrainingError, "trainer: step")


def test_a_remote_exception_is_reported_by_its_type_and_message() -> None:
    remote = RayTaskError("step", "a long remote traceback", ValueError("odd shape")).as_instanceof_cause()
    with pytest.raises(TrainingError, match=r"^trainer: step failed: ValueError: odd shape$"), step():
        raise remote


def test_a_remote_time_out_is_not_taken_for_a_local_one() -> None:
    remote = RayTaskError("start", "traceback", TimeoutError("peer")).as_instanceof_cause()
    with pytest.raises(TrainingError, match="trainer: step failed: TimeoutError: peer"), step():
        raise remote


def test_a_dead_process_is_reported_in_one_line() -> None:
    with pytest.raises(TrainingError, match=r"^trainer: step: a process died: [^\n]+$"), step():
        raise ActorDiedError


async def test_a_local_time_out_passes_through() -> None:
    with pytest.raises(TimeoutError), ray_boundary(TrainingError, "trainer: step"):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


@pytest.mark.parametrize(("stall_every_s", "least_s", "longest_s"), [(None, 8, 8), (6.0, 8 * 6, 20 * 8), (1e9, 8, 8)])
def test_stalls_of_the_loop_put_a_limit_off_but_not_for_ever(
    stall_every_s: float | None, least_s: float, longest_s: float
) -> None:
    loop = VirtualTimeLoop()

    async def stalls() -> None:
        while stall_every_s:
            await asyncio.sleep(stall_every_s)
            loop.stall(3.0)

    async def waited_s() -> float:
        stalling = asyncio.create_task(stalls())
        with pytest.raises(TimeoutError):
            async with silence_limit(8.0):
                await asyncio.Event().wait()
        stalling.cancel()
        return loop.time()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert least_s <= runner.run(waited_s()) <= longest_s


LIMIT_S = 0.2
Answering = Callable[[], Awaitable[str]]


async def call_ranks(answer: Answering) -> Any:
    rank = SimpleNamespace(write=SimpleNamespace(remote=answer))
    client = TrainerClient([rank], LIMIT_S)  # type: ignore[list-item]
    return (await client.call_ranks("publish v1", LIMIT_S, "write"))[0]


async def update_an_engine(answer: Answering) -> Any:
    async def update_weights(manifest: WeightManifest, payload: object) -> WeightAck:
        assert await answer() == "answer"
        return WeightAck(EngineId("e"), manifest.version, 0, 0.0, 0.0)

    engine = SimpleNamespace(engine_id="e", update_weights=update_weights)
    ack = await attempt(engine, PublishedVersion(WeightManifest(1, "", (), 0, 0), None), LIMIT_S)  # type: ignore[arg-type]
    return "answer" if isinstance(ack, WeightAck) else str(ack)


async def one_call(answer: Answering) -> Any:
    return await answer_of(answer(), LIMIT_S, TrainingError, "rank 0: step")


async def calls_together(answer: Answering) -> Any:
    return (await gather_answers("publish v1", LIMIT_S, answer()))[0]


WAYS = {"one call": one_call, "together": calls_together, "ranks": call_ranks, "engine": update_an_engine}


@pytest.mark.some(1)
@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_arrived_while_the_driver_stood_still_is_in_time(way: str) -> None:
    async def answer() -> str:
        for _ in range(5):  # what arrived is read in the turns of the loop after the standstill
            await asyncio.sleep(0.01)
        return "answer"

    asyncio.get_running_loop().call_later(0.02, time.sleep, 1.3)
    assert await WAYS[way](answer) == "answer"


async def test_calls_that_do_not_end_are_late_and_the_others_are_not() -> None:
    calls = [asyncio.ensure_future(asyncio.sleep(delay_s)) for delay_s in (0.0, 60.0)]
    assert await late_calls(calls, LIMIT_S) == {calls[1]}
    calls[1].cancel()


async def test_a_failure_that_nobody_looks_at_is_not_reported_by_asyncio() -> None:
    """Such as those of processes on a lost node that were asked to end, or that a cancelled publish waited for."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))

    async def dies() -> None:
        raise ActorDiedError

    assert await late_calls([asyncio.ensure_future(dies())], LIMIT_S) == set()
    gc.collect()
    assert reported == []


async def test_calls_that_need_each_other_name_what_they_were_for() -> None:
    with pytest.raises(WeightSyncError, match=r"publish v1: 1 of 2 did not answer within 0\.2 s"):
        await gather_answers("publish v1", LIMIT_S, asyncio.sleep(0.0), asyncio.sleep(60.0))


async def up() -> str:
    return "node"


async def test_processes_that_are_not_up_are_named_while_they_start_and_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_errors, "NOTE_S", 0.01)
    never = asyncio.get_running_loop().create_future()
    starts: dict[str, Awaitable[str]] = {"rank 0": up(), "rank 1": never}
    with pytest.raises(PlacementError, match=r"^trainer: start: rank 1 not up within 0\.2 s\. Raise it\.$"):
        await wait_started("trainer: start", starts, 0.2, TrainingError, "Raise it.")
    assert "trainer: start: waiting for rank 1, " in caplog.text
    assert "rank 0" not in caplog.text
    both = {"rank 0": up(), "rank 1": up()}
    assert await wait_started("trainer: start", both, 5.0, TrainingError, "") == ["node", "node"]


def test_what_is_waited_for_is_told_soon_and_then_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    left = iter(["8 GPUs", "8 GPUs", "2 GPUs"])

    async def waits() -> None:
        async with noting("cluster: reserving", lambda: next(left), 300.0, 2.0):
            await asyncio.sleep(150.0)
        await asyncio.sleep(600.0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(waits())
    assert caplog.messages == [
        "cluster: reserving: waiting for 8 GPUs, 2 s so far; the limit is 300 s",
        "cluster: reserving: waiting for 8 GPUs, 62 s so far; the limit is 300 s",
        "cluster: reserving: waiting for 2 GPUs, 122 s so far; the limit is 300 s",
    ]


async def test_a_process_that_fails_to_start_ends_the_wait_for_the_others() -> None:
    async def fails() -> str:
        raise RayTaskError("start", "traceback", OSError("no such checkpoint"))

    starts: dict[str, Awaitable[str]] = {"rank 0": asyncio.get_running_loop().create_future(), "rank 1": fails()}
    with pytest.raises(TrainingError, match="trainer: start failed: OSError: no such checkpoint"):
        await wait_started("trainer: start", starts, 1000.0, TrainingError, "")
