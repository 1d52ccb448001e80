"""The client of reference and teacher: a burst of groups waits here, and the time limit is that of one group."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from penstock.actors.reference import ReferenceClient
from penstock.dataflow.errors import PenstockError


class Worker:
    """Computes one group after another, `seconds` each; more wait inside. `logprobs.remote(...)` is a call made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.logprobs = SimpleNamespace(remote=self._logprobs)
        self.groups: list[int] = []
        self.most_inside = self._inside = 0
        self._lock = asyncio.Lock()

    def _logprobs(self, group: int) -> tuple[str, Any]:
        return f"logprobs of {group}", asyncio.ensure_future(self._compute(group))

    async def _compute(self, group: int) -> int:
        self._inside += 1
        self.most_inside = max(self.most_inside, self._inside)
        async with self._lock:
            self.groups.append(group)
            await asyncio.sleep(self.seconds)
        self._inside -= 1
        if group < 0:
            raise ray.exceptions.OutOfMemoryError("the node is running low on memory")
        return 3


async def test_a_burst_of_groups_waits_for_the_workers_and_none_is_late() -> None:
    workers = [Worker(0.05), Worker(0.05)]
    client = ReferenceClient("reference", workers, timeout_s=0.5)  # type: ignore[arg-type]
    found = await asyncio.gather(*(client.logprobs(group) for group in range(40)))  # type: ignore[arg-type]
    assert found == [f"logprobs of {group}" for group in range(40)]
    assert sorted(workers[0].groups + workers[1].groups) == list(range(40))
    assert [worker.most_inside for worker in workers] == [1, 1]


async def test_one_group_that_takes_longer_than_the_limit_is_an_error_that_names_the_worker() -> None:
    client = ReferenceClient("teacher", [Worker(60.0)], timeout_s=0.05)  # type: ignore[list-item]
    with pytest.raises(PenstockError, match=r"teacher: logprobs: no answer within 0\.05 s\..*teacher\.pool"):
        await asyncio.wait_for(client.logprobs(0), 5.0)  # type: ignore[arg-type]


async def test_a_worker_whose_group_was_cancelled_is_busy_until_it_has_answered() -> None:
    worker = Worker(0.1)
    client = ReferenceClient("reference", [worker], timeout_s=5.0)  # type: ignore[list-item]
    given_up = asyncio.create_task(client.logprobs(0))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    given_up.cancel()
    assert await client.logprobs(1) == "logprobs of 1"  # type: ignore[arg-type, comparison-overlap]
    assert (worker.groups, worker.most_inside) == ([0, 1], 1)


async def test_a_worker_that_dies_ends_the_wait_with_the_cause() -> None:
    client = ReferenceClient("reference", [Worker(0.01)], timeout_s=5.0)  # type: ignore[list-item]
    with pytest.raises(PenstockError, match=r"reference: logprobs: a process died: .*low on memory"):
        await client.logprobs(-1)  # type: ignore[arg-type]
