"""Environments are opened ahead, reused and limited as they say; each that was opened is closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.adapters.gymnasium_env import GymnasiumTasks
from penstock.envs.config import EnvConfig, EpisodeConfig, StreamConfig
from penstock.envs.environment import Action
from penstock.envs.streams import stream_factories
from penstock.envs.workers.environment_pool import Seconds, Usage
from penstock.envs.workers.episode_host import EpisodeHost, PlayedEpisode

MACHINES = """
import asyncio, itertools, os, time
from pathlib import Path
from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

numbers = itertools.count()

class Machine(Environment):
    def __init__(self, folder, reusable, open_s):
        self.folder, self.reusable, self.open_s = Path(folder), reusable, open_s
        self.name, self.told = f"{os.getpid()}-{next(numbers)}", []

    def note(self, what):
        with open(self.folder / "log", "a") as log: log.write(f"{what} {self.name}\\n")

    async def open(self):
        self.note("opening")
        (self.folder / "alive" / self.name).touch()
        alive = [one for one in (self.folder / "alive").iterdir() if Path(f"/proc/{one.name.split('-')[0]}").exists()]
        self.note(f"alive {len(alive)}")
        await asyncio.sleep(self.open_s)
        if (self.folder / "broken").exists(): raise RuntimeError("no machine left")
        self.note("opened")

    def reset(self, task):
        self.told = []
        return Observation(self.name)

    async def step(self, action):
        verb, _, rest = action.text.partition(" ")
        if verb == "block": time.sleep(60)
        if verb == "sleep": await asyncio.sleep(float(rest or 60))
        if verb == "raise": raise RuntimeError("the machine fell")
        if verb == "exit": os._exit(3)
        if verb == "end": return Done(1.0)
        self.told.append(verb)
        return Observation(" ".join(self.told))

    async def close(self):
        (self.folder / "alive" / self.name).unlink()
        self.note("closed")

class Machines(GeneratedTasks):
    def __init__(self, seed, folder, reusable=True, open_s=0.0):
        super().__init__(seed)
        self.arguments = folder, reusable, open_s
    def draw(self, rng): return {"prompt": str(rng.random())}
    def environment(self): return Machine(*self.arguments)
"""


class Opened:
    """A host, and what its machines have noted."""

    def __init__(self, host: EpisodeHost, folder: Path) -> None:
        self.host = host
        self.folder = folder

    def noted(self, what: str) -> list[str]:
        """What follows a word, in the order of the notes."""
        lines = (self.folder / "log").read_text().splitlines() if (self.folder / "log").exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == what]

    def num(self, state: str, kind: str = "") -> int:
        return self.host._pools[kind].num[state]  # type: ignore[index]

    def alive(self) -> list[str]:
        """Machines that are not closed and whose process runs."""
        names = [one.name for one in (self.folder / "alive").iterdir()]
        return [name for name in names if Path(f"/proc/{name.split('-')[0]}").exists()]


Machines = Callable[..., contextlib.AbstractAsyncContextManager[Opened]]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    (tmp_path / "planted_machines.py").write_text(MACHINES)
    (tmp_path / "alive").mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    @asynccontextmanager
    async def opened(
        streams: dict[str, StreamConfig] | None = None, args: dict[str, Any] | None = None, **limits: Any
    ) -> AsyncIterator[Opened]:
        own = {"folder": str(tmp_path), **(args or {})}
        episode = EpisodeConfig(**{"timeout_s": 20.0, **limits})
        env = EnvConfig(factory="planted_machines:Machines", args=own, streams=streams or {}, episode=episode)
        host = EpisodeHost(env, 0)
        try:
            yield Opened(host, tmp_path)
        finally:
            await host.close()

    return opened


def task(kind: str = "") -> Task:
    return Task(TaskId("t/0"), "world", {}, kind)


async def play(host: EpisodeHost, *texts: str, kind: str = "") -> list[str]:
    """The name of the machine, and its answers."""
    async with host.open(task(kind)) as played:
        said = [str((await played.reset())["content"])]
        for turn, text in enumerate(texts):
            said.append(str((await played.step(Action(text, turn=turn))).get("content")))
    return said


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - processes have no events
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("reusable", [True, False])
async def test_a_reusable_machine_plays_every_episode_and_another_one_a_single_episode(
    machines: Machines, reusable: bool
) -> None:
    async with machines(args={"reusable": reusable}) as opened:
        played = [await play(opened.host, "a", "b", "end"), await play(opened.host, "c"), await play(opened.host, "d")]
        assert [said[1:] for said in played] == [["a", "a b", "None"], ["c"], ["d"]]
        assert len({said[0] for said in played}) == (1 if reusable else 3)
    num = 1 if reusable else 3
    usage = opened.host.usage()
    assert (usage.opened, usage.closed, usage.episodes, usage.reused) == (num, num, 3, 3 - num)
    assert sorted(opened.noted("opened")) == sorted(opened.noted("closed"))
    assert (len(opened.noted("opened")), opened.alive()) == (num, [])


async def fail(host: EpisodeHost, text: str) -> None:
    with pytest.raises(TrajectoryError, match="step of t/0"):
        await play(host, text)


async def lose_the_engine(host: EpisodeHost, _: str) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with host.open(task()) as played:
            await played.reset()
            1 / 0  # noqa: B018


async def cancel(host: EpisodeHost, text: str) -> None:
    playing = asyncio.create_task(play(host, text))
    await asyncio.sleep(1.0)
    playing.cancel()
    await asyncio.wait([playing])


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("how", "text"),
    [(fail, "raise"), (fail, "sleep"), (fail, "block"), (fail, "exit"), (cancel, "sleep"), (lose_the_engine, "")],
    ids=["raises", "hangs", "blocks", "exits", "is cancelled", "loses its engine"],
)
async def test_a_machine_whose_episode_did_not_end_well_is_closed_and_never_reused(
    machines: Machines, how: Any, text: str
) -> None:
    async with machines(timeout_s=2.0) as opened:
        (before,) = await play(opened.host)
        assert await play(opened.host) == [before]
        await how(opened.host, text)
        (after,) = await play(opened.host)
        assert after != before
        assert await play(opened.host) == [after]
        await eventually(lambda: opened.alive() == [after])
        assert opened.num("idle") == 1
    assert opened.alive() == []
    assert opened.host.usage().opened == opened.host.usage().closed == 2


async def test_warm_machines_are_opened_while_others_play(machines: Machines) -> None:
    async with machines(warm=2, args={"reusable": False, "open_s": 0.3}) as opened, AsyncExitStack() as playing:
        await playing.enter_async_context(opened.host.open(task()))
        await eventually(lambda: opened.num("idle") == 2)
        before = opened.host.usage()
        for _ in range(2):
            await playing.enter_async_context(opened.host.open(task()))
        waited_s = opened.host.usage().waited_s - before.waited_s
        assert waited_s < 0.3, "they were open already"
        await eventually(lambda: opened.num("idle") == 2)
        assert (opened.num("playing"), len(opened.noted("opened"))) == (3, 5)
    assert sorted(opened.noted("opened")) == sorted(opened.noted("closed"))
    assert opened.host.usage().closed == 5


async def test_without_warm_ones_a_machine_is_open_for_its_episode_only(machines: Machines) -> None:
    async with machines(args={"reusable": False}) as opened:
        await play(opened.host, "a")
        await eventually(lambda: opened.host._pools[""].num.total() == 0)
        assert (len(opened.noted("opening")), opened.alive()) == (1, [])


async def test_a_limit_holds_while_episodes_hang_and_crash_and_all_is_closed(machines: Machines) -> None:
    """Of 64 episodes two crash their process, two block in it and two hang: a tenth."""
    acts = {5: "exit", 15: "block", 25: "sleep", 35: "exit", 45: "block", 55: "sleep"}
    limits = {"max_open": 6, "warm": 2, "num_workers": 2, "timeout_s": 1.5}

    async def one(index: int) -> str:
        try:
            return (await play(opened.host, "sleep 0.05", acts.get(index, "a"), "end"))[2]
        except TrajectoryError as error:
            return error.kind

    async with machines(**limits) as opened:
        ended = await asyncio.gather(*(one(index) for index in range(64)))
        assert {ended[index] for index in acts} == {"env"}
        # A process takes the episodes with it that play in it, at most six.
        assert ended.count("env") <= len(acts) + 2 * 5
        assert ended.count("sleep a") >= 64 - len(acts) - 2 * 5
        await play(opened.host, "a")
        await eventually(lambda: opened.num("closing") == 0)
        assert len(opened.host.pids) <= 2
    alive = list(map(int, opened.noted("alive")))
    assert max(alive) <= 6
    assert len(alive) < 64 - 6, "most episodes reused a machine"
    assert (opened.alive(), opened.host.pids) == ([], [])
    usage = opened.host.usage()
    assert usage.opened == usage.closed == len(opened.noted("opened"))
    assert usage.episodes - usage.reused <= usage.opened


async def test_a_process_that_is_killed_costs_its_own_machines_and_the_pool_is_filled_again(machines: Machines) -> None:
    async with machines(warm=2, num_workers=2) as opened, AsyncExitStack() as stack:
        playing: dict[int, PlayedEpisode] = {}  # by process
        for _ in range(4):
            played = await stack.enter_async_context(opened.host.open(task()))
            playing[int(str((await played.reset())["content"]).split("-")[0])] = played
        await eventually(lambda: opened.num("idle") == 2)
        (killed, lost), (_, other) = playing.items()
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(TrajectoryError, match="its process was killed by SIGKILL"):
            await lost.step(Action("a"))
        assert (await other.step(Action("a")))["content"] == "a"
        await eventually(lambda: not any(name.startswith(f"{killed}-") for name in opened.alive()))
        await play(opened.host)
        await eventually(lambda: opened.num("idle") >= 2)
        assert (await other.step(Action("b")))["content"] == "a b"
    usage = opened.host.usage()
    assert usage.opened == usage.closed
    assert opened.alive() == []


@pytest.mark.full
async def test_the_wait_is_bounded_says_what_it_waits_for_and_does_not_count_as_reset(machines: Machines) -> None:
    async with machines(max_open=1, wait_timeout_s=1.2, timeout_s=1.0, args={"open_s": 2.0}) as opened:
        async with opened.host.open(task()) as played:  # opening takes longer than a reset or the wait may
            await played.reset()
            words = r"open of t/0: no environment became free within 1\.2 s \(env\.episode\.wait_timeout_s\), while 1 "
            with pytest.raises(TrajectoryError, match=words + ".*1 playing of at most max_open=1") as caught:
                await play(opened.host)
            assert caught.value.kind == "env"
            waiting = asyncio.create_task(play(opened.host, "a"))
            await asyncio.sleep(0.8)
            assert not waiting.done()
        assert (await waiting)[1] == "a"
        assert opened.host.usage().waited_s > 0.8
        # All three are served, though the last of them waits for longer than the limit.
        await asyncio.gather(*(play(opened.host, "sleep 0.4", "sleep 0.4") for _ in range(3)))


async def test_an_opening_that_fails_costs_one_episode_and_is_not_repeated_ahead(machines: Machines) -> None:
    async with machines(warm=2) as opened:
        (opened.folder / "broken").touch()
        for number in (1, 2):
            with pytest.raises(TrajectoryError, match=r"(?s)open of t/0: .*RuntimeError: no machine left"):
                await play(opened.host)
            await eventually(lambda: opened.host._pools[""].num.total() == 0)
            assert len(opened.noted("opening")) <= 3 * number
        num_before = len(opened.noted("opening"))
        await asyncio.sleep(0.3)
        assert (len(opened.noted("opening")), opened.alive()) == (num_before, [])
        (opened.folder / "broken").unlink()
        await play(opened.host)
        await eventually(lambda: opened.num("idle") >= 2)
    assert opened.host.usage().opened == opened.host.usage().closed


async def test_an_episode_that_is_cancelled_while_it_waits_leaves_the_queue(machines: Machines) -> None:
    async with machines(max_open=1) as opened:
        async with opened.host.open(task()) as played:
            (name,) = [(await played.reset())["content"]]
            waiting = [asyncio.create_task(play(opened.host, "a")) for _ in range(3)]
            await asyncio.sleep(0.1)
            waiting[0].cancel()
        assert [said for one in waiting[1:] for said in await one] == [name, "a"] * 2
        async with opened.host.open(task()):
            late = asyncio.create_task(play(opened.host))
            await asyncio.sleep(0.1)
        late.cancel()  # the machine is lent to it now, which it does not know yet
        assert await play(opened.host) == [name]
    assert opened.host.usage().opened == opened.host.usage().closed == 1


async def test_every_task_source_has_its_own_machines_and_its_own_limit(machines: Machines) -> None:
    streams = {"few": StreamConfig(max_open=1), "many": StreamConfig()}
    async with machines(streams=streams, max_open=2, warm=2) as opened, AsyncExitStack() as stack:
        for kind in ("few", "many", ""):
            await stack.enter_async_context(opened.host.open(task(kind)))
        await eventually(lambda: [opened.num("opening", kind) for kind in ("few", "many", "")] == [0, 0, 0])
        assert [opened.host._pools[kind].num.total() for kind in ("few", "many", "")] == [1, 2, 2]
    limits = {kind: (one.episode.max_open, one.episode.warm) for kind, one in stream_factories(_env(streams)).items()}
    assert limits == {"": (2, 2), "few": (1, 1), "many": (2, 2)}


def _env(streams: dict[str, StreamConfig]) -> EnvConfig:
    return EnvConfig(factory="arithmetic", streams=streams, episode=EpisodeConfig(max_open=2, warm=2))


async def test_utilisation_is_the_share_of_the_open_time_in_which_calls_ran(machines: Machines) -> None:
    async with machines(args={"open_s": 1.0}) as opened:
        async with opened.host.open(task()) as played:
            await played.reset()
            for turn in range(4):
                await played.step(Action("sleep 0.3", turn=turn))
                await asyncio.sleep(0.1)  # the policy
        metrics, before = opened.host.usage().metrics_since(Usage()), opened.host.usage()
        assert 0.6 < metrics["env/utilisation"] < 0.9
        assert metrics["env/wait_s"] > 1.0
        assert (metrics["env/opened"], metrics["env/closed"], metrics["env/reused"]) == (1, 0, 0)
        await asyncio.sleep(0.3)
        after = opened.host.usage().metrics_since(before)
        assert after["env/utilisation"] < 0.3, "it is idle"
        assert "env/wait_s" not in after
    assert Usage().metrics_since(Usage()) == {}


def test_seconds_are_summed_over_what_is_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    seconds = Seconds()
    with seconds.one():
        now = 2.0
        with seconds.one():
            now = 3.0
        now = 7.0
    now = 100.0
    assert seconds.read() == 2 + 2 * 1 + 4


def test_more_warm_machines_than_may_be_open_are_refused() -> None:
    with pytest.raises(ValueError, match=r"episode\.warm=3 environments cannot be open while max_open=2"):
        EpisodeConfig(warm=3, max_open=2)


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_gymnasium_environment_is_reset_for_the_next_episode(reuse: bool) -> None:
    walk = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi", "is_slippery": False}, "reuse": reuse}
    source, replies = GymnasiumTasks(0, **walk), []  # type: ignore[arg-type]
    one = next(source.train())
    host = EpisodeHost(EnvConfig(factory="gymnasium", args=walk), 0)
    try:
        for actions in ("112", "11212212", "112"):
            async with host.open(Task(one.task_id, one.prompt, one.fields, "")) as played:
                replies.append([await played.reset()])
                for action in actions:
                    replies[-1].append(await played.step(Action(action)))
                    if replies[-1][-1].get("done"):
                        break
    finally:
        await host.close()
    assert replies[0] == replies[2] != replies[1]
    usage = host.usage()
    assert (usage.opened, usage.closed, usage.reused) == ((1, 1, 2) if reuse else (3, 3, 0))
