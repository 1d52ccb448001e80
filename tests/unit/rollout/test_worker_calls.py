"""Calls into the workers of an engine over sockets: answers by rank, errors, lateness, and a worker that has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.rollout.engines.vllm.channel import WorkerCalls, serve

TIMEOUT_S = 20.0


def refuse(why: str) -> None:
    raise WeightSyncError(why)


async def test_every_worker_answers_with_its_own_result() -> None:
    calls = WorkerCalls("engine-0", {rank: serve({"plus": lambda one, rank=rank: one + rank}) for rank in (1, 0)})
    assert await calls.call("adding", TIMEOUT_S, "plus", 10) == [10, 11]
    assert await calls.call("adding", TIMEOUT_S, "plus", 20) == [20, 21]
    calls.close()


async def test_who_has_another_key_is_refused_and_does_not_end_the_service() -> None:
    name, key = serve({"plus": lambda one: one + 1})
    with pytest.raises(AuthenticationError):
        Client(name, family="AF_UNIX", authkey=b"another")
    calls = WorkerCalls("engine-0", {0: (name, key)})
    assert await calls.call("adding", TIMEOUT_S, "plus", 1) == [2]
    calls.close()


async def test_errors_of_a_worker_are_errors_of_the_call() -> None:
    methods = {"refuse": refuse, "divide": lambda one: 1 / one}
    calls = WorkerCalls("engine-0", {0: serve(methods), 1: serve(methods)})
    with pytest.raises(WeightSyncError, match="engine-0: no space"):
        await calls.call("staging", TIMEOUT_S, "refuse", "no space")
    with pytest.raises(WeightSyncError, match="engine-0: ZeroDivisionError: division by zero"):
        await calls.call("staging", TIMEOUT_S, "divide", 0)
    assert await calls.call("staging", TIMEOUT_S, "divide", 2) == [0.5, 0.5]
    calls.close()


async def test_a_late_worker_is_named_and_its_answer_is_not_that_of_the_next_call() -> None:
    may_end = threading.Event()

    def wait(one: int) -> int:
        may_end.wait(TIMEOUT_S)
        return one

    calls = WorkerCalls("engine-0", {0: serve({"wait": lambda one: one}), 1: serve({"wait": wait})})
    with pytest.raises(WeightSyncError, match=r"publish v3: rank 1 of engine-0 has not finished after 0.1 s"):
        await calls.call("publish v3", 0.1, "wait", 3)
    may_end.set()
    assert await calls.call("publish v4", TIMEOUT_S, "wait", 4) == [4, 4]
    calls.close()


def test_a_worker_that_has_ended_is_a_lost_engine() -> None:
    program = (
        "import os, secrets, threading\n"
        "from penstock.rollout.engines.vllm.channel import serve\n"
        "secrets.token_bytes = lambda number: b'k' * number\n"
        "print(serve({'end': lambda: os._exit(3)})[0], flush=True)\n"
        "threading.Event().wait(20)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        calls = WorkerCalls("engine-0", {0: (worker.stdout.readline().strip(), b"k" * 32)})
        for _ in range(2):
            with pytest.raises(EngineLostError, match="engine-0: its worker of rank 0 has ended") as caught:
                asyncio.run(calls.call("staging", TIMEOUT_S, "end"))
            assert caught.value.is_final
    calls.close()
