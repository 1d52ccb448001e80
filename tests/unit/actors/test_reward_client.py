"""The client of the reward workers: every trajectory is scored or fails, and lost workers are restarted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from penstock.actors import batched_calls, restart_budget
from penstock.actors.reward.actor import Job, RewardActor, Scoring
from penstock.actors.reward.client import RewardClient
from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import pair

ELSEWHERE = asyncio.new_event_loop()
"""Where workers run: a loop of its own, as a process has."""
threading.Thread(target=ELSEWHERE.run_forever, daemon=True).start()


class Call:
    """Like the result of a Ray actor call: awaitable, with a `concurrent.futures.Future` on request."""

    def __init__(self, answer: Awaitable[Any]) -> None:
        async def wait() -> Any:
            return await answer

        self._future = asyncio.run_coroutine_threadsafe(wait(), ELSEWHERE)

    def future(self) -> concurrent.futures.Future[Any]:
        return self._future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()


def method(answer: Callable[..., Awaitable[Any]]) -> Any:
    """Like a method of an actor handle: called with `.remote(...)`."""
    return SimpleNamespace(remote=lambda *arguments: Call(answer(*arguments)))


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Actors that the client has ended; its pauses are short."""
    actors: list[Any] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(restart_budget, "LONGEST_PAUSE_S", 0.01)
    return actors


def not_there() -> None:
    raise ModuleNotFoundError("No module named 'my_rows'")


class Unreadable:
    """An object whose class the other side cannot import."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return not_there, ()


class Process:
    """A reward worker's process: scores all with 1. `actor` is like the handle from Ray."""

    def __init__(self) -> None:
        self.actor: Any = SimpleNamespace(submit=method(self.submit), collect=method(self.collect))
        self.labels: list[str] = []
        self.is_dead = False
        self.scoring = Scoring()

    async def submit(self, jobs: list[Job]) -> None:
        for number, label, body in jobs:
            self.scoring.begin(number, label, self.count(label, body))

    async def collect(self, wait_s: float) -> list[tuple[int, bytes]]:
        results: list[tuple[int, bytes]] = []
        until = time.monotonic() + wait_s
        while not results:
            await self.is_alive()
            results = await self.scoring.results.collect(0.01)
            if time.monotonic() >= until:
                break
        await self.is_alive()
        return results

    async def count(self, label: str, body: bytes) -> Any:
        self.labels.append(label)
        return await self.score(label, body)

    async def score(self, label: str, body: bytes) -> Any:
        return Score(1.0)

    async def is_alive(self) -> None:
        if self.is_dead:
            raise ray.exceptions.ActorDiedError


class Mortal(Process):
    """Dies during its first calls, before it has scored them."""

    async def score(self, label: str, body: bytes) -> Any:
        await asyncio.sleep(0.05)  # all calls of a tick come before it
        self.is_dead = True
        await asyncio.Event().wait()


class Hanging(Process):
    """Stops answering with its first call."""

    async def is_alive(self) -> None:
        if self.labels:
            await asyncio.Event().wait()

    async def score(self, label: str, body: bytes) -> Any:
        await asyncio.Event().wait()


class Place:
    """Starts one process after another of a worker, of the given `kinds`; the last kind repeats."""

    def __init__(self, *kinds: Callable[[], Process]) -> None:
        self.kinds = kinds
        self.processes: list[Process] = []

    def start(self) -> Any:
        self.processes.append(self.kinds[min(len(self.processes), len(self.kinds) - 1)]())
        return self.processes[-1].actor


@contextmanager
def client_of(*places: Place) -> Iterator[RewardClient]:
    client = RewardClient([place.start for place in places], ray.kill)
    yield client
    for worker in client._workers:
        worker.close()
    for process in (process for place in places for process in place.processes):
        ELSEWHERE.call_soon_threadsafe(process.scoring.cancel)


async def all_up(client: RewardClient) -> None:
    for worker in client._workers:
        worker.watch()
    while not all(worker.is_up for worker in client._workers):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_a_task_that_cannot_be_pickled_fails_alone() -> None:
    place = Place(Process)
    with client_of(place) as client:
        task, trajectory = pair("!")
        odd = replace(task, fields={"answer": lambda: None})
        results = await asyncio.gather(
            client.score(task, trajectory), client.score(odd, trajectory), client.score(task, trajectory),
            return_exceptions=True,
        )  # fmt: skip
    assert [getattr(result, "reward", None) for result in results] == [1.0, None, 1.0]
    assert isinstance(results[1], TrajectoryError)
    assert "the task cannot be pickled" in results[1].detail


class SlowOfOne(Process):
    """Scores the first trajectory when all others are scored."""

    async def score(self, label: str, body: bytes) -> Any:
        while label == self.labels[0] and len(self.labels) < 9:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return Score(float(len(self.labels)))


async def test_a_slow_reward_delays_no_other() -> None:
    place = Place(SlowOfOne)
    with client_of(place) as client:
        task, trajectory = pair("!")
        slow = asyncio.ensure_future(client.score(task, replace(trajectory, trajectory_id="slow")))
        await asyncio.sleep(0.05)
        for _ in range(8):
            assert not slow.done()
            await asyncio.wait_for(client.score(task, trajectory), 10.0)
        await asyncio.wait_for(slow, 10.0)


async def test_a_task_that_the_worker_cannot_unpickle_fails_with_the_cause_and_costs_no_worker(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    async def score(*_: object) -> Score:
        return Score(1.0)

    monkeypatch.setattr(RewardRunner, "score", score)
    actor = RewardActor(RewardConfig(fn="penstock.envs.tasks.arithmetic:exact_match"), SandboxConfig(), "cpu")
    handle: Any = SimpleNamespace(submit=method(actor.submit), collect=method(actor.collect))
    client = RewardClient([lambda: handle])
    task, trajectory = pair("!")
    odd = replace(task, fields={"answer": Unreadable()})
    good = asyncio.ensure_future(client.score(task, trajectory))
    with pytest.raises(
        TrajectoryError, match=r"cannot be unpickled in the .*: ModuleNotFoundError: No module named 'my_rows"
    ):
        await asyncio.wait_for(client.score(odd, trajectory), 10.0)
    assert isinstance(await good, Score)
    assert not killed
    client._workers[0].close()
    await actor.shutdown()


async def test_the_only_worker_dies_and_the_next_process_scores_its_trajectories(killed: list[Any]) -> None:
    place = Place(Mortal, Process)
    with client_of(place) as client:
        scores = await asyncio.wait_for(asyncio.gather(*(client.score(*pair("!")) for _ in range(5))), 10.0)
        assert [score.reward for score in scores] == [1.0] * 5
        assert (await client.score(*pair("!"))).reward == 1.0
    first, second = place.processes
    assert (len(first.labels), len(second.labels)) == (5, 6)
    assert killed == [first.actor], "nothing of it is left"


async def test_another_worker_scores_the_trajectories_of_a_dead_one_which_is_restarted() -> None:
    dying, living = Place(Mortal, Process), Place(Process)
    with client_of(dying, living) as client:
        await all_up(client)
        scores = await asyncio.wait_for(asyncio.gather(*(client.score(*pair("!")) for _ in range(4))), 10.0)
        assert [score.reward for score in scores] == [1.0] * 4
        assert len(dying.processes[0].labels) == 2
        await asyncio.wait_for(all_up(client), 10.0)
        before = len(living.processes[0].labels)
        await asyncio.gather(*(client.score(*pair("!")) for _ in range(4)))
    assert len(living.processes[0].labels) == before + 2, "every other one is for the new process"


async def test_a_trajectory_that_two_workers_died_of_fails_with_the_cause() -> None:
    place = Place(Mortal, Mortal, Process)
    with client_of(place) as client:
        with pytest.raises(TrajectoryError, match=r"0/0 \(t/0\): 2 reward workers were lost while scoring it"):
            await asyncio.wait_for(client.score(*pair("!")), 10.0)
        assert (await client.score(*pair("!"))).reward == 1.0, "the next one is served"


async def test_a_worker_that_keeps_dying_is_given_up_and_trajectories_then_fail_with_the_cause(
    killed: list[Any],
) -> None:
    place = Place(Mortal)
    with client_of(place) as client:
        while client._workers[0].given_up is None:
            with pytest.raises(TrajectoryError, match="reward worker"):
                await asyncio.wait_for(client.score(*pair("!")), 10.0)
        with pytest.raises(TrajectoryError, match=r"no reward worker is left\. .*not restarted; .*actor died"):
            await client.score(*pair("!"))
    assert len(place.processes) == 1 + restart_budget.RESTARTS_PER_HOUR
    assert len(killed) == len(place.processes), "the last one may hang, and would keep its device"


class Garbled(Process):
    """Its scores of two tasks cannot be read by the driver, or not be sent."""

    async def score(self, label: str, body: bytes) -> Any:
        odd = {"0/0 (unreadable)": Unreadable(), "0/0 (unsendable)": lambda: None}
        return odd.get(label, Score(1.0))


@pytest.mark.parametrize(
    ("task_id", "why"),
    [
        ("unreadable", r"cannot be unpickled: ModuleNotFoundError: No module named 'my_rows'"),
        ("unsendable", r"cannot be pickled: .*lambda"),
    ],
)
async def test_a_score_that_cannot_be_sent_or_read_fails_alone_and_costs_no_worker(
    task_id: str, why: str, killed: list[Any]
) -> None:
    place = Place(Garbled)
    task, trajectory = pair("!")
    with client_of(place) as client:
        good = asyncio.ensure_future(client.score(task, trajectory))
        with pytest.raises(TrajectoryError, match=rf"\({task_id}\): its score {why}"):
            await asyncio.wait_for(client.score(replace(task, task_id=task_id), trajectory), 10.0)
        assert (await good).reward == 1.0
    assert (len(place.processes), killed) == (1, [])


async def test_a_worker_that_hangs_is_replaced_and_its_trajectories_are_scored(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batched_calls, "POLL_S", 0.05)
    monkeypatch.setattr(batched_calls, "SILENCE_S", 0.5)
    place = Place(Hanging, Process)
    with client_of(place) as client:
        scores = await asyncio.wait_for(asyncio.gather(*(client.score(*pair("!")) for _ in range(3))), 20.0)
    assert [score.reward for score in scores] == [1.0] * 3
    assert killed == [place.processes[0].actor]
    assert "reward worker 0 with 3 trajectories is lost: it did not answer for 0 s" in caplog.text


async def test_a_cancelled_trajectory_affects_no_other_when_its_worker_dies() -> None:
    place = Place(Mortal, Process)
    with client_of(place) as client:
        given_up, kept = (asyncio.ensure_future(client.score(*pair("!"))) for _ in range(2))
        while not place.processes[0].labels:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        given_up.cancel()
        assert (await asyncio.wait_for(kept, 10.0)).reward == 1.0
    assert given_up.cancelled()
    assert len(place.processes[1].labels) == 1


@pytest.mark.full
async def test_after_a_stall_of_the_driver_no_living_worker_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    monkeypatch.setattr(batched_calls, "POLL_S", 0.05)
    monkeypatch.setattr(batched_calls, "SILENCE_S", 1.0)

    class Unhurried(Process):
        async def is_alive(self) -> None:
            await asyncio.sleep(0.4)

    place = Place(Unhurried)
    with client_of(place) as client:
        assert (await client.score(*pair("!"))).reward == 1.0
        await asyncio.sleep(0.2)  # a question is under way
        time.sleep(2.5)  # noqa: ASYNC251  the loop stands still; the worker's goes on
        await asyncio.sleep(0.3)
        assert (await client.score(*pair("!"))).reward == 1.0
        assert client._workers[0]._pause_s is None, "it was never lost"
        assert len(place.processes) == 1
    assert not killed
