"""Tools of a real MCP server, as a process and over HTTP: what they say, and what becomes of a server that fails."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, EpisodeConfig
from penstock.envs.environment import Action, Done, Observation
from penstock.envs.tools.functions import ToolServerError
from penstock.envs.tools.mcp_tools import McpServer, McpToolEnvironment, _text_of
from penstock.envs.workers.episode_host import EpisodeHost

SERVER = '''
import os, sys, time
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    raise ValueError("no luck")

@server.tool()
def secrets() -> str:
    return str(sorted(name for name in os.environ if name in ("MY_SECRET", "MINE")))

@server.tool()
def pid() -> str:
    return str(os.getpid())

@server.tool()
def die() -> str:
    print("I am out of ink", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def hang() -> str:
    time.sleep(600)

if __name__ == "__main__":
    server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
'''
TASK = Task(TaskId("t/0"), [{"role": "user", "content": "?"}], {}, "")


USERS = EpisodeConfig(timeout_s=20)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "served.py"
    path.write_text(SERVER)
    return path


@asynccontextmanager
async def episode(*servers: McpServer, timeout_s: float = 10.0) -> AsyncIterator[McpToolEnvironment]:
    class Episode(McpToolEnvironment):
        tool_timeout_s = timeout_s

        def score(self, task: Task, answer: str) -> float:
            return 1.0

    playing = Episode()
    playing.servers = servers
    try:
        yield playing
    finally:
        await playing.close()


def stdio(program: Path, **more: object) -> McpServer:
    return McpServer(command=(sys.executable, str(program), "stdio"), **more)  # type: ignore[arg-type]


def call(name: str, **arguments: object) -> Action:
    return Action(
        f'<tool_call>{{"name": "{name}", "arguments": {str(arguments).replace(chr(39), chr(34))}}}</tool_call>'
    )


async def said(playing: McpToolEnvironment, action: Action) -> str:
    reply = await playing.step(action)
    assert isinstance(reply, Observation)
    return reply.text


async def test_tools_are_described_and_called_and_a_server_that_dies_fails_the_attempt_with_its_last_words(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "x")
    tools = ["add", "fail", "secrets", "die"]
    async with episode(stdio(program, variables={"MINE": "1"}, tools=tools)) as playing:
        prompt = json.dumps((await playing.reset(TASK)).tools)
        assert '"name": "add", "description": "Add two numbers."' in prompt
        assert '"pid"' not in prompt
        assert await said(playing, call("add", a=2)) == "3"
        assert await said(playing, call("add", a="x")) == "error: add: 'x' is not of type 'integer'"
        assert await said(playing, call("fail")) == "error: Error executing tool fail"
        assert await said(playing, call("secrets")) == "['MINE']"
        assert "no tool 'pid'" in await said(playing, call("pid"))
        assert await playing.step(Action("3")) == Done(1.0)
        with pytest.raises(ToolServerError, match=r"(?s)MCP server .* ended during a call of die; .*I am out of ink"):
            await playing.step(call("die"))


async def test_the_servers_of_an_episode_end_when_the_next_one_begins(program: Path) -> None:
    async with episode(stdio(program)) as playing:
        pids = []
        for _ in range(2):
            await playing.reset(TASK)
            pids.append(int(await said(playing, call("pid"))))
        assert [psutil.pid_exists(pid) for pid in pids] == [False, True]


def test_resources_are_their_text_or_their_address() -> None:
    from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent, ResourceLink, TextResourceContents

    at = "file:///notes.txt"
    text, blob = TextResourceContents(uri=at, text="milk"), BlobResourceContents(uri=at, blob="bWlsaw==")
    parts = [
        EmbeddedResource(type="resource", resource=text),
        EmbeddedResource(type="resource", resource=blob),
        ResourceLink(type="resource_link", uri=at, name="notes"),
        ImageContent(type="image", data="", mime_type="image/png"),
    ]
    assert list(map(_text_of, parts)) == ["milk", f"[resource: {at}]", f"[resource_link: {at}]", "[image]"]


@pytest.mark.full
async def test_a_server_that_hangs_fails_the_attempt_and_is_killed(program: Path) -> None:
    async with episode(stdio(program), timeout_s=1.0) as playing:
        await playing.reset(TASK)
        pid = int(await said(playing, call("pid")))
        with pytest.raises(ToolServerError, match="did not answer a call of hang within 1 s"):
            await playing.step(call("hang"))
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(command=("no-such-program",)), "does not start: FileNotFoundError"),
        (McpServer(command=(sys.executable, "-c", "raise SystemExit('no key')")), "(?s)does not start: .*no key"),
        (
            McpServer(command=(sys.executable, "-c", "import time; time.sleep(60)"), startup_timeout_s=0.5),
            "its tools within 0.5 s",
        ),
        (McpServer(url="http://127.0.0.1:9/mcp"), "does not start: "),
    ],
)
async def test_a_server_that_does_not_start_says_why(server: McpServer, message: str) -> None:
    async with episode(server) as playing:
        with pytest.raises(ToolServerError, match=message):
            await playing.reset(TASK)


async def test_a_url_serves_as_well_and_its_end_fails_the_attempt(program: Path, unused_tcp_port: int) -> None:
    words = [sys.executable, str(program), "streamable-http", str(unused_tcp_port)]
    server = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                (await asyncio.open_connection("127.0.0.1", unused_tcp_port))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.1)
        async with episode(McpServer(url=f"http://127.0.0.1:{unused_tcp_port}/mcp"), timeout_s=5.0) as playing:
            await playing.reset(TASK)
            assert await said(playing, call("add", a=2)) == "3"
            server.kill()
            await server.wait()
            with pytest.raises(ToolServerError, match=r"MCP server 'http.* call of add"):
                await playing.step(call("add", a=2))
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


def test_a_server_is_a_command_or_a_url() -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        McpServer()


@pytest.mark.full
async def test_an_environment_process_that_is_killed_leaves_no_server(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    (tmp_path / "mine_mcp.py").write_text(
        f"""
import os, signal, sys
from penstock.dataflow.task import Task
from penstock.envs.tasks.generated_tasks import GeneratedTasks
from penstock.envs.tools.mcp_tools import McpServer, McpToolEnvironment

class Tasks(GeneratedTasks):
    def draw(self, rng):
        return {{"prompt": str(rng.random())}}
    def environment(self):
        return Episode()

class Episode(McpToolEnvironment):
    servers = (McpServer(command=(sys.executable, {str(program)!r}, "stdio")),)
    async def score(self, task, answer):
        open({str(note)!r}, "w").write(await self.toolbox._tools["pid"].call({{}}))
        os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    # It writes a note, of a process that this test can see.
    host = EpisodeHost(EnvConfig(factory="mine_mcp:Tasks", episode=USERS), 0)
    try:
        async with host.open(TASK) as played:
            await played.reset()
            with pytest.raises(TrajectoryError):
                await played.step(Action("answer"))
    finally:
        await host.close()
    assert not psutil.pid_exists(int(note.read_text()))
