"""The client of reference and teacher: groups wait here for a free worker, and lost workers are restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from penstock.actors import frozen_policies as reference
from penstock.actors import restart_budget
from penstock.actors.frozen_policies import FrozenPolicyClient
from penstock.actors.restart_budget import RESTARTS_PER_HOUR
from penstock.dataflow.errors import PenstockError, ShapeError, TrajectoryError
from tests.virtual_time import run_virtual

DIED = ray.exceptions.OutOfMemoryError("the node is running low on memory")


class Process:
    """Computes one group after another, `seconds` each; more wait inside. `logprobs.remote(...)` is a call made."""

    def __init__(self, seconds: float = 0.01, error: Exception | None = None, fails: Callable[[int], bool] = bool):
        self.seconds = seconds
        self.error = error
        self.fails = fails
        self.is_dead = False
        self.logprobs = SimpleNamespace(remote=self._logprobs)
        self.ready = SimpleNamespace(remote=self._ready)
        self.rest = SimpleNamespace(remote=lambda: asyncio.ensure_future(self._rest()))
        self.is_at_rest = True
        self.groups: list[int] = []
        self.most_inside = self._inside = 0
        self._lock = asyncio.Lock()

    def _ready(self) -> Any:
        return asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        if self.is_dead:
            raise DIED

    async def _rest(self) -> None:
        if self.is_dead:
            raise DIED
        async with self._lock:  # calls of an actor start in order
            self.is_at_rest = True

    def _logprobs(self, group: int) -> tuple[str, Any]:
        return f"logprobs of {group}", asyncio.ensure_future(self._compute(group))

    async def _compute(self, group: int) -> int:
        self._inside += 1
        self.most_inside = max(self.most_inside, self._inside)
        async with self._lock:
            self.is_at_rest = False
            self.groups.append(group)
            await asyncio.sleep(self.seconds)
        self._inside -= 1
        if self.error is not None and self.fails(group):
            self.is_dead = isinstance(self.error, ray.exceptions.OutOfMemoryError)
            raise self.error
        return 3


def always(_group: int) -> bool:
    return True


def dying(seconds: float = 0.01) -> Process:
    return Process(seconds, DIED, always)


def hanging() -> Process:
    return Process(1e6)


def dying_at_start() -> Process:
    process = Process()
    process.is_dead = True
    return process


def raised(cause: Exception) -> Exception:
    """As an exception of the actor arrives at the driver."""
    return ray.exceptions.RayTaskError("logprobs", "Traceback (most recent call last):\n  …\n", cause)


class Starter:
    """Starts one process after another of a worker, of the given `kinds`; the last kind repeats."""

    def __init__(self, *kinds: Callable[[], Process]) -> None:
        self.kinds = kinds
        self.processes: list[Process] = []

    def __call__(self) -> Any:
        self.processes.append(self.kinds[min(len(self.processes), len(self.kinds) - 1)]())
        return self.processes[-1]


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Processes that the client has killed; its pauses are short."""
    processes: list[Any] = []
    monkeypatch.setattr(ray, "kill", processes.append)
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(restart_budget, "LONGEST_PAUSE_S", 0.01)
    return processes


@contextmanager
def client_of(*starters: Starter, timeout_s: float = 5.0, start_timeout_s: float = 5.0) -> Iterator[Any]:
    client = FrozenPolicyClient("reference", starters, start_timeout_s, timeout_s)
    yield client
    client.close()


async def computed(client: Any, *groups: int) -> list[str]:
    return await asyncio.wait_for(asyncio.gather(*(client.logprobs(group) for group in groups)), 10.0)


async def test_a_burst_of_groups_waits_for_the_workers_and_none_is_late() -> None:
    starters = [Starter(lambda: Process(0.05)), Starter(lambda: Process(0.05))]
    with client_of(*starters, timeout_s=0.5) as client:
        assert await computed(client, *range(40)) == [f"logprobs of {group}" for group in range(40)]
    workers = [starter.processes[0] for starter in starters]
    assert sorted(workers[0].groups + workers[1].groups) == list(range(40))
    assert [worker.most_inside for worker in workers] == [1, 1]


async def test_a_worker_whose_group_was_cancelled_is_busy_until_it_has_answered() -> None:
    starter = Starter(lambda: Process(0.1))
    with client_of(starter) as client:
        given_up = asyncio.create_task(client.logprobs(0))
        await asyncio.sleep(0.01)
        given_up.cancel()
        assert await computed(client, 1) == ["logprobs of 1"]
    (worker,) = starter.processes
    assert (worker.groups, worker.most_inside) == ([0, 1], 1)


async def test_the_only_worker_dies_and_its_next_process_computes_the_group_again(
    killed: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    starter = Starter(dying, Process)
    with client_of(starter) as client:
        assert await computed(client, 7, 8) == ["logprobs of 7", "logprobs of 8"]
    first, second = starter.processes
    assert (first.groups, sorted(second.groups)) == ([7], [7, 8])
    assert killed == [first], "nothing of it is left"
    assert "reference worker 0 is lost and started again (restart 1 of 10 within an hour)" in caplog.text
    assert "low on memory" in caplog.text


async def test_another_worker_computes_the_group_of_a_lost_one() -> None:
    never = asyncio.Event()

    class Loading(Process):
        async def _answer(self) -> None:
            await never.wait()

    lost, other = Starter(dying, Loading), Starter(Process)
    with client_of(lost, other) as client:
        assert await computed(client, 1) == ["logprobs of 1"]
    assert other.processes[0].groups == [1]


@pytest.mark.parametrize("error", [DIED, raised(RuntimeError("CUDA error: an illegal memory access"))])
async def test_a_group_on_which_two_workers_were_lost_fails_with_the_cause_and_the_next_one_is_computed(
    error: Exception,
) -> None:
    starter = Starter(lambda: Process(0.01, error, lambda group: group < 0))
    with client_of(starter) as client:
        with pytest.raises(TrajectoryError, match=r"reference: 2 workers were lost .*(low on memory|illegal)") as found:
            await computed(client, -1)
        assert await computed(client, 1) == ["logprobs of 1"]
    assert (found.value.kind, "Traceback" in found.value.detail) == ("reward", error is not DIED)
    assert len(starter.processes) == 3


async def test_no_group_is_blamed_for_workers_that_died_while_they_were_idle() -> None:
    starters = [Starter(Process), Starter(Process)]
    with client_of(*starters) as client:
        for starter in starters:
            starter.processes[0].is_dead = True
        assert await computed(client, 1) == ["logprobs of 1"]
    assert [starter.processes[0].groups for starter in starters] == [[], []]


async def test_a_worker_that_hangs_is_killed_and_replaced_and_its_group_computed_again(
    killed: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    starter = Starter(hanging, Process)
    with client_of(starter, timeout_s=0.05) as client:
        assert await computed(client, 1) == ["logprobs of 1"]
    assert killed == [starter.processes[0]]
    assert "reference worker 0: logprobs: no answer within 0.05 s" in caplog.text
    assert "reference.pool" in caplog.text


async def test_an_idle_worker_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch, killed: list[Any]) -> None:
    class Stopped(Process):
        async def _answer(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(reference, "PING_TIMEOUT_S", 0.05)
    starter = Starter(Stopped, Process)
    with client_of(starter) as client:
        assert await computed(client, 1) == ["logprobs of 1"]
    assert killed == [starter.processes[0]]


async def test_after_a_stall_of_the_driver_no_living_worker_counts_as_lost(killed: list[Any]) -> None:
    starter = Starter(lambda: Process(0.4))
    with client_of(starter, timeout_s=1.0) as client:
        computing = asyncio.create_task(client.logprobs(1))
        await asyncio.sleep(0.05)
        time.sleep(2.5)  # noqa: ASYNC251 - the loop stands still
        assert await asyncio.wait_for(computing, 10.0) == "logprobs of 1"
    assert not killed


async def test_the_worker_of_a_cancelled_group_is_replaced_when_it_is_lost() -> None:
    starter = Starter(lambda: dying(0.05), Process)
    with client_of(starter) as client:
        given_up = asyncio.create_task(client.logprobs(1))
        await asyncio.sleep(0.01)
        given_up.cancel()
        assert await computed(client, 2) == ["logprobs of 2"]
    assert [process.groups for process in starter.processes] == [[1], [2]]


async def test_when_all_workers_are_given_up_every_group_that_waits_gets_the_error() -> None:
    starters = [Starter(Process, dying_at_start), Starter(Process, dying_at_start)]
    with client_of(*starters) as client:
        for starter in starters:
            starter.processes[0].is_dead = True
        waiting = [asyncio.create_task(client.logprobs(group)) for group in range(5)]
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10.0)
    assert {type(error) for error in found} == {PenstockError}
    assert "reference: no worker is left: 2 of 2 were given up (each is restarted at most 10 times" in str(found[0])
    assert "low on memory" in str(found[0])
    assert "continue with `penstock resume`" in str(found[0])
    assert [len(starter.processes) for starter in starters] == [1 + RESTARTS_PER_HOUR] * 2


async def test_a_worker_that_cannot_be_started_again_is_given_up() -> None:
    def no_memory() -> Process:
        raise OSError("fork: Cannot allocate memory")

    no_worker = pytest.raises(PenstockError, match=r"no worker is left.*fork: Cannot allocate memory")
    with client_of(Starter(dying, no_memory)) as client, no_worker:
        await computed(client, 1)


def test_a_worker_that_never_comes_up_is_given_up_however_long_each_start_takes() -> None:
    class Loading(Process):
        async def _answer(self) -> None:
            await asyncio.Event().wait()

    async def starts() -> float:
        no_worker = pytest.raises(PenstockError, match=r"no worker is left.*start: no answer within 1000 s")
        with client_of(Starter(dying, Loading), start_timeout_s=1000.0) as client, no_worker:
            await client.logprobs(1)
        return asyncio.get_running_loop().time()

    assert run_virtual(starts()) == pytest.approx(RESTARTS_PER_HOUR * 1000.0, abs=1.0)


def test_the_pauses_between_restarts_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(restart_budget, "LONGEST_PAUSE_S", 60.0)

    async def restarts() -> float:
        with (
            client_of(Starter(dying, dying_at_start)) as client,
            pytest.raises(PenstockError, match="no worker is left"),
        ):
            await client.logprobs(1)
        return asyncio.get_running_loop().time()

    assert 243 / 2 <= run_virtual(restarts()) <= 244, "1 + 2 + 4 + … + 32 + 3 · 60 s, or at least half of it"


async def test_a_mistake_that_no_restart_mends_stops_the_run_with_its_cause(killed: list[Any]) -> None:
    starter = Starter(lambda: Process(0.01, raised(ShapeError("planted: 3 and 4")), always))
    with client_of(starter) as client, pytest.raises(PenstockError, match="failed: ShapeError: planted: 3 and 4"):
        await computed(client, 1)
    assert not killed


async def test_a_worker_that_does_not_load_at_the_start_of_the_run_ends_it() -> None:
    died = pytest.raises(PenstockError, match=r"reference: start: a process died: .*low on memory")
    with client_of(Starter(dying_at_start)) as client, died:
        await client.start()


async def test_a_closed_client_starts_no_more_processes() -> None:
    starter = Starter(lambda: dying(0.05), Process)
    with client_of(starter) as client:
        computing = asyncio.create_task(client.logprobs(1))
        await asyncio.sleep(0.01)
    await asyncio.wait([computing])
    await asyncio.sleep(0.1)
    assert len(starter.processes) == 1


async def test_workers_at_rest_have_ended_their_groups_and_begin_no_other_one() -> None:
    starters = [Starter(lambda: Process(0.05)), Starter(lambda: Process(0.05))]
    with client_of(*starters) as client:
        running = [asyncio.create_task(client.logprobs(group)) for group in range(3)]
        await asyncio.sleep(0.01)
        workers = [starter.processes[0] for starter in starters]
        async with client.at_rest():
            assert all(worker.is_at_rest for worker in workers)
            before = [list(worker.groups) for worker in workers]
            late = asyncio.create_task(client.logprobs(3))
            await asyncio.sleep(0.15)
            assert all(worker.is_at_rest for worker in workers), "no group is computed, and none waits in a worker"
            assert [list(worker.groups) for worker in workers] == before
        assert await asyncio.gather(*running, late) == [f"logprobs of {group}" for group in range(4)]
        assert not all(worker.is_at_rest for worker in workers)


async def test_a_step_that_fails_lets_the_workers_go_on() -> None:
    with client_of(Starter(Process)) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.at_rest():
                raise ZeroDivisionError
        assert await computed(client, 1) == ["logprobs of 1"]


async def test_a_worker_that_does_not_rest_is_ended_and_its_next_process_computes(killed: list[Any]) -> None:
    class Sleepless(Process):
        async def _rest(self) -> None:
            await asyncio.Event().wait()

    starter = Starter(Sleepless, Process)
    with client_of(starter, timeout_s=0.05) as client:
        async with client.at_rest():
            assert killed == [starter.processes[0]]
            starter.processes[0].is_dead = True
        assert await computed(client, 1) == ["logprobs of 1"]
    assert starter.processes[1].groups == [1]
