"""A fault of an environment fails its own episode and is never a reward; other episodes continue."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig, StreamConfig
from penstock.envs.environment import Action
from penstock.envs.workers.episode_host import EpisodeHost

ENVIRONMENTS = """
import asyncio, os, socket, struct, sys, time
from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

class Play(Environment):
    def __init__(self, greeting):
        self.greeting = greeting

    async def reset(self, task):
        self.task = task
        if task.fields.get("breaks") == "reset":
            raise RuntimeError("no board")
        return Observation(self.greeting + task.prompt)

    async def step(self, action):
        text = action.text
        if text == "block": time.sleep(60)
        if text == "spin":
            while True: pass
        if text == "sleep": await asyncio.sleep(60)
        if text == "raise": raise RuntimeError("the board fell")
        if text.startswith("{"):
            caller = sys._getframe()
            while "call_id" not in caller.f_locals: caller = caller.f_back
            number = caller.f_locals["call_id"]
            for fd in range(3, 64):
                try:
                    if socket.socket(fileno=os.dup(fd)).family == socket.AF_UNIX:
                        os.write(fd, struct.pack("!IQ", len(text), number) + text.encode())
                except OSError: pass
            time.sleep(60)
        if text == "exit": os._exit(3)
        if text == "leave": raise SystemExit(2)
        if text == "end": return Done({"won": 1, "tidy": 0.5}, {"moves": 2})
        if text == "huge": return Observation("x" * (2 << 20))
        if text == "process": return Observation(str(os.getpid()))
        bad = {"none": None, "word": "text", "nan": Done(float("nan")), "count": Observation("", counts={"a": "b"}),
               "role": Observation("", "assistant"), "content": Observation([{"role": "user"}])}
        return bad[text] if text in bad else Observation(f"{action.turn}:{text}", "tool", 0.25, {"moves": 1})

class Plain(Play):
    def reset(self, task): return Observation([{"role": "user", "content": task.prompt}])
    def step(self, action): return Done(1.0)

class Tasks(GeneratedTasks):
    kind, greeting = Play, "hello "
    def draw(self, rng): return {"prompt": str(rng.random())}
    def environment(self): return self.kind(self.greeting)

class Others(Tasks):
    kind = Plain

class Fragile(Tasks):
    def __init__(self, seed, broken="", note=""):
        super().__init__(seed)
        self.greeting = str(len(note))
        if os.path.exists(broken): raise RuntimeError("no licence")
"""


@pytest.fixture
def make_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (tmp_path / "planted_envs.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)

    @asynccontextmanager
    async def opened(
        timeout_s: float = 20.0, factory: str = "planted_envs:Tasks", num_workers: int = 1, **args: object
    ) -> AsyncIterator[EpisodeHost]:
        streams = {"other": StreamConfig(factory="planted_envs:Others")}
        limits = EpisodeConfig(timeout_s=timeout_s, num_workers=num_workers)
        host = EpisodeHost(EnvConfig(factory=factory, args=args, streams=streams, episode=limits), 0)
        try:
            yield host
        finally:
            await host.close()

    return opened


def task(environment: str = "", **fields: object) -> Task:
    return Task(TaskId("t/0"), "world", fields, environment)


async def test_an_episode_is_played_and_every_stream_has_its_own_environment(make_host: Callable[..., Any]) -> None:
    async with make_host() as host:
        async with host.open(task()) as played:
            assert (await played.reset())["content"] == "hello world"
            reply = await played.step(Action("left", turn=3))
            assert (reply["content"], reply["role"], reply["reward"]) == ("3:left", "tool", 0.25)
            assert reply["counts"] == {"moves": 1}
            reply = await played.step(Action("end"))
            assert (reply["done"], reply["reward"], reply["parts"]) == (True, 1.5, {"won": 1.0, "tidy": 0.5})
        async with host.open(task("other")) as played:
            assert (await played.reset())["content"] == [{"role": "user", "content": "world"}]
            assert (await played.step(Action("")))["reward"] == 1.0


@pytest.mark.parametrize(("num_workers", "shares"), [(1, [5]), (2, [2, 3])])
async def test_episodes_are_spread_over_the_processes(
    make_host: Callable[..., Any], num_workers: int, shares: list[int]
) -> None:
    async with make_host(num_workers=num_workers) as host, AsyncExitStack() as open_episodes:
        processes: Counter[str] = Counter()
        for _ in range(5):
            played = await open_episodes.enter_async_context(host.open(task()))
            await played.reset()
            processes[(await played.step(Action("process")))["content"]] += 1
        assert sorted(processes.values()) == shares


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "RuntimeError: the board fell"),
        ("leave", "SystemExit: 2"),
        ("none", "step returned None of type NoneType; expected Observation, a list of them, or Done"),
        ("word", "step returned 'text' of type str; expected Observation, a list of them, or Done"),
        ("nan", "step returned Done with reward nan; expected a finite number"),
        ("count", "with counts a dict with a='b' of type str"),
        ("role", "role 'assistant'.*expected one of user, tool, system"),
        ("content", "expected one of user, tool, system, and text or messages"),
        ("huge", "an observation of 2.* bytes; at most 1048576 fit"),
        ("{}", "its process sent what is no reply and was killed"),
        ('{"done": true, "reward": NaN}', "its process sent what is no reply"),
        ('{"content": "", "role": "user", "counts": {"a": 1e999}}', "its process sent what is no reply"),
        ('{"closed": true}', "its process answered {'closed': True}; expected content or several or done"),
        ("exit", "its process ended with exit code 3"),
    ],
)
async def test_what_goes_wrong_in_a_step_is_an_env_failure(
    make_host: Callable[..., Any], text: str, message: str
) -> None:
    async with make_host() as host:
        async with host.open(task()) as played:
            await played.reset()
            with pytest.raises(TrajectoryError, match=rf"(?s)step of t/0: .*{message}") as caught:
                await played.step(Action(text))
            assert caught.value.kind == "env"
        async with host.open(task()) as played:
            assert (await played.reset())["content"] == "hello world"


async def test_a_reset_that_raises_is_an_env_failure(make_host: Callable[..., Any]) -> None:
    async with make_host() as host, host.open(task(breaks="reset")) as played:
        with pytest.raises(TrajectoryError, match=r"(?s)reset of t/0: .*no board"):
            await played.reset()


async def reset(host: EpisodeHost, one: Task) -> None:
    async with host.open(one) as played:
        await played.reset()


class Unreadable:
    """Can be pickled, but not read back."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (task(row=Unreadable()), "reset of t/0: .*ValueError: invalid literal for int"),
        (task("elsewhere"), r"open of t/0: .*the task names the environment 'elsewhere'; there are \['', 'other'\]"),
    ],
)
async def test_a_task_that_the_process_cannot_read_costs_no_other_episode(
    make_host: Callable[..., Any], bad: Task, message: str
) -> None:
    async with make_host() as host, host.open(task()) as bystander:
        await bystander.reset()
        before = host.pids
        with pytest.raises(TrajectoryError, match=rf"(?s){message}") as caught:
            await reset(host, bad)
        assert caught.value.kind == "env"
        assert (await bystander.step(Action("still here")))["content"] == "0:still here"
        async with host.open(task()) as newcomer:
            await newcomer.reset()
        assert host.pids == before


@pytest.mark.some(1)
@pytest.mark.parametrize("text", ["block", "spin"])
async def test_a_hang_costs_its_own_episode_and_the_process_only_when_the_others_have_ended(
    make_host: Callable[..., Any], text: str
) -> None:
    async with make_host(timeout_s=2.0) as host, host.open(task()) as bystander:
        await bystander.reset()
        (first,) = host.pids
        async with host.open(task()) as played:
            await played.reset()
            with pytest.raises(TrajectoryError, match=r"timed out after 2 s \(env.episode.timeout_s\)"):
                await played.step(Action(text))
        assert (await bystander.step(Action("still here")))["content"] == "0:still here"
        async with host.open(task()) as newcomer:
            await newcomer.reset()
            assert len(host.pids) == 2, "new episodes go to a fresh process"
        await bystander.step(Action("end"))
        assert first in host.pids
    assert host.pids == []


async def test_the_process_of_a_hang_is_killed_when_it_has_no_other_episode(make_host: Callable[..., Any]) -> None:
    async with make_host(timeout_s=0.5) as host:
        with contextlib.suppress(TrajectoryError):
            async with host.open(task()) as played:
                await played.reset()
                await played.step(Action("block"))
        await eventually(lambda: host.pids == [])


async def test_an_asynchronous_hang_is_cancelled_and_the_process_stays(make_host: Callable[..., Any]) -> None:
    async with make_host(timeout_s=1.0) as host:
        async with host.open(task()) as played:
            await played.reset()
            before = host.pids
            with pytest.raises(TrajectoryError, match="timed out after 1 s"):
                await played.step(Action("sleep"))
        await asyncio.sleep(0.3)
        async with host.open(task()) as played:
            await played.reset()
        assert host.pids == before


async def test_two_hundred_episodes_at_a_time_do_not_mix(make_host: Callable[..., Any]) -> None:
    async def play(index: int) -> list[str]:
        async with host.open(Task(TaskId(f"t/{index}"), str(index), {}, "")) as played:
            said = [(await played.reset())["content"]]
            said += [(await played.step(Action(f"{index}", turn=turn)))["content"] for turn in range(3)]
        return said

    async with make_host() as host:
        for index, said in enumerate(await asyncio.gather(*(play(index) for index in range(200)))):
            assert said == [f"hello {index}", f"0:{index}", f"1:{index}", f"2:{index}"]


async def test_an_environment_that_does_not_load_stops_the_run(make_host: Callable[..., Any]) -> None:
    async with make_host(factory="planted_envs:Tsks") as host:
        with pytest.raises(ConfigError, match=r"has no attribute 'Tsks'\. Did you mean 'Tasks'"):
            async with host.open(task()):
                pass


async def test_a_process_that_does_not_load_in_the_middle_of_a_run_costs_an_episode_and_is_replaced(
    make_host: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"

    async def play_and_lose_the_process() -> None:
        async with host.open(task()) as played:
            await played.reset()
            with pytest.raises(TrajectoryError, match="exit code 3"):
                await played.step(Action("exit"))

    async def fail(message: str) -> None:
        with pytest.raises(TrajectoryError, match=message) as caught:
            async with host.open(task()):
                pass
        assert caught.value.kind == "env"

    async with make_host(factory="planted_envs:Fragile", broken=str(broken)) as host:
        await play_and_lose_the_process()
        broken.touch()
        await fail("no licence")
        broken.unlink()
        await play_and_lose_the_process()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "no_python"))
            await fail("its process cannot be started: FileNotFoundError")
        await play_and_lose_the_process()


async def test_settings_may_be_longer_than_an_argument_of_a_program(make_host: Callable[..., Any]) -> None:
    async with make_host(factory="planted_envs:Fragile", note="x" * 200_000) as host, host.open(task()) as played:
        assert (await played.reset())["content"] == "200000world"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - processes have no events
            await asyncio.sleep(0.02)
