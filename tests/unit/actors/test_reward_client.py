"""The driver's side of a reward worker: every job is answered or fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.actors.direct import Address, Listener
from penstock.actors.reward_client import RewardClient
from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import Score
from tests.answers import pair


class Worker:
    """Scores all with 1. `actor` is what the client would have from Ray."""

    def __init__(self) -> None:
        self.listener = Listener(self._score)
        self.actor: Any = SimpleNamespace(listen=SimpleNamespace(remote=self._listen))
        self.num_messages = 0

    async def _listen(self) -> Address:
        return await self.listener.listen("127.0.0.1")

    def _score(self, jobs: list[Any]) -> None:
        self.num_messages += 1
        self.listener.send([(number, Score(1.0, {})) for number, _, _ in jobs])


async def test_a_worker_that_sends_what_is_no_score_is_lost_and_nobody_waits_for_it() -> None:
    worker = Worker()
    worker.listener = Listener(lambda _: worker.listener.send("no list of results"))
    client = RewardClient([worker.actor])
    with pytest.raises(TrajectoryError, match="reward worker died: what it sent cannot be read: ValueError"):
        await asyncio.wait_for(client.score(*pair("!")), 10.0)
    await worker.listener.close()


async def test_a_task_that_cannot_be_sent_fails_alone_and_jobs_of_a_tick_travel_together() -> None:
    worker = Worker()
    client = RewardClient([worker.actor])
    assert (await client.score(*pair("!"))).reward == 1.0
    await asyncio.gather(*(client.score(*pair("!")) for _ in range(10)))
    assert worker.num_messages == 2
    task, trajectory = pair("!")
    odd = replace(task, fields={"answer": lambda: None})
    results = await asyncio.gather(
        client.score(task, trajectory), client.score(odd, trajectory), client.score(task, trajectory),
        return_exceptions=True,
    )  # fmt: skip
    assert [getattr(result, "reward", None) for result in results] == [1.0, None, 1.0]
    assert isinstance(results[1], TrajectoryError)
    assert "the task cannot be sent" in results[1].detail
    for one in client._workers:
        one.close()
    await worker.listener.close()
