"""The driver's side of the reward workers: every job is answered or fails, and lost workers are started again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from penstock.actors import direct, reward_client
from penstock.actors.direct import Address, Listener
from penstock.actors.reward import RewardActor
from penstock.actors.reward_client import RewardClient
from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.scoring import RewardRunner
from tests.answers import pair


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Actors that the client has ended; its pauses are short."""
    actors: list[Any] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    monkeypatch.setattr(reward_client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(reward_client, "LONGEST_PAUSE_S", 0.01)
    return actors


class Process:
    """A reward worker's process: scores all with 1. `actor` is what the client would have from Ray."""

    def __init__(self) -> None:
        self.listener = Listener(self.score)
        self.actor: Any = SimpleNamespace(
            listen=SimpleNamespace(remote=self._listen), is_alive=SimpleNamespace(remote=self._is_alive)
        )
        self.num_messages = 0
        self.is_dead = False

    async def _listen(self) -> Address:
        await self._is_alive()
        return await self.listener.listen("127.0.0.1")

    async def _is_alive(self) -> None:
        if self.is_dead:
            raise ray.exceptions.ActorDiedError

    def score(self, jobs: list[Any]) -> None:
        self.num_messages += 1
        self.listener.send([(number, Score(1.0, {})) for number, *_ in jobs])

    async def die(self) -> None:
        self.is_dead = True
        await self.listener.close()


class Mortal(Process):
    """Dies of its first jobs, unscored."""

    def score(self, jobs: list[Any]) -> None:
        self.num_messages += 1
        self.is_dead = True
        self.dying = asyncio.ensure_future(self.die())


class Place:
    """A worker's place: one process after another, as `kinds` says; the last kind stays."""

    def __init__(self, *kinds: Callable[[], Process]) -> None:
        self.kinds = kinds
        self.processes: list[Process] = []

    def start(self) -> Any:
        self.processes.append(self.kinds[min(len(self.processes), len(self.kinds) - 1)]())
        return self.processes[-1].actor


@contextmanager
def client_of(*places: Place) -> Iterator[RewardClient]:
    client = RewardClient([place.start for place in places])
    yield client
    for worker in client._workers:
        worker.close()


async def test_a_task_that_cannot_be_sent_fails_alone_and_jobs_of_a_tick_travel_together() -> None:
    place = Place(Process)
    with client_of(place) as client:
        assert (await client.score(*pair("!"))).reward == 1.0
        await asyncio.gather(*(client.score(*pair("!")) for _ in range(10)))
        assert place.processes[0].num_messages == 2
        task, trajectory = pair("!")
        odd = replace(task, fields={"answer": lambda: None})
        results = await asyncio.gather(
            client.score(task, trajectory), client.score(odd, trajectory), client.score(task, trajectory),
            return_exceptions=True,
        )  # fmt: skip
    assert [getattr(result, "reward", None) for result in results] == [1.0, None, 1.0]
    assert isinstance(results[1], TrajectoryError)
    assert "the task cannot be sent" in results[1].detail


def not_there() -> None:
    raise ModuleNotFoundError("No module named 'my_rows'")


class Unreadable:
    """A field whose class the worker cannot import."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return not_there, ()


async def test_a_task_that_the_worker_cannot_read_fails_with_the_cause_and_costs_no_worker(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    async def score(*_: object) -> Score:
        return Score(1.0)

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(RewardRunner, "score", score)
    actor = RewardActor(RewardConfig(fn="penstock.envs.arithmetic:exact_match"), SandboxConfig(), "cpu")
    handle: Any = SimpleNamespace(listen=SimpleNamespace(remote=actor.listen))
    client = RewardClient([lambda: handle])
    task, trajectory = pair("!")
    odd = replace(task, fields={"answer": Unreadable()})
    good = asyncio.ensure_future(client.score(task, trajectory))
    with pytest.raises(
        TrajectoryError, match=r"cannot be read in the .*: ModuleNotFoundError: No module named 'my_rows"
    ):
        await asyncio.wait_for(client.score(odd, trajectory), 10.0)
    assert isinstance(await good, Score), "it travelled with the other, and is scored"
    assert not killed
    client._workers[0].close()
    await actor.shutdown()


async def test_the_only_worker_dies_and_the_next_process_scores_what_it_had(killed: list[Any]) -> None:
    place = Place(Mortal, Process)
    with client_of(place) as client:
        scores = await asyncio.wait_for(asyncio.gather(*(client.score(*pair("!")) for _ in range(5))), 10.0)
        assert [score.reward for score in scores] == [1.0] * 5
        assert (await client.score(*pair("!"))).reward == 1.0
    first, second = place.processes
    assert (first.num_messages, second.num_messages) == (1, 2)
    assert killed == [first.actor], "nothing of it is left"


async def test_another_worker_scores_what_a_dead_one_had_and_it_comes_back() -> None:
    dying, living = Place(Mortal, Process), Place(Process)
    with client_of(dying, living) as client:
        scores = await asyncio.wait_for(asyncio.gather(*(client.score(*pair("!")) for _ in range(4))), 10.0)
        assert [score.reward for score in scores] == [1.0] * 4
        assert living.processes[0].num_messages == 2
        while not all(worker.is_up for worker in client._workers):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.gather(*(client.score(*pair("!")) for _ in range(4)))
    assert dying.processes[1].num_messages == 1, "every other job is for it again"


async def test_a_job_that_two_workers_died_of_fails_and_says_so() -> None:
    place = Place(Mortal, Mortal, Process)
    with client_of(place) as client:
        with pytest.raises(TrajectoryError, match=r"0/0 \(t/0\): reward workers were lost while they scored it, 2 t"):
            await asyncio.wait_for(client.score(*pair("!")), 10.0)
        assert (await client.score(*pair("!"))).reward == 1.0, "the next one is served"


async def test_a_worker_that_keeps_dying_is_given_up_and_jobs_then_fail_with_the_cause() -> None:
    place = Place(Mortal)
    with client_of(place) as client:
        while client._workers[0].given_up is None:
            with pytest.raises(TrajectoryError, match="reward worker"):
                await asyncio.wait_for(client.score(*pair("!")), 10.0)
        with pytest.raises(TrajectoryError, match=r"no reward worker is left\. .*not started again; .*actor died"):
            await client.score(*pair("!"))
    assert len(place.processes) == 1 + reward_client.LOSSES_PER_HOUR


class Babbling(Process):
    """Answers jobs of the task `odd` with what is no list of results."""

    def score(self, jobs: list[Any]) -> None:
        if any("(odd)" in label for _, label, _ in jobs):
            self.listener.send("no list of results")
        else:
            super().score(jobs)


async def test_a_living_worker_that_is_lost_with_one_task_is_kept_and_with_two_tasks_it_is_replaced(
    killed: list[Any],
) -> None:
    place = Place(Babbling)
    task, trajectory = pair("!")
    odd = replace(task, task_id=TaskId("odd"))
    with client_of(place) as client:
        with pytest.raises(TrajectoryError, match=r"2 times; the last: what it sent cannot be read: ValueError"):
            await asyncio.wait_for(client.score(odd, trajectory), 10.0)
        assert (await client.score(task, trajectory)).reward == 1.0
        assert (len(place.processes), killed) == (1, []), "the task is to blame"
        odd_again = asyncio.ensure_future(client.score(odd, trajectory))
        with pytest.raises(TrajectoryError, match="2 times"):
            await asyncio.wait_for(client.score(replace(odd, task_id=TaskId("other")), trajectory), 10.0)
        with pytest.raises(TrajectoryError, match="2 times"):
            await odd_again
        assert (await asyncio.wait_for(client.score(task, trajectory), 10.0)).reward == 1.0
    assert killed, "it was lost with two different tasks"


async def test_a_driver_that_stood_still_takes_no_living_worker_for_dead(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    monkeypatch.setattr(direct, "SIGN_OF_LIFE_S", 0.2)
    monkeypatch.setattr(reward_client, "SILENCE_S", 1.0)
    elsewhere = asyncio.new_event_loop()
    threading.Thread(target=elsewhere.run_forever, daemon=True).start()
    place = Place(Process)
    with client_of(place) as client:
        process = place.processes[0]
        listening = asyncio.run_coroutine_threadsafe(process.listener.listen("127.0.0.1"), elsewhere)
        address = await asyncio.wrap_future(listening)

        async def listen() -> Address:
            return address

        process.actor.listen.remote = listen
        assert (await client.score(*pair("!"))).reward == 1.0
        time.sleep(2.5)  # noqa: ASYNC251  the loop stands still; the worker's goes on
        await asyncio.sleep(0.3)
        assert (await client.score(*pair("!"))).reward == 1.0
        assert not client._workers[0]._losses
        assert len(place.processes) == 1
    assert not killed
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(process.listener.close(), elsewhere))
    elsewhere.call_soon_threadsafe(elsewhere.call_later, 0.05, elsewhere.stop)
