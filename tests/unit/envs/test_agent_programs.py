"""Agent programs as processes and functions: how they end, what they leave, and what that costs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig
from penstock.envs.endpoint.scripted import play_program
from penstock.envs.loading import load_task_source
from penstock.envs.tasks.agents import parse_reward, words_for
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.envs.workers.episode_host import EpisodeHost

PROGRAM = """
import http.client, json, os, sys, time

def ask(text):
    address = os.environ["OPENAI_BASE_URL"].split("/")[2]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body),
                       {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]

def note(pid):
    with open(sys.argv[2], "a") as file:
        file.write(f"{pid} ")

task = json.load(open(os.environ["PENSTOCK_TASK"]))
assert sys.stdin.read() == "", "a program that appends it to its prompt finds nothing"
note(os.getpid())
kind = sys.argv[1]
if kind == "scores":
    print("thinking")
    print(json.dumps({"same": ask(task["prompt"]) == task["fields"]["answer"], "style": 0.5}).replace("true", "1"))
if kind == "says nothing": ask("?"); print("goodbye")
if kind == "crashes": ask("?"); print("oh", file=sys.stderr); sys.exit(3)
if kind == "kills itself": ask("?"); os.kill(os.getpid(), 9)
if kind == "hangs": time.sleep(60)
if kind == "floods":
    ask("?")
    for _ in range(200): print("x" * 100_000)
    print(0.5)
if kind == "forks":
    ask("?")
    if os.fork() == 0:
        note(os.getpid()); time.sleep(60)
    print(1); sys.stdout.flush()
if kind == "leaves a daemon":
    ask("?")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid()); time.sleep(60)
        os._exit(0)
    os.wait(); time.sleep(0.2); print(1)
"""
FUNCTIONS = """
import time
from penstock.envs.tasks.generated_tasks import GeneratedTasks

class Tasks(GeneratedTasks):
    def draw(self, rng): return {"prompt": str(rng.random()), "answer": "yes"}

async def agent(task, client):
    kind = task.fields["kind"]
    if kind == "blocks": time.sleep(30)
    if kind == "raises": raise RuntimeError("no idea")
    if kind == "words": return "well done"
    answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    return {"same": float(answer.choices[0].message.content == task.fields["answer"])}

def plain(task, client): return 1.0
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (tmp_path / "planted_program.py").write_text(PROGRAM)
    (tmp_path / "planted_agents.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    @asynccontextmanager
    async def played(agent: Any, timeout_s: float = 20.0) -> AsyncIterator[tuple[Callable[[], Any], EpisodeHost]]:
        args = {"tasks": "planted_agents:Tasks", "agent": agent}
        config = EnvConfig(factory="agent", args=args, episode=EpisodeConfig(timeout_s=timeout_s))
        host = EpisodeHost(config, 0)

        async def yes(part: object) -> str:
            return "yes"

        async def once(kind: str = "") -> EpisodeReply:
            async with host.open(Task(TaskId("t/0"), "Is it?", {"answer": "yes", "kind": kind}, "")) as opened:
                assert (await opened.reset()) == {"runs_itself": True}
                return await play_program(config, opened, "t/0", yes)

        try:
            yield once, host
        finally:
            await host.close()

    return played


def program(kind: str, pids: Path) -> list[str]:
    return [sys.executable, "-S", "-E", str(pids.parent / "planted_program.py"), kind, str(pids)]


def is_alive(pid: str) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def wait_until_gone(pids: Path) -> None:
    async with asyncio.timeout(20):
        for pid in pids.read_text().split() if pids.exists() else []:  # else it was ended before it had begun
            while is_alive(pid):  # noqa: ASYNC110  there is no event for it
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("scores", {"done": True, "reward": 1.5, "parts": {"same": 1.0, "style": 0.5}, "counts": {}}),
        ("says nothing", {"done": True}),
        ("floods", {"done": True, "reward": 0.5, "parts": {}, "counts": {}}),
        ("forks", {"done": True, "reward": 1.0, "parts": {}, "counts": {}}),
    ],
)
async def test_a_program_plays_its_episode_and_leaves_no_process(
    play: Callable[..., Any], tmp_path: Path, kind: str, expected: EpisodeReply
) -> None:
    pids = tmp_path / "pids"
    async with play(program(kind, pids)) as (once, _):
        assert await once() == expected
        await wait_until_gone(pids)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("crashes", r"the agent ended with exit code 3: oh"),
        ("kills itself", "the agent was killed by SIGKILL"),
        ("hangs", r"neither a request that could be answered nor an end within 1 s \(env.episode.timeout_s\)"),
    ],
)
async def test_a_program_that_fails_costs_its_own_attempt_and_leaves_no_process(
    play: Callable[..., Any], tmp_path: Path, kind: str, message: str
) -> None:
    pids = tmp_path / "pids"
    async with play(program(kind, pids), timeout_s=1.0 if kind == "hangs" else 20.0) as (once, host):
        with pytest.raises(TrajectoryError, match=message):
            await once()
        await wait_until_gone(pids)
        assert len(host.pids) == 1, "the process above it goes on"


async def test_a_daemon_ends_with_the_environment_process(play: Callable[..., Any], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with play(program("leaves a daemon", pids)) as (once, _):
        assert (await once())["reward"] == 1.0
        assert len(pids.read_text().split()) == 2
    await wait_until_gone(pids)


async def test_a_function_gets_a_client_and_one_that_fails_costs_its_own_attempt(play: Callable[..., Any]) -> None:
    async with play("planted_agents:agent", timeout_s=20.0) as (once, host):
        replies = await asyncio.gather(*[once() for _ in range(8)])
        assert all(reply["parts"] == {"same": 1.0} for reply in replies)
        with pytest.raises(TrajectoryError, match="RuntimeError: no idea"):
            await once("raises")
        with pytest.raises(TrajectoryError, match="Done with reward 'well done' of type str; expected a number"):
            await once("words")
        assert len(host.pids) == 1


@pytest.mark.full
async def test_the_process_of_a_function_that_blocks_is_replaced(play: Callable[..., Any]) -> None:
    async with play("planted_agents:agent", timeout_s=1.0) as (once, host):
        with pytest.raises(TrajectoryError, match="neither a request that could be answered nor an end within 1 s"):
            await once("blocks")
        async with asyncio.timeout(30):
            while host.pids:  # noqa: ASYNC110  there is no event for it
                await asyncio.sleep(0.05)


@pytest.mark.usefixtures("play")
def test_what_cannot_be_an_agent_is_refused_before_anything_starts() -> None:
    def load(**args: Any) -> None:
        load_task_source(EnvConfig(factory="agent", args={"tasks": "planted_agents:Tasks", **args}), 0)

    with pytest.raises(ConfigError, match=r"no `async def agent\(task, client\)`"):
        load(agent="planted_agents:plain")
    with pytest.raises(ConfigError, match="Did you mean"):
        load(agent="planted_agents:ask")
    with pytest.raises(ConfigError, match="empty command"):
        load(agent=[])
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        load(agent=["no-such-program", "x"])
    with pytest.raises(ConfigError, match=r"env\.args\.tasks"):
        load(agent=[sys.executable], tasks=None)


def test_the_last_line_is_a_reward_only_if_it_is_a_number_or_an_object_of_numbers() -> None:
    assert parse_reward("log\n1\n\n") == 1.0
    assert parse_reward('{"a": 1, "b": -0.5}') == {"a": 1.0, "b": -0.5}
    assert [parse_reward(text) for text in ("", "0.5\ndone", '{"a": "x"}', "{}", "true", "[1]", "[" * 9000)] == [
        None
    ] * 7


def test_a_prompt_that_spells_a_place_of_the_command_stays_as_it_is() -> None:
    task = Task(TaskId("t/1"), "What is {task_id}, and {prompt}? $HOME \\1", {}, "")
    assert words_for(["agent", "-p", "{prompt}", "--id={task_id}"], task) == ["agent", "-p", task.prompt, "--id=t/1"]
