"""Command-line agents in repositories: real processes in real sandboxes, which try what they must not be able to do."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.envs.config import EndpointConfig, EnvConfig, EpisodeConfig
from penstock.envs.endpoint.scripted import play_program
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.environment import EndpointAccess
from penstock.envs.loading import load_task_source
from penstock.envs.sandbox import bubblewrap, workspace
from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, SandboxResult
from penstock.envs.sandbox.local import LocalSandbox
from penstock.envs.sandbox.service import make_service
from penstock.envs.tasks.repositories import TEST_LIMITS, File, RepositoryEpisode, overlaid, pack, read_files, unpack
from penstock.envs.workers.episode_child import EpisodeReply, to_episode_reply
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.agents import CODEC, ReplyingEngine

isolated = pytest.mark.skipif(bool(why_no_namespaces()), reason="this host allows no user namespaces")
MARK = "86399.5"
"""Seconds that processes of these tests sleep: their command lines tell them from all others."""
ANSWERS = ("yes",) * 4
BUGGY = "def add(a, b):\n    return a - b\n"
ROW = {
    "prompt": "Repair add in sums.py.",
    "files": {"sums.py": BUGGY, "pkg/data.txt": "four\n"},
    "hidden": {
        "checks/hidden_test.py": "import sys\nsys.path.insert(0, '.')\nimport sums\nassert sums.add(2, 3) == 5\n"
    },
    "tests": "python checks/hidden_test.py",
    "secret": "s3cret-of-the-task",
}
AGENT = """
import http.client, json, os, socket, subprocess, sys, time
from pathlib import Path

def ask(text, content=False):
    address = os.environ["OPENAI_BASE_URL"].split("/")[2]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body),
                       {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    response = connection.getresponse()
    answer = json.load(response)
    return answer["choices"][0]["message"]["content"] if response.status == 200 else None

def fix(): Path("sums.py").write_text(Path("sums.py").read_text().replace("a - b", "a + b"))

def sleep(): subprocess.Popen(["sleep", MARK], start_new_session=True)

def outcome(call):
    try: call()
    except OSError as error: return type(error).__name__
    return "it worked"

def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(3); client.connect(address)

def report(**found): Path("report.json").write_text(json.dumps(found))

def everything():
    "All that can be read, but for the system and the interpreter."
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in SYSTEM]
        for name in names:
            try: yield os.path.join(folder, name), Path(folder, name).read_bytes()[:100_000]
            except OSError: pass

kind, prompt = sys.argv[1:3]
if kind != "asks nothing": ask(prompt)
exec(KINDS[kind])
"""
KINDS = {
    "fixes": "fix()",
    "does nothing": "pass",
    "asks nothing": "print('no key', file=sys.stderr); sys.exit(2)",
    "fixes and crashes": "fix(); sys.exit(3)",
    "fixes and hangs": "fix(); time.sleep(float(MARK))",
    "fixes and asks on": "fix(); [ask('again') for _ in range(50)]; time.sleep(float(MARK))",
    "leaves daemons": """
fix(); sleep()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp("sleep", ["sleep", MARK])
    os._exit(0)
os.wait(); time.sleep(0.2)
""",
    "floods": "fix()\nfor _ in range(1024): print('x' * 65536)",
    "fills its disk": """
fix(); written = 0
try:
    for number in range(100):
        with open(f"junk{number}", "wb") as file: written += file.write(bytes(1 << 20))
except OSError as error:
    os.remove("junk0"); report(error=error.strerror, mib=written >> 20)
""",
    "leaves a sparse file": "fix()\nfor n in range(40):\n    with open(f'b{n}', 'wb') as big: big.truncate(60 << 20)",
    "fills its memory": "fix(); found = []\nwhile True: found.append(os.urandom(1 << 20))",
    "plants tests": """
import py_compile
os.makedirs("elsewhere"); Path("elsewhere/hidden_test.py").write_text("pass"); os.symlink("elsewhere", "checks")
""",
    "plants a cached module": """
os.makedirs("__pycache__", exist_ok=True); Path("__pycache__/sums.cpython-311.pyc").write_bytes(b"x"); fix()
""",
    "reaches out": """
mine = os.environ["OPENAI_API_KEY"]
keys = set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: found = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\\0")
    except OSError: continue
    keys |= {one.partition("=")[2] for one in found if "pk-" in one} - {mine}
commands = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\\0", b" ").decode()[:60])
    except OSError: pass
report(
    network=outcome(lambda: connect(socket.AF_INET, ("1.1.1.1", 53))),
    endpoint=outcome(lambda: connect(socket.AF_INET, ("127.0.0.1", PORT))),
    abstract=outcome(lambda: connect(socket.AF_UNIX, "\\0penstock-test")),
    others_key=str(sorted(keys)),
    others_files=sorted({at for at, content in everything()
                         if at != __file__ and (b"s3cret" in content or b"hidden_test" in content)}),
    host=os.listdir(FOLDER),
    writes={at: outcome(lambda: open(at + "/x", "w")) for at in ("/", "/usr", "/etc", "/proc/sys", sys.prefix)},
    kills=outcome(lambda: os.kill(HOST_PID, 0)),
    inits=outcome(lambda: os.kill(1, 0)),
    num_others=sum("sleep " + MARK in one for one in commands),
    variables=sorted(name for name in os.environ if "SECRET" in name or "PENSTOCK" in name),
    children=outcome(lambda: os.unshare(0x10000000)) if hasattr(os, "unshare") else "absent",
)
sleep()
""",
    "works like a program": """
found = {}
found["home"] = Path.home() != Path.cwd() and Path.home().joinpath(".agent/settings.json").read_text()
Path.home().joinpath("cache").write_text("x")
found["log"] = subprocess.run(["git", "log", "--format=%an %s"], capture_output=True, text=True).stdout.strip()
found["status"] = subprocess.run(["git", "status", "--short"], capture_output=True, text=True).stdout
found["mine"] = os.environ["MINE"]
found["made"] = Path("made.txt").exists()
found["executable"] = os.access("run.sh", os.X_OK)
found["link"] = os.readlink("link") if os.path.islink("link") else None
found["history"] = Path(".git/old").exists()
found["stdin"] = sys.stdin.read()
found["terminal"] = outcome(os.openpty)
Path("/dev/shm/x").write_text("x")
fix(); report(**found)
""",
}


def sleeping() -> list[str]:
    """Processes of this machine that these tests have left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if MARK.encode() in words and b"sleep" in words[0]:
            found.append(path.parent.name)
    return found


async def nothing_sleeps() -> None:
    async with asyncio.timeout(20):
        while sleeping():  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.05)


@pytest.fixture
def port() -> int:
    """A port for the endpoint that programs know."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> Callable[..., Any]:
    """`play(kind, row, **args)` to the replies of one episode, or of several at once."""
    monkeypatch.setenv("A_SECRET", "s3cret-of-the-host")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", os.defpath)  # `python` may not be there
    system = ["/proc", "/sys", "/dev", "/usr", *bubblewrap.python_folders(), *map(str, Path("/").glob("lib*"))]
    given = {
        "MARK": MARK,
        "KINDS": KINDS,
        "PORT": port,
        "FOLDER": str(tmp_path),
        "HOST_PID": os.getpid(),
        "SYSTEM": system,
    }
    agent = tmp_path / "bin" / "agent.py"
    agent.parent.mkdir()
    agent.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()) + AGENT)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")

    @asynccontextmanager
    async def hosted(kind: str, **args: Any) -> AsyncIterator[tuple[EnvConfig, EpisodeHost]]:
        config = configured(tmp_path, [sys.executable, "-S", "-E", str(agent), kind, "{prompt}"], port, **args)
        host = EpisodeHost(config, 0)
        try:
            yield config, host
        finally:
            await host.close()

    async def played(
        kind: str, row: dict[str, Any] | None = None, answers: Sequence[str] = ANSWERS, **args: Any
    ) -> EpisodeReply:
        async with hosted(kind, **args) as (config, host):
            reply = await play_one(config, host, {**ROW, **(row or {})}, answers)
        await nothing_sleeps()
        return reply

    return played


def configured(folder: Path, agent: list[str], port: int, *, timeout_s: float = 60.0, **args: Any) -> EnvConfig:
    given = {
        "task_args": {"path": str(folder / "rows.jsonl"), "held_out": "train"},
        "agent": agent,
        "read": [str(folder / "bin")],
        **args,
    }
    return EnvConfig(
        factory="repository",
        args=given,
        episode=EpisodeConfig(timeout_s=timeout_s),
        endpoint=EndpointConfig(port=port),
    )


async def play_one(
    config: EnvConfig, host: EpisodeHost, row: dict[str, Any], answers: Sequence[str] = ANSWERS, name: str = "t/0"
) -> EpisodeReply:
    left = iter(answers)
    fields = {name: value for name, value in row.items() if name != "prompt"}

    async def say(part: object) -> str | None:
        return next(left, None)

    async with host.open(Task(TaskId(name), row["prompt"], fields, "")) as opened:
        assert (await opened.reset()) == {"runs_itself": True}
        return await play_program(config, opened, name, say)


def reported(reply: EpisodeReply) -> dict[str, Any]:
    """What the agent has written into report.json, from the patch."""
    (line,) = re.findall(r"^\+({.*})$", reply["answer"], re.MULTILINE)
    return json.loads(line)


@isolated
async def test_an_agent_whose_repository_passes_the_hidden_tests_gets_1_and_its_patch_is_the_answer(play: Any) -> None:
    reply = await play("fixes")
    assert (reply["reward"], reply["parts"]) == (1.0, {})
    assert reply["answer"] == (
        "diff --git a/sums.py b/sums.py\n" + reply["answer"].splitlines()[1] + "\n--- a/sums.py\n+++ b/sums.py\n"
        "@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    )
    counts = reply["counts"]
    assert (counts["files_changed"], counts["agent_limit"], counts["agent_errors"], counts["tests_limit"]) == (
        1,
        0,
        0,
        0,
    )
    assert 0 < counts["tests_s"] < 60
    assert 0 < counts["agent_s"] < 60


@pytest.mark.some(2)
@isolated
@pytest.mark.parametrize(
    ("kind", "reward", "counts"),
    [
        ("does nothing", 0.0, {"files_changed": 0, "agent_errors": 0}),
        ("fixes and crashes", 1.0, {"files_changed": 1, "agent_errors": 1}),
        ("leaves daemons", 1.0, {"files_changed": 1, "agent_limit": 0}),
        ("plants tests", 0.0, {"agent_limit": 0}),
        ("plants a cached module", 1.0, {"files_changed": 1}),
    ],
)
async def test_what_an_agent_leaves_is_judged_however_it_ends(
    play: Any, kind: str, reward: float, counts: dict[str, float]
) -> None:
    reply = await play(kind)
    assert reply["reward"] == reward
    assert counts.items() <= reply["counts"].items()


@isolated
async def test_tests_whose_command_is_not_there_are_counted(play: Any) -> None:
    reply = await play("fixes", {"tests": "no-such-program"})
    assert (reply["reward"], reply["counts"]["tests_not_found"]) == (0.0, 1)


@pytest.mark.some(1)
@isolated
@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("fixes and hangs", {"wall_s": 3.0}),
        ("floods", {}),
        ("fills its memory", {"memory_mib": 256}),
    ],
)
async def test_an_agent_at_a_limit_is_killed_and_judged(play: Any, kind: str, limits: dict[str, float]) -> None:
    reply = await play(kind, agent_limits=limits)
    assert (reply["reward"], reply["counts"]["agent_limit"]) == (1.0, 1)


@isolated
async def test_an_agent_that_asks_on_after_its_budget_is_killed_and_judged(play: Any) -> None:
    reply = await play("fixes and asks on", answers=ANSWERS[:1])
    assert reply["reward"] == 1.0
    assert "+    return a + b" in reply["answer"]


@isolated
async def test_the_disk_of_an_agent_is_its_own_and_bounded(play: Any) -> None:
    reply = await play("fills its disk", agent_limits={"max_disk_mib": 16})
    found = reported(reply)
    assert found["error"] == "No space left on device"
    assert 10 <= found["mib"] < 16
    assert reply["reward"] == 1.0


@isolated
async def test_more_than_may_be_read_is_a_reward_of_0_and_not_our_memory(play: Any) -> None:
    reply = await play("leaves a sparse file", agent_limits={"max_disk_mib": 64})
    assert (reply["reward"], reply["counts"]["unreadable"]) == (0.0, 1)


@isolated
async def test_an_agent_that_never_asks_fails_the_attempt_with_what_it_said(play: Any) -> None:
    with pytest.raises(TrajectoryError, match=r"the agent has ended and not called the policy: exit code 2; no key"):
        await play("asks nothing")


@pytest.mark.some(2)
@isolated
@pytest.mark.parametrize(
    ("tests", "args", "reward", "parts"),
    [
        ("exit 1", {}, 0.0, {}),
        (f"sleep {MARK}", {"test_limits": {"wall_s": 1.0}}, 0.0, {}),
        ('echo; echo \'{"a": 1, "b": 0.5}\'', {}, 1.0, {}),
        ('echo; echo \'{"a": 1, "b": 0.5}\'; exit 1', {"prints_reward": True}, 1.5, {"a": 1.0, "b": 0.5}),
        ("echo 0.25", {"prints_reward": True}, 0.25, {}),
        ("echo no number", {"prints_reward": True}, 0.0, {}),
    ],
)
async def test_the_reward_is_the_exit_code_of_the_tests_or_what_they_print(
    play: Any, tests: str, args: dict[str, Any], reward: float, parts: dict[str, float]
) -> None:
    reply = await play("fixes", {"tests": tests}, **args)
    assert (reply["reward"], reply["parts"]) == (reward, parts)
    assert reply["counts"]["tests_limit"] == float("sleep" in tests)
    printed = {"reward_not_printed": float("no number" in tests)} if "prints_reward" in args else {}
    assert {name: count for name, count in reply["counts"].items() if "printed" in name} == printed


@isolated
async def test_an_agent_finds_a_repository_with_one_commit_and_a_home_of_its_own(play: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)
    (repository / ".git" / "old").write_text("the solution")
    (repository / "sums.py").write_text(BUGGY)
    (repository / "run.sh").write_text("#!/bin/sh\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "link").symlink_to("sums.py")
    reply = await play(
        "works like a program",
        {"files": str(repository), "setup": "echo made > made.txt"},
        home={".agent/settings.json": "{}"},
        variables={"MINE": "yes"},
    )
    assert reported(reply) == {
        "home": "{}", "log": "agent start", "status": "", "mine": "yes", "made": True, "executable": True,
        "link": "sums.py", "history": False, "stdin": "", "terminal": "it worked",
    }  # fmt: skip
    assert (reply["reward"], reply["counts"]["files_changed"]) == (1.0, 2), "setup has changed nothing"
    assert sorted(path.name for path in repository.iterdir()) == [".git", "link", "run.sh", "sums.py"]


@isolated
async def test_an_episode_reaches_nothing_of_another_nor_of_this_machine(play: Any, tmp_path: Path, port: int) -> None:
    agent = [sys.executable, "-S", "-E", str(tmp_path / "bin" / "agent.py"), "reaches out", "{prompt}"]
    config = configured(tmp_path, agent, 0)
    hidden = tmp_path / "hidden" / "checks"
    hidden.mkdir(parents=True)
    (hidden / "hidden_test.py").write_text("# s3cret of the tests\nassert True\n")
    host = EpisodeHost(config, 0)
    with socket.socket(socket.AF_UNIX) as other, socket.create_server(("127.0.0.1", port)):
        other.bind("\0penstock-test")
        other.listen()
        try:
            row = {**ROW, "hidden": str(tmp_path / "hidden")}
            replies = await asyncio.gather(*[play_one(config, host, row) for _ in range(2)])
        finally:
            await host.close()
    await nothing_sleeps()
    for reply in replies:
        found = reported(reply)
        assert found.pop("inits") in {"it worked", "PermissionError"}, "process 1 is that of its own sandbox"
        assert set(found.pop("writes").values()) <= {"OSError", "PermissionError", "FileNotFoundError"}
        assert found.pop("children") in {"PermissionError", "OSError", "absent"}
        assert found == {
            "network": "OSError", "endpoint": "ConnectionRefusedError", "abstract": "ConnectionRefusedError",
            "others_key": "[]", "others_files": [], "host": ["bin"], "kills": "ProcessLookupError",
            "num_others": 0, "variables": [],
        }  # fmt: skip
        assert reply["reward"] == 1.0


@isolated
async def test_a_repository_that_cannot_be_set_up_is_a_failure_and_no_reward(play: Any) -> None:
    with pytest.raises(TrajectoryError, match=r"the repository cannot be set up .*exit code 3; nothing here"):
        await play("fixes", {"setup": "echo nothing here >&2; exit 3"})
    with pytest.raises(TrajectoryError, match="the repository cannot be set up"):
        await play("fixes", {"files": {"big": "x" * (2 << 20)}}, agent_limits={"max_disk_mib": 1})


@isolated
async def test_tests_may_run_on_a_sandbox_service(play: Any) -> None:
    sandbox = LocalSandbox(SandboxConfig())
    async with TestServer(make_service(sandbox, TEST_LIMITS)) as server:
        reply = await play("fixes", remote={"url": str(server.make_url("")).rstrip("/")})
    assert reply["reward"] == 1.0
    assert "+    return a + b" in reply["answer"]


@isolated
async def test_a_service_that_is_away_is_a_failure_and_no_reward(play: Any, port: int) -> None:
    remote = {"url": "http://127.0.0.1:9", "max_attempts": 1}
    with pytest.raises(TrajectoryError, match=r"SandboxUnavailableError: sandbox\.remote\.url"):
        await play("fixes", remote=remote)


@isolated
async def test_the_relay_passes_on_what_it_gets_and_bounds_connections_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    monkeypatch.setattr(workspace, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(workspace, "MAX_RELAYED_BYTES", 1 << 20)
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server, asyncio.timeout(20):
        relay = workspace.Relay(server.sockets[0].getsockname())
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        await relay.start(listener)
        first, second, third = [await asyncio.open_connection(*address) for _ in range(3)]
        for reader, writer in (first, second):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await third[0].readexactly(1)
        first[1].write_eof()
        assert await first[0].read() == b"", "an end of one way is passed on"
        second[1].write(bytes(1 << 20))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await second[0].readexactly(1 << 20)
        await relay.close()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(*address)
        assert relay.num_connections == 2


@isolated
async def test_a_budget_of_the_run_ends_the_agent_and_its_work_is_judged_and_trained(
    play: Any, tmp_path: Path, port: int
) -> None:
    agent = [sys.executable, "-S", "-E", str(tmp_path / "bin" / "agent.py"), "fixes and asks on", "{prompt}"]
    host, endpoint = EpisodeHost(configured(tmp_path, agent, port), 0), Endpoint(EndpointConfig(), 60.0)
    player = EpisodePlayer(host.open, CODEC, EpisodeBudget(max_turns=1, max_tokens=2000), endpoint)
    pool = EnginePool([ReplyingEngine(lambda _: "yes")], 8)
    runner = TrajectoryRunner(pool, CODEC, 20.0, episodes=player)
    task = Task(TaskId("t/0"), ROW["prompt"], {**ROW}, "")
    sampling = SamplingParams(50, stop_token_ids=CODEC.stop_token_ids)
    try:
        trajectory = await runner.run(RolloutContext(task, "t/0"), 0, sampling)
    finally:
        await endpoint.close()
        await host.close()
    await nothing_sleeps()
    episode = trajectory.episode
    assert episode is not None
    assert (episode.end, episode.reward, len(episode.turns)) == ("max_turns", 1.0, 1)
    assert episode.answer is not None
    assert "+    return a + b" in episode.answer
    assert episode.counts["files_changed"] == 1


@isolated
@pytest.mark.full
async def test_of_many_agents_at_once_each_gets_its_own_reward_and_nothing_is_left(
    play: Any, tmp_path: Path, port: int
) -> None:
    agent = [sys.executable, "-S", "-E", str(tmp_path / "bin" / "agent.py"), "{task_id}", "{prompt}"]
    config = configured(tmp_path, agent, 0, agent_limits={"wall_s": 40.0}, timeout_s=200.0)
    kinds = ["fixes", "does nothing", "leaves daemons", "fixes and crashes"] * 5
    kinds += ["fixes and hangs", "floods", "asks nothing", "fixes and asks on"]
    host = EpisodeHost(config, 0)
    try:
        playing = [play_one(config, host, ROW, name=kind) for kind in kinds]
        replies = await asyncio.gather(*playing, return_exceptions=True)
        assert len(host.pids) == 1
    finally:
        await host.close()
    await nothing_sleeps()
    failed = [kind for kind, reply in zip(kinds, replies, strict=True) if isinstance(reply, TrajectoryError)]
    assert failed == ["asks nothing"]
    rewards = {(kind, reply["reward"]) for kind, reply in zip(kinds, replies, strict=True) if isinstance(reply, dict)}
    assert rewards == {(kind, float(kind != "does nothing")) for kind in kinds if kind != "asks nothing"}


SDK_AGENT = """
import asyncio, os, subprocess, sys
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions")

@function_tool
def shell(command: str) -> str:
    "Run a command."
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout

agent = Agent(name="coder", instructions="Use the shell.", model=os.environ["OPENAI_MODEL"], tools=[shell])
print(asyncio.run(Runner.run(agent, sys.argv[1])).final_output)
"""


@isolated
@pytest.mark.full
async def test_an_agent_of_the_openai_agents_sdk_works_in_a_sandbox(play: Any, tmp_path: Path, port: int) -> None:
    pytest.importorskip("agents")
    (tmp_path / "bin" / "sdk.py").write_text(SDK_AGENT)
    config = configured(tmp_path, [sys.executable, str(tmp_path / "bin" / "sdk.py"), "{prompt}"], port)
    call = '<tool_call>{"name": "shell", "arguments": {"command": "sed -i \'s/a - b/a + b/\' sums.py"}}</tool_call>'
    host = EpisodeHost(config, 0)
    try:
        reply = await play_one(config, host, ROW, [call, "It adds now."])
    finally:
        await host.close()
    assert (reply["reward"], reply["counts"]["agent_errors"]) == (1.0, 0)


def minimal_image(folder: Path) -> Path:
    """A root filesystem with a shell and a few programs of this machine, and the libraries that they need."""
    root = folder / "image"
    for name in ("sh", "bash", "env", "mkdir", "chmod", "tar", "base64", "cat", "sed", "diff", "ls", "tr"):
        program = shutil.which(name)
        assert program is not None
        copied = [program, *re.findall(r"(/\S+) \(0x", os.popen(f"ldd {program}").read())]
        for path in copied:
            at = root / (f"bin/{name}" if path == program else path.lstrip("/"))
            at.parent.mkdir(parents=True, exist_ok=True)
            if not at.exists():
                shutil.copy(os.path.realpath(path), at)
    (root / "etc").mkdir()
    (root / "etc" / "os-release").write_text("an image\n")
    return root


@isolated
async def test_an_image_is_the_root_of_agent_and_tests(play: Any, tmp_path: Path, port: int) -> None:
    (tmp_path / "bin" / "agent.sh").write_text(
        """body='{"model": "policy", "messages": [{"role": "user", "content": "go on"}]}'
exec 3<>/dev/tcp/127.0.0.1/41000
printf 'POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nAuthorization: Bearer %s\\r\\n' \\
    "$OPENAI_API_KEY" >&3
printf 'Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n%s' "${#body}" "$body" >&3
{ cat <&3 | sed -n '1s/\\r//p'; cat /etc/os-release; ls / | tr '\\n' ' '; } > seen.txt
sed -i 's/a - b/a + b/' sums.py
"""
    )
    config = configured(tmp_path, ["bash", str(tmp_path / "bin" / "agent.sh")], port)
    tests = 'case "$(cat sums.py)" in *"a + b"*) cat /etc/os-release;; *) exit 1;; esac'
    host = EpisodeHost(config, 0)
    try:
        reply = await play_one(config, host, {**ROW, "image": str(minimal_image(tmp_path)), "tests": tests})
    finally:
        await host.close()
    assert reply["reward"] == 1.0
    seen = [line[1:] for line in reply["answer"].splitlines() if line.startswith("+")]
    assert {"HTTP/1.1 200 OK", "an image", "    return a + b"} <= set(seen)
    (root,) = [line.split() for line in seen if "sandbox" in line]
    assert set(root) >= {"bin", "dev", "etc", "proc", "sandbox"}
    assert not {"usr", "home", "image"} & set(root), "of this machine"


@isolated
def test_what_cannot_be_a_repository_is_refused_before_anything_starts(play: Any, tmp_path: Path) -> None:
    def first(row: dict[str, Any] | None = None, **args: Any) -> Task:
        (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, **(row or {})}) + "\n")
        config = configured(tmp_path, **{"agent": ["true"], "port": 0, **args})
        return next(load_task_source(config, 0).train())

    assert first().fields["tests"] == ROW["tests"]
    for row, message in [
        ({"tests": None}, "tests=None is no text"),
        ({"files": None}, "it has no files"),
        ({"files": "/no/such/folder"}, "files='/no/such/folder': there is no such folder"),
        ({"files": {"../x": "y"}}, "the path '../x', which is not below the folder"),
        ({"files": {"x": 1}}, "files has {'x': 1}, which is no text"),
        ({"hidden": str(tmp_path / "bin")}, "is in what the agent may read"),
        ({"image": "/no/such/folder"}, "no folder with a root filesystem"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            first(row)
    for args, message in [
        ({"agent": "mini"}, "the agent is a list of the words"),
        ({"agent": []}, "the agent is a list of the words"),
        ({"read": ["/no/such/path"]}, "there is no '/no/such/path'"),
        ({"agent_limits": {"wall": 1}}, "wall"),
        ({"agnet": ["true"]}, "Did you mean 'agent'"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            first(**args)


def test_without_isolation_it_is_refused_unless_that_is_allowed(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: "/bin/false")
    with pytest.raises(ConfigError, match=r"allow_unisolated=false, but this host allows no isolation"):
        load_task_source(configured(tmp_path, ["true"], 0), 0)
    load_task_source(configured(tmp_path, ["true"], 0, allow_unisolated=True), 0)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["fixes", "leaves daemons", "fixes and hangs"])
async def test_without_isolation_limits_hold_and_nothing_is_left(
    play: Any, tmp_path: Path, port: int, kind: str
) -> None:
    agent = [sys.executable, "-S", "-E", str(tmp_path / "bin" / "agent.py"), kind, "{prompt}"]
    config = configured(tmp_path, agent, port, allow_unisolated=True, agent_limits={"wall_s": 4.0})
    source: Any = load_task_source(config, 0)
    episode = RepositoryEpisode(replace(source.environment()._setting, isolate=False))
    episode.reset(Task(TaskId("t/0"), ROW["prompt"], {**ROW}, ""))
    folders = set(Path(tempfile.gettempdir()).glob("penstock-sandbox-*"))

    async def say(part: object) -> str:
        return "yes"

    class Played:
        async def run(self, access: EndpointAccess) -> EpisodeReply:
            return to_episode_reply(await episode.run(access), "run")

    reply = await play_program(config, Played(), "t/0", say)  # type: ignore[arg-type]
    await episode.close()
    await nothing_sleeps()
    assert (reply["reward"], reply["counts"]["agent_limit"]) == (1.0, float(kind == "fixes and hangs"))
    assert set(Path(tempfile.gettempdir()).glob("penstock-sandbox-*")) == folders


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (SandboxResult("exited", 127, "", "sh: 1: base64: not found", 0.1), r"exit code 127; sh: 1: base64: not found"),
        (SandboxResult("killed", None, "", "", 0.1, "SIGKILL"), "SIGKILL"),
        (SandboxResult("memory", None, "", "", 0.1, "more than 1 MiB"), None),
    ],
)
async def test_files_that_cannot_be_collected_are_a_failure_unless_the_agent_is_to_blame(
    tmp_path: Path, result: SandboxResult, message: str | None
) -> None:
    class Broken:
        async def run(self, program: Program, limits: Limits) -> SandboxResult:
            return result

    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    config = configured(tmp_path, ["true"], 0, allow_unisolated=True, read=[])
    source: Any = load_task_source(config, 0)
    collecting = source.environment()._collect(Broken())
    if message is None:
        assert await collecting is None
    else:
        with pytest.raises(RuntimeError, match=f"(?s)cannot be collected.*{message}"):
            await collecting


def test_hidden_files_replace_what_stands_in_their_way() -> None:
    hidden = {"a/b/test.py": File(b"1"), "c": File(b"2")}
    files = {
        "a/b/other.py": File(b"3"), "a/b/test.py": File(b"4"), "c/below": File(b"5"), "d": File(b"6"),
    }  # fmt: skip
    assert overlaid(files, hidden) == {"a/b/other.py": File(b"3"), "d": File(b"6"), **hidden}
    assert overlaid({"a/b": File(b"", link="/etc")}, hidden) == hidden
    assert overlaid({"a": File(b"7")}, hidden) == hidden


def test_files_come_out_of_an_archive_as_they_went_in_and_no_more_than_allowed() -> None:
    files = {"a/b.py": File(b"x" * 700), "run": File(b"y", is_executable=True), "l": File(b"", link="a/b.py")}
    files[f"{'long/' * 40}name"] = File(b"z")
    assert unpack(pack(files), 1000) == files
    assert pack(files) == pack(dict(files))
    assert unpack(pack(files), 700) is None
    assert unpack(pack(files)[:-1200][:900], 1000) in (None, {}), "half an archive"
    assert unpack(b"", 1000) is None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        first = tarfile.TarInfo("./one")
        first.size = 600
        archive.addfile(first, io.BytesIO(bytes(600)))
        for number in range(10):
            link = tarfile.TarInfo(f"./link{number}")
            link.type, link.linkname = tarfile.LNKTYPE, "./one"
            archive.addfile(link)
        fifo = tarfile.TarInfo("./fifo")
        fifo.type = tarfile.FIFOTYPE
        archive.addfile(fifo)
    assert unpack(buffer.getvalue(), 1000) is None, "names of one file count as files"
    assert len(unpack(buffer.getvalue(), 10_000) or {}) == 11


def test_the_files_of_a_mapping_may_be_missing_as_in_a_table() -> None:
    assert read_files({"a": "x", "b": None}, "files") == {"a": File(b"x")}
