"""Environments on several nodes: where an episode is opened, and what a lost node or a broken environment costs."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest
import ray

from penstock.actors import episodes
from penstock.actors.episodes import EpisodeActor, RemoteEpisodes, SpreadEpisodes, share_of_node
from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig, StreamConfig
from penstock.envs.workers.environment_pool import Usage

ENV = EnvConfig(factory="arithmetic")


class Played:
    """An episode whose environment answers what the task says."""

    def __init__(self, task: Task, where: str) -> None:
        self.task = task
        self.where = where

    async def reset(self) -> dict[str, Any]:
        if "error" in self.task.fields:
            raise TrajectoryError("env", str(self.task.fields["error"]))
        return {"runs_itself": True} if "program" in self.task.fields else {"content": self.where}

    async def step(self, action: Any) -> dict[str, Any]:
        return {"content": f"{self.where}: {action}"}

    async def step_all(self, actions: Any) -> dict[str, Any]:
        return {"content": f"{self.where}: {len(actions)}"}

    async def run(self, access: Any) -> dict[str, Any]:
        return {"done": True}

    async def cut_off(self) -> dict[str, Any]:
        return {"done": True}


class Host:
    """In place of `EpisodeHost`."""

    def __init__(self, where: str, refusal: Exception | None = None) -> None:
        self.where = where
        self.refusal = refusal
        self.num_open = 0
        self.num_opened = 0
        self.errors: list[BaseException] = []
        self.is_closed = False
        self.may_open = asyncio.Event()
        self.may_open.set()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Played]:
        if self.refusal is not None:
            raise self.refusal
        await self.may_open.wait()
        self.num_open += 1
        self.num_opened += 1
        try:
            yield Played(task, self.where)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self.num_open -= 1

    def usage(self) -> Usage:
        return Usage(opened=self.num_opened, episodes=self.num_opened)

    async def close(self) -> None:
        self.is_closed = True


class Actor:
    """Answers as a Ray actor does: `actor.method.remote(...)` is a call that was made already."""

    def __init__(self, actor: EpisodeActor) -> None:
        self._actor = actor
        self.is_dead = False

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self.is_dead:
                raise ray.exceptions.RayActorError
            return await getattr(self._actor, method)(*arguments, **named)

        # As in Ray, a caller that is cancelled does not cancel the call.
        remote = staticmethod(lambda *args, **named: asyncio.shield(asyncio.ensure_future(call(*args, **named))))
        return type("Method", (), {"remote": remote})


class Here:
    """The driver's machine, with one process."""

    num_workers, failure = 1, ""

    def __init__(self) -> None:
        self.host = Host("here")
        self.open, self.close, self.usage = self.host.open, self.host.close, self.host.usage


Nodes = Callable[..., tuple[SpreadEpisodes, Here, Host, Actor]]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The driver's machine and another node, which has two processes."""

    def make(refusal: Exception | None = None) -> tuple[SpreadEpisodes, Here, Host, Actor]:
        there = Host("there", refusal)
        monkeypatch.setattr(episodes, "EpisodeHost", lambda _env, _seed: there)
        monkeypatch.setattr(ray, "kill", lambda _actor: None)
        actor, here = Actor(EpisodeActor(ENV, 0)), Here()
        remote = RemoteEpisodes("10.0.0.2", ENV, lambda: cast("Any", actor))
        remote.num_workers = 2
        return SpreadEpisodes([cast("Any", here), remote]), here, there, actor

    return make


def task(**fields: Any) -> Task:
    return Task(TaskId("t"), "prompt", fields)


async def reset(source: SpreadEpisodes, **fields: Any) -> str:
    async with source.open(task(**fields)) as played:
        return str((await played.reset()).get("content"))


async def test_an_episode_is_opened_where_there_are_the_fewest_per_process(two_nodes: Nodes) -> None:
    source, here, there, _ = two_nodes()
    async with AsyncExitStack() as stack:
        for _ in range(3):
            played = await stack.enter_async_context(source.open(task()))
        assert here.host.num_open == 3, "it may run itself"
        assert (await played.reset())["content"] == "here"
    async with AsyncExitStack() as stack:
        where = []
        for _ in range(6):
            played = await stack.enter_async_context(source.open(task()))
            where.append((await played.reset())["content"])
        assert (where.count("here"), where.count("there")) == (2, 4)
        assert (await played.step("go"))["content"] == f"{where[-1]}: go"
        assert (await played.step_all(["a", "b"]))["content"] == f"{where[-1]}: 2"
    await asyncio.sleep(0.01)
    assert (here.host.num_open, there.num_open) == (0, 0), "all are closed"
    await source.close()
    assert here.host.is_closed
    assert there.is_closed


async def test_programs_run_on_the_machine_of_the_endpoint(two_nodes: Nodes) -> None:
    source, _, there, _ = two_nodes()
    async with AsyncExitStack() as stack:
        for _ in range(4):
            played = await stack.enter_async_context(source.open(task(program=True)))
            assert (await played.reset())["runs_itself"]
            assert (await played.run(None))["done"]  # type: ignore[arg-type]
        assert there.num_open == 0


async def test_a_program_among_other_environments_is_played_again_there(two_nodes: Nodes) -> None:
    source, _, _, _ = two_nodes()
    await reset(source)
    async with source.open(task()):
        with pytest.raises(TrajectoryError, match="played again on the driver's machine"):
            await reset(source, program=True)
    assert await reset(source, program=True) == "None"


async def test_an_environment_that_raises_fails_its_own_episode(two_nodes: Nodes) -> None:
    source, _, _, _ = two_nodes()
    await reset(source)
    async with source.open(task()):
        with pytest.raises(TrajectoryError, match="no board") as failed:
            await reset(source, error="no board")
        assert failed.value.kind == "env"
        assert await reset(source) == "there"


async def test_an_episode_that_is_given_up_while_it_opens_is_closed_on_its_node(two_nodes: Nodes) -> None:
    source, _, there, _ = two_nodes()
    await reset(source)
    async with source.open(task()):
        there.may_open.clear()
        opening = asyncio.create_task(reset(source))
        await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.wait([opening])
        there.may_open.set()
        await asyncio.sleep(0.01)
        assert there.num_open == 0
        assert await reset(source) == "there", "the node is not blamed"


class Unreadable:
    """A task's field that raises where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("no number",))


async def test_a_task_that_cannot_be_sent_or_read_fails_its_own_episode(two_nodes: Nodes) -> None:
    source, _, _, _ = two_nodes()
    await reset(source)
    async with source.open(task()):
        with pytest.raises(TrajectoryError, match=r"cannot be unpickled on the node .*: ValueError: .*no number"):
            await reset(source, field=Unreadable())
        with pytest.raises(TrajectoryError, match="t cannot be sent to another node"):
            await reset(source, field=lambda: None)
        assert await reset(source) == "there"
    assert pickle.loads(pickle.dumps(task())) == task()


@pytest.mark.parametrize("is_lost", [True, False], ids=["the node is lost", "the environments do not load there"])
async def test_a_node_that_cannot_play_costs_one_attempt_and_is_said_once(
    two_nodes: Nodes, caplog: pytest.LogCaptureFixture, *, is_lost: bool
) -> None:
    source, _, _, actor = two_nodes(None if is_lost else ConfigError(["env.factory='my.Env': no module 'my'."]))
    actor.is_dead = is_lost
    await reset(source)
    async with source.open(task()):
        with caplog.at_level(logging.WARNING):
            with pytest.raises(TrajectoryError) as failed:
                await reset(source)
            assert failed.value.kind == "env"
            assert await reset(source) == await reset(source) == "here"
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "environments on 10.0.0.2: open t" in warning
    assert ("process died" if is_lost else "no module 'my'") in warning
    assert "No more episodes are played there" in warning


async def test_the_node_learns_whether_an_episode_ended_well_so_that_its_environment_may_play_again(
    two_nodes: Nodes,
) -> None:
    source, here, there, _ = two_nodes()
    await reset(source)
    async with source.open(task()):  # one is open here, so that the others are opened there
        assert await reset(source) == "there"
        await asyncio.sleep(0.01)
        assert (there.num_open, there.errors) == (0, [])
        with pytest.raises(RuntimeError, match="the engine is lost"):
            async with source.open(task()):
                raise RuntimeError("the engine is lost")
        await asyncio.sleep(0.01)
    (error,) = there.errors
    assert (there.num_open, type(error)) == (0, TrajectoryError)
    assert source.usage() == Usage(opened=4, episodes=4) == here.usage() + there.usage()


def test_the_nodes_share_processes_and_limits() -> None:
    limits = EpisodeConfig(num_workers=7, warm=2, max_open=8)
    env = EnvConfig(factory="arithmetic", episode=limits, streams={"a": StreamConfig(max_open=3), "b": StreamConfig()})
    shares = [share_of_node(env, index, 3) for index in range(3)]
    assert [one.episode.num_workers for one in shares] == [3, 2, 2]
    assert [one.episode.warm for one in shares] == [1, 1, 0]
    assert [one.episode.max_open for one in shares] == [3, 3, 2]
    assert [one.streams["a"].max_open for one in shares] == [1, 1, 1]
    assert all(one.streams["b"].max_open is None for one in shares)
    unlimited = EnvConfig(factory="arithmetic", episode=EpisodeConfig(num_workers=2))
    assert share_of_node(unlimited, 1, 2).episode.max_open is None
